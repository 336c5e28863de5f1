"""Speculative decoding: drafts are sampled independently, then accepted so that the distribution stays the same.

Two calls per round: one samples `draft` tokens from what is decided (probabilities q), one predicts the same positions
strictly causally (probabilities p). A draft x is accepted with probability min(1, p(x) / q(x)); the first that is not
is replaced by a sample from the positive part of p - q, and after a round without a rejection there is a free sample
from p. So every token has the distribution of one-at-a-time causal decoding, though not its very tokens.

Shapes: B batch, S tokens of a step, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.decode.sampling import probs
from arpg.decode.state import DecodeState
from arpg.decode.steps import StepPlan, TokenCursor
from arpg.kernels.ops import gumbel_argmax
from arpg.noise import Stream, uniform
from arpg.settings import SamplingSettings


class Speculative:
    """A noise stream each for drafts (the tokens' own), acceptance and replacement.

    A position keeps its noise from round to round. That is sound: drafts behind a replaced one decided nothing.
    """

    ragged = True

    def __init__(self, request: Request, plan: Plan, device: torch.device, *, settings: SamplingSettings) -> None:
        self.cursor = TokenCursor(request, plan, device, lookahead=settings.draft + 1)
        self.num_slots = self.cursor.num_slots
        self.num_steps: int | None = None
        self._settings = settings
        self._draft_probs_BSV: Tensor | None = None  # between the two calls of a round
        self._steps = 0

    def select(self, rows_B: Tensor) -> None:
        """Keep only these samples."""
        self.cursor.select(rows_B)
        if self._draft_probs_BSV is not None:
            self._draft_probs_BSV = self._draft_probs_BSV[rows_B]

    def next_step(self, state: DecodeState) -> StepPlan | None:
        """Draft tokens, or verify the drafts."""
        left = self.cursor.left
        if left == 0:
            return None
        if self._draft_probs_BSV is None:
            encode = self.cursor.encode(-1, 0)
            predict = self.cursor.predict(0, min(self._settings.draft, left), drafts=0)
        else:
            last = min(self._draft_probs_BSV.shape[1], left - 1)
            encode = self.cursor.encode(0, last)
            predict = self.cursor.predict(1, last + 1, drafts=last)
        self._position_BS = predict.position_BS
        return StepPlan(encode, predict)

    def accept(self, state: DecodeState, logits_BSV: Tensor, sampled_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the drafts for the next call, or accept and replace them."""
        self._steps += 1
        probs_BSV = probs(logits_BSV, self._settings)
        offset_S = torch.arange(sampled_BS.shape[1], device=sampled_BS.device)
        if self._draft_probs_BSV is None:
            kept_BS = (offset_S == 0).expand_as(sampled_BS)  # the first draft is always right
            if self.cursor.left == 1:
                self.cursor.advance(state, torch.ones_like(sampled_BS[:, 0]))
            else:
                self._draft_probs_BSV = probs_BSV
            ids_BS = sampled_BS
        else:
            ids_BS, count_B1 = self._verify(state, probs_BSV, self._draft_probs_BSV)
            kept_BS = offset_S < count_B1
            self.cursor.advance(state, count_B1[:, 0] + 1)
            self._draft_probs_BSV = None
        self.num_steps = self._steps if self.cursor.left == 0 else None
        return ids_BS, kept_BS

    def _verify(self, state: DecodeState, p_BSV: Tensor, q_BSV: Tensor) -> tuple[Tensor, Tensor]:
        """The ids behind the first draft with the replacement in, and how many of them (`[B, 1]`) are decided."""
        # Nothing was drafted behind the last draft: with q = 0 there, the free sample is a replacement like any other.
        q_BSV = F.pad(q_BSV[:, 1:], (0, 0, 0, 1))[:, : p_BSV.shape[1]]
        draft_BS = state.ids_BN.gather(1, self._position_BS)
        p_BS, q_BS = (probs_BSV.gather(2, draft_BS[..., None])[..., 0] for probs_BSV in (p_BSV, q_BSV))
        u_BS = uniform(state.key_B2, Stream.ACCEPT, self._position_BS, 1)[..., 0]
        accepted_BS = (u_BS * q_BS < p_BS) & (q_BS > 0)
        count_B1 = accepted_BS.cumprod(1).sum(1, keepdim=True)

        at_B1 = count_B1.clamp_max(p_BSV.shape[1] - 1)
        p_B1V, q_B1V = (probs_BSV.take_along_dim(at_B1[..., None], dim=1) for probs_BSV in (p_BSV, q_BSV))
        rest_B1V = (p_B1V - q_B1V).clamp_min(0)
        rest_B1V = torch.where(rest_B1V.sum(-1, keepdim=True) > 0, rest_B1V, p_B1V)
        new_B1 = gumbel_argmax(rest_B1V.log(), state.key_B2, Stream.REPLACE, self._position_BS.gather(1, at_B1))
        new_B1 = torch.where(count_B1 == at_B1, new_B1, draft_BS[:, -1:])  # all accepted, and nothing behind them
        return draft_BS.scatter(1, at_B1, new_B1), (count_B1 + 1).clamp_max(p_BSV.shape[1])
