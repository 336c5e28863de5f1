"""Tasks: each one only builds the request that the one loop fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arpg.decode import Request
from arpg.errors import require
from arpg.model import ARPG, Condition, class_condition, control_condition, text_condition


@dataclass(frozen=True, eq=False)
class Prompt:
    """A text and its states `[T, E]`; no states: no prompt. What guidance leads away from likewise."""

    text: str = ""
    states_TE: Tensor | None = None
    negative: str = ""
    negative_TE: Tensor | None = None


Label = int | Prompt  # what a picture shall show


@dataclass(frozen=True, eq=False)
class ControlMap:
    """A condition image on the grid of a request: 8 bits `[H, W]`, a patch for each token."""

    pixels_HW: Tensor
    kind: str
    strength: float


def condition(model: ARPG, labels: Sequence[Label]) -> Condition:
    """Of classes or of prompts, whichever the model takes."""
    prompts = [label for label in labels if isinstance(label, Prompt)]
    classes = [label for label in labels if isinstance(label, int)]
    if prompts:
        require(not classes, "there are classes and prompts; expected one or the other")
        return text_condition(model, [p.states_TE for p in prompts], [p.negative_TE for p in prompts])
    return class_condition(model, torch.tensor(classes))


@torch.no_grad()
def steered(model: ARPG, plain: Condition, control: Sequence[ControlMap]) -> Condition:
    """The condition with an image for each sample, where there are some."""
    if not control:
        return plain
    return control_condition(
        model, plain, [c.pixels_HW for c in control], [c.kind for c in control], [c.strength for c in control]
    )


def fill(
    model: ARPG,
    labels: Label | Sequence[Label] | None,
    seeds: Sequence[int],
    *,
    ids_N: Tensor,
    known_N: Tensor,
    grid: tuple[int, int] | None = None,
    pos_N2: Tensor | None = None,
    control: Sequence[ControlMap] = (),
) -> Request:
    """The unknown tokens of an image, once for each seed. Label, tokens and mask are one for all or one for each.

    No label: the null class, or no prompt. `control`: none, or a condition image for each seed.
    """
    if labels is None:
        labels = model.config.num_classes if model.text is None else Prompt()
    if isinstance(labels, Label):
        labels = [labels] * len(seeds)
    return Request(
        steered(model, condition(model, labels), control),
        grid or model.config.grid,
        ids_N.cpu().expand(len(seeds), -1),
        known_N.cpu().expand(len(seeds), -1),
        tuple(seeds),
        pos_N2,
    )


def generate(
    model: ARPG, labels: Sequence[int], seeds: Sequence[int], *, grid: tuple[int, int] | None = None
) -> Request:
    """Images of classes from nothing: `labels[i]` with `seeds[i]`."""
    require(len(labels) == len(seeds), f"there are {len(labels)} classes and {len(seeds)} seeds; expected one each")
    for label in labels:
        require(
            0 <= label < model.config.num_classes,
            f"class {label} does not exist; expected an id from 0 to {model.config.num_classes - 1}",
        )
    condition = class_condition(model, torch.tensor(labels))
    return Request.from_nothing(condition, grid or model.config.grid, tuple(seeds))
