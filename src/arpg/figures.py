"""Figures: the step of every token, the bits of every token, decoding as a GIF, and plots where matplotlib is there."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from arpg.decode.plan import SamplePlan, plan_sample
from arpg.files import write_whole
from arpg.image import adm_crop, sheet
from arpg.settings import ORDERS, SamplingSettings

SIDE = 192  # pixels of the longer side of a map
MARGIN, CAPTION = 14, 26
FRAME_MS, LAST_FRAME_MS = 120, 2000  # milliseconds that a frame of an animation is shown
# Early to late: the stops of a dark-to-light colour ramp.
RAMP = np.array([(38, 22, 74), (104, 37, 119), (178, 54, 95), (232, 103, 62), (251, 178, 76), (252, 244, 190)])

log = logging.getLogger(__name__)


def draw_plans(grid: tuple[int, int], settings: SamplingSettings, *, seed: int) -> Image.Image:
    """Return a figure with the step of every token, one map per order, four in a row."""
    cell = max(1, SIDE // max(grid))
    width, height = grid[1] * cell, grid[0] * cell
    columns = 4
    rows = math.ceil(len(ORDERS) / columns)
    size = (columns * (width + MARGIN) + MARGIN, rows * (height + CAPTION + MARGIN) + MARGIN)
    canvas = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=14)
    for i, order in enumerate(ORDERS):
        x = MARGIN + i % columns * (width + MARGIN)
        y = MARGIN + i // columns * (height + CAPTION + MARGIN)
        draw.text((x, y), order, fill="black", font=font)
        known = [False] * (grid[0] * grid[1])
        plan = plan_sample(grid, known, seed, dataclasses.replace(settings, order=order))
        colours = _colours(plan).reshape(*grid, 3).repeat(cell, 0).repeat(cell, 1)
        canvas.paste(Image.fromarray(colours), (x, y + CAPTION))
    return canvas


def draw_bits(bits_hw: NDArray[np.float32], image: Image.Image) -> Image.Image:
    """Return a figure of an image with the bits of each token beside it: the more bits, the brighter."""
    cell = max(1, SIDE // max(bits_hw.shape))
    height, width = (side * cell for side in bits_hw.shape)
    low, high = float(bits_hw.min()), float(bits_hw.max())
    colours = ramp((bits_hw.ravel() - low) / max(high - low, 1e-9)).reshape(*bits_hw.shape, 3)
    canvas = Image.new("RGB", (2 * width + 3 * MARGIN, height + CAPTION + 2 * MARGIN), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=14)
    draw.text((MARGIN, MARGIN), "picture", fill="black", font=font)
    text = f"bits per token: {low:.1f} to {high:.1f}"
    draw.text((2 * MARGIN + width, MARGIN), text, fill="black", font=font)
    canvas.paste(adm_crop(image, min(width, height)).resize((width, height)), (MARGIN, MARGIN + CAPTION))
    canvas.paste(Image.fromarray(colours.repeat(cell, 0).repeat(cell, 1)), (2 * MARGIN + width, MARGIN + CAPTION))
    return canvas


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


class Frames:
    """The previews of every candidate, in the order of the steps."""

    def __init__(self) -> None:
        self._previews: dict[int, list[Image.Image]] = {}

    def add(self, rows: Sequence[int], previews: Sequence[Image.Image]) -> None:
        """Add the previews of the candidates `rows` after a step."""
        for row, image in zip(rows, previews, strict=True):
            self._previews.setdefault(row, []).append(image)

    def sheets(self, kept: Sequence[int], *, columns: int | None = None) -> list[Image.Image]:
        """Return one sheet per step with the kept candidates, all at the size of the last preview."""
        shown = [self._previews[row] for row in kept]
        size = shown[0][-1].size
        frames = []
        for k in range(max(map(len, shown))):
            images = [previews[min(k, len(previews) - 1)] for previews in shown]
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
