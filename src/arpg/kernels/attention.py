"""Attention of a handful of queries over a short cache: each query sees the first slots of its row. Forward only.

New slots bring their own keys and values; they go into the cache on the way, so that a layer of Pass 1 is one kernel.
Shapes: B rows, S queries, T slots, H heads, K head channels.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels import ahead
from arpg.kernels.rotary import store_turned

_MOST = 64  # queries of one program
_MANY = 512  # programs that keep a GPU busy: then each takes few slots at a time, with few warps

Rotation = tuple[Tensor, Tensor]  # cos_BSK, sin_BSK


def attend(
    q_BSHK: Tensor, key_BTHK: Tensor, value_BTHK: Tensor, limit_BS: Tensor | None, rotation: Rotation | None = None
) -> Tensor:
    """`[B, S, H, K]`. `limit_BS`: how many slots each query sees, one or more; None: all.

    With a rotation (`[B, S, K]` each) the queries are turned on their way in.
    """
    return _launch((q_BSHK, q_BSHK, q_BSHK), (key_BTHK, value_BTHK), limit_BS, rotation, key_BTHK.shape[1], new=False)


def attend_and_store(
    qkv_BS3HK: Tensor, cache: tuple[Tensor, Tensor], limit_BS: Tensor | None, rotation: Rotation, first: int | Tensor
) -> Tensor:
    """Queries and keys are turned; keys and values go to the cache, from slot `first` (of each row) on. `[B, S, H, K]`.

    `limit_BS` counts slots of the cache, the new ones among them.
    """
    q, k, v = qkv_BS3HK.unbind(2)
    if q.shape[1] <= _MOST:
        return _launch((q, k, v), cache, limit_BS, rotation, first, new=True)
    store_turned(k, v, *rotation, key_BTHK=cache[0], value_BTHK=cache[1], first=first)
    if isinstance(first, Tensor):  # a row ends where its limits say
        return attend(q, *cache, limit_BS, rotation)
    key, value = (x[:, : first + q.shape[1]] for x in cache)
    return attend(q, key, value, limit_BS, rotation)


def _launch(
    qkv: tuple[Tensor, Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    limit_BS: Tensor | None,
    rotation: Rotation | None,
    first: int | Tensor,
    *,
    new: bool,
) -> Tensor:
    q, k, v = qkv
    batch, queries, heads, channels = q.shape
    out = torch.empty((batch, queries, heads, channels), dtype=q.dtype, device=q.device)
    limit = q if limit_BS is None else limit_BS.expand(batch, queries)  # without limits: not read
    cos, sin = (q, q) if rotation is None else (x.contiguous() for x in rotation)
    ragged = isinstance(first, Tensor)
    rows = max(16, min(_MOST, triton.next_power_of_2(queries)))
    many = batch * heads * triton.cdiv(queries, rows) >= _MANY
    slots, warps, stages = (16, 1, 3) if many and rows == 16 else (64, 4, 2)
    _attend[(triton.cdiv(queries, rows), batch * heads)](
        q, k, v, *cache, limit, cos, sin, first if ragged else q, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *cache[0].stride()[:3], *cache[1].stride()[:3],
        *limit.stride()[:2], queries, 0 if ragged else first, heads, math.log2(math.e) / math.sqrt(channels), channels,
        limit_BS is not None, rotation is not None, new, ragged, rows, slots,
        max(16, triton.next_power_of_2(channels)), ahead(q), num_warps=warps, num_stages=stages, launch_pdl=ahead(q),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["S", "first"])
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, key, value, limit, cos, sin, lengths, out,
    qb, qs, qh, nb, ns, nh, ub, us, uh, kb, kt, kh, vb, vt, vh, lb, ls,
    S, first, H, scale, K: tl.constexpr,
    LIMITED: tl.constexpr, TURN: tl.constexpr, NEW: tl.constexpr, RAGGED: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Some queries of one head of one row; softmax on the fly, in base 2. The new slots come first, then the cache."""
    if AHEAD:  # the next kernel may fetch its weights
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    there = (query[:, None] < S) & (channel[None, :] < K)
    angle = (batch * S + query[:, None]) * K + channel[None, :]
    q += batch * qb + head * qh
    if TURN:
        c, n = tl.load(cos + angle, there, other=0.0), tl.load(sin + angle, there, other=0.0)
        x = _turned(q, query[:, None] * qs, channel[None, :], c, n, there)
    else:
        x = tl.load(q + query[:, None] * qs + channel[None, :], there, other=0.0)
    end = first
    if RAGGED:
        end = tl.load(lengths + batch).to(tl.int32)
    if LIMITED:
        sees = tl.load(limit + batch * lb + query * ls, query < S, other=1).to(tl.int32)
    key += batch * kb + head * kh
    value += batch * vb + head * vh
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, CHANNELS), tl.float32)
    if NEW:  # as many as there are queries
        new_keys = _turned(k + batch * nb + head * nh, query[:, None] * ns, channel[None, :], c, n, there)
        new_values = tl.load(v + batch * ub + head * uh + query[:, None] * us + channel[None, :], there, other=0.0)
        to = (end + query)[:, None]
        tl.store(key + to * kt + channel[None, :], new_keys, there)
        tl.store(value + to * vt + channel[None, :], new_values, there)
        new_visible = (query < S)[None, :]
        if LIMITED:
            new_visible = new_visible & ((end + query)[None, :] < sees[:, None])
        most, total, mean = _look(x, new_keys, new_values, new_visible, scale, most, total, mean)
    for start in range(0, end, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        stored = (slot[:, None] < end) & (channel[None, :] < K)
        keys = tl.load(key + slot[:, None] * kt + channel[None, :], stored, other=0.0)
        values = tl.load(value + slot[:, None] * vt + channel[None, :], stored, other=0.0)
        visible = (slot < end)[None, :]
        if LIMITED:
            visible = visible & (slot[None, :] < sees[:, None])
        most, total, mean = _look(x, keys, values, visible, scale, most, total, mean)
    result = (mean / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + ((batch * S + query[:, None]) * H + head) * K + channel[None, :], result, there)


@triton.jit
def _look(x, keys, values, visible, scale, most, total, mean):  # type: ignore[no-untyped-def]
    """Some more slots enter the softmax; a query may see none of them."""
    score = tl.dot(x, tl.trans(keys), input_precision="ieee") * scale
    score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(most, tl.max(score, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - safe[:, None])
    fade = tl.exp2(most - safe)
    total = total * fade + tl.sum(weight, 1)
    mean = mean * fade[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
    return higher, total, mean


@triton.jit
def _turned(at, row, channel, cos, sin, there):  # type: ignore[no-untyped-def]
    """Rows of one head, turned. A channel's partner is read again: cheaper than to move it between threads."""
    x = tl.load(at + row + channel, there, other=0.0)
    partner = tl.load(at + row + (channel ^ 1), there, other=0.0).to(tl.float32)
    partner = tl.where(channel % 2 == 0, -partner, partner)
    return (x.to(tl.float32) * cos + partner * sin).to(x.dtype)
