"""Canvas: a picture, the part of it that is to be filled, and how both fit the token grid.

The model sees a part of the picture (or all of it) at its own size. What it makes comes back at the picture's
size, and only where the mask says so: every other pixel stays as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from arpg.errors import require
from arpg.image import MAX_PIXELS, Pixels

Mask = NDArray[np.bool_]
Box = tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True)
class Canvas:
    image: Image.Image  # RGB
    mask_HW: Mask  # True where a pixel is to be filled
    view: Box  # the part that the model sees
    grid: tuple[int, int]
    size: tuple[int, int]  # width and height at which the model sees it

    @classmethod
    def fit(cls, image: Image.Image, mask_HW: Mask, *, grid: tuple[int, int], stride: int) -> Canvas:
        """The view is the picture, or of a longer one the part of the grid's shape that holds the mask, centred on it.

        A mask too long for that is seen with the whole picture, squeezed.
        """
        require(
            mask_HW.shape == (image.height, image.width),
            f"the mask is {mask_HW.shape[1]}x{mask_HW.shape[0]} pixels, the image {image.width}x{image.height}; "
            "they must be the same size",
        )
        return cls(image, mask_HW, _view(image.size, mask_HW, grid), grid, (grid[1] * stride, grid[0] * stride))

    def pixels(self) -> Pixels:
        """`[H, W, 3]`: what the model sees."""
        seen = self.image.crop(self.view)
        if seen.size != self.size:
            seen = seen.resize(self.size, Image.Resampling.BICUBIC)
        return np.asarray(seen)

    def part(self) -> tuple[float, float, float, float]:
        """The view as shares of the picture: left, top, right, bottom."""
        (left, top, right, bottom), (width, height) = self.view, self.image.size
        return left / width, top / height, right / width, bottom / height

    def known(self) -> Mask:
        """`[N]`: which tokens are known, namely those whose patch does not touch the mask."""
        left, top, right, bottom = self.view
        mask = self.mask_HW[top:bottom, left:right].astype(np.int64)
        touched = _overlaps(self.grid[0], bottom - top) @ mask @ _overlaps(self.grid[1], right - left).T
        known_N: Mask = touched.ravel() == 0
        return known_N

    def paste(self, made: Image.Image, *, feather: int = 0) -> Image.Image:
        """The picture with the masked pixels from what the model made; `feather` pixels inside the mask are blended."""
        left, top, right, bottom = self.view
        size = (right - left, bottom - top)
        if made.size != size:
            made = made.resize(size, Image.Resampling.BICUBIC)
        layer = self.image.copy()
        layer.paste(made, (left, top))
        alpha = Image.fromarray(self.mask_HW.astype(np.uint8) * 255)
        if feather > 0:
            # Blurred, then stretched so that it is 0 at the seam and full `feather` pixels inside.
            soft = np.asarray(alpha.filter(ImageFilter.BoxBlur(feather))).astype(np.int64)
            alpha = Image.fromarray((np.clip(2 * soft - 255, 0, 255) * self.mask_HW).astype(np.uint8))
        return Image.composite(layer, self.image, alpha)

    @classmethod
    def extend(cls, image: Image.Image, sides: Box, *, grid: tuple[int, int], stride: int) -> Canvas:
        """Room around a picture (pixels at the left, top, right and bottom), all of it to be filled.

        The view is everything, on a grid as much larger than the model's as the canvas is than the picture: the
        picture's shorter side spans the model's.
        """
        require(
            min(sides) >= 0 and max(sides) > 0,
            "outpainting is left {}, top {}, right {}, bottom {} pixels; expected 0 or more, and more than 0 on some "
            "side".format(*sides),
        )
        left, top, right, bottom = sides
        size = (image.width + left + right, image.height + top + bottom)
        require(size[0] * size[1] <= MAX_PIXELS, f"the result would have {size[0]}x{size[1]} pixels; ask for less")
        # Beyond the picture its border goes on, so that patches at the seam see no edge that is not there.
        wide = np.pad(np.asarray(image), ((top, bottom), (left, right), (0, 0)), mode="edge")
        mask = np.ones((size[1], size[0]), dtype=bool)
        mask[top : top + image.height, left : left + image.width] = False
        scale = min(grid) / min(image.size)
        larger = (max(grid[0], math.ceil(size[1] * scale)), max(grid[1], math.ceil(size[0] * scale)))
        return cls(Image.fromarray(wide), mask, (0, 0, *size), larger, (larger[1] * stride, larger[0] * stride))


def box_mask(size: tuple[int, int], box: Box) -> Mask:
    """The mask of a rectangle in an image of (width, height)."""
    left, top, right, bottom = box
    require(
        0 <= left < right <= size[0] and 0 <= top < bottom <= size[1],
        f"box is {','.join(map(str, box))}; expected left,top,right,bottom inside {size[0]}x{size[1]} pixels",
    )
    mask = np.zeros((size[1], size[0]), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def _view(size: tuple[int, int], mask_HW: Mask, grid: tuple[int, int]) -> Box:
    width, height = size
    whole = (0, 0, width, height)
    # The largest part of the grid's shape that fits into the picture.
    scale = min(width / grid[1], height / grid[0])
    wide, high = max(1, round(grid[1] * scale)), max(1, round(grid[0] * scale))
    rows, columns = np.flatnonzero(mask_HW.any(1)), np.flatnonzero(mask_HW.any(0))
    if not len(rows) or columns[-1] - columns[0] >= wide or rows[-1] - rows[0] >= high:
        return whole
    left = min(max(0, (int(columns[0]) + int(columns[-1]) + 1 - wide) // 2), width - wide)
    top = min(max(0, (int(rows[0]) + int(rows[-1]) + 1 - high) // 2), height - high)
    return left, top, left + wide, top + high


def _overlaps(tokens: int, pixels: int) -> NDArray[np.int64]:
    """`[tokens, pixels]`: 1 where a token's stretch and a pixel's have more than a point in common."""
    token, pixel = np.arange(tokens)[:, None], np.arange(pixels)[None]
    meets = (token * pixels < (pixel + 1) * tokens) & (pixel * tokens < (token + 1) * pixels)
    result: NDArray[np.int64] = meets.astype(np.int64)
    return result
