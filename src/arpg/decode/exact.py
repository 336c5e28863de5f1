"""Exact decoding: the tokens of one-at-a-time causal decoding, in a fraction of the calls.

The noise of a position is fixed by its seed, so a draft of a token can be verified: sample again, now that the tokens
before it are known. Each call encodes the drafts, predicts every drafted position given what stands before it, and
predicts further positions. As long as a sampled token equals its draft, the next one was sampled from the right tokens.
The first that differs is right as well, and all behind it are the next drafts.

Shapes: B batch, S tokens of a step, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.decode.state import DecodeState
from arpg.decode.steps import StepPlan, TokenCursor


class Exact:
    """Every step decides at least one place of each sample, and at most one more than it has drafts."""

    ragged = True

    def __init__(self, request: Request, plan: Plan, device: torch.device, *, draft: int) -> None:
        """`draft`: tokens that are drafted beyond the verified ones in each call."""
        self.cursor = TokenCursor(request, plan, device, lookahead=2 * draft)
        self.num_slots = self.cursor.num_slots
        self.num_steps: int | None = None
        self._draft = draft
        self._num_drafts = 0  # tokens beyond the decided ones that stand in the state
        self._steps = 0

    def select(self, rows_B: Tensor) -> None:
        """Keep only these samples."""
        self.cursor.select(rows_B)

    def next_step(self, state: DecodeState) -> StepPlan | None:
        """Encode the last decided token and the drafts; predict the drafted positions and `draft` more."""
        left = self.cursor.left
        if left == 0:
            return None
        self._num_drafts = min(self._num_drafts, left - 1)
        more = min(self._draft, left - 1 - self._num_drafts)
        encode = self.cursor.encode(-1, self._num_drafts)
        predict = self.cursor.predict(0, self._num_drafts + 1 + more, drafts=self._num_drafts)
        self._position_BS = predict.position_BS
        return StepPlan(encode, predict)

    def accept(self, state: DecodeState, logits_BSV: Tensor, sampled_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Accept tokens up to and including the first that differs from its draft."""
        draft_BS = state.ids_BN.gather(1, self._position_BS[:, : self._num_drafts])
        right_B1 = (sampled_BS[:, : self._num_drafts] == draft_BS).cumprod(1).sum(1, keepdim=True)
        kept_BS = torch.arange(sampled_BS.shape[1], device=sampled_BS.device) <= right_B1
        self.cursor.advance(state, right_B1[:, 0] + 1)
        self._num_drafts = self._draft
        self._steps += 1
        self.num_steps = self._steps if self.cursor.left == 0 else None
        return sampled_BS, kept_BS
