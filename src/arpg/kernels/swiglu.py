"""silu(gate) * up in one pass over the fused projection, and its gradient straight into one tensor.

Shapes: M rows, F hidden channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels.dispatch import FLOAT8

_ROWS, _CHANNELS = 8, 256


@torch.library.custom_op("arpg::swiglu", mutates_args=())
def swiglu(gate_up: Tensor) -> Tensor:
    """`[..., F]` from the gates and ups `[..., 2 F]`; F is a multiple of 256."""
    return _forward(gate_up, gate_up.dtype)


@torch.library.custom_op("arpg::swiglu_float8", mutates_args=())
def swiglu_float8(gate_up: Tensor) -> Tensor:
    """The same in float8. No gradient."""
    return _forward(gate_up, FLOAT8)


def _forward(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=dtype)
    _swiglu_forward[_grid(out)](gate_up, out, out.numel() // out.shape[-1], out.shape[-1], _ROWS, _CHANNELS)
    return out


@torch.library.custom_op("arpg::swiglu_backward", mutates_args=())
def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of gates and ups."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    out = torch.empty_like(gate_up)
    _backward[_grid(grad)](gate_up, grad, out, grad.numel() // grad.shape[-1], grad.shape[-1], _ROWS, _CHANNELS)
    return out


@swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@swiglu_float8.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=FLOAT8)


@swiglu_backward.register_fake
def _(gate_up: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    return swiglu_backward(*ctx.saved_tensors, grad)


swiglu.register_autograd(_gradient, setup_context=_setup)


def _grid(hidden: Tensor) -> tuple[int, int]:
    return triton.cdiv(hidden.numel() // hidden.shape[-1], _ROWS), triton.cdiv(hidden.shape[-1], _CHANNELS)


@triton.jit
def _offsets(M, F, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return row.to(tl.int64), channel, (row < M) & (channel < F)


@triton.jit
def _swiglu_forward(gate_up, out, M, F, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, channel, there = _offsets(M, F, ROWS, CHANNELS)
    at = gate_up + row * (2 * F) + channel
    gate = tl.load(at, there, other=0.0).to(tl.float32)
    up = tl.load(at + F, there, other=0.0).to(tl.float32)
    tl.store(out + row * F + channel, (gate * (1.0 / (1.0 + tl.exp(-gate))) * up).to(out.dtype.element_ty), there)


@triton.jit
def _backward(gate_up, grad, out, M, F, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, channel, there = _offsets(M, F, ROWS, CHANNELS)
    at = row * (2 * F) + channel
    gate = tl.load(gate_up + at, there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + F, there, other=0.0).to(tl.float32)
    d = tl.load(grad + row * F + channel, there, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    tl.store(out + at, (d * up * (sigmoid + silu * (1 - sigmoid))).to(out.dtype.element_ty), there)
    tl.store(out + at + F, (d * silu).to(out.dtype.element_ty), there)
