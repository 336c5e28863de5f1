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
    middle = ((rows - 1) / 2, (columns - 1) / 2)
    half = window[0] * window[1] / 2
    corners: list[tuple[int, int]] = []
    while not known.all():
        best: tuple[bool, float, float] | None = None
        chosen = (0, 0)
        for top in range(rows):
            for left in range(columns):
                count = int(known[top : top + window[0], left : left + window[1]].sum())
                if count == window[0] * window[1]:
                    continue
                # Up to half known: the more the better. Beyond that: the fewer the better, and only as a last resort.
                few = count <= half
                away = abs(top - middle[0]) + abs(left - middle[1])
                rank = (few, float(count if few else -count), -away)
                if best is None or rank > best:
                    best, chosen = rank, (top, left)
        top, left = chosen
        known[top : top + window[0], left : left + window[1]] = True
        corners.append(chosen)
    return corners
