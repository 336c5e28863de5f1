"""A way of decoding: what each turn of the loop writes and asks, and what it keeps of the answer.

Shapes: B batch, S tokens of a turn, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from arpg.decode.state import Ask, State, Write


@dataclass(frozen=True)
class Turn:
    """One call of the network: Pass 1 writes (None: there is nothing yet), then Pass 2 is asked."""

    write: Write | None
    ask: Ask


class Way(Protocol):
    """The loop calls `turn` and `keep` by turns, until there is no turn."""

    ragged: bool  # may rows hold different numbers of tokens?
    tokens: int  # image tokens that the cache must hold, padding included
    num_steps: int | None  # turns in all; None: that is not known yet

    def turn(self, state: State) -> Turn | None: ...

    def keep(self, state: State, logits_RSV: Tensor, drawn_BS: Tensor) -> tuple[Tensor, Tensor | None]:
        """The ids that shall stand at the positions just asked for, and which of them are final (None: all)."""
        ...
