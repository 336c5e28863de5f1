"""Orders: in which sequence the positions of a grid are filled.

An order is a list of raster positions. The fixed ones are defined for any height x width:

- raster: row by row.
- alternate: row by row, every second row from right to left.
- spiral-in: clockwise from the top left corner along the border, then the next ring; spiral-out is its reverse.
- z-curve: by the Morton code of (row, column), i.e. the Z-curve of the enclosing power-of-two square, without
  the cells outside the grid.

Those that depend on the seed:

- random: a uniformly random permutation.
- halton: the Halton sequence (bases 2 and 3) over the grid, shifted around the torus; any run of it is spread out.
- local: each step takes positions close to what is known, but away from each other.

Any other order is given as its positions, or as a function that returns them for a grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from arpg.errors import require
from arpg.noise import Stream, position_words
from arpg.settings import Order, read_order

Grid = tuple[int, int]
Positions = NDArray[np.int64]
Words = NDArray[np.int64]


def resolve_order(order: Order, grid: Grid) -> str | tuple[int, ...]:
    """Return the name of an order or its positions; an `InputError` if they are not a permutation of the grid."""
    made = read_order(order(grid) if callable(order) else order)
    tokens = grid[0] * grid[1]
    assert not callable(made), "a function that returns a function"
    require(
        isinstance(made, str) or len(made) == tokens,
        f"order has {len(made)} positions, but the grid has {grid[0]}x{grid[1]} = {tokens} tokens; expected one "
        "position for each",
    )
    return made


def fill_orders(
    order: str | tuple[int, ...],
    grid: Grid,
    open_BN: NDArray[np.bool_],
    seeds: Sequence[int],
    *,
    sizes: Sequence[tuple[int, ...]],
) -> Positions:
    """Return the open positions of each sample in a resolved order, one sample after the other.

    `sizes`: the step sizes of each sample, which matter to `local` alone.
    """
    if order in ("random", "halton", "local"):
        words_BN = position_words(seeds, Stream.ORDER, grid[0] * grid[1])
    if order == "local":
        rows = zip(open_BN, sizes, words_BN, strict=True)
        return np.concatenate([_local(grid, np.flatnonzero(open_N), each, words_N) for open_N, each, words_N in rows])
    if order == "random":
        # Their stable argsort: with its position behind it, no word occurs twice, and sorting is faster than argsort.
        full_BN = words_BN << 31 | np.arange(words_BN.shape[1])
        full_BN.sort(axis=1)
        full_BN &= 2**31 - 1
    elif order == "halton":
        full_BN = np.stack([_halton(grid, words_N) for words_N in words_BN])
    else:
        full_N = _FIXED[order](*grid) if isinstance(order, str) else np.array(order, dtype=np.int64)
        full_BN = np.tile(full_N, (len(open_BN), 1))
    return full_BN.ravel() if open_BN.all() else full_BN[np.take_along_axis(open_BN, full_BN, axis=1)]


def _raster(height: int, width: int) -> Positions:
    return np.arange(height * width)


def _alternate(height: int, width: int) -> Positions:
    cells = _raster(height, width).reshape(height, width).copy()
    cells[1::2] = cells[1::2, ::-1]
    return cells.ravel()


def _spiral_in(height: int, width: int) -> Positions:
    cells = _raster(height, width).reshape(height, width)
    rings: list[Positions] = []
    while cells.size:
        rings.append(cells[0])
        cells = np.rot90(cells[1:])
    return np.concatenate(rings)


def _spiral_out(height: int, width: int) -> Positions:
    return _spiral_in(height, width)[::-1].copy()


def _z_curve(height: int, width: int) -> Positions:
    row, column = np.divmod(_raster(height, width), width)
    code = np.zeros(height * width, dtype=np.int64)
    for bit in range(max(height, width).bit_length()):
        code |= ((column >> bit) & 1) << (2 * bit)
        code |= ((row >> bit) & 1) << (2 * bit + 1)
    return np.argsort(code, kind="stable")


_FIXED = {
    "raster": _raster,
    "alternate": _alternate,
    "spiral-in": _spiral_in,
    "spiral-out": _spiral_out,
    "z-curve": _z_curve,
}


def _radical_inverse(index: Positions, base: int) -> NDArray[np.float64]:
    """The digits of each index in the base, mirrored behind the point."""
    result, scale = np.zeros(len(index)), 1.0
    while index.any():
        index, digit = np.divmod(index, base)
        scale /= base
        result += digit * scale
    return result


@lru_cache(maxsize=16)
def _halton_cells(grid: Grid) -> tuple[Positions, Positions]:
    """Rows and columns in which the points of the sequence fall, until each cell of the grid has been hit."""
    height, width = grid
    # Every cell contains an elementary box of side 1/2^a x 1/3^b, so it is hit among the first 2^a 3^b points.
    points = 2 ** math.ceil(math.log2(2 * height)) * 3 ** math.ceil(math.log(2 * width, 3))
    index = np.arange(1, points + 1)
    row = np.floor(_radical_inverse(index, 2) * height).astype(np.int64)
    return row, np.floor(_radical_inverse(index, 3) * width).astype(np.int64)


def _halton(grid: Grid, words: Words) -> Positions:
    """Cells in the order in which the sequence first falls into them."""
    height, width = grid
    row, column = _halton_cells(grid)
    shift_row, shift_column = int(words[0]) % height, int(words[-1] >> 8) % width
    cells = (row + shift_row) % height * width + (column + shift_column) % width
    _, first = np.unique(cells, return_index=True)
    order: Positions = cells[np.sort(first)]
    return order


@lru_cache(maxsize=16)
def _distances(grid: Grid) -> NDArray[np.float64]:
    """`[2 H - 1, 2 W - 1]`: how far a cell is from one in the middle."""
    height, width = grid
    distance: NDArray[np.float64] = np.hypot(*np.ogrid[1 - height : height, 1 - width : width])
    return distance


def _around(table: NDArray[np.float64], grid: Grid, position: int) -> NDArray[np.float64]:
    """The part of a table around the middle that is the grid, where the position is the middle."""
    row, column = divmod(position, grid[1])
    return table[grid[0] - 1 - row :, grid[1] - 1 - column :][: grid[0], : grid[1]]


def _local(grid: Grid, fill: Positions, sizes: tuple[int, ...], words: Words) -> Positions:
    """Greedy: the next position is the one closest to what is known, and crowding its own step costs.

    The cost of a neighbour in the same step falls off with the distance: a Gaussian, one cell wide. Where that
    leaves a choice (at first, always), a wider one with a small weight spreads the step over the grid, and
    then the seed decides.
    """
    distance = _distances(grid)
    squared = distance**2
    closed = np.ones(grid, dtype=bool)
    closed.flat[fill] = False
    to_known = np.full(grid, float(sum(grid)))
    for known in np.flatnonzero(closed).tolist():
        np.minimum(to_known, _around(distance, grid, known), out=to_known)
    tie = (words * 1e-6 / 2**32).reshape(grid)
    order: list[int] = []
    for size in sizes:
        spacing = max(1.0, math.sqrt(len(fill) / size) / 2)
        crowding = 3.0 * np.exp(-squared / 2) + 0.05 * np.exp(-squared / (2 * spacing**2))
        score = np.where(closed, -np.inf, tie - to_known)
        for _ in range(size):
            position = int(score.argmax())
            order.append(position)
            score -= _around(crowding, grid, position)
            score.flat[position] = -np.inf
        for position in order[len(order) - size :]:
            closed.flat[position] = True
            np.minimum(to_known, _around(distance, grid, position), out=to_known)
    return np.array(order, dtype=np.int64)
