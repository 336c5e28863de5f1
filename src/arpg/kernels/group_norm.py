"""GroupNorm and SiLU over channels-last images, and what stands around them in the tokenizer's decoder.

The tensors are far larger than any cache, so what counts is how often they are read and written. A convolution leaves
its bias to the next kernel. The kernel that adds a residual (or puts the four outputs of an upsampling convolution in
their places) also takes the moments of what it writes; one more kernel norms, applies SiLU and writes what the next
convolution reads. Moments are (sum, squared deviation) of each channel in each part of an image, so that nothing is
lost to cancellation. All sums in float32. No gradients.
Shapes: B batch, C channels, HW pixels, P parts of an image, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 8192  # of a part: pixels x channels


class Moments:
    """Of an image `[B, C, H, W]`, part by part."""

    def __init__(self, x_BCHW: Tensor) -> None:
        batch, channels, height, width = x_BCHW.shape
        self.pixels, self.channels = height * width, channels
        self.block_channels = triton.next_power_of_2(channels)
        self.part = max(1, _NUMBERS // self.block_channels)
        self.parts = triton.cdiv(self.pixels, self.part)
        self.sums_BPC2 = x_BCHW.new_empty((batch, self.parts, channels, 2), dtype=torch.float32)

    @property
    def grid(self) -> tuple[int, int]:
        """The programs of a launch: rows and parts."""
        return self.sums_BPC2.shape[0], self.parts


def moments(x_BCHW: Tensor) -> Moments:
    """Return the moments of an image."""
    x_BCHW = last(x_BCHW)
    found = Moments(x_BCHW)
    _add[found.grid](
        x_BCHW, x_BCHW, x_BCHW, x_BCHW, found.sums_BPC2, found.pixels, found.channels, found.parts,
        False, found.part, found.block_channels, num_warps=8,
    )  # fmt: skip
    return found


def add(x_BCHW: Tensor, y_BCHW: Tensor, bias_C: Tensor) -> tuple[Tensor, Moments]:
    """x + y + bias, and its moments."""
    x_BCHW, y_BCHW = last(x_BCHW), last(y_BCHW)
    found, out = Moments(x_BCHW), torch.empty_like(x_BCHW)
    _add[found.grid](
        x_BCHW, y_BCHW, bias_C, out, found.sums_BPC2, found.pixels, found.channels, found.parts,
        True, found.part, found.block_channels, num_warps=8,
    )  # fmt: skip
    return out, found


def spread(x_BCHW: Tensor, bias_C: Tensor) -> tuple[Tensor, Moments]:
    """`[B, C, 2h, 2w]` from an upsampling convolution's `[B, 4C, h + 1, w + 1]` (`tokenizer/fused.py`), and moments."""
    x_BCHW = last(x_BCHW)
    batch, channels, height, width = x_BCHW.shape
    shape = (batch, channels // 4, 2 * (height - 1), 2 * (width - 1))
    out = torch.empty(shape, dtype=x_BCHW.dtype, device=x_BCHW.device, memory_format=torch.channels_last)
    found = Moments(out)
    _spread[found.grid](
        x_BCHW, bias_C, out, found.sums_BPC2, found.pixels, found.channels, found.parts, height, width,
        found.part, found.block_channels, num_warps=8,
    )  # fmt: skip
    return out, found


def norm(x_BCHW: Tensor, of: Moments, bias_C: Tensor | None, norm: torch.nn.GroupNorm, *, silu: bool = True) -> Tensor:
    """The norm (with SiLU) of x + bias, whose moments without the bias are known."""
    x_BCHW = last(x_BCHW)
    batch, channels = x_BCHW.shape[:2]
    line_B2C = torch.empty((batch, 2, channels), dtype=torch.float32, device=x_BCHW.device)
    size = channels // norm.num_groups
    _line[(batch, norm.num_groups)](
        of.sums_BPC2, norm.weight if bias_C is None else bias_C, norm.weight, norm.bias, line_B2C,
        of.pixels, channels, of.parts, of.part, norm.eps, bias_C is not None,
        size, triton.next_power_of_2(size), triton.next_power_of_2(of.parts), num_warps=4,
    )  # fmt: skip
    out = torch.empty_like(x_BCHW)
    _apply[of.grid](
        x_BCHW, line_B2C, out, of.pixels, channels, silu, of.part, of.block_channels, num_warps=8
    )  # fmt: skip
    return out


def last(x_BCHW: Tensor) -> Tensor:
    """Return `x_BCHW` with its channels last in memory."""
    return x_BCHW.contiguous(memory_format=torch.channels_last)


@triton.jit
def _part(pixels, C, PART: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where this program's part lies: its first number, its pixels and channels, and which of them are there."""
    pixel = tl.program_id(1) * PART + tl.arange(0, PART)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    first = tl.program_id(0).to(tl.int64) * pixels * C
    return first, pixel, channel, (pixel < pixels) & (channel < C)


@triton.jit
def _store_moments(  # type: ignore[no-untyped-def]
    x, there, sums, pixels, C, parts, PART: tl.constexpr, CHANNELS: tl.constexpr
):
    count = tl.minimum(pixels - tl.program_id(1) * PART, PART)
    total = tl.sum(tl.where(there, x, 0.0), 0)
    off = tl.where(there, x - (total / count)[None, :], 0.0)
    channel = tl.arange(0, CHANNELS)
    at = sums + ((tl.program_id(0).to(tl.int64) * parts + tl.program_id(1)) * C + channel) * 2
    tl.store(at, total, channel < C)
    tl.store(at + 1, tl.sum(off * off, 0), channel < C)


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    x, y, bias, out, sums, pixels, C, parts,
    ADD: tl.constexpr, PART: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The moments of x, or of x + y + bias, which is written."""
    first, pixel, channel, there = _part(pixels, C, PART, CHANNELS)
    at = first + pixel * C + channel
    value = tl.load(x + at, there, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(y + at, there, other=0.0).to(tl.float32)
        value += tl.load(bias + channel, channel < C, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), there)
        value = value.to(out.dtype.element_ty).to(tl.float32)  # of what is there to be normed
    _store_moments(value, there, sums, pixels, C, parts, PART, CHANNELS)


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    x, bias, out, sums, pixels, C, parts, height, width, PART: tl.constexpr, CHANNELS: tl.constexpr
):
    """Pixel (2i + a, 2j + b) is output (a, b) of the convolution at (i + a, j + b)."""
    first, pixel, channel, there = _part(pixels, C, PART, CHANNELS)
    row, column = pixel // (2 * (width - 1)), pixel % (2 * (width - 1))
    a, b = row % 2, column % 2
    source = ((row // 2 + a) * width + column // 2 + b) * (4 * C) + (2 * a + b) * C + channel
    value = tl.load(x + tl.program_id(0).to(tl.int64) * height * width * 4 * C + source, there, other=0.0)
    value = value.to(tl.float32) + tl.load(bias + channel, channel < C, other=0.0).to(tl.float32)
    tl.store(out + first + pixel * C + channel, value.to(out.dtype.element_ty), there)
    value = value.to(out.dtype.element_ty).to(tl.float32)
    _store_moments(value, there, sums, pixels, C, parts, PART, CHANNELS)


@triton.jit
def _line(  # type: ignore[no-untyped-def]
    sums, added, weight, bias, line, pixels, C, parts, part, eps,
    ADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One group of one image: the line factor * x + shift that each of its channels is put through."""
    index, inside = tl.arange(0, PARTS)[:, None], tl.arange(0, BLOCK)[None, :]
    there = (index < parts) & (inside < SIZE)
    channel = tl.program_id(1) * SIZE + inside
    at = sums + ((tl.program_id(0).to(tl.int64) * parts + index) * C + channel) * 2
    count = tl.minimum(pixels - index * part, part).to(tl.float32)
    total, squares = tl.load(at, there, other=0.0), tl.load(at + 1, there, other=0.0)
    shift = tl.zeros((1, BLOCK), tl.float32)
    if ADDED:
        shift = tl.load(added + channel, inside < SIZE, other=0.0).to(tl.float32)
        total += tl.where(there, shift * count, 0.0)
    size = pixels * SIZE * 1.0
    mean = tl.sum(total) / size
    off = tl.where(there, total / tl.where(there, count, 1.0) - mean, 0.0)
    variance = tl.sum(squares + tl.where(there, off * off * count, 0.0)) / size
    factor = tl.rsqrt(variance + eps) * tl.load(weight + channel, inside < SIZE, other=0.0).to(tl.float32)
    to = line + tl.program_id(0) * 2 * C + channel
    tl.store(to, factor, inside < SIZE)
    offset = tl.load(bias + channel, inside < SIZE, other=0.0).to(tl.float32)
    tl.store(to + C, offset + (shift - mean) * factor, inside < SIZE)


@triton.jit
def _apply(  # type: ignore[no-untyped-def]
    x, line, out, pixels, C, SILU: tl.constexpr, PART: tl.constexpr, CHANNELS: tl.constexpr
):
    first, pixel, channel, there = _part(pixels, C, PART, CHANNELS)
    at = first + pixel * C + channel
    own = line + tl.program_id(0) * 2 * C + channel
    factor, shift = tl.load(own, channel < C, other=0.0), tl.load(own + C, channel < C, other=0.0)
    value = tl.load(x + at, there, other=0.0).to(tl.float32) * factor + shift
    if SILU:
        value = value * (1.0 / (1.0 + tl.exp(-value)))
    tl.store(out + at, value.to(out.dtype.element_ty), there)
