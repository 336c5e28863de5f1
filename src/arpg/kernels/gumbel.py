"""Gumbel-max sampling in one pass over the logits: Philox 4x32-10 noise and argmax, none of it in memory.

The noise is that of `arpg.noise`. Shapes: B batch, S tokens, V codes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels.dispatch import prefetch_weights

_CODES, _WARPS = 1024, 4  # codes per iteration (a multiple of 4) and warps of a program
_SMALL_BATCH = 128  # tokens up to which most of a GPU would be idle: each program then has more warps
_SMALL_BATCH_CODES, _SMALL_BATCH_WARPS, _MAX_ITERATIONS = 4096, 16, 8


def sample(
    logits_BSV: Tensor,
    temperature: float,
    key_B2: Tensor,
    stream: int,
    position_BS: Tensor,
    *,
    static: bool = False,
) -> Tensor:
    """Ids `[B, S]`: argmax(logits / temperature + noise).

    `static`: seeds and positions were written before the decode started, so that they may be read before the
    kernel in front ends. Otherwise everything is read after the dependency barrier.
    """
    key_B2 = key_B2.contiguous()
    position_BS = position_BS if position_BS.stride(-1) == 1 else position_BS.contiguous()
    logits_BSV = logits_BSV if logits_BSV.stride(-1) == 1 else logits_BSV.contiguous()
    num_tokens, num_codes = logits_BSV.shape[1:]
    batch = len(position_BS)
    ids_BS = position_BS.new_empty(position_BS.shape)
    small = batch * num_tokens <= _SMALL_BATCH and num_codes <= _SMALL_BATCH_CODES * _MAX_ITERATIONS
    codes, warps = (_SMALL_BATCH_CODES, _SMALL_BATCH_WARPS) if small else (_CODES, _WARPS)
    pdl = small and prefetch_weights(logits_BSV)
    if ids_BS.numel():
        _sample[(batch * num_tokens,)](
            logits_BSV, key_B2, position_BS, ids_BS,
            *logits_BSV.stride()[:2], position_BS.stride(0), num_tokens, num_codes, temperature,
            int(stream), codes, triton.cdiv(num_codes, codes), small, pdl, static,
            num_warps=warps, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return ids_BS


@triton.jit(do_not_specialize=["S"])
def _sample(  # type: ignore[no-untyped-def]
    logits, keys, positions, ids, logit_b, logit_s, position_b, S, V, temperature,
    STREAM: tl.constexpr, CODES: tl.constexpr, ITERATIONS: tl.constexpr, SMALL: tl.constexpr,
    PDL: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """One token. Each lane keeps the best of its codes; at the end the best lane wins, of equal ones the first code.

    In small batches all noise is made before the logits are read: with PDL and static positions, before the dependency
    barrier.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not STATIC:
            tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    row = token // S
    at = row * logit_b + (token % S) * logit_s
    key0, key1 = tl.load(keys + 2 * row).to(tl.uint32), tl.load(keys + 2 * row + 1).to(tl.uint32)
    position = tl.load(positions + row * position_b + token % S).to(tl.uint32)
    best = tl.full((CODES,), float("-inf"), tl.float32)
    best_code = tl.zeros((CODES,), tl.int32)
    if SMALL:
        noises = ()
        for iteration in tl.static_range(ITERATIONS):
            block = (iteration * (CODES // 4) + tl.arange(0, CODES // 4)).to(tl.uint32)
            noise = _gumbel(_words(block, position, STREAM, key0, key1, CODES))
            if PDL and STATIC:  # not pure, so that the compiler does not move it behind the wait
                noise = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [noise], tl.float32, is_pure=False, pack=1)
            noises += (noise,)  # type: ignore[assignment]
        if PDL and STATIC:
            tl.extra.cuda.gdc_wait()
        for iteration in tl.static_range(ITERATIONS):
            code = iteration * CODES + tl.arange(0, CODES)
            value = tl.load(logits + at + code, code < V, other=0.0).to(tl.float32) / temperature + noises[iteration]
            best, best_code = _better(best, best_code, value, code, V)
    else:
        for iteration in range(ITERATIONS):
            code = iteration * CODES + tl.arange(0, CODES)
            block = (iteration * (CODES // 4) + tl.arange(0, CODES // 4)).to(tl.uint32)
            logit = tl.load(logits + at + code, code < V, other=0.0).to(tl.float32)
            value = logit / temperature + _gumbel(_words(block, position, STREAM, key0, key1, CODES))
            best, best_code = _better(best, best_code, value, code, V)
    winner = tl.min(tl.where(best == tl.max(best), best_code, V))
    tl.store(ids + token, winner.to(tl.int64))


@triton.jit
def _better(best, best_code, value, code, V):  # type: ignore[no-untyped-def]
    better = (value > best) & (code < V)
    return tl.where(better, value, best), tl.where(better, code, best_code)


@triton.jit
def _words(block, position, stream: tl.constexpr, key0, key1, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The words of `CODES` codes: four for each block."""
    c0 = block
    c1 = block * 0 + position
    c2 = block * 0 + stream
    c3 = block * 0
    for _ in tl.static_range(10):
        low0, high0 = c0 * 0xD2511F53, tl.umulhi(c0, c0 * 0 + 0xD2511F53)
        low1, high1 = c2 * 0xCD9E8D57, tl.umulhi(c2, c2 * 0 + 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (CODES,))


@triton.jit
def _gumbel(word):  # type: ignore[no-untyped-def]
    """-log(-log(1 - u)). log1p by Kahan: what rounding 1 - u loses is put back."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, u / (1.0 - rest))
    minus_log = tl.where(rest == 1.0, u, -tl.log(rest) * lost)
    return -tl.log(minus_log)
