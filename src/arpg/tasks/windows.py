"""Windows: how a grid larger than the trained one is filled, a trained grid at a time, each leaning on the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def plan_windows(known_hw: Mask, window: tuple[int, int]) -> list[tuple[int, int]]:
    """The top left corners of the windows, in order; together they cover every unknown token.

    Greedy: the next window is the one with unknown tokens that has the most known ones, but at most half of its
    tokens known while there are such windows, so that steps stay large; ties go to the one nearest to the middle.
    """
    known = known_hw.copy()
    rows, columns = (size - side + 1 for size, side in zip(known.shape, window, strict=True))
    assert rows >= 1
    assert columns >= 1
    area = window[0] * window[1]
    away = np.add.outer(abs(np.arange(rows) - (rows - 1) / 2), abs(np.arange(columns) - (columns - 1) / 2))
    corners: list[tuple[int, int]] = []
    while not known.all():
        count = _sums(known, window)
        # Up to half known: the more the better. Beyond that: the fewer the better, and only as a last resort.
        rank = np.where(count <= area / 2, count + area, -count).astype(np.float64)
        rank[count == area] = -np.inf
        best = np.where(rank == rank.max(), away, np.inf)
        top, left = divmod(int(best.argmin()), columns)
        known[top : top + window[0], left : left + window[1]] = True
        corners.append((top, left))
    return corners


def _sums(known_hw: Mask, window: tuple[int, int]) -> NDArray[np.int64]:
    """How many tokens of each window are known."""
    total = np.pad(known_hw.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    high, wide = window
    sums: NDArray[np.int64] = total[high:, wide:] - total[:-high, wide:] - total[high:, :-wide] + total[:-high, :-wide]
    return sums
