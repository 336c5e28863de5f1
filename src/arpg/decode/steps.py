"""Steps: what one step of the loop encodes, predicts and accepts, and the cursor over the plans of a batch.

Shapes: B batch, S tokens of a step, T positions of all steps, K steps, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.device import send_all

if TYPE_CHECKING:
    from arpg.decode.state import DecodeState


@dataclass(frozen=True)
class EncodeArgs:
    """Tokens that Pass 1 writes to the cache, named by position; rows are padded with position N."""

    position_BS: Tensor
    count_B: Tensor | None = None  # how many of a row's positions are real; None: all
    longest: int | None = None  # image tokens of the longest row after this; None: all that are written
    static: bool = False  # the tensors were written before the decode started


@dataclass(frozen=True)
class PredictArgs:
    """Positions that Pass 2 predicts, padded with N."""

    position_BS: Tensor
    scale_BS: Tensor | None  # guidance, one for each position or for each row; None: not guided
    visible_BS: Tensor | None = None  # image tokens of the cache that each sees; None: all that its row has
    static: bool = False  # the tensors were written before the decode started


@dataclass(frozen=True)
class StepPlan:
    """One call of the network: Pass 1 encodes (None: nothing yet), then Pass 2 predicts."""

    encode: EncodeArgs | None
    predict: PredictArgs


class DecodeStrategy(Protocol):
    """Decides what each step encodes and predicts, and which of the sampled tokens are accepted.

    The loop calls `next_step` and `accept` alternately, until there is no next step.
    """

    ragged: bool  # rows may hold different numbers of tokens
    num_slots: int  # image tokens that the cache must hold, padding included
    num_steps: int | None  # steps in all; None: not known yet

    def next_step(self, state: DecodeState) -> StepPlan | None:
        """Return the next step, or None after the last."""
        ...

    def accept(self, state: DecodeState, logits_BSV: Tensor, sampled_BS: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the ids for the positions just predicted, and which of them are final (None: all)."""
        ...


class PlanCursor:
    """The steps of a batch as padded tensors on the device, and which step comes next.

    `position_BT` holds the positions of each step; every group is as wide as its longest row and padded with position
    N. The first group is empty: it is what is encoded before the first step. All rows move together.
    """

    def __init__(self, request: Request, plan: Plan, device: torch.device, *, lookahead: int = 0) -> None:
        """`lookahead`: columns of padding behind the last step."""
        self.num_steps, count_BK = plan.num_steps, plan.count_BK
        known_B, width_K = request.known_BN.numpy().sum(axis=1), count_BK.max(axis=0)
        self.widths: list[int] = [0, *width_K.tolist(), *[1] * lookahead]
        self.ragged = bool((known_B != known_B[0]).any() or (count_BK != width_K).any())
        position_BT = np.full((len(count_BK), sum(self.widths)), request.num_tokens)
        group_T = np.repeat(np.arange(self.num_steps), width_K)
        offset_T = np.arange(len(group_T)) - (width_K.cumsum() - width_K)[group_T]
        position_BT[:, : len(group_T)][offset_T < count_BK[:, group_T]] = plan.order_T
        arrays: dict[str, NDArray[Any]] = {"position_BT": position_BT}
        if plan.guided:
            arrays["scale_BK"] = np.ones((len(count_BK), self.num_steps + lookahead), dtype=np.float32)
            arrays["scale_BK"][:, : self.num_steps] = plan.scale_BK
        if self.ragged:
            arrays["count_BK"] = count_BK
        sent = send_all(arrays, device)
        self.position_BT, self.scale_BK, self.count_BK = sent["position_BT"], sent.get("scale_BK"), sent.get("count_BK")
        # Image tokens of the longest row before each group is encoded, and after the last.
        first, length_BK = int(known_B.max()), known_B[:, None] + count_BK.cumsum(axis=1)
        self.longest: list[int] = [first, first, *length_BK.max(axis=0).tolist()]
        # The tokens of the last step are never encoded.
        ends = [self.longest[k] + self.widths[k] for k in range(self.num_steps)]
        self.num_slots = max(first, *ends, 0)
        self._next = 0

    def next_step(self) -> StepPlan | None:
        """Return the next step: encode what was sampled last, predict the next positions. None after the last."""
        k = self._next
        if k == self.num_steps:
            return None
        self._next += 1
        encode = None
        if self.widths[k]:
            count_B = None if self.count_BK is None else self.count_BK[:, k - 1]
            encode = EncodeArgs(self._groups[k], count_B, self.longest[k + 1], static=True)
        scale_B1 = None if self.scale_BK is None else self.scale_BK[:, k : k + 1]
        return StepPlan(encode, PredictArgs(self._groups[k + 1], scale_B1, static=True))

    @cached_property
    def _groups(self) -> tuple[Tensor, ...]:
        """`[B, S]` of each group. Made when first used: where graphs are replayed, only `tensors` are."""
        return torch.split(self.position_BT, self.widths, dim=1)

    def predicted(self) -> tuple[Tensor, ...]:
        """`[B, S]`: the positions that each step predicts, padded with N."""
        return self._groups[1 : self.num_steps + 1]

    def tensors(self) -> list[Tensor]:
        """The tensors that differ between batches of the same shape."""
        return [x for x in (self.position_BT, self.scale_BK, self.count_BK) if x is not None]


class PlannedSteps:
    """The strategy of the plan: each step fills as many positions as planned, all at once."""

    def __init__(self, cursor: PlanCursor) -> None:
        self.cursor = cursor
        self.ragged, self.num_slots = cursor.ragged, cursor.num_slots
        self.num_steps: int | None = cursor.num_steps

    def next_step(self, state: DecodeState) -> StepPlan | None:
        """Return the next planned step."""
        return self.cursor.next_step()

    def accept(self, state: DecodeState, logits_BSV: Tensor, sampled_BS: Tensor) -> tuple[Tensor, Tensor | None]:
        """Accept every sampled token."""
        return sampled_BS, None
