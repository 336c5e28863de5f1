"""The exact way: the very tokens of one-at-a-time causal decoding, in a fraction of the calls.

The noise of a position is fixed by its seed, so a guess at a token can be checked against the token itself: draw
again, now that the tokens before it are known. Each call writes the guesses, asks for every guessed position given
what stands before it, and asks on beyond. As long as a draw equals the guess, the next draw was made from the right
tokens. The first that differs is right as well, and all behind it are the next guesses.

Shapes: B batch, S tokens of a turn, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arpg.decode.plan import Plan
from arpg.decode.queue import Queue
from arpg.decode.request import Request
from arpg.decode.state import State
from arpg.decode.way import Turn


class Exact:
    """Every turn decides at least one place of each sample, and at most one more than it guesses."""

    ragged = True

    def __init__(self, request: Request, plan: Plan, device: torch.device, *, draft: int) -> None:
        self.queue = Queue(request, plan, device, ahead=2 * draft)
        self.tokens = self.queue.tokens
        self.num_steps: int | None = None
        self._draft = draft
        self._guesses = 0  # tokens beyond the decided ones that stand in the state
        self._turns = 0

    def keep_rows(self, rows_B: Tensor) -> None:
        self.queue.keep(rows_B)

    def turn(self, state: State) -> Turn | None:
        left = self.queue.left
        if left == 0:
            return None
        self._guesses = min(self._guesses, left - 1)
        more = min(self._draft, left - 1 - self._guesses)
        write = self.queue.write(-1, self._guesses)
        ask = self.queue.ask(0, self._guesses + 1 + more, guesses=self._guesses, prefix=state.num_prefix)
        self._position_BS = ask.position_BS
        return Turn(write, ask)

    def keep(self, state: State, logits_RSV: Tensor, drawn_BS: Tensor) -> tuple[Tensor, Tensor]:
        guess_BS = state.ids_BN.gather(1, self._position_BS[:, : self._guesses])
        right_B1 = (drawn_BS[:, : self._guesses] == guess_BS).cumprod(1).sum(1, keepdim=True)
        kept_BS = torch.arange(drawn_BS.shape[1], device=drawn_BS.device) <= right_B1
        self.queue.advance(state, right_B1[:, 0] + 1)
        self._guesses = self._draft
        self._turns += 1
        self.num_steps = self._turns if self.queue.left == 0 else None
        return drawn_BS, kept_BS
