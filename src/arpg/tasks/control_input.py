"""ControlInput: a condition image as a user gives it, and how it is fitted to the size that the model sees.

Shapes: H W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from arpg.config import DEFAULT_CONTROL_MODEL, ControlConfig
from arpg.errors import present
from arpg.extractors import extract, to_condition
from arpg.image import ImageInput, adm_crop, resize, to_image, to_rgb
from arpg.settings import TASK_SETTINGS

Part = tuple[float, float, float, float]  # left, top, right, bottom as fractions of the whole
WHOLE: Part = (0.0, 0.0, 1.0, 1.0)
BINARY_KINDS = ("canny",)  # white lines on black and nothing between


@dataclass(frozen=True, eq=False)
class ControlInput:
    """A condition image of any size, its kind, and its strength: 0 ignores it, 1 is as the model was trained."""

    image: Image.Image
    kind: str = "canny"
    strength: float = 1.0

    if TYPE_CHECKING:

        def __init__(self, image: ImageInput, kind: str = "canny", strength: float = 1.0) -> None: ...

    def __post_init__(self) -> None:
        TASK_SETTINGS["kind"].check(self.kind)
        TASK_SETTINGS["strength"].check(self.strength)
        object.__setattr__(self, "image", to_image(self.image, what="condition image", alpha=True))

    @classmethod
    def from_image(
        cls,
        image: ImageInput,
        kind: str = "canny",
        strength: float = 1.0,
        *,
        size: tuple[int, int] | None = None,
        depth: str | None = None,
    ) -> ControlInput:
        """Extract the edges or the depth of an image, with `size` of its centre crop at that (width, height).

        `depth` names the depth model, see `open_depth`.
        """
        TASK_SETTINGS["kind"].check(kind)
        rgb = to_rgb(to_image(image))
        if size is not None:  # a square is cropped as the training images were
            rgb = adm_crop(rgb, size[0]) if size[0] == size[1] else ImageOps.fit(rgb, size)
        return cls(extract(kind, rgb, depth=depth), kind, strength)

    def fit(self, size: tuple[int, int], part: Part | None = None) -> Image.Image:
        """Return `part` of the image at (width, height), greyscale; None: a centre crop of the size's aspect ratio."""
        grey = to_condition(self.image)
        left, top, right, bottom = _centre(grey.size, size) if part is None else part
        box = (left * grey.width, top * grey.height, right * grey.width, bottom * grey.height)
        if grey.size == size and box == (0, 0, *size):
            return grey
        shrink = max(1.0, (box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
        if self.kind not in BINARY_KINDS:
            return resize(grey, size, box=box)
        # A line that is one pixel wide would fade as it shrinks: a pixel is white where half a line crosses it.
        coverage = np.asarray(resize(grey, size, Image.Resampling.BOX, box=box))
        return Image.fromarray(np.where(coverage >= max(1.0, 127.5 / shrink), 255, 0).astype(np.uint8))


Controls = ControlInput | Sequence[ControlInput] | None


def check_controls(control: Controls, config: ControlConfig | None) -> tuple[ControlInput, ...]:
    """Return the condition images as a tuple; raise an `InputError` if the model does not take their kinds."""
    if control is None:
        return ()
    takes = present(config, f"the model takes no condition images; one that does is {DEFAULT_CONTROL_MODEL}")
    controls = (control,) if isinstance(control, ControlInput) else tuple(control)
    for each in controls:
        takes.kind_id(each.kind)
    return controls


def _centre(size: tuple[int, int], shape: tuple[int, int]) -> Part:
    """Return the largest centred part of `size` that has the aspect ratio of `shape`."""
    wide, high = size[0] / shape[0], size[1] / shape[1]
    across, down = min(1.0, high / wide), min(1.0, wide / high)
    return (1 - across) / 2, (1 - down) / 2, (1 + across) / 2, (1 + down) / 2
