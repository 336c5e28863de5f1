"""What an image is asked to be: the slots that stand before its tokens, and what Pass 2 asks with.

Shapes: B batch, P prefix slots, N grid tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arpg.errors import require
from arpg.model.rope import nowhere

if TYPE_CHECKING:
    from arpg.model.arpg import ARPG


@dataclass(frozen=True)
class Condition:
    """The condition of each sample, and the null condition that guidance compares it with."""

    prefix_BPD: Tensor
    null_prefix_BPD: Tensor
    place_BP2: Tensor  # where the prefix slots stand (a class: nowhere)
    query_BND: Tensor | None = None  # replaces the [MASK] queries, position by position; its null is plain [MASK]

    def __len__(self) -> int:
        return self.prefix_BPD.shape[0]

    @classmethod
    def gather(cls, parts: Sequence[tuple[Condition, int]]) -> Condition:
        """Samples of several conditions as one."""
        queries = [condition.query_BND[row] for condition, row in parts if condition.query_BND is not None]
        assert len(queries) in (0, len(parts))
        return cls(
            prefix_BPD=torch.stack([condition.prefix_BPD[row] for condition, row in parts]),
            null_prefix_BPD=torch.stack([condition.null_prefix_BPD[row] for condition, row in parts]),
            place_BP2=torch.stack([condition.place_BP2[row] for condition, row in parts]),
            query_BND=torch.stack(queries) if queries else None,
        )


def class_condition(model: ARPG, labels_B: Tensor) -> Condition:
    """One slot that holds the class; `num_classes` stands for the null class (a dropped label)."""
    config = model.config
    if labels_B.device.type == "cpu":  # a check on an accelerator would have to wait for it
        bad = labels_B[(labels_B < 0) | (labels_B > config.num_classes)]
        require(not len(bad), f"class {bad.tolist()} does not exist; expected 0 to {config.num_classes - 1}")
    ids_B = labels_B.to(model.device) + config.first_class_id
    null_B = torch.full_like(ids_B, config.null_class_id)
    return Condition(
        prefix_BPD=model.embed(ids_B[:, None]),
        null_prefix_BPD=model.embed(null_B[:, None]),
        place_BP2=nowhere(len(ids_B), 1, device=model.device),
    )
