"""A condition image as a user gives it, and how it is brought to the size that the model sees.

Shapes: H W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from arpg.config import ControlConfig
from arpg.errors import one_of, present, require
from arpg.extractors import extract, ready_made
from arpg.image import adm_crop, to_rgb
from arpg.settings import CONTROL_KINDS

Part = tuple[float, float, float, float]  # left, top, right, bottom as shares of the whole
WHOLE: Part = (0.0, 0.0, 1.0, 1.0)
LINES = ("canny",)  # kinds that are white lines on black and nothing between


@dataclass(frozen=True, eq=False)
class ControlInput:
    """A condition image of any size, its kind, and how much it steers: 0 not at all, 1 as the model was trained."""

    image: Image.Image
    kind: str = "canny"
    strength: float = 1.0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, CONTROL_KINDS)
        require(
            math.isfinite(self.strength) and self.strength >= 0,
            f"strength is {self.strength}; expected 0 (no control) or more (1 is what the model was trained with)",
        )

    @classmethod
    def of(
        cls,
        picture: Image.Image,
        kind: str = "canny",
        strength: float = 1.0,
        *,
        size: tuple[int, int] | None = None,
        depth: str | None = None,
    ) -> ControlInput:
        """What a picture shows of the kind: its edges or its depth. With a (width, height), its middle at that size.

        `depth`: what estimates it, see `open_depth`.
        """
        one_of("kind", kind, CONTROL_KINDS)
        rgb = to_rgb(picture)
        if size is not None:  # a square is cut as the training images were
            rgb = adm_crop(rgb, size[0]) if size[0] == size[1] else ImageOps.fit(rgb, size)
        return cls(extract(kind, rgb, depth=depth), kind, strength)

    def fit(self, size: tuple[int, int], part: Part | None = None) -> Image.Image:
        """The image at (width, height), grey: a part of it, or without one the middle that has the size's shape."""
        grey = ready_made(self.image)
        left, top, right, bottom = _middle(grey.size, size) if part is None else part
        box = (left * grey.width, top * grey.height, right * grey.width, bottom * grey.height)
        if grey.size == size and box == (0, 0, *size):
            return grey
        smaller = max(1.0, (box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
        if self.kind not in LINES:
            return grey.resize(size, Image.Resampling.BICUBIC, box=box)
        # A line that is one pixel wide would fade as it shrinks: a pixel is white where half a line crosses it.
        share = np.asarray(grey.resize(size, Image.Resampling.BOX, box=box))
        return Image.fromarray(np.where(share >= max(1.0, 127.5 / smaller), 255, 0).astype(np.uint8))


Controls = ControlInput | Sequence[ControlInput] | None


def checked(control: Controls, config: ControlConfig | None) -> tuple[ControlInput, ...]:
    """The condition images, which must be of kinds that the model takes."""
    if control is None:
        return ()
    takes = present(config, "the model takes no condition images; choose one that does, such as garden-control")
    controls = (control,) if isinstance(control, ControlInput) else tuple(control)
    for each in controls:
        takes.kind_id(each.kind)
    return controls


def _middle(size: tuple[int, int], shape: tuple[int, int]) -> Part:
    """The largest part in the middle that has the other's shape."""
    wide, high = size[0] / shape[0], size[1] / shape[1]
    across, down = min(1.0, high / wide), min(1.0, wide / high)
    return (1 - across) / 2, (1 - down) / 2, (1 + across) / 2, (1 + down) / 2
