"""The speculative way: drafts are drawn independently, then kept with the chance that makes the law right.

Two calls a round: one draws `draft` tokens from what is decided (laws q), one asks for the same places strictly
causally (laws p). A draft x is kept with probability min(1, p(x) / q(x)); the first that is not is replaced by a draw
from what p has more than q, and after a round without one there is a free draw from p. So every token has the law of
one-at-a-time causal decoding, though not its very tokens.

Shapes: B batch, S tokens of a turn, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.decode.noise import Stream, uniform
from arpg.decode.plan import Plan
from arpg.decode.queue import Queue
from arpg.decode.request import Request
from arpg.decode.sampling import draw, guide, law
from arpg.decode.state import State
from arpg.decode.way import Turn
from arpg.settings import SamplingSettings


class Speculative:
    """A noise stream each for drafts (the tokens' own), acceptance and replacement.

    A position keeps its noise from round to round. That is sound: drafts behind a replaced one decided nothing.
    """

    ragged = True

    def __init__(self, request: Request, plan: Plan, device: torch.device, *, settings: SamplingSettings) -> None:
        self.queue = Queue(request, plan, device, ahead=settings.draft + 1)
        self.tokens = self.queue.tokens
        self.num_steps: int | None = None
        self._settings = settings
        self._draft_law_BSV: Tensor | None = None  # between the two calls of a round
        self._turns = 0

    def keep_rows(self, rows_B: Tensor) -> None:
        self.queue.keep(rows_B)
        if self._draft_law_BSV is not None:
            self._draft_law_BSV = self._draft_law_BSV[rows_B]

    def turn(self, state: State) -> Turn | None:
        left = self.queue.left
        if left == 0:
            return None
        if self._draft_law_BSV is None:
            drafts = min(self._settings.draft, left)
            write = self.queue.write(-1, 0)
            ask = self.queue.ask(0, drafts, guesses=0)
        else:
            last = min(self._draft_law_BSV.shape[1], left - 1)
            write = self.queue.write(0, last)
            ask = self.queue.ask(1, last + 1, guesses=last)
        self._position_BS, self._scale_BS = ask.position_BS, ask.scale_BS
        return Turn(write, ask)

    def keep(self, state: State, logits_RSV: Tensor, drawn_BS: Tensor) -> tuple[Tensor, Tensor]:
        self._turns += 1
        law_BSV = law(guide(logits_RSV, self._scale_BS), self._settings)
        offset_S = torch.arange(drawn_BS.shape[1], device=drawn_BS.device)
        if self._draft_law_BSV is None:
            kept_BS = (offset_S == 0).expand_as(drawn_BS)  # the first draft is always right
            if self.queue.left == 1:
                self.queue.advance(state, torch.ones_like(drawn_BS[:, 0]))
            else:
                self._draft_law_BSV = law_BSV
            ids_BS = drawn_BS
        else:
            ids_BS, count_B1 = self._check(state, law_BSV, self._draft_law_BSV)
            kept_BS = offset_S < count_B1
            self.queue.advance(state, count_B1[:, 0] + 1)
            self._draft_law_BSV = None
        self.num_steps = self._turns if self.queue.left == 0 else None
        return ids_BS, kept_BS

    def _check(self, state: State, p_BSV: Tensor, q_BSV: Tensor) -> tuple[Tensor, Tensor]:
        """The ids behind the first draft with the replacement in, and how many of them (`[B, 1]`) are decided."""
        # Nothing was drafted behind the last draft: with q = 0 there, the free draw is a replacement like any other.
        q_BSV = F.pad(q_BSV[:, 1:], (0, 0, 0, 1))[:, : p_BSV.shape[1]]
        draft_BS = state.ids_BN.gather(1, self._position_BS)
        p_BS, q_BS = (law_BSV.gather(2, draft_BS[..., None])[..., 0] for law_BSV in (p_BSV, q_BSV))
        u_BS = uniform(state.key_B2, Stream.ACCEPT, self._position_BS, 1)[..., 0]
        accepted_BS = (u_BS * q_BS < p_BS) & (q_BS > 0)
        count_B1 = accepted_BS.cumprod(1).sum(1, keepdim=True)

        at_B1 = count_B1.clamp_max(p_BSV.shape[1] - 1)
        p_B1V, q_B1V = (law_BSV.take_along_dim(at_B1[..., None], dim=1) for law_BSV in (p_BSV, q_BSV))
        more_B1V = (p_B1V - q_B1V).clamp_min(0)
        more_B1V = torch.where(more_B1V.sum(-1, keepdim=True) > 0, more_B1V, p_B1V)
        new_B1 = draw(more_B1V.log(), state.key_B2, Stream.REPLACE, self._position_BS.gather(1, at_B1))
        new_B1 = torch.where(count_B1 == at_B1, new_B1, draft_BS[:, -1:])  # all kept, and nothing behind them
        return draft_BS.scatter(1, at_B1, new_B1), (count_B1 + 1).clamp_max(p_BSV.shape[1])
