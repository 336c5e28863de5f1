"""Rotary position embedding in one pass: split the fused projection, rotate queries and keys, and the gradient; in
decoding, write rotated keys and values straight into the cache.

Shapes: B batch, S slots, H heads, K head channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels.dispatch import prefetch_weights

if TYPE_CHECKING:
    from arpg.kernels.ops import Packing


@torch.library.custom_op("arpg::split_qkv_rope", mutates_args=())
def split_qkv_rope(qkv_BS3HK: Tensor, cos_BSK: Tensor, sin_BSK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, rotated, and values: `[B, S, H, K]` each."""
    q, k, v = (torch.empty_like(qkv_BS3HK[:, :, 0], memory_format=torch.contiguous_format) for _ in range(3))
    _launch(qkv_BS3HK.unbind(2), (q, k, v), cos_BSK, sin_BSK, sets=3)
    return q, k, v


@torch.library.custom_op("arpg::merge_qkv_rope", mutates_args=())
def merge_qkv_rope(q: Tensor, k: Tensor, v: Tensor, cos_BSK: Tensor, sin_BSK: Tensor) -> Tensor:
    """The gradient of `split_qkv_rope`: `[B, S, 3, H, K]` with queries and keys rotated back."""
    batch, slots, heads, channels = q.shape
    out = q.new_empty((batch, slots, 3, heads, channels))
    _launch((q, k, v), out.unbind(2), cos_BSK, sin_BSK, sets=3, back=True)
    return out


@torch.library.custom_op("arpg::apply_rope", mutates_args=())
def apply_rope(x_BSHK: Tensor, cos_BSK: Tensor, sin_BSK: Tensor, back: bool = False) -> Tensor:
    """One set of heads, rotated forwards or back."""
    out = torch.empty_like(x_BSHK, memory_format=torch.contiguous_format)
    _launch((x_BSHK,), (out,), cos_BSK, sin_BSK, sets=1, back=back)
    return out


def store_rope(
    key_BSHK: Tensor,
    value_BSHK: Tensor,
    cos_BSK: Tensor,
    sin_BSK: Tensor,
    *,
    key_BTHK: Tensor,
    value_BTHK: Tensor,
    first: int | Tensor,
    packing: Packing | None = None,
) -> None:
    """Write rotated keys and values into a cache of any type, from slot `first` (of each row) on. No gradient.

    `packing`: all but the cache is packed.
    """
    sources, targets = (key_BSHK, key_BSHK, value_BSHK), (key_BTHK, key_BTHK, value_BTHK)
    _launch(sources, targets, cos_BSK, sin_BSK, sets=2, first=first, packing=packing)


def packed_row(x_CTHK: Tensor, rows: int) -> Tensor:
    """View packed tokens as one row, the same one for all of so many."""
    return x_CTHK.flatten(0, 1).expand(rows, -1, -1, -1)


def _launch(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    cos_BSK: Tensor,
    sin_BSK: Tensor,
    *,
    sets: int,
    back: bool = False,
    first: int | Tensor = 0,
    packing: Packing | None = None,
) -> None:
    """Queries (`sets` 1 or 3), keys and values (2 or 3), written from slot `first` on; values are not rotated."""
    batch, slots, heads, channels = sources[0].shape
    start, count = cos_BSK, cos_BSK  # not read
    if packing is not None:
        batch, slots, start, count = len(targets[0]), packing.width, packing.start_R, packing.count_R
        sources = [packed_row(x, batch) for x in sources]
    sources = [x if x.stride(-1) == 1 else x.contiguous() for x in sources]
    x0, x1, x2 = (sources[min(i, len(sources) - 1)] for i in range(3))
    y0, y1, y2 = (targets[min(i, len(targets) - 1)] for i in range(3))
    ragged = isinstance(first, Tensor)
    pdl = sets == 2 and prefetch_weights(x0)  # between two decoding kernels that have PDL, too
    _rope_kernel[(batch * slots,)](
        x0, x1, x2, y0, y1, y2, cos_BSK.contiguous(), sin_BSK.contiguous(), first if ragged else cos_BSK, start, count,
        slots, heads,
        *x0.stride()[:3], *x1.stride()[:3], *x2.stride()[:3], *y0.stride()[:3], *y1.stride()[:3], *y2.stride()[:3],
        0 if ragged else first, ragged, packing is not None, sets, -1.0 if back else 1.0,
        triton.next_power_of_2(heads), channels, pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit(do_not_specialize=["S", "first"])
def _rope_kernel(  # type: ignore[no-untyped-def]
    x0, x1, x2, y0, y1, y2, cos, sin, lengths, starts, counts, S, H,
    xb0, xs0, xh0, xb1, xs1, xh1, xb2, xs2, xh2, yb0, ys0, yh0, yb1, ys1, yh1, yb2, ys2, yh2, first,
    RAGGED: tl.constexpr, PACKED: tl.constexpr, SETS: tl.constexpr, SIGN: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One slot: all its heads rotate by the same angles. PACKED: the source is one row of all packed tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch, slot = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, K)[None, :]
    there = (head < H) & (channel < K)
    token, origin = slot, batch * S
    if PACKED:
        if slot >= tl.load(counts + batch):
            return
        origin = tl.load(starts + batch)
        token = origin + slot
    pair = (origin + slot) * K + 2 * tl.arange(0, K // 2)[None, :]
    c, n = tl.load(cos + pair), tl.load(sin + pair) * SIGN
    if SETS != 2:
        x = tl.load(x0 + batch * xb0 + token * xs0 + head * xh0 + channel, there, other=0.0)
        y = _rotate(x, c, n, HEADS, K).to(y0.dtype.element_ty)
        tl.store(y0 + batch * yb0 + slot * ys0 + head * yh0 + channel, y, there)
    if SETS > 1:
        to = slot + (tl.load(lengths + batch) if RAGGED else first)
        x = tl.load(x1 + batch * xb1 + token * xs1 + head * xh1 + channel, there, other=0.0)
        y = _rotate(x, c, n, HEADS, K).to(y1.dtype.element_ty)
        tl.store(y1 + batch * yb1 + to * ys1 + head * yh1 + channel, y, there)
        x = tl.load(x2 + batch * xb2 + token * xs2 + head * xh2 + channel, there, other=0.0)
        tl.store(y2 + batch * yb2 + to * ys2 + head * yh2 + channel, x.to(y2.dtype.element_ty), there)


@triton.jit
def _rotate(x, cos, sin, HEADS: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (HEADS, K // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (HEADS, K))


def rope_table(pos_BS2: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """`ops.rope_table` in one pass: cosines and sines `[B, S, K]`."""
    pos_BS2 = pos_BS2.contiguous()
    cos, sin = (torch.empty((*pos_BS2.shape[:2], head_dim), device=pos_BS2.device) for _ in range(2))
    _rope_table[(pos_BS2.numel() // 2,)](
        pos_BS2, cos, sin, math.log2(base), head_dim, triton.next_power_of_2(head_dim), num_warps=1
    )
    return cos, sin


@triton.jit
def _rope_table(pos, cos, sin, log_base, K: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One slot. The first half of the channels rotates by the row, the second by the column, in pairs."""
    slot = tl.program_id(0).to(tl.int64)
    row, column = tl.load(pos + 2 * slot), tl.load(pos + 2 * slot + 1)
    channel = tl.arange(0, CHANNELS)
    exponent = ((channel % (K // 2)) // 2).to(tl.float32) / (K // 4)
    angle = tl.where(channel < K // 2, row, column) * tl.exp2(-log_base * exponent)
    exists = (row >= 0).to(tl.float32)
    tl.store(cos + slot * K + channel, tl.cos(angle) * exists, channel < K)
    tl.store(sin + slot * K + channel, tl.sin(angle) * exists, channel < K)


@split_qkv_rope.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, slots, _, heads, channels = qkv.shape
    q, k, v = (qkv.new_empty((batch, slots, heads, channels)) for _ in range(3))
    return q, k, v


@merge_qkv_rope.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, slots, heads, channels = q.shape
    return q.new_empty((batch, slots, 3, heads, channels))


@apply_rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:3])


split_qkv_rope.register_autograd(
    lambda ctx, *grads: (merge_qkv_rope(*grads, *ctx.saved_tensors), None, None), setup_context=_save
)
apply_rope.register_autograd(
    lambda ctx, grad: (apply_rope(grad, *ctx.saved_tensors, True), None, None, None), setup_context=_save
)
