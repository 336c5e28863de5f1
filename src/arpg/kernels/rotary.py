"""Rotation of queries and keys in one pass: the fused projection is taken apart, and its gradient put together again.

Shapes: B batch, S slots, H heads, K head channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@torch.library.custom_op("arpg::split_turned", mutates_args=())
def split_turned(qkv_BS3HK: Tensor, cos_BSK: Tensor, sin_BSK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned, and values: `[B, S, H, K]` each."""
    q, k, v = (torch.empty_like(qkv_BS3HK[:, :, 0], memory_format=torch.contiguous_format) for _ in range(3))
    _launch(qkv_BS3HK.unbind(2), (q, k, v), cos_BSK, sin_BSK, back=False)
    return q, k, v


@torch.library.custom_op("arpg::join_turned", mutates_args=())
def join_turned(q: Tensor, k: Tensor, v: Tensor, cos_BSK: Tensor, sin_BSK: Tensor) -> Tensor:
    """The gradient of `split_turned`: queries and keys are turned back into their places in `[B, S, 3, H, K]`."""
    batch, slots, heads, channels = q.shape
    out = q.new_empty((batch, slots, 3, heads, channels))
    _launch((q, k, v), out.unbind(2), cos_BSK, sin_BSK, back=True)
    return out


@torch.library.custom_op("arpg::turn", mutates_args=())
def turn(x_BSHK: Tensor, cos_BSK: Tensor, sin_BSK: Tensor, back: bool = False) -> Tensor:
    """One set of heads, turned forwards or back."""
    out = torch.empty_like(x_BSHK, memory_format=torch.contiguous_format)
    _launch((x_BSHK,), (out,), cos_BSK, sin_BSK, back=back)
    return out


def _launch(
    sources: tuple[Tensor, ...], targets: tuple[Tensor, ...], cos_BSK: Tensor, sin_BSK: Tensor, *, back: bool
) -> None:
    """Of one set of heads, or of three, of which the third is only copied."""
    batch, slots, heads, channels = sources[0].shape
    sources = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in sources)
    x0, x1, x2 = (sources[min(i, len(sources) - 1)] for i in range(3))
    y0, y1, y2 = (targets[min(i, len(targets) - 1)] for i in range(3))
    _turn_kernel[(batch * slots,)](
        x0, x1, x2, y0, y1, y2, cos_BSK.contiguous(), sin_BSK.contiguous(), slots, heads,
        *x0.stride()[:3], *x1.stride()[:3], *x2.stride()[:3], *y0.stride()[:3],
        len(sources), -1.0 if back else 1.0, triton.next_power_of_2(heads), channels,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _turn_kernel(  # type: ignore[no-untyped-def]
    x0, x1, x2, y0, y1, y2, cos, sin, S, H,
    b0, s0, h0, b1, s1, h1, b2, s2, h2, b, s, h,
    SETS: tl.constexpr, SIGN: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One slot: all its heads turn by the same angles. The targets lie alike."""
    batch, slot = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, K)[None, :]
    there = (head < H) & (channel < K)
    pair = (batch * S + slot) * K + 2 * tl.arange(0, K // 2)[None, :]
    c, n = tl.load(cos + pair), tl.load(sin + pair) * SIGN
    at = batch * b + slot * s + head * h + channel
    first = tl.load(x0 + batch * b0 + slot * s0 + head * h0 + channel, there, other=0.0)
    tl.store(y0 + at, _turned(first, c, n, HEADS, K).to(y0.dtype.element_ty), there)
    if SETS == 3:
        second = tl.load(x1 + batch * b1 + slot * s1 + head * h1 + channel, there, other=0.0)
        tl.store(y1 + at, _turned(second, c, n, HEADS, K).to(y1.dtype.element_ty), there)
        tl.store(y2 + at, tl.load(x2 + batch * b2 + slot * s2 + head * h2 + channel, there, other=0.0), there)


@triton.jit
def _turned(x, cos, sin, HEADS: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (HEADS, K // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (HEADS, K))


@split_turned.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, slots, _, heads, channels = qkv.shape
    q, k, v = (qkv.new_empty((batch, slots, heads, channels)) for _ in range(3))
    return q, k, v


@join_turned.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, slots, heads, channels = q.shape
    return q.new_empty((batch, slots, 3, heads, channels))


@turn.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:3])


split_turned.register_autograd(
    lambda ctx, *grads: (join_turned(*grads, *ctx.saved_tensors), None, None), setup_context=_save
)
turn.register_autograd(lambda ctx, grad: (turn(grad, *ctx.saved_tensors, True), None, None, None), setup_context=_save)
