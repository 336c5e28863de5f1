"""Products of a handful of rows: norm, product, then SwiGLU or the residual sum, in one kernel. Forward only.

With so few rows a product takes as long as its weights take to come. So a program fetches all of its weights before it
waits for the kernel in front of it (programmatic dependent launch); what is left to do then is a matter of the rows.
A norm needs the squares of all inputs of a row. Whoever makes the rows can sum the squares of its outputs on the way;
then the product behind it does not multiply the rows with themselves, which is as much as the product itself.
Shapes: M rows, D inputs, N outputs, P programs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels import ahead
from arpg.kernels.few_rows_gluon import product

GLUON = True  # the product of `few_rows_gluon.py`, where it can run; otherwise the one below


class Tile(NamedTuple):
    """What one program takes. Each warp multiplies inputs of its own; their sums meet at the end."""

    outputs: int
    warps: int
    inputs: int  # of a warp at a time
    registers: int  # of a thread, at most: the programs of a processor share 65,536


# By kind of product, then by the most rows that a program takes. No tile may make a thread spill much (docs/log.md).
TILES: dict[str, dict[int, Tile]] = {
    "plain": {4: Tile(16, 4, 256, 168), 8: Tile(16, 4, 256, 168), 16: Tile(16, 4, 256, 168)},
    "swiglu": {4: Tile(8, 4, 256, 168), 8: Tile(8, 4, 256, 168), 16: Tile(8, 4, 256, 168)},
    "sum": {4: Tile(8, 4, 256, 168), 8: Tile(8, 4, 256, 168), 16: Tile(8, 4, 256, 168)},
}


class Placed(NamedTuple):
    """What one program of the product in Gluon takes."""

    outputs: int  # of a group
    groups: int  # at most; no more than it takes to give each processor one program
    warps: int
    staged: bool  # weights wait in shared memory, not in registers
    lead: int  # parts of the rows that are asked for before one is multiplied
    registers: int


PLACED: dict[str, dict[int, Placed]] = {
    "plain": {16: Placed(8, 3, 8, False, 2, 128), 32: Placed(8, 3, 8, True, 2, 128)},
    "swiglu": {16: Placed(8, 3, 8, True, 2, 112), 32: Placed(8, 3, 8, True, 2, 168)},
    "sum": {16: Placed(8, 1, 8, True, 4, 96), 32: Placed(8, 1, 8, True, 2, 128)},
}


def linear(
    x: Tensor,
    weight_ND: Tensor,
    *,
    norm_D: Tensor | None = None,
    eps: float = 0.0,
    add: Tensor | None = None,
    swiglu: bool = False,
    squares_PM: Tensor | None = None,
    sums_PM: Tensor | None = None,
) -> Tensor:
    """`[..., N]`, the product with `x`, `[..., D]`, which is normed first if the norm's weight is given; plus `add`.

    With `swiglu`, of gates and ups `[2 N, D]`: silu(gate) * up. `sums_PM`, as `empty_sums` makes it, is filled with
    sums of the squares of the outputs; a norm of them can be given these as `squares_PM`.
    """
    inputs, outputs = x.shape[-1], len(weight_ND) // (2 if swiglu else 1)
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    x_MD = x.flatten(0, -2)
    add_MN = out if add is None else add.flatten(0, -2)
    assert x_MD.stride(-1) == add_MN.stride(-1) == 1
    assert weight_ND.is_contiguous()
    kind = "swiglu" if swiglu else "plain" if add is None else "sum"
    rows = _rows(kind, x)
    parts, padded = (0, 0) if squares_PM is None else squares_PM.shape
    assert parts == 0 or padded == triton.cdiv(len(x_MD), rows) * rows
    tensors = (
        x_MD, x if norm_D is None else norm_D, weight_ND, add_MN, out, x if squares_PM is None else squares_PM,
        x if sums_PM is None else sums_PM, len(x_MD), outputs, x_MD.stride(0), add_MN.stride(0), eps, inputs,
        norm_D is not None, add is not None, swiglu, sums_PM is not None, parts, triton.next_power_of_2(parts), rows,
    )  # fmt: skip
    blocks = triton.cdiv(len(x_MD), rows)
    if placed(x):
        place = PLACED[kind][rows]
        groups = _groups(place, outputs, x)
        product[(triton.cdiv(outputs, place.outputs * groups), blocks)](
            *tensors, place.outputs, groups, place.warps, place.staged, place.lead, ahead(x), num_warps=place.warps,
            maxnreg=place.registers, launch_pdl=ahead(x),
        )  # fmt: skip
    else:
        tile = TILES[kind][rows]
        _linear[(triton.cdiv(outputs, tile.outputs), blocks)](
            *tensors, tile.outputs, tile.warps, tile.inputs, triton.cdiv(inputs, tile.warps * tile.inputs), ahead(x),
            num_warps=tile.warps, maxnreg=tile.registers, launch_pdl=ahead(x),
        )  # fmt: skip
    return out


def empty_sums(x: Tensor, weight_ND: Tensor) -> Tensor:
    """Room for the sums of squares of `x @ weight + something`: `[P, M]`, one for each program and row.

    Rows are filled up to those of a whole number of programs, so that they can be read without a mask.
    """
    rows = _rows("sum", x)
    padded = triton.cdiv(x.numel() // x.shape[-1], rows) * rows
    if placed(x):
        place = PLACED["sum"][rows]
        groups = _groups(place, len(weight_ND), x)
        makers = triton.cdiv(len(weight_ND), place.outputs * groups) * groups
        return torch.empty((padded, makers), dtype=torch.float32, device=x.device).t()
    makers = triton.cdiv(len(weight_ND), TILES["sum"][rows].outputs)
    return torch.empty((makers, padded), dtype=torch.float32, device=x.device)


def placed(x: Tensor) -> bool:
    """Whether the product in Gluon takes these rows."""
    return GLUON and x.is_cuda and x.element_size() == 2 and x.shape[-1] % 16 == 0


def _rows(kind: str, x: Tensor) -> int:
    """Rows of a program."""
    sizes = list(PLACED[kind] if placed(x) else TILES[kind])
    return next((most for most in sizes if most * x.shape[-1] >= x.numel()), max(sizes))


def _groups(place: Placed, outputs: int, x: Tensor) -> int:
    return min(place.groups, triton.cdiv(triton.cdiv(outputs, place.outputs), _processors(x.device)))


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


@triton.jit(do_not_specialize=["M"])
def _linear(  # type: ignore[no-untyped-def]
    x, norm, weight, add, out, squares, sums, M, N, x_row, add_row, eps, D: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, SWIGLU: tl.constexpr, SUMS: tl.constexpr, GIVEN: tl.constexpr, GIVEN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WARPS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Some outputs of some rows. Tiles are `[warp, row or output, input]`; nothing but weights is read ahead."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.arange(0, WARPS)[:, None, None] * INPUTS + tl.arange(0, INPUTS)[None, None, :]
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    EACH: tl.constexpr = 2 * OUTPUTS if SWIGLU else OUTPUTS
    both = tl.arange(0, EACH)  # the gates of some outputs, then their ups
    line = tl.program_id(0) * OUTPUTS + both % OUTPUTS
    weights, rows = (), ()
    for part in tl.static_range(PARTS):
        channel = first + part * WARPS * INPUTS
        weights += (_weights(weight, norm, line, both // OUTPUTS * N, channel, N, D, NORM),)  # type: ignore[assignment]
    if AHEAD:
        tl.extra.cuda.gdc_wait()
    there = (row[:, None] < M) & (output[None, :] < N)
    if ADD:
        before = tl.load(add + row[:, None] * add_row + output[None, :], there, other=0.0)
    if GIVEN:
        maker = tl.arange(0, GIVEN_BLOCK)[:, None]
        given_squares = tl.load(squares + maker * (tl.num_programs(1) * ROWS) + row[None, :], maker < GIVEN, other=0.0)
    sums_of_warps = tl.zeros((WARPS, ROWS, EACH), tl.float32)
    products = tl.zeros((WARPS, ROWS, ROWS), tl.float32)
    LEAD: tl.constexpr = PARTS if ROWS <= 16 else 1  # parts of the rows that are read before one is multiplied
    for turn in tl.static_range(PARTS + LEAD):
        if turn < PARTS:
            channel = first + turn * WARPS * INPUTS
            given = (row[None, :, None] < M) & (channel < D)
            rows += (tl.load(x + row[None, :, None] * x_row + channel, given, other=0.0),)  # type: ignore[assignment]
        if turn >= LEAD:
            some = rows[turn - LEAD]  # type: ignore[var-annotated]
            across = tl.permute(weights[turn - LEAD], (0, 2, 1))
            sums_of_warps = tl.dot(some, across, sums_of_warps, input_precision="ieee")
            if (
                NORM and not GIVEN
            ):  # squares as the diagonal of a product: far fewer instructions than a sum over threads
                products = tl.dot(some, tl.permute(some, (0, 2, 1)), products, input_precision="ieee")
    total = tl.sum(sums_of_warps, 0)
    if NORM:
        if GIVEN:
            square = tl.sum(given_squares, 0)
        else:
            itself = (row[:, None] == row[None, :])[None]
            square = tl.sum(tl.sum(tl.where(itself, products, 0.0), 2), 0)
        factor = tl.rsqrt(square / D + eps)[:, None]
        total = total * factor
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, OUTPUTS)), (0, 2, 1)))
        total = up * gate / (1.0 + tl.exp(-gate))
    if ADD:
        total += before.to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + row[:, None] * N + output[None, :], result, there)
    if SUMS:  # of what will be read, rounded
        rounded = tl.where(there, result.to(tl.float32), 0.0)
        tl.store(sums + tl.program_id(0) * (tl.num_programs(1) * ROWS) + row, tl.sum(rounded * rounded, 1))


@triton.jit
def _weights(weight, norm, output, skip, channel, N, D: tl.constexpr, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scaled by the norm's, while the rows are not there yet. `skip`: lines of the weight that come before."""
    there = (output[None, :, None] < N) & (channel < D)
    tile = tl.load(weight + (output + skip)[None, :, None] * D + channel, there, other=0.0)
    if NORM:
        tile = (tile.to(tl.float32) * tl.load(norm + channel, channel < D, other=0.0).to(tl.float32)).to(tile.dtype)
    return tile
