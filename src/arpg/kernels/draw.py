"""The Gumbel-max draw in one pass over the logits: guidance, Philox 4x32-10 noise, argmax, nothing of it in memory.

The numbers are those of `decode/noise.py`. Shapes: B batch, R rows (B, or 2B when guided), S tokens, V codes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels import ahead

_CODES, _WARPS = 1024, 4  # at a time; a multiple of 4
_FEW = 128  # tokens that leave most of a GPU idle: each is given more of it
_FEW_CODES, _FEW_WARPS, _MOST_TURNS = 4096, 16, 8


def draw(
    logits_RSV: Tensor, scale_BS: Tensor | None, temperature: float, key_B2: Tensor, stream: int, position_BS: Tensor
) -> Tensor:
    """Ids `[B, S]`: argmax(logits / temperature + noise), with a scale of the guided logits."""
    key_B2 = key_B2.contiguous()
    position_BS = position_BS if position_BS.stride(-1) == 1 else position_BS.contiguous()
    logits_RSV = logits_RSV if logits_RSV.stride(-1) == 1 else logits_RSV.contiguous()
    num_tokens, num_codes = logits_RSV.shape[1:]
    batch = len(position_BS)
    scale = key_B2 if scale_BS is None else scale_BS.expand(batch, num_tokens)  # not guided: not read
    ids_BS = position_BS.new_empty(position_BS.shape)
    few = batch * num_tokens <= _FEW and num_codes <= _FEW_CODES * _MOST_TURNS
    codes, warps = (_FEW_CODES, _FEW_WARPS) if few else (_CODES, _WARPS)
    if ids_BS.numel():
        _draw[(batch * num_tokens,)](
            logits_RSV, logits_RSV[batch:], scale, key_B2, position_BS, ids_BS,
            *logits_RSV.stride()[:2], *scale.stride(), position_BS.stride(0), num_tokens, num_codes, temperature,
            scale_BS is not None, int(stream), codes, triton.cdiv(num_codes, codes), few, few and ahead(logits_RSV),
            num_warps=warps, **({"launch_pdl": True} if few and ahead(logits_RSV) else {}),
        )  # fmt: skip
    return ids_BS


@triton.jit(do_not_specialize=["S"])
def _draw(  # type: ignore[no-untyped-def]
    logits, nulls, scales, keys, positions, ids, logit_b, logit_s, scale_b, scale_s, position_b, S, V, temperature,
    GUIDED: tl.constexpr, STREAM: tl.constexpr, CODES: tl.constexpr, TURNS: tl.constexpr, FEW: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One token. Each lane keeps the best of its codes; at the end the best lane wins, of equal ones the first code.

    Few tokens have all their noise before the logits are there. Seeds and positions are as old as the request.
    """
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    row = token // S
    at = row * logit_b + (token % S) * logit_s
    key0, key1 = tl.load(keys + 2 * row).to(tl.uint32), tl.load(keys + 2 * row + 1).to(tl.uint32)
    position = tl.load(positions + row * position_b + token % S).to(tl.uint32)
    scale = tl.load(scales + row * scale_b + (token % S) * scale_s) if GUIDED else 1.0
    best = tl.full((CODES,), float("-inf"), tl.float32)
    best_code = tl.zeros((CODES,), tl.int32)
    if FEW:
        noises = ()
        for turn in tl.static_range(TURNS):
            block = (turn * (CODES // 4) + tl.arange(0, CODES // 4)).to(tl.uint32)
            noise = _gumbel(_words(block, position, STREAM, key0, key1, CODES))
            if AHEAD:  # not pure, so that the compiler does not move it behind the wait
                noise = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [noise], tl.float32, is_pure=False, pack=1)
            noises += (noise,)  # type: ignore[assignment]
        if AHEAD:
            tl.extra.cuda.gdc_wait()
        for turn in tl.static_range(TURNS):
            code = turn * CODES + tl.arange(0, CODES)
            value = _logit(logits + at, nulls + at, code, V, scale, GUIDED) / temperature + noises[turn]
            best, best_code = _better(best, best_code, value, code, V)
    else:
        for turn in range(TURNS):
            code = turn * CODES + tl.arange(0, CODES)
            block = (turn * (CODES // 4) + tl.arange(0, CODES // 4)).to(tl.uint32)
            logit = _logit(logits + at, nulls + at, code, V, scale, GUIDED)
            value = logit / temperature + _gumbel(_words(block, position, STREAM, key0, key1, CODES))
            best, best_code = _better(best, best_code, value, code, V)
    winner = tl.min(tl.where(best == tl.max(best), best_code, V))
    tl.store(ids + token, winner.to(tl.int64))


@triton.jit
def _logit(logits, nulls, code, V, scale, GUIDED: tl.constexpr):  # type: ignore[no-untyped-def]
    logit = tl.load(logits + code, code < V, other=0.0).to(tl.float32)
    if GUIDED:
        null = tl.load(nulls + code, code < V, other=0.0).to(tl.float32)
        logit = null + scale * (logit - null)
    return logit


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
