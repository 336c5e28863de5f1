"""The Gumbel-max draw in one pass over the logits: guidance, Philox 4x32-10 noise, argmax, nothing of it in memory.

The numbers are those of `decode/noise.py`. Shapes: B batch, R rows (B, or 2B when guided), S tokens, V codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CODES = 1024  # at a time; a multiple of 4


def draw(
    logits_RSV: Tensor, scale_BS: Tensor | None, temperature: float, key_B2: Tensor, stream: int, position_BS: Tensor
) -> Tensor:
    """Ids `[B, S]`: argmax(logits / temperature + noise), with a scale of the guided logits."""
    position_BS, key_B2 = position_BS.contiguous(), key_B2.contiguous()
    logits_RSV = logits_RSV if logits_RSV.stride(-1) == 1 else logits_RSV.contiguous()
    num_tokens, num_codes = logits_RSV.shape[1:]
    batch = len(position_BS)
    scale = key_B2 if scale_BS is None else scale_BS.expand(batch, num_tokens)  # not guided: not read
    ids_BS = torch.empty_like(position_BS)
    if ids_BS.numel():
        _draw[(batch * num_tokens,)](
            logits_RSV, logits_RSV[batch:], scale, key_B2, position_BS, ids_BS,
            *logits_RSV.stride()[:2], *scale.stride(), num_tokens, num_codes, temperature,
            scale_BS is not None, int(stream), _CODES, triton.cdiv(num_codes, _CODES), num_warps=4,
        )  # fmt: skip
    return ids_BS


@triton.jit(do_not_specialize=["S"])
def _draw(  # type: ignore[no-untyped-def]
    logits, nulls, scales, keys, positions, ids, logit_b, logit_s, scale_b, scale_s, S, V, temperature,
    GUIDED: tl.constexpr, STREAM: tl.constexpr, CODES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One token. Each lane keeps the best of its codes; at the end the best lane wins, of equal ones the first code."""
    token = tl.program_id(0).to(tl.int64)
    row = token // S
    at = row * logit_b + (token % S) * logit_s
    key0, key1 = tl.load(keys + 2 * row).to(tl.uint32), tl.load(keys + 2 * row + 1).to(tl.uint32)
    position = tl.load(positions + token).to(tl.uint32)
    if GUIDED:
        scale = tl.load(scales + row * scale_b + (token % S) * scale_s)
    best = tl.full((CODES,), float("-inf"), tl.float32)
    best_code = tl.zeros((CODES,), tl.int32)
    for turn in range(TURNS):
        code = turn * CODES + tl.arange(0, CODES)
        block = (turn * (CODES // 4) + tl.arange(0, CODES // 4)).to(tl.uint32)
        logit = tl.load(logits + at + code, code < V, other=0.0).to(tl.float32)
        if GUIDED:
            null = tl.load(nulls + at + code, code < V, other=0.0).to(tl.float32)
            logit = null + scale * (logit - null)
        value = logit / temperature + _gumbel(_words(block, position, STREAM, key0, key1, CODES))
        better = (value > best) & (code < V)
        best = tl.where(better, value, best)
        best_code = tl.where(better, code, best_code)
    winner = tl.min(tl.where(best == tl.max(best), best_code, V))
    tl.store(ids + token, winner.to(tl.int64))


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
