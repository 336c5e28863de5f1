"""Cut-outs: objects freed from a white background, and given another colour.

Shapes: h w pixels of a cut-out, 4 channels: red, green, blue, alpha.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from arpg.errors import require

Pixels = NDArray[np.uint8]
WHITE = 255.0
TOLERANCE = 24  # how far from white the background may be, summed over the channels


def cut_out(image: Image.Image) -> Image.Image:
    """The object as RGBA, cropped: what is connected with the border and nearly white goes, edges become soft.

    White inside an object stays. Edge colours are freed from the white that is mixed into them.
    """
    rgb = image.convert("RGB")
    framed = Image.new("RGB", (rgb.width + 2, rgb.height + 2), "white")
    framed.paste(rgb, (1, 1))
    pixels = np.asarray(framed, np.float32)
    outside_hw = _connected_with_the_border((WHITE - pixels).sum(-1) <= TOLERANCE)
    require(not outside_hw.all(), "the picture is white all over; expected an object on a white background")
    # Near the border an edge pixel is partly white: its alpha is how far it is from white, compared with the inside.
    inside = Image.fromarray((~outside_hw).astype(np.uint8) * 255)
    core_hw = np.asarray(inside.filter(ImageFilter.MinFilter(3))) > 0
    rim_hw = ~outside_hw & ~core_hw
    darkness = WHITE - pixels.min(-1)
    expected = np.maximum(255 * _blurred(darkness * core_hw) / np.maximum(_blurred(255.0 * core_hw), 1.0), 1.0)
    alpha = np.where(core_hw, 1.0, np.where(rim_hw, np.clip(darkness / expected, 0.0, 1.0), 0.0))
    freed = WHITE - (WHITE - pixels) / np.maximum(alpha, 0.25)[..., None]
    rgba = np.concatenate((np.where(rim_hw[..., None], freed, pixels), 255 * alpha[..., None]), -1)
    rows, columns = (np.flatnonzero(alpha.max(axis) > 0.5) for axis in (1, 0))
    require(len(rows) > 0, "the picture has no object that stands out from its white background")
    box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    return Image.fromarray(np.clip(rgba, 0, 255).astype(np.uint8)).crop(box)


def tint(cutout: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    """The object in another colour: light and shade stay, at the brightness of the new colour."""
    rgba = np.asarray(cutout, np.float32)
    alpha = rgba[..., 3:] / 255
    light = rgba[..., :3] @ np.array([0.299, 0.587, 0.114], np.float32)
    inside = light[alpha[..., 0] > 0.5]
    low, middle, high = np.percentile(inside, (2, 50, 98)) if inside.size else (0.0, 128.0, 255.0)
    # Shade below the middle leads to a dark version of the colour, light above it towards white.
    down = np.clip((light - low) / max(middle - low, 16.0), 0, 1)[..., None]
    up = np.clip((light - middle) / max(high - middle, 16.0), 0, 1)[..., None]
    base = np.array(colour, np.float32)
    shaded = base * (0.45 + 0.55 * down)
    out = shaded + (255 - shaded) * 0.55 * up
    return Image.fromarray(np.concatenate((np.clip(out, 0, 255), 255 * alpha), -1).astype(np.uint8))


def _connected_with_the_border(free_hw: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The free pixels that a walk over free ones reaches from the border (which is free): sweeps until nothing new."""
    reached = np.zeros_like(free_hw)
    reached[0], reached[-1], reached[:, 0], reached[:, -1] = True, True, True, True
    count = -1
    while count != reached.sum():
        count = int(reached.sum())
        for turns in range(4):
            # Along each line: reached where the last reached pixel is nearer than the last blocked one.
            free, known = np.rot90(free_hw, turns), np.rot90(reached, turns)
            index = np.arange(1, free.shape[1] + 1)
            last_known = np.maximum.accumulate(np.where(known, index, 0), axis=1)
            last_blocked = np.maximum.accumulate(np.where(free, 0, index), axis=1)
            reached = np.rot90(free & (last_known > last_blocked), -turns) | reached
    return reached


def _blurred(values_hw: NDArray[np.floating]) -> NDArray[np.float32]:
    return np.asarray(Image.fromarray(values_hw.astype(np.uint8)).filter(ImageFilter.GaussianBlur(2)), np.float32)
