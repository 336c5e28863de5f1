"""Canvas: an image, a mask of the part to fill, and how both map to the token grid.

The model sees a part of the image (or all of it) at its own size. Its output is resized back and pasted only where the
mask is set: every other pixel of the image stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from arpg.errors import require
from arpg.image import MAX_PIXELS, Pixels, resize

Mask = NDArray[np.bool_]
Box = tuple[int, int, int, int]  # left, top, right, bottom


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
