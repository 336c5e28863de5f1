"""Stages: each picture task as a way from a picture to a picture, through tokens on a grid and windows over it.

Shapes: h w grid, N = h * w tokens, M tokens that the tokenizer makes of the picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from arpg.canvas import Canvas, Mask
from arpg.config import WAYS, one_of
from arpg.errors import require
from arpg.image import MAX_PIXELS, Pixels
from arpg.windows import plan_windows

Grid = tuple[int, int]
MAX_TOKENS = 1 << 14  # of one picture: a square of 1024 pixels where a token is 8 pixels wide
TRAINED_AT = 1.0  # how far a picture may be from the wanted shape, in pixels of the result


@dataclass(frozen=True, eq=False)
class Stage:
    """What is known of a picture before, what is drawn, and what comes out. Its sizes are known before any picture."""

    grid: Grid
    known_hw: Mask
    window: Grid
    corners: tuple[tuple[int, int], ...]  # the windows, in the order in which they are filled
    see: Callable[[Image.Image], Pixels] | None = None  # what the tokenizer is shown of a picture; None: nothing
    give: Callable[[Image.Image], Image.Image] = lambda made: made  # what becomes of the pixels that were drawn
    stand_M: Tensor | None = None  # where the picture's tokens stand on the grid; None: one for each place
    place_N2: Tensor | None = None  # as in a request; only where one window is everything

    def __post_init__(self) -> None:
        check_tokens(self.grid)
        assert self.known_hw.shape == self.grid
        assert self.place_N2 is None or self.window == self.grid


def check_tokens(grid: Grid) -> None:
    require(
        grid[0] * grid[1] <= MAX_TOKENS,
        f"the picture would have {grid[1]}x{grid[0]} tokens; at most {MAX_TOKENS} can be drawn; ask for a smaller size",
    )


def from_nothing(grid: Grid) -> Stage:
    return Stage(grid, np.zeros(grid, dtype=bool), grid, ((0, 0),))


def fill(canvas: Canvas, *, feather: int = 0) -> Stage:
    """The masked part of one picture, which the canvas holds."""
    require(feather >= 0, f"feather is {feather}; expected 0 or more pixels")
    known = canvas.known().reshape(canvas.grid)
    return Stage(
        canvas.grid,
        known,
        canvas.grid,
        ((0, 0),),
        see=lambda _: canvas.pixels(),
        give=lambda made: canvas.paste(made, feather=feather),
    )


def extend(canvas: Canvas, window: Grid) -> Stage:
    """Beyond the sides of one picture, which the canvas holds, window by window."""
    check_tokens(canvas.grid)
    known = canvas.known().reshape(canvas.grid)
    return Stage(
        canvas.grid,
        known,
        window,
        tuple(plan_windows(known, window)),
        see=lambda _: canvas.pixels(),
        give=canvas.paste,
    )
