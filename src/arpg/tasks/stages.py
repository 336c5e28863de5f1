"""Stages: how each image task goes from an image to tokens on a grid, which windows it samples, and back to an image.

Shapes: h w grid, N = h * w tokens, M tokens of the image that a stage starts from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from arpg.errors import require
from arpg.image import MAX_PIXELS, Pixels, resize
from arpg.model.rope import grid_positions
from arpg.settings import TASK_SETTINGS
from arpg.tasks.canvas import Canvas, Mask
from arpg.tasks.control_input import WHOLE, Part

Grid = tuple[int, int]
MAX_TOKENS = 1 << 14  # of one image: a square of 1024 pixels where a token is 8 pixels wide


@dataclass(frozen=True, eq=False)
class Stage:
    """One pass over a grid of tokens. All of it is known before any image is."""

    grid: Grid
    known_hw: Mask
    window: Grid  # tokens sampled by one request
    corners: tuple[tuple[int, int], ...]  # top left corners of the windows, in the order in which they are sampled
    preprocess: Callable[[Image.Image], Pixels] | None = None  # image to the tokenizer's input; None: starts empty
    postprocess: Callable[[Image.Image], Image.Image] | None = None  # the tokenizer's output to the result; None: as is
    token_index_M: Tensor | None = None  # where on the grid the image's tokens go; None: one for each grid token
    pos_N2: Tensor | None = None  # positions as in a request; only where one window is the whole grid
    control_part: Part | None = None  # of a condition image that the grid covers; None: a centre crop of its shape

    def __post_init__(self) -> None:
        check_tokens(self.grid)
        assert self.known_hw.shape == self.grid
        assert self.pos_N2 is None or self.window == self.grid


def check_tokens(grid: Grid) -> None:
    """Raise an `InputError` if the grid has too many tokens."""
    require(
        grid[0] * grid[1] <= MAX_TOKENS,
        f"the image would have {grid[1]}x{grid[0]} tokens; at most {MAX_TOKENS} are sampled; choose a smaller size",
    )


def generate_stage(grid: Grid) -> Stage:
    """Sample every token of a grid."""
    return Stage(grid, np.zeros(grid, dtype=bool), grid, ((0, 0),))


def inpaint_stage(canvas: Canvas, *, feather: int = 0) -> Stage:
    """Sample the masked part of the canvas's image."""
    TASK_SETTINGS["feather"].check(feather)
    known = canvas.known().reshape(canvas.grid)
    return Stage(
        canvas.grid,
        known,
        canvas.grid,
        ((0, 0),),
        preprocess=lambda _: canvas.pixels(),
        postprocess=lambda made: canvas.paste(made, feather=feather),
        control_part=canvas.part(),
    )


def outpaint_stage(canvas: Canvas, window: Grid) -> Stage:
    """Sample what lies beyond the sides of the canvas's image, window by window."""
    check_tokens(canvas.grid)
    known = canvas.known().reshape(canvas.grid)
    return Stage(
        canvas.grid,
        known,
        window,
        tuple(plan_windows(known, window)),
        preprocess=lambda _: canvas.pixels(),
        postprocess=canvas.paste,
        control_part=WHOLE,
    )


def expand_stage(
    image_size: tuple[int, int], size: tuple[int, int], *, window: Grid, stride: int, method: str
) -> Stage:
    """Enlarge an image of (width, height) to `size`, which has the same aspect ratio, with newly sampled detail.

    `positions`: the image's own tokens are spread over the larger grid, whose positions are scaled into the trained
    range (so they are fractional), and all others are sampled together. `checkerboard`: the same, but every other
    token of the resized image is known. `windows`: likewise, but the rest is sampled window by window, at trained
    positions.
    """
    TASK_SETTINGS["method"].check(method)
    _check_size(image_size, size)
    high, wide = math.ceil(size[1] / stride), math.ceil(size[0] / stride)
    if method == "windows":  # at least one must fit
        scale = max(1.0, window[0] / high, window[1] / wide)
        high, wide = math.ceil(high * scale), math.ceil(wide * scale)
    check_tokens((high, wide))
    encoded = (high, wide)  # grid of the image that the tokenizer encodes
    known = np.add.outer(np.arange(high), np.arange(wide)) % 2 == 0
    token_index = None
    if method == "positions":
        encoded = (math.ceil(image_size[1] / stride), math.ceil(image_size[0] / stride))
        known = np.zeros((high, wide), dtype=bool)
        rows, columns = (np.arange(few) * many // few for few, many in zip(encoded, known.shape, strict=True))
        known[np.ix_(rows, columns)] = True
        token_index = torch.from_numpy(np.flatnonzero(known))
    one_window = method != "windows"
    return Stage(
        (high, wide),
        known,
        (high, wide) if one_window else window,
        ((0, 0),) if one_window else tuple(plan_windows(known, window)),
        preprocess=lambda image: np.asarray(resize(image, (encoded[1] * stride, encoded[0] * stride))),
        postprocess=lambda made: resize(made, size),
        token_index_M=token_index,
        pos_N2=grid_positions(high, wide) * min(1.0, window[0] / high, window[1] / wide) if one_window else None,
    )


def plan_windows(known_hw: Mask, window: Grid) -> list[tuple[int, int]]:
    """Return the top left corners of windows, in order, that together cover every unknown token.

    Greedy: the next window is the one with unknown tokens that has the most known ones, but at most half of its
    tokens known while there are such windows, so that steps stay large; ties go to the one nearest to the middle.
    """
    known = known_hw.copy()
    rows, columns = (size - side + 1 for size, side in zip(known.shape, window, strict=True))
    assert rows >= 1
    assert columns >= 1
    area = window[0] * window[1]
    distance = np.add.outer(abs(np.arange(rows) - (rows - 1) / 2), abs(np.arange(columns) - (columns - 1) / 2))
    corners: list[tuple[int, int]] = []
    while not known.all():
        count = _known_per_window(known, window)
        # Up to half known: the more the better. Beyond that: the fewer the better, and only as a last resort.
        rank = np.where(count <= area / 2, count + area, -count).astype(np.float64)
        rank[count == area] = -np.inf
        best = np.where(rank == rank.max(), distance, np.inf)
        top, left = divmod(int(best.argmin()), columns)
        known[top : top + window[0], left : left + window[1]] = True
        corners.append((top, left))
    return corners


def _known_per_window(known_hw: Mask, window: Grid) -> NDArray[np.int64]:
    """Count the known tokens of the window at each corner."""
    total = np.pad(known_hw.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    high, wide = window
    sums: NDArray[np.int64] = total[high:, wide:] - total[:-high, wide:] - total[high:, :-wide] + total[:-high, :-wide]
    return sums


def _check_size(image_size: tuple[int, int], size: tuple[int, int]) -> None:
    (width, height), text = size, f"{size[0]}x{size[1]}"
    require(width >= 1 and height >= 1, f"size is {text}; expected 1 or more pixels per side")
    require(width * height <= MAX_PIXELS, f"size is {text}; at most {MAX_PIXELS // 10**6} million pixels are sampled")
    require(
        width >= image_size[0] and height >= image_size[1] and size != image_size,
        f"size is {text}, the image is {image_size[0]}x{image_size[1]} pixels; expected a larger size",
    )
    best = max(width, round(height * image_size[0] / image_size[1]))
    fitting = (best, round(best * image_size[1] / image_size[0]))
    require(
        abs(width * image_size[1] - height * image_size[0]) < max(image_size),
        f"size is {text}, but the image is {image_size[0]}x{image_size[1]} pixels and keeps its shape; expected "
        f"{fitting[0]}x{fitting[1]}, or outpaint it to the shape first",
    )
