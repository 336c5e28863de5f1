"""A linear layer for a handful of rows, with what stands around it: norm before, SwiGLU or residual sum after.

With few rows a product takes as long as its weight takes to arrive, and a kernel of its own for each small thing
would double the time. Forward only. Shapes: M rows, D inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 64  # rows

_CONFIG = {16: (16, 512, 4, 4), 32: (16, 256, 4, 4), 64: (32, 128, 4, 4)}  # by rows: outputs, inputs, warps, stages


def linear(
    x_MD: Tensor,
    weight_ND: Tensor,
    *,
    norm_D: Tensor | None = None,
    eps: float = 0.0,
    add_MN: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """x @ weight.T, of x or of x normed (root mean square); then SwiGLU of the two halves, or something added."""
    x_MD = x_MD.contiguous()
    (rows, inputs), outputs = x_MD.shape, len(weight_ND) // (2 if swiglu else 1)
    out = torch.empty((rows, outputs), dtype=x_MD.dtype, device=x_MD.device)
    most = max(16, triton.next_power_of_2(rows))
    few_outputs, few_inputs, warps, stages = _CONFIG[most]
    few_inputs = min(few_inputs, max(16, triton.next_power_of_2(inputs)))
    _linear[(triton.cdiv(outputs, few_outputs),)](
        x_MD, weight_ND, norm_D, add_MN, out, rows, inputs, outputs, eps,
        norm_D is not None, add_MN is not None, swiglu, most, few_outputs, few_inputs,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _linear(  # type: ignore[no-untyped-def]
    x, weight, norm, add, out, M, D, N, eps,
    NORM: tl.constexpr, ADD: tl.constexpr, SWIGLU: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows. The norm's factor is the same for a whole row, so it is multiplied in at the end."""
    row = tl.arange(0, ROWS)[:, None]
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    gates = tl.zeros((ROWS, OUTPUTS), tl.float32)
    squares = tl.zeros((ROWS, INPUTS), tl.float32)
    for start in range(0, D, INPUTS):
        channel = start + tl.arange(0, INPUTS)
        part = tl.load(x + row * D + channel[None, :], (row < M) & (channel[None, :] < D), other=0.0)
        if NORM:
            wide = part.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm + channel, channel < D, other=0.0).to(tl.float32)
            part = (wide * scale[None, :]).to(part.dtype)
        at = weight + output * D + channel[:, None]
        there = (output < N) & (channel[:, None] < D)
        if SWIGLU:  # the gates are the first half of the outputs
            gates = tl.dot(part, tl.load(at, there, other=0.0), gates, input_precision="ieee")
            at += N * D
        total = tl.dot(part, tl.load(at, there, other=0.0), total, input_precision="ieee")
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 1) / D + eps)[:, None]
        total, gates = total * factor, gates * factor
    if SWIGLU:
        total = total * gates / (1.0 + tl.exp(-gates))
    there = (row < M) & (output < N)
    if ADD:
        total += tl.load(add + row * N + output, there, other=0.0).to(tl.float32)
    tl.store(out + row * N + output, total.to(out.dtype.element_ty), there)
