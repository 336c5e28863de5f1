"""Request builders: a class, a prompt, a condition image and known tokens become a `Request` of the decode loop.

Shapes: B samples, N grid tokens, T prompt tokens, E width of the text encoder, H W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arpg.decode import Request
from arpg.errors import require
from arpg.model import Condition, ControlMap, TokenDecoder, class_condition, control_condition, text_condition


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt and a negative prompt with their encoder states; None where there is no such prompt."""

    text: str = ""
    states_TE: Tensor | None = None
    negative: str = ""
    negative_TE: Tensor | None = None


Label = int | Prompt  # a class id, or a prompt


def label_condition(model: TokenDecoder, labels: Sequence[Label]) -> Condition:
    """Build the condition of `labels`: all classes or all prompts, whichever the model takes."""
    prompts = [label for label in labels if isinstance(label, Prompt)]
    classes = [label for label in labels if isinstance(label, int)]
    if prompts:
        require(not classes, "there are classes and prompts; expected one or the other")
        return text_condition(model, [p.states_TE for p in prompts], [p.negative_TE for p in prompts])
    return class_condition(model, torch.tensor(classes))


def fill(
    model: TokenDecoder,
    labels: Label | Sequence[Label] | None,
    seeds: Sequence[int],
    *,
    ids_N: Tensor,
    known_N: Tensor,
    grid: tuple[int, int] | None = None,
    pos_N2: Tensor | None = None,
    control: Sequence[ControlMap] = (),
) -> Request:
    """Request the tokens that are not known, once for each seed.

    `labels`, `ids_N` and `known_N` are the same for all samples, or one for each. No label is the null class or an
    empty prompt. `control` is empty or has a condition image for each seed.
    """
    if labels is None:
        labels = model.config.num_classes if model.text is None else Prompt()
    if isinstance(labels, Label):
        labels = [labels] * len(seeds)
    condition = label_condition(model, labels)
    if control:
        with torch.no_grad():
            condition = control_condition(model, condition, control)
    return Request(
        condition,
        grid or model.config.grid,
        ids_N.cpu().expand(len(seeds), -1),
        known_N.cpu().expand(len(seeds), -1),
        tuple(seeds),
        pos_N2,
    )


def generate(
    model: TokenDecoder, labels: Sequence[int], seeds: Sequence[int], *, grid: tuple[int, int] | None = None
) -> Request:
    """Request whole images: one of class `labels[i]` with seed `seeds[i]` for each i."""
    require(len(labels) == len(seeds), f"there are {len(labels)} classes and {len(seeds)} seeds; expected one each")
    for label in labels:
        require(
            0 <= label < model.config.num_classes,
            f"class {label} does not exist; expected an id from 0 to {model.config.num_classes - 1}",
        )
    condition = class_condition(model, torch.tensor(labels))
    return Request.from_nothing(condition, grid or model.config.grid, tuple(seeds))
