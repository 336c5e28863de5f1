"""GEMM with int8 weights on a GPU, for small batches. No gradients.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 64  # of `int8_gemm`
_OUTPUTS, _INPUTS = 32, 128


@torch.library.custom_op("arpg::int8_gemm", mutates_args=())
def int8_gemm(x: Tensor, values_OI: Tensor, scale_O: Tensor) -> Tensor:
    """x times the weight, for at most `MAX_ROWS` rows: the time is that of reading the weight, which is read once."""
    x = x.contiguous()
    outputs, inputs = values_OI.shape
    num_rows = x.numel() // inputs
    assert num_rows <= MAX_ROWS
    out = x.new_empty((*x.shape[:-1], outputs))
    rows = max(16, triton.next_power_of_2(num_rows))
    _int8_gemm[(triton.cdiv(outputs, _OUTPUTS),)](
        x, values_OI, scale_O, out, num_rows, inputs, outputs,
        rows, _OUTPUTS, _INPUTS, triton.cdiv(inputs, _INPUTS), num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@int8_gemm.register_fake
def _(x: Tensor, values_OI: Tensor, scale_O: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], values_OI.shape[0]))


@triton.jit
def _int8_gemm(  # type: ignore[no-untyped-def]
    x, values, scales, out, num_rows, num_inputs, num_outputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """All rows, some outputs. The weight becomes x's type in registers, which is exact; scales come last."""
    row = tl.arange(0, ROWS)[:, None]
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for iteration in range(ITERATIONS):
        inputs = iteration * INPUTS + tl.arange(0, INPUTS)
        seen = (row < num_rows) & (inputs[None, :] < num_inputs)
        left = tl.load(x + row * num_inputs + inputs[None, :], seen, other=0.0)
        there = (output[None, :] < num_outputs) & (inputs[:, None] < num_inputs)
        right = tl.load(values + output[None, :].to(tl.int64) * num_inputs + inputs[:, None], there, other=0)
        total += tl.dot(left, right.to(left.dtype))
    total *= tl.load(scales + output, output < num_outputs, other=0.0)[None, :]
    there = (row < num_rows) & (output[None, :] < num_outputs)
    tl.store(out + row * num_outputs + output[None, :], total.to(out.dtype.element_ty), there)
