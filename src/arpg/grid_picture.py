"""Pictures of numbers on the grid, from dark to light: the step of every token, or its surprise."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from arpg.config import ORDERS, SamplingSettings
from arpg.decode.plan import SamplePlan, plan_sample
from arpg.image import adm_crop

SIDE = 192  # pixels of the longer side of a map
MARGIN, CAPTION = 14, 26
# Early to late: the stops of a dark-to-light colour ramp.
RAMP = np.array([(38, 22, 74), (104, 37, 119), (178, 54, 95), (232, 103, 62), (251, 178, 76), (252, 244, 190)])


def draw_plans(grid: tuple[int, int], settings: SamplingSettings, *, seed: int) -> Image.Image:
    """One map per order, four in a row."""
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
    """The picture, and beside it the bits of each token: the least surprising is darkest, the most brightest."""
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
    """`[N, 3]`: the colour of each position's step."""
    step_of = np.repeat(np.arange(len(plan.sizes)), plan.sizes)
    share = np.empty(len(plan.order))
    share[np.array(plan.order)] = step_of / max(1, len(plan.sizes) - 1)
    return ramp(share)


def ramp(share_N: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """`[N, 3]`: the colours of numbers from 0 (dark) to 1 (light)."""
    stops = np.linspace(0, 1, len(RAMP))
    channels = [np.interp(share_N, stops, RAMP[:, c]) for c in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)
