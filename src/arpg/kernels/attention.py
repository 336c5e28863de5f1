"""Attention of a handful of queries over a short cache: each query sees the first slots of its row. Forward only.

Shapes: B rows, S queries, T slots, H heads, K head channels.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels.rotary import _turned

_SLOTS = 64  # at a time


def attend(
    q_BSHK: Tensor,
    key_BTHK: Tensor,
    value_BTHK: Tensor,
    limit_BS: Tensor | None,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`[B, S, H, K]`. `limit_BS`: how many slots each query sees, one or more; None: all.

    With a rotation (`[B, S, K]` each) the queries are turned on their way in.
    """
    batch, queries, heads, channels = q_BSHK.shape
    slots = key_BTHK.shape[1]
    out = torch.empty((batch, queries, heads, channels), dtype=q_BSHK.dtype, device=q_BSHK.device)
    limit = q_BSHK if limit_BS is None else limit_BS.expand(batch, queries)  # without limits: not read
    cos, sin = (q_BSHK, q_BSHK) if rotation is None else (x.contiguous() for x in rotation)
    rows = max(16, min(64, triton.next_power_of_2(queries)))
    turns = triton.cdiv(slots, _SLOTS)
    turns = turns if turns <= 8 else 8 * triton.cdiv(turns, 8)  # few kernels for many lengths
    _attend[(triton.cdiv(queries, rows), batch * heads)](
        q_BSHK, key_BTHK, value_BTHK, limit, cos, sin, out,
        *q_BSHK.stride()[:3], *key_BTHK.stride()[:3], *value_BTHK.stride()[:3], *limit.stride()[:2], *out.stride()[:3],
        queries, slots, heads, math.log2(math.e) / math.sqrt(channels), channels,
        limit_BS is not None, rotation is not None, rows, _SLOTS, max(16, triton.next_power_of_2(channels)), turns,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, key, value, limit, cos, sin, out,
    qb, qs, qh, kb, kt, kh, vb, vt, vh, lb, ls, ob, os, oh,
    S, T, H, scale, K: tl.constexpr,
    LIMITED: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """Some queries of one head of one row; softmax on the fly, in base 2."""
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    there = (query[:, None] < S) & (channel[None, :] < K)
    x = tl.load(q + batch * qb + query[:, None] * qs + head * qh + channel[None, :], there, other=0.0)
    if TURN:
        even = 2 * tl.arange(0, CHANNELS // 2)[None, :]
        pair, real = (batch * S + query[:, None]) * K + even, (query[:, None] < S) & (even < K)
        c, n = tl.load(cos + pair, real, other=0.0), tl.load(sin + pair, real, other=0.0)
        x = _turned(x, c, n, ROWS, CHANNELS).to(x.dtype)
    sees = tl.full((ROWS,), T, tl.int64)
    if LIMITED:
        sees = tl.load(limit + batch * lb + query * ls, query < S, other=1).to(tl.int64)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, CHANNELS), tl.float32)
    for turn in range(TURNS):
        slot = turn * SLOTS + tl.arange(0, SLOTS)
        stored = (slot[:, None] < T) & (channel[None, :] < K)
        k = tl.load(key + batch * kb + slot[:, None] * kt + head * kh + channel[None, :], stored, other=0.0)
        score = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
        score = tl.where((slot[None, :] < sees[:, None]) & (slot[None, :] < T), score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(most - higher)
        v = tl.load(value + batch * vb + slot[:, None] * vt + head * vh + channel[None, :], stored, other=0.0)
        total = total * fade + tl.sum(weight, 1)
        mean = mean * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        most = higher
    result = (mean / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + batch * ob + query[:, None] * os + head * oh + channel[None, :], result, there)
