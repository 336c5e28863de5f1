"""What is drawn while a model learns: of each of several classes, of captions, or along condition images.

Shapes: B samples, N grid tokens, T tokens of a caption, E width of the text states, H W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from arpg import tasks
from arpg.data.control_maps import ControlMaps
from arpg.data.text_states import TextStates
from arpg.data.tokens import NO_CLASS, TokenSet
from arpg.decode import Request
from arpg.errors import present
from arpg.image import sheet
from arpg.model import ARPG, text_condition


@dataclass(frozen=True)
class Samples:
    """What is asked for, and what is shown with the result."""

    request: Request
    captions: Sequence[str] | None = None
    conditions: Sequence[Image.Image] | None = None

    def sheet(self, images: Sequence[Image.Image]) -> Image.Image:
        if self.conditions is not None:
            pairs = zip(self.conditions, images, strict=True)
            images = [sheet([condition, image], columns=2) for condition, image in pairs]
        return sheet(images, captions=self.captions)


def of_classes(model: ARPG, grid: tuple[int, int], num_images: int) -> Samples:
    """One image for each of so many classes."""
    labels = [i * model.config.num_classes // num_images for i in range(num_images)]
    return Samples(tasks.generate(model, labels, list(range(num_images)), grid=grid))


def of_captions(model: ARPG, tokens: TokenSet, text: TextStates, num_images: int) -> Samples:
    """One for each of the first captions."""
    seeds = range(min(num_images, len(tokens)))
    states_BTE, length_B = text.gather(np.array(seeds))
    states = [torch.from_numpy(row[:length]).float() for row, length in zip(states_BTE, length_B, strict=True)]
    request = Request.from_nothing(text_condition(model, states), tokens.grid, tuple(seeds))
    return Samples(request, captions=present(tokens.captions, "no captions")[: len(seeds)])


def of_conditions(model: ARPG, tokens: TokenSet, control: ControlMaps, num_images: int) -> Samples:
    """One for each of some condition images, evenly spaced, with their classes where there are some."""
    index = np.arange(num_images) * len(tokens) // num_images
    pixels_BHW, kind_B = control.gather(index, np.zeros_like(index))
    kinds = present(model.config.control, "no kinds").kinds
    steer = [
        tasks.ControlMap(pixels, kinds[kind], 1.0) for pixels, kind in zip(pixels_BHW, kind_B.tolist(), strict=True)
    ]
    labels = None
    if model.text is None:
        labels = [model.config.num_classes if label == NO_CLASS else int(label) for label in tokens.labels[index]]
    ids_N = torch.zeros(tokens.grid[0] * tokens.grid[1], dtype=torch.long)
    request = tasks.fill(
        model, labels, range(num_images), ids_N=ids_N, known_N=ids_N.bool(), grid=tokens.grid, control=steer
    )
    return Samples(request, conditions=[Image.fromarray(pixels) for pixels in pixels_BHW.cpu().numpy()])
