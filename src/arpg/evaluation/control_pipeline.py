"""A pipeline as what the score of control asks: images of conditions, labels and seeds.

Shapes: B batch, H W pixels.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from arpg.errors import InputError, require
from arpg.evaluation.control_images import Generate, Grey, Labels
from arpg.image import Pixels
from arpg.pipeline import Pipeline


def steered(pipe: Pipeline, settings: dict[str, Any]) -> Generate:
    """Draws what follows the conditions."""
    try:
        control = importlib.import_module("arpg.tasks.control_input").ControlInput
    except ImportError:
        raise InputError("this arpg draws without control; install one that has `arpg control`") from None

    def generate(conditions_BHW: Grey, labels_B: Labels, *, kind: str, seeds: Sequence[int], strength: float) -> Pixels:
        controls = [control(Image.fromarray(condition), kind, strength) for condition in conditions_BHW]
        return _pixels(pipe, labels_B, seeds, control=controls, **settings)

    return generate


def plain(pipe: Pipeline, settings: dict[str, Any]) -> Generate:
    """Draws the same labels and seeds, and is not told of the conditions."""

    def generate(conditions_BHW: Grey, labels_B: Labels, *, kind: str, seeds: Sequence[int], strength: float) -> Pixels:
        return _pixels(pipe, labels_B, seeds, **settings)

    return generate


def side(pipe: Pipeline) -> int:
    """Pixels of a side of what the model draws."""
    height, width = (tokens * pipe.tokenizer.config.stride for tokens in pipe.model.config.grid)
    require(height == width, f"the model draws {width}x{height} pixels; test images are cropped to squares only")
    return height


def _pixels(pipe: Pipeline, labels_B: Labels, seeds: Sequence[int], **options: Any) -> Pixels:
    classes: list[Any] = [None if label < 0 else int(label) for label in labels_B]
    drawn = pipe.generate(classes, seed=list(seeds), batch_size=len(classes), **options)
    return np.stack([np.asarray(image.convert("RGB")) for image in drawn])
