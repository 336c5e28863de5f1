"""Figures: the step of every token, the bits of every token, decoding as a GIF, and plots where matplotlib is there."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from arpg.decode.plan import SamplePlan, plan_sample
from arpg.files import write_whole
from arpg.image import adm_crop, sheet
from arpg.settings import ORDERS, SamplingSettings

SIDE = 192  # pixels of the longer side of a map
FRAME_MS, LAST_FRAME_MS = 120, 2000  # milliseconds that a frame of an animation is shown
# Early to late: the stops of a dark-to-light colour ramp.
RAMP = np.array([(38, 22, 74), (104, 37, 119), (178, 54, 95), (232, 103, 62), (251, 178, 76), (252, 244, 190)])

log = logging.getLogger(__name__)


def draw_plans(grid: tuple[int, int], settings: SamplingSettings, *, seed: int) -> Image.Image:
    """Return a figure with the step of every token, one map per order, four in a row."""
    maps = []
    for order in ORDERS:
        known = [False] * (grid[0] * grid[1])
        plan = plan_sample(grid, known, seed, dataclasses.replace(settings, order=order))
        maps.append(_enlarged(_colours(plan).reshape(*grid, 3)))
    return sheet(maps, columns=4, captions=ORDERS)


def draw_bits(bits_hw: NDArray[np.float32], image: Image.Image) -> Image.Image:
    """Return a figure of an image with the bits of each token beside it: the more bits, the brighter."""
    low, high = float(bits_hw.min()), float(bits_hw.max())
    colours = ramp((bits_hw.ravel() - low) / max(high - low, 1e-9)).reshape(*bits_hw.shape, 3)
    bits = _enlarged(colours)
    shown = adm_crop(image, min(bits.size)).resize(bits.size)
    return sheet([shown, bits], columns=2, captions=["image", f"bits per token: {low:.1f} to {high:.1f}"])


def _enlarged(colours_hw3: NDArray[np.uint8]) -> Image.Image:
    """Return the colours of tokens as an image whose longer side has about `SIDE` pixels."""
    cell = max(1, SIDE // max(colours_hw3.shape[:2]))
    return Image.fromarray(colours_hw3.repeat(cell, 0).repeat(cell, 1))


def _colours(plan: SamplePlan) -> NDArray[np.uint8]:
    """Return the colour of each token's step, `[N, 3]`."""
    step_of = np.repeat(np.arange(len(plan.sizes)), plan.sizes)
    share = np.empty(len(plan.order))
    share[np.array(plan.order)] = step_of / max(1, len(plan.sizes) - 1)
    return ramp(share)


def ramp(share_N: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Return the colours of numbers from 0 (dark) to 1 (light), `[N, 3]`."""
    stops = np.linspace(0, 1, len(RAMP))
    channels = [np.interp(share_N, stops, RAMP[:, c]) for c in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def frame_sheets(previews: Sequence[Sequence[Image.Image]], *, columns: int | None = None) -> list[Image.Image]:
    """Return one sheet per step from the previews of each image after every step, all at the size of the last one."""
    size = previews[0][-1].size
    frames = []
    for k in range(max(map(len, previews))):
        images = [own[min(k, len(own) - 1)] for own in previews]
        images = [image if image.size == size else image.resize(size) for image in images]
        frames.append(images[0] if len(images) == 1 else sheet(images, columns=columns))
    return frames


def new_plot(size: tuple[float, float], *, file: str | Path) -> Any:
    """Return a matplotlib figure of `size` inches; None without matplotlib, with a warning that `file` is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("no %s: matplotlib is not installed (pip install 'arpg[train]')", file)
        return None
    return Figure(figsize=size, layout="constrained")


def save_plot(figure: Any, path: Path) -> None:
    """Write a matplotlib figure, in the format of the file's ending."""
    kind = path.suffix.lstrip(".") or "png"
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=120, format=kind))


def save_gif(frames: Sequence[Image.Image], path: Path) -> None:
    """Write a looping GIF whose last frame is shown longer; an incomplete file is never left behind."""
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    # A palette for each frame; dithering would flicker.
    frames = [frame.quantize(256, dither=Image.Dither.NONE) for frame in frames]

    def write(temporary: Path) -> None:
        frames[0].save(temporary, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)

    write_whole(path, write)
