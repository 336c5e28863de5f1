"""A convolution of the tokenizer's decoder with its neighbours, as an implicit GEMM over channels-last images.

While a tile of the input is read, GroupNorm and SiLU are applied to it (`group_norm.line`: a factor and a shift per
image and channel, which make half the norm); the border is zero after them, not before. Before the output is written,
the bias and a residual are added, and its moments are taken for the norm that follows. So an activation is written once
and read by the convolution alone, where the library's convolution takes a pass for each neighbour. The price: each tap
normalises its tile anew.

A convolution after upsampling is the four 2 x 2 convolutions over the small image that `tokenizer/fused.py` describes;
each program computes one of the four and writes its pixels where they belong, so that nothing else is written.

Which shapes take it is measured, by `benchmarks/pixels.py`, and written into `TILES`. Sums in float32. No gradients.
Shapes: B batch, I inputs, O outputs, HW pixels of the input, P parts of an image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels.group_norm import Moments, last, store_moments


class ConvShape(NamedTuple):
    """What the best tile depends on: channels, and height and width of the input."""

    inputs: int
    outputs: int
    height: int
    width: int
    upsample: bool = False


@dataclass(frozen=True)
class Tile:
    """What a program computes, and how."""

    pixels: int
    outputs: int
    inputs: int  # of a step of the sum
    warps: int = 8
    stages: int = 3
    registers: int | None = None  # of a thread, at most; 128: two programs of 8 warps share a multiprocessor
    norm: bool = True  # in the prologue; else by a kernel before

    def fit(self, shape: ConvShape) -> Tile:
        """Return the tile with sides that divide the inputs and are not far larger than the outputs and pixels."""
        pixels = max(16, min(self.pixels, triton.next_power_of_2(shape.height * shape.width)))
        outputs = max(16, min(self.outputs, triton.next_power_of_2(shape.outputs)))
        inputs = min(self.inputs, shape.inputs & -shape.inputs)
        return replace(self, pixels=pixels, outputs=outputs, inputs=inputs)

    def programs(self, shape: ConvShape) -> int:
        """Programs per image."""
        parts = triton.cdiv(shape.height * shape.width, self.pixels) * (4 if shape.upsample else 1)
        return parts * triton.cdiv(shape.outputs, self.outputs)


# Shapes at which it beats the library's on an H200 in half precision, by `benchmarks/pixels.py --tiles`.
TILES: dict[ConvShape, Tile] = {}
DEFAULT_TILE = Tile(128, 64, 64)  # for shapes that have not been measured; fits every GPU's shared memory


def conv_shape(x_BIHW: Tensor, weight_OIkk: Tensor) -> ConvShape:
    """Return the shape of a convolution; weights of 2 x 2 are those after upsampling, `[4 O, I, 2, 2]`."""
    upsample = weight_OIkk.shape[-1] == 2
    outputs = weight_OIkk.shape[0] // (4 if upsample else 1)
    _, inputs, height, width = x_BIHW.shape
    return ConvShape(inputs, outputs, height, width, upsample)


def supports(shape: ConvShape) -> bool:
    """Whether the kernel takes a shape: enough inputs for a step of the tensor cores."""
    return shape.inputs % 16 == 0


def conv(
    x_BIHW: Tensor,
    weight_OIkk: Tensor,
    bias_O: Tensor,
    tile: Tile,
    *,
    line_B2I: Tensor | None = None,
    residual_BOHW: Tensor | None = None,
    moments: bool = True,
    dtype: torch.dtype | None = None,
    outputs: int | None = None,
) -> tuple[Tensor, Moments]:
    """Return the convolution of an image (after norm and SiLU, where the line of half the norm is given) + bias +
    residual, and its moments (not filled in, where they are not wanted), `[B, O, H, W]`.

    Weights of 2 x 2 are those after upsampling, `[4 O, I, 2, 2]`; the result is then `[B, O, 2H, 2W]`.
    `dtype`: of the result, where it is not that of the image. `outputs`: how many of them, where not all.
    """
    x_BIHW, weight_OIkk = last(x_BIHW), last(weight_OIkk if outputs is None else weight_OIkk[:outputs])
    shape = conv_shape(x_BIHW, weight_OIkk)
    tile = tile.fit(shape)
    scale = 2 if shape.upsample else 1
    out = torch.empty(
        (len(x_BIHW), shape.outputs, scale * shape.height, scale * shape.width),
        dtype=dtype or x_BIHW.dtype,
        device=x_BIHW.device,
        memory_format=torch.channels_last,
    )
    found = Moments(out, part=tile.pixels, phases=scale**2)
    _conv[tile.programs(shape), len(x_BIHW)](
        x_BIHW, x_BIHW if line_B2I is None else line_B2I, weight_OIkk, bias_O,
        out if residual_BOHW is None else last(residual_BOHW), out, found.sums_BPC2,
        shape.height, shape.width, found.parts, shape.inputs, shape.outputs,
        line_B2I is not None, residual_BOHW is not None, moments, weight_OIkk.shape[-1],
        isinstance(_conv, triton.JITFunction) and x_BIHW.dtype == torch.bfloat16,
        tile.pixels, tile.outputs, tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return out, found


# The prologue is the bottleneck, so it is written for two bfloat16 at a time: halves of their norms (a, b), and
# SiLU(2a) as a + a tanh(a), one operation of the special function unit instead of two. The error of this tanh, 2^-11,
# is below the rounding to bfloat16. $1: the pair; $2, $3: factors; $4, $5: shifts; $6: all bits for a pixel in the
# image, none outside.
_NORM_SILU = tl.constexpr("""{
    .reg .f32 a, b, s, t;
    .reg .b32 p;
    shl.b32 p, $1, 16;
    mov.b32 a, p;
    and.b32 p, $1, 0xffff0000;
    mov.b32 b, p;
    fma.rn.f32 a, a, $2, $4;
    fma.rn.f32 b, b, $3, $5;
    tanh.approx.f32 s, a;
    tanh.approx.f32 t, b;
    fma.rn.f32 a, a, s, a;
    fma.rn.f32 b, b, t, b;
    cvt.rn.bf16x2.f32 p, b, a;
    and.b32 $0, p, $6;
}""")


@triton.jit
def _norm_silu(tile, factor, shift, bits, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """SiLU(2 (factor * tile + shift)) where a pixel has its bits, else 0. PAIRS: bfloat16, not in the interpreter."""
    if PAIRS:
        return tl.inline_asm_elementwise(
            _NORM_SILU, "=r,r,f,f,f,f,r,r", [tile, factor, shift, bits], tl.bfloat16, is_pure=True, pack=2
        )
    value = 2.0 * (tile.to(tl.float32) * factor + shift)
    return tl.where(bits != 0, value / (1.0 + tl.exp(-value)), 0.0).to(tile.dtype)


@triton.jit
def _conv(  # type: ignore[no-untyped-def]
    x, line, weight, bias, residual, out, sums,
    height, width, parts, C_IN: tl.constexpr, C_OUT: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr, SIDE: tl.constexpr, PAIRS: tl.constexpr,
    PIXELS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """A tile of pixels and outputs of one image; SIDE: taps along each side, 2 after upsampling."""
    PHASES: tl.constexpr = 4 if SIDE == 2 else 1
    TAPS: tl.constexpr = SIDE * SIDE
    image = tl.program_id(1).to(tl.int64)
    blocks = (C_OUT + OUTPUTS - 1) // OUTPUTS
    part = tl.program_id(0) // blocks  # neighbours in time share their pixels
    phase, first = part % PHASES, part // PHASES * PIXELS
    area = height * width
    pixel, channel = first + tl.arange(0, PIXELS), tl.program_id(0) % blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    row, column = pixel // width, pixel % width
    top, left = row - 1 + phase // 2, column - 1 + phase % 2  # of the first tap
    inside = tl.zeros((PIXELS,), tl.int32)  # bit t: tap t lies in the image
    for bit in tl.static_range(TAPS):
        y, z = top + bit // SIDE, left + bit % SIDE
        inside |= tl.where((pixel < area) & (y >= 0) & (y < height) & (z >= 0) & (z < width), 1 << bit, 0)
    x += image * area * C_IN
    line += image * 2 * C_IN
    first_tap = x + ((top * width + left) * C_IN)[:, None] + tl.arange(0, INPUTS)[None, :]
    weight += (phase * C_OUT + channel)[None, :] * (TAPS * C_IN) + tl.arange(0, INPUTS)[:, None]
    total = tl.zeros((PIXELS, OUTPUTS), tl.float32)
    for step in range(TAPS * (C_IN // INPUTS)):
        tap, chunk = step % TAPS, step // TAPS * INPUTS
        bits = ((inside << (31 - tap)) >> 31)[:, None]  # all where the tap lies in the image, else none
        tile = tl.load(first_tap + (tap // SIDE * width + tap % SIDE) * C_IN + chunk, bits != 0, other=0.0)
        if NORM:
            inputs = chunk + tl.arange(0, INPUTS)
            factor, shift = tl.load(line + inputs)[None, :], tl.load(line + C_IN + inputs)[None, :]
            tile = _norm_silu(tile, factor, shift, bits, PAIRS)
        taps = tl.load(weight + tap * C_IN + chunk, (channel < C_OUT)[None, :], other=0.0)
        total = tl.dot(tile, taps, total, input_precision="ieee")
    value = total + tl.load(bias + channel, channel < C_OUT, other=0.0).to(tl.float32)[None, :]
    pixel_out = pixel if PHASES == 1 else (2 * row + phase // 2) * (2 * width) + 2 * column + phase % 2
    there_out = (pixel < area)[:, None] & (channel < C_OUT)[None, :]
    at = image * (area * PHASES * C_OUT) + (pixel_out * C_OUT)[:, None] + channel[None, :]
    if RESIDUAL:
        value += tl.load(residual + at, there_out, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), there_out)
    if MOMENTS:
        value = value.to(out.dtype.element_ty).to(tl.float32)  # of what is there to be normed
        store_moments(value, there_out, sums, image * parts + part, tl.minimum(area - first, PIXELS), channel, C_OUT)
