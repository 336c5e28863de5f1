"""Products of a handful of rows: norm, product, then SwiGLU or the residual sum, in one kernel. Forward only.

With so few rows a product takes as long as its weights take to come. So a program fetches all of its weights before it
waits for the kernel in front of it (programmatic dependent launch); what is left to do then is a matter of the rows.
Shapes: M rows, D inputs, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels import ahead


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


def linear(
    x: Tensor,
    weight_ND: Tensor,
    *,
    norm_D: Tensor | None = None,
    eps: float = 0.0,
    add: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """`[..., N]`, the product with `x`, `[..., D]`, which is normed first if the norm's weight is given; plus `add`.

    With `swiglu`, of gates and ups `[2 N, D]`: silu(gate) * up.
    """
    inputs, outputs = x.shape[-1], len(weight_ND) // (2 if swiglu else 1)
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    x_MD = x.flatten(0, -2)
    add_MN = out if add is None else add.flatten(0, -2)
    assert x_MD.stride(-1) == add_MN.stride(-1) == 1
    assert weight_ND.is_contiguous()
    tiles = TILES["swiglu" if swiglu else "plain" if add is None else "sum"]
    rows = next((most for most in tiles if most >= len(x_MD)), max(tiles))
    tile = tiles[rows]
    _linear[(triton.cdiv(outputs, tile.outputs), triton.cdiv(len(x_MD), rows))](
        x_MD, x if norm_D is None else norm_D, weight_ND, add_MN, out, len(x_MD), outputs, x_MD.stride(0),
        add_MN.stride(0), eps, inputs, norm_D is not None, add is not None, swiglu, rows, tile.outputs, tile.warps,
        tile.inputs, triton.cdiv(inputs, tile.warps * tile.inputs), ahead(x), num_warps=tile.warps,
        maxnreg=tile.registers, launch_pdl=ahead(x),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _linear(  # type: ignore[no-untyped-def]
    x, norm, weight, add, out, M, N, x_row, add_row, eps, D: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    SWIGLU: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WARPS: tl.constexpr, INPUTS: tl.constexpr,
    PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Some outputs of some rows. Tiles are `[warp, row or output, input]`; nothing but weights is read ahead."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.arange(0, WARPS)[:, None, None] * INPUTS + tl.arange(0, INPUTS)[None, None, :]
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    ups, gates, rows = (), (), ()
    for part in tl.static_range(PARTS):
        channel = first + part * WARPS * INPUTS
        if SWIGLU:
            gates += (_weights(weight, norm, output, channel, N, D, NORM),)  # type: ignore[assignment]
            ups += (_weights(weight + N * D, norm, output, channel, N, D, NORM),)  # type: ignore[assignment]
        else:
            ups += (_weights(weight, norm, output, channel, N, D, NORM),)  # type: ignore[assignment]
    if AHEAD:
        tl.extra.cuda.gdc_wait()
    there = (row[:, None] < M) & (output[None, :] < N)
    if ADD:
        before = tl.load(add + row[:, None] * add_row + output[None, :], there, other=0.0)
    up = tl.zeros((WARPS, ROWS, OUTPUTS), tl.float32)
    gate = tl.zeros((WARPS, ROWS, OUTPUTS), tl.float32)
    products = tl.zeros((WARPS, ROWS, ROWS), tl.float32)
    LEAD: tl.constexpr = PARTS if ROWS <= 16 else 1  # parts of the rows that are read before one is multiplied
    for turn in tl.static_range(PARTS + LEAD):
        if turn < PARTS:
            channel = first + turn * WARPS * INPUTS
            given = (row[None, :, None] < M) & (channel < D)
            rows += (tl.load(x + row[None, :, None] * x_row + channel, given, other=0.0),)  # type: ignore[assignment]
        if turn >= LEAD:
            some = rows[turn - LEAD]  # type: ignore[var-annotated]
            if SWIGLU:
                gate = tl.dot(some, tl.permute(gates[turn - LEAD], (0, 2, 1)), gate, input_precision="ieee")
            up = tl.dot(some, tl.permute(ups[turn - LEAD], (0, 2, 1)), up, input_precision="ieee")
            if NORM:  # squares as the diagonal of a product: far fewer instructions than a sum over threads
                products = tl.dot(some, tl.permute(some, (0, 2, 1)), products, input_precision="ieee")
    total = tl.sum(up, 0)
    gate_total = tl.sum(gate, 0)
    if NORM:
        itself = (row[:, None] == row[None, :])[None]
        squares = tl.sum(tl.sum(tl.where(itself, products, 0.0), 2), 0)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        total, gate_total = total * factor, gate_total * factor
    if SWIGLU:
        total = total * gate_total / (1.0 + tl.exp(-gate_total))
    if ADD:
        total += before.to(tl.float32)
    tl.store(out + row[:, None] * N + output[None, :], total.to(out.dtype.element_ty), there)


@triton.jit
def _weights(weight, norm, output, channel, N, D: tl.constexpr, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scaled by the norm's, while the rows are not there yet."""
    tile = tl.load(weight + output[None, :, None] * D + channel, (output[None, :, None] < N) & (channel < D), other=0.0)
    if NORM:
        tile = (tile.to(tl.float32) * tl.load(norm + channel, channel < D, other=0.0).to(tl.float32)).to(tile.dtype)
    return tile
