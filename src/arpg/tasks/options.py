"""Options of image tasks as typed keyword arguments: the settings of `arpg.settings`, their aliases, and what else a
task takes. A test holds these types equal to the tables of settings.
"""

from __future__ import annotations

import functools
import inspect
import secrets
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, SupportsIndex, TypedDict, TypeVar, get_args, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.errors import InputError, require, suggest
from arpg.image import ImageInput
from arpg.settings import TASK_SETTINGS, Order
from arpg.tasks.control_input import Controls
from arpg.tasks.stages import Box

Class = str | SupportsIndex  # a name or an id, which may be a numpy integer
Classes = Class | Sequence[Class] | NDArray[Any] | Tensor | None
Seed = SupportsIndex | torch.Generator | Sequence[SupportsIndex | torch.Generator] | None
StepCallback = Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None]

P = ParamSpec("P")
T = TypeVar("T")


class SharedOptions(TypedDict, total=False):
    """What every image task takes. Settings are described in `arpg.settings`; None is the model's recommendation."""

    num_images: int | None
    num_images_per_prompt: int | None
    seed: Seed
    generator: Seed
    best_of: int | None
    batch_size: int | None
    steps: int | None
    num_inference_steps: int | None
    guidance: float | None
    guidance_scale: float | None
    guidance_schedule: str | None
    order: Order | None
    schedule: str | Sequence[int] | None
    attention: str | None
    decode: str | None
    draft: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None


class TaskOptions(SharedOptions, total=False):
    """Options of tasks with one class or prompt."""

    prompt: str | None
    negative: str | None
    control: Controls


class InpaintOptions(TaskOptions, total=False):
    """Options of `inpaint` and `edit`."""

    feather: int


class OutpaintOptions(TaskOptions, total=False):
    """Options of `outpaint`."""

    left: int
    top: int
    right: int
    bottom: int


class ExpandOptions(TaskOptions, total=False):
    """Options of `expand`."""

    method: str | None
    way: str | None


class ControlOptions(SharedOptions, total=False):
    """Options of `control`."""

    prompt: str | Sequence[str] | None
    negative: str | Sequence[str | None] | None


class GenerateOptions(ControlOptions, total=False):
    """Options of `generate`, which takes several classes or prompts."""

    control: Controls


class CallOptions(SharedOptions, total=False):
    """Options of `pipe(...)`, which chooses the task by what is given."""

    control: Controls
    negative: str | Sequence[str | None] | None
    negative_prompt: str | Sequence[str | None] | None
    image: ImageInput | None
    mask_image: ImageInput | None
    control_image: ImageInput | None
    height: int | None
    width: int | None
    box: Box | None
    left: int
    top: int
    right: int
    bottom: int
    feather: int | None
    method: str | None
    kind: str | None
    strength: float | None
    callback_on_step_end: StepCallback | None


def show_options(method: Callable[P, T]) -> Callable[P, T]:
    """Show each key of `**options: Unpack[...]` in a method's signature, and refuse other names with a suggestion.

    Type checkers read the annotation; `help()` and notebooks read the signature.
    """
    signature = inspect.signature(method)
    *named, rest = signature.parameters.values()
    (options,) = get_args(get_type_hints(method)[rest.name])
    shown = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=TASK_SETTINGS[name].default if name in TASK_SETTINGS else None,
            annotation=hint,
        )
        for name, hint in get_type_hints(options).items()
    ]
    known = [parameter.name for parameter in (*named[1:], *shown)]

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known:  # a suggestion takes longer than the rest of the call
                raise InputError(f"{method.__name__} has no option {name!r}; {suggest(name, known)}")
        return method(*args, **kwargs)

    checked.__signature__ = signature.replace(parameters=[*named, *shown])  # type: ignore[attr-defined]
    return checked


def as_list(classes: Any) -> list[Any]:
    """Return several classes or prompts as a list, and one of them (or None) as a list of one."""
    one = classes is None or isinstance(classes, str) or np.ndim(classes) == 0
    return [classes] if one else list(classes)


def read_seed(seed: Seed) -> int | list[int]:
    """Return an int or a list of ints; None is a random one, a torch generator stands for its initial seed."""
    if seed is None:
        return secrets.randbelow(2**32)
    if isinstance(seed, Sequence):
        return [_one_seed(each) for each in seed]
    return _one_seed(seed)


def _one_seed(seed: SupportsIndex | torch.Generator) -> int:
    known = isinstance(seed, torch.Generator) or hasattr(seed, "__index__")
    require(known, f"seed is {seed!r}; expected a whole number, a torch.Generator or None")
    return seed.initial_seed() if isinstance(seed, torch.Generator) else seed.__index__()
