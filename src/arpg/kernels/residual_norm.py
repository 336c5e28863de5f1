"""Dropout, residual addition and RMSNorm in one pass over the stream, and their gradients in another.

Shapes: B batch, R rows (2B: conditional, then unconditional), S slots, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels.dispatch import FLOAT8, prefetch_weights

# Of the backward pass: each program sums its share of the weight's gradient, some rows at a time, while the next come.
_PROGRAMS, _ROWS, _STAGES = 512, 1, 3


@torch.library.custom_op("arpg::residual_norm", mutates_args=())
def residual_norm(
    x_BSD: Tensor, delta_BSD: Tensor, weight_D: Tensor, key_B: Tensor, p: float, eps: float
) -> tuple[Tensor, Tensor]:
    """x + dropout(delta), and that normed; masks as in `ops.keyed_dropout`. p = 0: no dropout, whatever the keys."""
    return _forward(x_BSD, delta_BSD, weight_D, key_B, p, eps, x_BSD.dtype)


@torch.library.custom_op("arpg::residual_norm_float8", mutates_args=())
def residual_norm_float8(x_BSD: Tensor, delta_BSD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and that normed, in float8. No gradient."""
    return _forward(x_BSD, delta_BSD, weight_D, weight_D, 0.0, eps, FLOAT8)  # without dropout no key is read


def _forward(
    x_BSD: Tensor, delta_BSD: Tensor, weight_D: Tensor, key_B: Tensor, p: float, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    x_BSD, delta_BSD = x_BSD.contiguous(), delta_BSD.contiguous()
    total, normed = torch.empty_like(x_BSD), torch.empty_like(x_BSD, dtype=dtype)
    slots, width = x_BSD.shape[-2:]
    half, warps = _block(width)
    _residual_norm_forward[(x_BSD.numel() // width,)](
        x_BSD, delta_BSD, weight_D, key_B, total, normed, slots, width, _threshold(p), 1.0 / (1.0 - p), eps,
        p > 0, half, num_warps=warps,
    )  # fmt: skip
    return total, normed


@torch.library.custom_op("arpg::residual_norm_backward", mutates_args=())
def residual_norm_backward(
    grad_total: Tensor, grad_normed: Tensor, total_BSD: Tensor, weight_D: Tensor, key_B: Tensor, p: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the stream, of what was added (empty without dropout: it is the same) and of the weight."""
    grad_total, grad_normed = grad_total.contiguous(), grad_normed.contiguous()
    slots, width = total_BSD.shape[-2:]
    rows = total_BSD.numel() // width
    programs = min(triton.cdiv(rows, _ROWS), _PROGRAMS)
    half, warps = _block(width)
    grad_x = torch.empty_like(total_BSD)
    grad_delta = torch.empty_like(total_BSD if p > 0 else total_BSD[:0])
    parts = torch.empty((programs, width), dtype=torch.float32, device=total_BSD.device)
    _backward[(programs,)](
        grad_total, grad_normed, total_BSD, weight_D, key_B, grad_x, grad_delta, parts, rows, slots, width,
        _threshold(p), 1.0 / (1.0 - p), eps, p > 0, half, _ROWS, programs, triton.cdiv(rows, programs * _ROWS), _STAGES,
        num_warps=min(8, _ROWS * warps),
    )  # fmt: skip
    return grad_x, grad_delta, parts.sum(0).to(weight_D.dtype)


def guided_norm(
    x_RSD: Tensor, delta_RSD: Tensor | None, weight_D: Tensor, scale_BS: Tensor, eps: float, *, dtype: torch.dtype
) -> Tensor:
    """`[B, S, D]`: x + delta, normed and guided, rounded once. No gradient, and the sum itself is not kept."""
    x_RSD = x_RSD.contiguous()
    delta = x_RSD if delta_RSD is None else delta_RSD.contiguous()
    rows, slots, width = x_RSD.shape
    scale_BS = scale_BS.expand(rows // 2, slots)
    guided = torch.empty((rows // 2, slots, width), dtype=dtype, device=x_RSD.device)
    pdl = prefetch_weights(x_RSD)
    half, warps = _block(width)
    _residual_norm_guided[(rows // 2 * slots,)](
        x_RSD, delta, weight_D, scale_BS, guided, *scale_BS.stride(), guided.numel(), slots, width, eps,
        delta_RSD is not None, 2 * half, pdl, num_warps=warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return guided


def _threshold(p: float) -> int:
    return round(p * 2**16)


def _block(width: int) -> tuple[int, int]:
    """Channels of a half row, padded to a power of two, and the warps that take it."""
    half: int = triton.next_power_of_2(width // 2)
    return half, max(1, min(8, half // 256))


@residual_norm.register_fake
def _(x: Tensor, delta: Tensor, weight: Tensor, key: Tensor, p: float, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@residual_norm_float8.register_fake
def _(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=FLOAT8)


@residual_norm_backward.register_fake
def _(
    grad_total: Tensor, grad_normed: Tensor, total: Tensor, weight: Tensor, key: Tensor, p: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    added = total.shape if p > 0 else (0, *total.shape[1:])
    return total.new_empty(total.shape), total.new_empty(added), torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, key, ctx.p, ctx.eps = inputs
    ctx.save_for_backward(output[0], weight, key)


def _gradient(ctx: Any, grad_total: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_delta, grad_weight = residual_norm_backward(
        grad_total, grad_normed, *ctx.saved_tensors, ctx.p, ctx.eps
    )
    return grad_x, grad_delta if ctx.p > 0 else grad_x, grad_weight, None, None, None


residual_norm.register_autograd(_gradient, setup_context=_setup)


@triton.jit
def _residual_norm_forward(  # type: ignore[no-untyped-def]
    x, delta, weight, key, total, normed, S, D, threshold, scale, eps, DROP: tl.constexpr, HALF: tl.constexpr
):
    """One row, as two halves: a channel of each shares a random word."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, HALF)
    there = channel < D // 2
    low, high = row * D + channel, row * D + D // 2 + channel
    low_delta = tl.load(delta + low, there, other=0.0).to(tl.float32)
    high_delta = tl.load(delta + high, there, other=0.0).to(tl.float32)
    if DROP:
        keep_low, keep_high = _keep(key, row, channel, row + 1, S, D, threshold)
        low_delta = tl.where(keep_low, low_delta * scale, 0.0)
        high_delta = tl.where(keep_high, high_delta * scale, 0.0)
    # Rounded before the norm: this is what the backward pass will read.
    low_sum = (tl.load(x + low, there, other=0.0).to(tl.float32) + low_delta).to(total.dtype.element_ty)
    high_sum = (tl.load(x + high, there, other=0.0).to(tl.float32) + high_delta).to(total.dtype.element_ty)
    tl.store(total + low, low_sum, there)
    tl.store(total + high, high_sum, there)
    low_sum, high_sum = low_sum.to(tl.float32), high_sum.to(tl.float32)
    r = tl.rsqrt(tl.sum(low_sum * low_sum + high_sum * high_sum) / D + eps)
    low_normed = (low_sum * r).to(total.dtype.element_ty).to(tl.float32) * tl.load(weight + channel, there).to(
        tl.float32
    )
    high_weight = tl.load(weight + D // 2 + channel, there).to(tl.float32)
    high_normed = (high_sum * r).to(total.dtype.element_ty).to(tl.float32) * high_weight
    tl.store(normed + low, low_normed.to(normed.dtype.element_ty), there)
    tl.store(normed + high, high_normed.to(normed.dtype.element_ty), there)


@triton.jit(do_not_specialize=["S"])
def _residual_norm_guided(  # type: ignore[no-untyped-def]
    x, delta, weight, scales, guided, scale_b, scale_s, null, S, D, eps, ADD: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One slot of a sample: its conditional row, and its unconditional one `null` numbers further."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    there = channel < D
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scale = tl.load(scales + row // S * scale_b + row % S * scale_s).to(tl.float32)
    at = row * D + channel
    cond = _normed(x, delta, at, there, D, eps, ADD)
    uncond = _normed(x, delta, at + null, there, D, eps, ADD)
    mixed = (cond + (scale - 1.0) * (cond - uncond)) * tl.load(weight + channel, there, other=0.0).to(tl.float32)
    tl.store(guided + at, mixed.to(guided.dtype.element_ty), there)


@triton.jit
def _normed(x, delta, at, there, D, eps, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of x + delta (rounded, as elsewhere) over its root mean square."""
    total = tl.load(x + at, there, other=0.0)
    if ADD:
        total = (total.to(tl.float32) + tl.load(delta + at, there, other=0.0).to(tl.float32)).to(total.dtype)
    total = total.to(tl.float32)
    return total * tl.rsqrt(tl.sum(total * total) / D + eps)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad_total, grad_normed, total, weight, key, grad_x, grad_delta, parts, M, S, D, threshold, scale, eps,
    DROP: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr, TURNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS rows in each turn, while those of the next are fetched; the weight's gradient is summed on the way."""
    channel = tl.arange(0, HALF)[None, :]
    inside = channel < D // 2
    low_weight = tl.load(weight + channel, inside, other=0.0).to(tl.float32)
    high_weight = tl.load(weight + D // 2 + channel, inside, other=0.0).to(tl.float32)
    low_part = tl.zeros((ROWS, HALF), tl.float32)
    high_part = tl.zeros((ROWS, HALF), tl.float32)
    for turn in tl.range(TURNS, num_stages=STAGES):
        row = (tl.program_id(0).to(tl.int64) + turn * PROGRAMS) * ROWS + tl.arange(0, ROWS)[:, None]
        there = inside & (row < M)
        low = row * D + channel
        high = low + D // 2
        low_x = tl.load(total + low, there, other=0.0).to(tl.float32)
        high_x = tl.load(total + high, there, other=0.0).to(tl.float32)
        low_grad = tl.load(grad_normed + low, there, other=0.0).to(tl.float32)
        high_grad = tl.load(grad_normed + high, there, other=0.0).to(tl.float32)
        low_rest = tl.load(grad_total + low, there, other=0.0).to(tl.float32)
        high_rest = tl.load(grad_total + high, there, other=0.0).to(tl.float32)
        low_scaled, high_scaled = low_grad * low_weight, high_grad * high_weight
        square = tl.sum(low_x * low_x + high_x * high_x, 1)[:, None]
        along = tl.sum(low_scaled * low_x + high_scaled * high_x, 1)[:, None]
        r = tl.rsqrt(square / D + eps)
        low_x, high_x, along = low_x * r, high_x * r, along * r / D
        low_part += low_grad * low_x
        high_part += high_grad * high_x
        low_grad = r * (low_scaled - low_x * along) + low_rest
        high_grad = r * (high_scaled - high_x * along) + high_rest
        tl.store(grad_x + low, low_grad.to(grad_x.dtype.element_ty), there)
        tl.store(grad_x + high, high_grad.to(grad_x.dtype.element_ty), there)
        if DROP:
            keep_low, keep_high = _keep(key, row, channel, M, S, D, threshold)
            low_grad = tl.where(keep_low, low_grad * scale, 0.0)
            high_grad = tl.where(keep_high, high_grad * scale, 0.0)
            tl.store(grad_delta + low, low_grad.to(grad_delta.dtype.element_ty), there)
            tl.store(grad_delta + high, high_grad.to(grad_delta.dtype.element_ty), there)
    at = parts + tl.program_id(0) * D + tl.arange(0, HALF)
    whole = tl.arange(0, HALF) < D // 2
    tl.store(at, tl.sum(low_part, 0), whole)
    tl.store(at + D // 2, tl.sum(high_part, 0), whole)


@triton.jit
def _keep(key, row, channel, M, S, D, threshold):  # type: ignore[no-untyped-def]
    """As `ops.keyed_dropout`: 16 bits of a mixed word for a channel of each half."""
    word = tl.load(key + row // S, row < M, other=0) + ((row % S) * (D // 2) + channel).to(tl.int32)
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x7FEB352D
    word = (word ^ ((word >> 15) & 0x1FFFF)) * -2073254261
    word = word ^ ((word >> 16) & 0xFFFF)
    return (word & 0xFFFF) >= threshold, ((word >> 16) & 0xFFFF) >= threshold
