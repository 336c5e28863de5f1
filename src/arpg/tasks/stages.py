"""Stages: how each image task goes from an image to tokens on a grid, which windows it samples, and back to an image.

A `Canvas` is an image with a mask of the part to fill. The model sees a part of the image (or all of it) at its own
size. Its output is resized back and pasted only where the mask is set: every other pixel of the image stays as it is.
Shapes: h w grid, N = h * w tokens, M tokens of the image that a stage starts from, H W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from arpg.errors import require
from arpg.image import MAX_PIXELS, Pixels, resize
from arpg.model.rope import grid_positions
from arpg.settings import TASK_SETTINGS
from arpg.tasks.control_input import WHOLE, Part

Grid = tuple[int, int]
Mask = NDArray[np.bool_]
Box = tuple[int, int, int, int]  # left, top, right, bottom
MAX_TOKENS = 1 << 14  # of one image: a square of 1024 pixels where a token is 8 pixels wide


@dataclass(frozen=True)
class Canvas:
    """An image, its mask, and the part of both that the model sees."""

    image: Image.Image  # RGB
    mask_HW: Mask  # True where a pixel is to be filled
    view: Box  # the part that the model sees
    grid: tuple[int, int]
    size: tuple[int, int]  # width and height at which the model sees it

    @classmethod
    def fit(cls, image: Image.Image, mask_HW: Mask, *, grid: tuple[int, int], stride: int) -> Canvas:
        """View the whole image, or the part with the grid's aspect ratio that is centred on the mask and holds it.

        If no such part holds the mask, the view is the whole image, squeezed.
        """
        require(
            mask_HW.shape == (image.height, image.width),
            f"the mask is {mask_HW.shape[1]}x{mask_HW.shape[0]} pixels, the image {image.width}x{image.height}; "
            "they must be the same size",
        )
        return cls(image, mask_HW, _view(image.size, mask_HW, grid), grid, (grid[1] * stride, grid[0] * stride))

    def pixels(self) -> Pixels:
        """Return what the model sees, `[H, W, 3]`."""
        return np.asarray(resize(self.image.crop(self.view), self.size))

    def part(self) -> tuple[float, float, float, float]:
        """Return the view as fractions of the image: left, top, right, bottom."""
        (left, top, right, bottom), (width, height) = self.view, self.image.size
        return left / width, top / height, right / width, bottom / height

    def known(self) -> Mask:
        """Return which tokens are known, `[N]`: those whose patch does not touch the mask."""
        left, top, right, bottom = self.view
        (y0, y1), (x0, x1) = _patches(self.grid[0], bottom - top), _patches(self.grid[1], right - left)
        total = np.pad(self.mask_HW[top:bottom, left:right].cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        inside = total[np.ix_(y1, x1)] - total[np.ix_(y0, x1)] - total[np.ix_(y1, x0)] + total[np.ix_(y0, x0)]
        known_N: Mask = inside.ravel() == 0
        return known_N

    def paste(self, made: Image.Image, *, feather: int = 0) -> Image.Image:
        """Replace the masked pixels of the image by those of `made`; blend the outer `feather` pixels of the mask."""
        left, top, right, bottom = self.view
        layer = self.image.copy()
        layer.paste(resize(made, (right - left, bottom - top)), (left, top))
        return Image.composite(layer, self.image, Image.fromarray(_opacity(self.mask_HW, feather)))

    @classmethod
    def extend(cls, image: Image.Image, sides: Box, *, grid: tuple[int, int], stride: int) -> Canvas:
        """Add pixels at the left, top, right and bottom of an image, all of them to be filled.

        The view is the whole canvas. Its grid is larger than the model's by the factor by which the canvas is larger
        than the image: the image's shorter side spans the model's grid.
        """
        require(
            min(sides) >= 0 and max(sides) > 0,
            "outpainting is left {}, top {}, right {}, bottom {} pixels; expected 0 or more, and more than 0 on some "
            "side".format(*sides),
        )
        left, top, right, bottom = sides
        size = (image.width + left + right, image.height + top + bottom)
        require(size[0] * size[1] <= MAX_PIXELS, f"the result would have {size[0]}x{size[1]} pixels; choose fewer")
        # The border is repeated, so that patches at the seam see no edge that is not there.
        wide = np.pad(np.asarray(image), ((top, bottom), (left, right), (0, 0)), mode="edge")
        mask = np.ones((size[1], size[0]), dtype=bool)
        mask[top : top + image.height, left : left + image.width] = False
        scale = min(grid) / min(image.size)
        larger = (max(grid[0], math.ceil(size[1] * scale)), max(grid[1], math.ceil(size[0] * scale)))
        return cls(Image.fromarray(wide), mask, (0, 0, *size), larger, (larger[1] * stride, larger[0] * stride))


def box_mask(size: tuple[int, int], box: Box) -> Mask:
    """Return the mask of a box in an image of (width, height)."""
    left, top, right, bottom = box
    require(
        0 <= left < right <= size[0] and 0 <= top < bottom <= size[1],
        f"box is {','.join(map(str, box))}; expected left,top,right,bottom inside {size[0]}x{size[1]} pixels",
    )
    mask = np.zeros((size[1], size[0]), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def box_image(size: tuple[int, int], box: Box) -> Image.Image:
    """Return the mask of a box as an image: white inside."""
    return Image.fromarray(box_mask(size, box).astype(np.uint8) * 255)


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


def _view(size: tuple[int, int], mask_HW: Mask, grid: tuple[int, int]) -> Box:
    width, height = size
    whole = (0, 0, width, height)
    # The largest part with the grid's aspect ratio that fits into the image.
    scale = min(width / grid[1], height / grid[0])
    wide, high = max(1, round(grid[1] * scale)), max(1, round(grid[0] * scale))
    rows, columns = np.flatnonzero(mask_HW.any(1)), np.flatnonzero(mask_HW.any(0))
    if not len(rows) or columns[-1] - columns[0] >= wide or rows[-1] - rows[0] >= high:
        return whole
    left = min(max(0, (int(columns[0]) + int(columns[-1]) + 1 - wide) // 2), width - wide)
    top = min(max(0, (int(rows[0]) + int(rows[-1]) + 1 - high) // 2), height - high)
    return left, top, left + wide, top + high


def _opacity(mask_HW: Mask, feather: int) -> NDArray[np.uint8]:
    """Return the share of each pixel that is new, 0 to 255: none outside the mask, all `feather` pixels inside.

    Where the mask is thinner than that the share grows faster, so that its middle is new.
    """
    depth = np.zeros(mask_HW.shape, np.uint16)  # pixels to the seam, at most feather + 1
    inner = Image.fromarray(mask_HW.astype(np.uint8))
    for _ in range(feather + 1):
        depth += np.asarray(inner)
        inner = inner.filter(ImageFilter.MinFilter(3))
    deepest = _largest_near(_largest_near(depth, feather).T, feather).T
    opacity: NDArray[np.uint8] = (255 * (depth - 0.5 * mask_HW) / np.maximum(deepest - 0.5, 0.5)).astype(np.uint8)
    return opacity


def _largest_near(values_HW: NDArray[np.uint16], reach: int) -> NDArray[np.uint16]:
    """Return the largest value within `reach` columns of each column."""
    padded = np.pad(values_HW, ((0, 0), (reach, reach)))
    size = 1  # of the window that each column of `padded` stands for
    while size < 2 * reach + 1:
        step = min(size, 2 * reach + 1 - size)
        padded = np.maximum(padded[:, :-step], padded[:, step:])
        size += step
    return padded


def _patches(tokens: int, pixels: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first pixel of each token's patch along one side, and the one after its last; neighbours may share."""
    token = np.arange(tokens)
    return token * pixels // tokens, -(-(token + 1) * pixels // tokens)


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
