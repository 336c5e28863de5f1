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

from arpg.errors import one_of, require
from arpg.image import MAX_PIXELS, Pixels
from arpg.model.rope import grid_places
from arpg.settings import EXPAND_METHODS
from arpg.tasks.canvas import Canvas, Mask
from arpg.tasks.control_input import WHOLE, Part
from arpg.tasks.windows import plan_windows

Grid = tuple[int, int]
MAX_TOKENS = 1 << 14  # of one picture: a square of 1024 pixels where a token is 8 pixels wide


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
    part: Part | None = None  # of a condition image, which the grid covers; None: the middle that has its shape

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
        part=canvas.part(),
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
        part=WHOLE,
    )


def expand(picture: tuple[int, int], size: tuple[int, int], *, window: Grid, stride: int, way: str) -> Stage:
    """A picture of (width, height) as a larger one of the same shape, with detail that is new.

    `positions`: the picture's own tokens stand at their places in the larger grid, which is squeezed into the trained
    one (so places lie between the trained ones), and all others are filled together. `checkerboard`: the same, but
    what is known is every other token of the enlarged picture. `windows`: likewise, but the rest is filled window by
    window, at trained places.
    """
    one_of("way", way, EXPAND_METHODS)
    _check_size(picture, size)
    high, wide = math.ceil(size[1] / stride), math.ceil(size[0] / stride)
    if way == "windows":  # one must fit
        larger = max(1.0, window[0] / high, window[1] / wide)
        high, wide = math.ceil(high * larger), math.ceil(wide * larger)
    check_tokens((high, wide))
    seen = (math.ceil(picture[1] / stride), math.ceil(picture[0] / stride)) if way == "positions" else (high, wide)
    known = np.add.outer(np.arange(high), np.arange(wide)) % 2 == 0
    stand = None
    if way == "positions":
        known = np.zeros((high, wide), dtype=bool)
        rows, columns = (np.arange(few) * many // few for few, many in zip(seen, known.shape, strict=True))
        known[np.ix_(rows, columns)] = True
        stand = torch.from_numpy(np.flatnonzero(known))
    scale = min(1.0, window[0] / high, window[1] / wide)
    at_once = way != "windows"
    return Stage(
        (high, wide),
        known,
        (high, wide) if at_once else window,
        ((0, 0),) if at_once else tuple(plan_windows(known, window)),
        see=lambda image: np.asarray(_resized(image, (seen[1] * stride, seen[0] * stride))),
        give=lambda made: _resized(made, size),
        stand_M=stand,
        place_N2=grid_places(high, wide) * scale if at_once else None,
    )


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def _check_size(picture: tuple[int, int], size: tuple[int, int]) -> None:
    (width, height), text = size, f"{size[0]}x{size[1]}"
    require(width >= 1 and height >= 1, f"size is {text}; expected 1 or more pixels per side")
    require(width * height <= MAX_PIXELS, f"size is {text}; at most {MAX_PIXELS // 10**6} million pixels are drawn")
    require(
        width >= picture[0] and height >= picture[1] and size != picture,
        f"size is {text}, the picture is {picture[0]}x{picture[1]} pixels; expected a larger size",
    )
    best = max(width, round(height * picture[0] / picture[1]))
    fitting = (best, round(best * picture[1] / picture[0]))
    require(
        abs(width * picture[1] - height * picture[0]) < max(picture),
        f"size is {text}, but the picture is {picture[0]}x{picture[1]} pixels and keeps its shape; expected "
        f"{fitting[0]}x{fitting[1]}, or outpaint it to the shape first",
    )
