"""Products of a handful of rows: norm, product, then SwiGLU or the residual sum, in one kernel. Forward only.

With so few rows a product takes as long as its weights take to come. So a program fetches all of its weights before it
waits for the kernel in front of it (programmatic dependent launch); what is left to do then is a matter of the rows.
A norm needs the squares of all inputs of a row. Whoever makes the rows can sum the squares of its outputs on the way;
then the product behind it need not. The kernel itself is in `few_rows_gluon.py`.
Shapes: M rows, D inputs, N outputs, P groups of outputs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from arpg.kernels import ahead
from arpg.kernels.few_rows_gluon import few_rows_product

ROWS = 16  # of a program: what the tensor cores take at once


class Tile(NamedTuple):
    """What one program takes. Each warp multiplies inputs of its own; their sums meet at the end."""

    outputs: int  # of a group
    groups: int  # at most; no more than it takes to give each processor one program
    warps: int
    staged: bool  # weights wait in shared memory, not in registers
    lead: int  # parts of the rows that are asked for before one is multiplied
    registers: int  # of a thread, at most: the programs of a processor share 65,536


# By kind of product, the fastest of those that `benchmarks/small_gemm.py --tiles` tries.
TILES: dict[str, Tile] = {
    "plain": Tile(8, 3, 4, True, 4, 168),
    "swiglu": Tile(8, 1, 4, False, 4, 168),
    "sum": Tile(8, 1, 8, False, 6, 112),
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
    tile = TILES["swiglu" if swiglu else "plain" if add is None else "sum"]
    groups, blocks = _groups(tile, outputs, x), triton.cdiv(len(x_MD), ROWS)
    parts, padded = (0, 0) if squares_PM is None else squares_PM.shape
    assert parts == 0 or padded == blocks * ROWS
    few_rows_product[(triton.cdiv(outputs, tile.outputs * groups), blocks)](
        x_MD, x if norm_D is None else norm_D, weight_ND, add_MN, out, x if squares_PM is None else squares_PM,
        x if sums_PM is None else sums_PM, len(x_MD), outputs, x_MD.stride(0), add_MN.stride(0), eps, inputs,
        norm_D is not None, add is not None, swiglu, sums_PM is not None, parts, triton.next_power_of_2(parts), ROWS,
        tile.outputs, groups, tile.warps, tile.staged, tile.lead, ahead(x), num_warps=tile.warps,
        maxnreg=tile.registers, launch_pdl=ahead(x),
    )  # fmt: skip
    return out


def empty_sums(x: Tensor, weight_ND: Tensor) -> Tensor:
    """Room for the sums of squares of `x @ weight + something`: `[P, M]`, those of a row beside each other.

    Rows are filled up to those of a whole number of programs, so that they can be read without a mask.
    """
    tile = TILES["sum"]
    groups = _groups(tile, len(weight_ND), x)
    makers = triton.cdiv(len(weight_ND), tile.outputs * groups) * groups
    padded = triton.cdiv(x.numel() // x.shape[-1], ROWS) * ROWS
    return torch.empty((padded, makers), dtype=torch.float32, device=x.device).t()


def _groups(tile: Tile, outputs: int, x: Tensor) -> int:
    return min(tile.groups, triton.cdiv(triton.cdiv(outputs, tile.outputs), _processors(x.device)))


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132
