"""Numbers of 8 bits on a GPU: rows that leave the kernel that makes them as float8, and products with int8 weights.

A row is scaled so that its largest number is the largest of float8. No gradients.
Shapes: M rows, I inputs, O outputs, F hidden channels, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels import FLOAT8, FLOAT8_MAX, Rows

MAX_ROWS = 64  # of `int8_product`
_OUTPUTS, _INPUTS = 32, 128


def quantise_rows(x: Tensor) -> Rows:
    x = x.contiguous()
    rows = _empty_rows(x.shape, x.device)
    block, warps = _block(x.shape[-1])
    _quantise[(x.numel() // x.shape[-1],)](x, *rows, x.shape[-1], FLOAT8_MAX, block, num_warps=warps)
    return rows


def swiglu_rows(gate_up: Tensor) -> Rows:
    """silu(gate) * up, from `[..., 2 F]`."""
    gate_up = gate_up.contiguous()
    hidden = gate_up.shape[-1] // 2
    rows = _empty_rows((*gate_up.shape[:-1], hidden), gate_up.device)
    block, warps = _block(hidden)
    _swiglu[(gate_up.numel() // (2 * hidden),)](gate_up, *rows, hidden, FLOAT8_MAX, block, num_warps=warps)
    return rows


def norm_rows(x_BSD: Tensor, delta_BSD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Rows]:
    """x + delta, and that normed (`kernels/residual.py`, without dropout)."""
    x_BSD, delta_BSD = x_BSD.contiguous(), delta_BSD.contiguous()
    total, rows, width = torch.empty_like(x_BSD), _empty_rows(x_BSD.shape, x_BSD.device), x_BSD.shape[-1]
    block, warps = _block(width)
    _norm[(x_BSD.numel() // width,)](
        x_BSD, delta_BSD, weight_D, total, *rows, width, eps, FLOAT8_MAX, block, num_warps=warps
    )
    return total, rows


def int8_product(x: Tensor, values_OI: Tensor, scale_O: Tensor) -> Tensor:
    """x times the weight, for at most `MAX_ROWS` rows: the time is that of reading the weight, which is read once."""
    x = x.contiguous()
    outputs, inputs = values_OI.shape
    num_rows = x.numel() // inputs
    assert num_rows <= MAX_ROWS
    out = x.new_empty((*x.shape[:-1], outputs))
    rows = max(16, triton.next_power_of_2(num_rows))
    _int8_product[(triton.cdiv(outputs, _OUTPUTS),)](
        x, values_OI, scale_O, out, num_rows, inputs, outputs,
        rows, _OUTPUTS, _INPUTS, triton.cdiv(inputs, _INPUTS), num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def _empty_rows(shape: tuple[int, ...], device: torch.device) -> Rows:
    return Rows(
        torch.empty(shape, dtype=FLOAT8, device=device),
        torch.empty((*shape[:-1], 1), dtype=torch.float32, device=device),
    )


def _block(channels: int) -> tuple[int, int]:
    """Channels of a row, padded to a power of two, and the warps that take it."""
    block: int = triton.next_power_of_2(channels)
    return block, max(1, min(8, block // 256))


@triton.jit
def _store(row, channel, there, x, values, scales, C, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.maximum(tl.max(tl.abs(x)), 1e-12) / LARGEST
    tl.store(scales + row, scale)
    x = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
    tl.store(values + row * C + channel, x.to(values.dtype.element_ty), there)


@triton.jit
def _quantise(x, values, scales, C, LARGEST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = channel < C
    found = tl.load(x + row * C + channel, there, other=0.0).to(tl.float32)
    _store(row, channel, there, found, values, scales, C, LARGEST)


@triton.jit
def _swiglu(gate_up, values, scales, C, LARGEST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = channel < C
    at = gate_up + row * (2 * C) + channel
    gate = tl.load(at, there, other=0.0).to(tl.float32)
    up = tl.load(at + C, there, other=0.0).to(tl.float32)
    _store(row, channel, there, gate * (1.0 / (1.0 + tl.exp(-gate))) * up, values, scales, C, LARGEST)


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    x, delta, weight, total, values, scales, C, eps, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there, at = channel < C, row * C + channel
    added = tl.load(x + at, there, other=0.0).to(tl.float32) + tl.load(delta + at, there, other=0.0).to(tl.float32)
    added = added.to(total.dtype.element_ty)
    tl.store(total + at, added, there)
    added = added.to(tl.float32)
    normed = added * tl.rsqrt(tl.sum(added * added) / C + eps)
    scaled = normed * tl.load(weight + channel, there, other=0.0).to(tl.float32)
    _store(row, channel, there, scaled, values, scales, C, LARGEST)


@triton.jit
def _int8_product(  # type: ignore[no-untyped-def]
    x, values, scales, out, num_rows, num_inputs, num_outputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """All rows, some outputs. The weight becomes x's type in registers, which is exact; scales come last."""
    row = tl.arange(0, ROWS)[:, None]
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for turn in range(TURNS):
        inputs = turn * INPUTS + tl.arange(0, INPUTS)
        seen = (row < num_rows) & (inputs[None, :] < num_inputs)
        left = tl.load(x + row * num_inputs + inputs[None, :], seen, other=0.0)
        there = (output[None, :] < num_outputs) & (inputs[:, None] < num_inputs)
        right = tl.load(values + output[None, :].to(tl.int64) * num_inputs + inputs[:, None], there, other=0)
        total += tl.dot(left, right.to(left.dtype))
    total *= tl.load(scales + output, output < num_outputs, other=0.0)[None, :]
    there = (row < num_rows) & (output[None, :] < num_outputs)
    tl.store(out + row * num_outputs + output[None, :], total.to(out.dtype.element_ty), there)
