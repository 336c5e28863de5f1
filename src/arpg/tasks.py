"""Tasks: each one only builds the request that the one loop fills."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arpg.decode import Request
from arpg.errors import require
from arpg.model import ARPG, class_condition


def fill(
    model: ARPG,
    labels: int | Sequence[int] | None,
    seeds: Sequence[int],
    *,
    ids_N: Tensor,
    known_N: Tensor,
    grid: tuple[int, int] | None = None,
    place_N2: Tensor | None = None,
) -> Request:
    """The unknown tokens of an image, once for each seed. Label, tokens and mask are one for all or one for each.

    No label: the null class.
    """
    given = model.config.num_classes if labels is None else labels
    return Request(
        class_condition(model, torch.tensor(given).expand(len(seeds))),
        grid or model.config.grid,
        ids_N.cpu().expand(len(seeds), -1),
        known_N.cpu().expand(len(seeds), -1),
        tuple(seeds),
        place_N2,
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
