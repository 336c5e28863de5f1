"""Attention of a handful of queries over a short cache: each query sees the first slots of its row. Forward only.

New slots bring their own keys and values; they go into the cache on the way, so that a layer of Pass 1 is one kernel.
Settled slots are complete, whichever kernels in front still run: steps before have written them. With few programs they
are read before the wait for those kernels, all at once; what is left to read then are the queries and the newest slots.
The kernel itself is in `attention_kernel.py`.
Shapes: B rows, S queries, T slots, H heads, K head channels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from arpg.kernels import ahead
from arpg.kernels.attention_kernel import attend_kernel
from arpg.kernels.rotary import store_turned

_MOST = 64  # queries of one program
_MANY = 512  # programs that keep a GPU busy
_AT_ONCE = {128: 4, 256: 4, 512: 16}  # settled slots that a program can read before it waits, and its warps

Rotation = tuple[Tensor, Tensor]  # cos_BSK, sin_BSK


class Tiles(NamedTuple):
    """How the work is cut. Registers decide how many programs run at once."""

    queries: int
    slots: int
    warps: int
    stages: int
    registers: int | None = None  # of a thread, for heads of up to 64 channels
    early: bool = False  # the settled slots are read before the wait; others are no more than `queries`


def tiles(queries: int, pairs: int, *, new: bool, settled: int | None = None, newest: int = 0) -> Tiles:
    """For so many queries, in so many pairs of a row and a head. New slots: one program must take all the queries.

    Behind so many settled slots there are so many others; None: that is not known. `benchmarks/attention_tiles.py`
    measures other tiles.
    """
    rows = 16 if queries <= 16 else 32 if queries <= 32 else _MOST
    if pairs * triton.cdiv(queries, rows) < _MANY:  # as much of the cache at once as there is, mostly
        slots = None if settled is None else next((most for most in _AT_ONCE if most >= settled), None)
        if slots is not None and newest <= rows == 16:
            return Tiles(rows, slots, _AT_ONCE[slots], stages=2, early=True)
        return Tiles(rows, slots=128, warps=8, stages=2) if rows == 16 else Tiles(rows, slots=64, warps=4, stages=2)
    if rows > 16:
        return Tiles(_MOST, slots=32, warps=4, stages=3)
    return Tiles(rows, slots=16, warps=1, stages=3, registers=128)  # so that a multiprocessor holds 16 programs


def attend(
    q_BSHK: Tensor,
    key_BTHK: Tensor,
    value_BTHK: Tensor,
    limit_BS: Tensor | None,
    rotation: Rotation | None = None,
    *,
    settled: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`[B, S, H, K]`. `limit_BS`: how many slots each query sees, one or more; None: all.

    With a rotation (`[B, S, K]` each) the queries are turned on their way in. `settled`: so many slots, the first ones,
    are complete, whichever kernels still run. `dtype`: of what comes out, by default that of the queries.
    """
    qkv, cache = (q_BSHK, q_BSHK, q_BSHK), (key_BTHK, value_BTHK)
    return _launch(qkv, cache, limit_BS, rotation, key_BTHK.shape[1], settled, new=False, dtype=dtype)


def attend_and_store(
    qkv_BS3HK: Tensor,
    cache: tuple[Tensor, Tensor],
    limit_BS: Tensor | None,
    rotation: Rotation,
    first: int | Tensor,
    *,
    settled: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Queries and keys are turned; keys and values go to the cache, from slot `first` (of each row) on. `[B, S, H, K]`.

    `limit_BS` counts slots of the cache, the new ones among them. `settled` as in `attend`.
    """
    q, k, v = qkv_BS3HK.unbind(2)
    if q.shape[1] <= _MOST:
        return _launch((q, k, v), cache, limit_BS, rotation, first, settled, new=True, dtype=dtype)
    store_turned(k, v, *rotation, key_BTHK=cache[0], value_BTHK=cache[1], first=first)
    if isinstance(first, Tensor):  # a row ends where its limits say
        return attend(q, *cache, limit_BS, rotation, dtype=dtype)
    key, value = (x[:, : first + q.shape[1]] for x in cache)
    return attend(q, key, value, limit_BS, rotation, dtype=dtype)


def _launch(
    qkv: tuple[Tensor, Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    limit_BS: Tensor | None,
    rotation: Rotation | None,
    first: int | Tensor,
    settled: int,
    *,
    new: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    """`first`: where the new slots go; without new ones, where the cache ends."""
    q, k, v = qkv
    batch, queries, heads, channels = q.shape
    out = torch.empty((batch, queries, heads, channels), dtype=dtype or q.dtype, device=q.device)
    limit = q if limit_BS is None else limit_BS.expand(batch, queries)  # without limits: not read
    cos, sin = (q, q) if rotation is None else (x.contiguous() for x in rotation)
    ragged = isinstance(first, Tensor)
    known: dict[str, int] = {}
    if not isinstance(first, Tensor) and not torch.compiler.is_compiling():  # which would compile for each number
        if not new:
            known = {"settled": settled, "newest": first - settled}
        elif settled == first:
            known = {"settled": settled, "newest": queries}
    cut = tiles(queries, batch * heads, new=new, **known)
    assert not new or queries <= cut.queries
    assert not cut.early or (known["settled"] <= cut.slots and 0 <= known["newest"] <= cut.queries)
    early = ahead(q)
    options: dict[str, Any] = {}
    if early:
        options["launch_pdl"] = True
    if cut.registers is not None and channels <= 64 and not torch.compiler.is_compiling():  # which cannot pass it on
        options["maxnreg"] = cut.registers
    attend_kernel[(triton.cdiv(queries, cut.queries), batch * heads)](
        q, k, v, *cache, limit, cos, sin, first if ragged else q, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *cache[0].stride()[:3], *cache[1].stride()[:3],
        *limit.stride()[:2], queries, 0 if ragged else first, settled if cut.early else 0, heads,
        math.log2(math.e) / math.sqrt(channels), channels, limit_BS is not None, rotation is not None, new, ragged,
        cut.queries, cut.slots, max(16, triton.next_power_of_2(channels)), early, cut.early,
        num_warps=cut.warps, num_stages=cut.stages, **options,
    )  # fmt: skip
    return out
