"""Exact and speculative decoding: one-at-a-time causal decoding in fewer calls, by drafts that later calls verify.

Exact decoding gives its very tokens. The noise of a position is fixed by its seed, so a draft of a token can be
verified: sample again, now that the tokens before it are known. Each call encodes the drafts, predicts every drafted
position given what stands before it, and predicts further positions. As long as a sampled token equals its draft, the
next one was sampled from the right tokens. The first that differs is right as well, and all behind it are the next
drafts.

Speculative decoding gives its distribution, though not its very tokens. Two calls per round: one samples `draft` tokens
independently from what is decided (probabilities q), one predicts the same positions strictly causally (probabilities
p). A draft x is accepted with probability min(1, p(x) / q(x)); the first that is not is replaced by a sample from the
positive part of p - q, and after a round without a rejection there is a free sample from p.

Shapes: B batch, S tokens of a step, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.decode.sampling import probs
from arpg.decode.state import DecodeState, EncodeArgs, PlanCursor, PredictArgs, StepPlan
from arpg.device import send
from arpg.errors import require
from arpg.kernels.ops import gumbel_argmax
from arpg.noise import Stream, uniform
from arpg.settings import SamplingSettings


class TokenCursor(PlanCursor):
    """A cursor over plans of one token per step in which each row moves on by a number that only the device knows.

    `done_B` places of each order are decided. Offsets count from there: -1 is the last decided place, 0 the next. The
    cache holds what is decided except for that last one, which is encoded first. Guidance belongs to a place of the
    order, whichever call decides it.
    """

    def __init__(self, request: Request, plan: Plan, device: torch.device, *, lookahead: int) -> None:
        """`lookahead`: how far beyond the end of an order offsets may reach."""
        require(
            bool((plan.count_BK <= 1).all()),
            "the plan fills several tokens at once; exact and speculative decoding need a plan of single tokens",
        )
        super().__init__(request, plan, device, lookahead=lookahead)
        total_B, known_B = torch.from_numpy(plan.count_BK.sum(axis=1)), request.known_BN.sum(dim=1)
        self.total_B, self.known_B = send(total_B, device), send(known_B, device)
        self.done_B = torch.zeros_like(self.total_B)
        self.left = self.num_steps  # places that the row with the most of them still has
        self.started = False
        # Rows that are done still encode their padding.
        self.num_slots = int((known_B + total_B).max()) + lookahead

    def encode(self, first: int, stop: int) -> EncodeArgs | None:
        """Encode the tokens at these offsets, if there are any: there is none at -1 before the first call."""
        first = first if self.started else max(first, 0)
        return EncodeArgs(self.position_BT.gather(1, self._places(first, stop))) if first < stop else None

    def predict(self, first: int, stop: int, *, drafts: int) -> PredictArgs:
        """Predict these offsets; each sees what is decided, and the `drafts` at the offsets before its own."""
        place_BS = self._places(first, stop)
        offset_S = torch.arange(first, stop, device=place_BS.device).clamp_max(drafts)
        return PredictArgs(
            self.position_BT.gather(1, place_BS),
            None if self.scale_BK is None else self.scale_BK.gather(1, place_BS),
            (self.known_B + self.done_B)[:, None] + offset_S,
        )

    def advance(self, state: DecodeState, count_B: Tensor) -> None:
        """Decide `count_B` more places and drop whatever else is in the cache. Waits for the device."""
        self.started = True
        self.done_B = torch.minimum(self.done_B + count_B, self.total_B)
        length_B = self.known_B + (self.done_B - 1).clamp_min(0)
        self.left, longest = torch.stack(((self.total_B - self.done_B).max(), length_B.max())).tolist()
        state.roll_back(length_B, longest)

    def select(self, rows_B: Tensor) -> None:
        """Keep only these rows."""
        self.position_BT, self.total_B = self.position_BT[rows_B], self.total_B[rows_B]
        self.known_B, self.done_B = self.known_B[rows_B], self.done_B[rows_B]
        self.scale_BK = None if self.scale_BK is None else self.scale_BK[rows_B]
        self.left = int((self.total_B - self.done_B).max())

    def _places(self, first: int, stop: int) -> Tensor:
        offset_S = torch.arange(first, stop, device=self.done_B.device)
        return (self.done_B[:, None] + offset_S).clamp(0, self.position_BT.shape[1] - 1)


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
