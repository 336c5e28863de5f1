"""The call `pipe(...)`: which task its arguments describe, its progress bar, and the form of its result."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from arpg.errors import require
from arpg.image import to_image, to_rgb
from arpg.tasks.control_input import ControlInput
from arpg.tasks.options import Classes
from arpg.tasks.task import ImageTask, OnStep

if TYPE_CHECKING:
    from arpg.pipeline import Pipeline

T = TypeVar("T")
OUTPUT_TYPES = ("pil", "np", "pt", "latent")
SIDES = ("left", "top", "right", "bottom")


class ImageOutput(NamedTuple, Generic[T]):
    """The result of `pipe(...)`: `images` in the form that `output_type` names."""

    images: T


def choose_task(pipe: Pipeline, prompt: Classes, given: dict[str, Any]) -> ImageTask:
    """Build the task that the arguments of `pipe(...)` describe, see `Pipeline.__call__`.

    `given` holds those that are not None. Arguments that the task does not take are refused by its method.
    """
    image, mask, box, wide, high = (given.pop(k, None) for k in ("image", "mask_image", "box", "width", "height"))
    sides = {name: given.pop(name) for name in SIDES if name in given}
    for name, canonical in (("negative_prompt", "negative"), ("control_image", "control")):
        require(not {name, canonical} <= set(given), f"{name} and {canonical} are both given; leave one of them out")
    if "negative_prompt" in given:
        given["negative"] = given.pop("negative_prompt")
    parts = {name: given.pop(name) for name in ("kind", "strength") if name in given}
    if "control_image" in given:
        given["control"] = ControlInput(given.pop("control_image"), **parts)
    else:
        require(not parts, f"{' and '.join(parts)} is given without control_image; give it, too")
    label: dict[str, Any] = {"class_" if pipe.prompts is None else "prompt": prompt}
    source = None if image is None else to_rgb(to_image(image))
    width, height = pipe.image_size if source is None else source.size
    size = (wide or round(width * (high or height) / height), high or round(height * (wide or width) / width))
    ways = {"mask_image": mask, "box": box, "/".join(sides): sides or None, "height or width": wide or high}
    chosen = [name for name, value in ways.items() if value is not None]
    if source is None:
        extra = [name for name in chosen if name != "height or width"]
        require(not extra, f"{' and '.join(extra)} is given without an image; give image, too")
        if size == pipe.image_size:
            return pipe.generate_task(label.pop("class_", None), **label, **given)
        return pipe.expand_task(None, size=size, **label, **given)
    require(
        len(chosen) == 1,
        f"image is given with {' and '.join(chosen) or 'nothing else'}; expected one of mask_image (inpaint), box "
        "(edit), left, top, right or bottom (outpaint), and height or width (expand)",
    )
    if mask is not None:
        return pipe.inpaint_task(source, mask, **label, **given)
    if box is not None:
        return pipe.edit_task(source, box, **label, **given)
    if sides:
        return pipe.outpaint_task(source, **sides, **label, **given)
    return pipe.expand_task(source, size=size, **label, **given)


def decode_with_bar(task: ImageTask, on_step: OnStep, config: Mapping[str, Any]) -> None:
    """Decode a task with a progress bar; `config` are arguments of `tqdm`, see `Pipeline.set_progress_bar_config`."""
    shown = sys.stderr.isatty() or "ipykernel" in sys.modules
    config = {"desc": "sampling", "leave": False, "disable": not shown, **config}
    bar = None
    if not config["disable"]:
        from tqdm.auto import tqdm

        bar = tqdm(**config)
    try:
        for step in task.steps():
            if bar is not None:
                bar.total = None if step.num_steps is None else len(task) * step.num_steps
                bar.update()
            if on_step is not None:
                on_step(step)
    finally:
        if bar is not None:
            bar.close()


def to_output(task: ImageTask, output_type: str) -> ImageOutput[Any]:
    """Return the result of a decoded task as `output_type` names it."""
    if output_type == "latent":
        return ImageOutput(task.ids())
    images = task.images()
    if output_type == "pil":
        return ImageOutput(images)
    pixels_BHW3 = np.stack([np.asarray(image) for image in images]).astype(np.float32) / 255
    return ImageOutput(pixels_BHW3 if output_type == "np" else torch.from_numpy(pixels_BHW3).permute(0, 3, 1, 2))
