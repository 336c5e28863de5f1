"""The planned way: a step fills as many positions as the plan says, all at once. Nothing waits for the device.

Shapes: B batch, S tokens of a step, T tokens of all steps, K steps, V vocabulary.
"""

from __future__ import annotations

import itertools
from functools import cached_property

import torch
from torch import Tensor

from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.decode.start import known_positions
from arpg.decode.state import Ask, State, Write
from arpg.decode.way import Turn
from arpg.device import send


class Planned:
    """Every index is on the device before the loop starts: what the turns hold are parts of three tensors."""

    def __init__(self, request: Request, plan: Plan, device: torch.device) -> None:
        known = known_positions(request)
        steps = range(plan.num_steps)
        sizes = [[*p.sizes, *[0] * (len(steps) - len(p.sizes))] for p in plan.samples]
        self.widths = [max(column) for column in zip(*sizes, strict=True)]
        self.ragged = any(len(set(column)) > 1 for column in ([len(row) for row in known], *zip(*sizes, strict=True)))
        self.num_steps: int | None = len(steps)
        rows = [
            _padded(p.order, row, self.widths, request.num_tokens) for p, row in zip(plan.samples, sizes, strict=True)
        ]
        scales = [[*p.scales, *[1.0] * (len(steps) - len(p.scales))] for p in plan.samples]
        self.position_BT = send(torch.tensor(rows, dtype=torch.long), device)
        self.scale_BK = send(torch.tensor(scales), device) if plan.guided else None
        self.count_BK = send(torch.tensor(sizes), device) if self.ragged else None
        # Of the longest row, at first and after each step.
        rising = [itertools.accumulate(row, initial=len(there)) for row, there in zip(sizes, known, strict=True)]
        self.lengths = [max(lengths) for lengths in zip(*rising, strict=True)]
        # The last step's tokens are never looked at.
        self.tokens = max(self.lengths[0], *(self.lengths[s] + self.widths[s] for s in steps[:-1]), 0)
        self._next = 0

    @cached_property
    def _turns(self) -> list[Turn]:
        """Made when they are asked for: a recorded generation has its own."""
        turns: list[Turn] = []
        write: Write | None = None
        for s, position_BS in enumerate(torch.split(self.position_BT, self.widths, dim=1)):
            scale_B1 = None if self.scale_BK is None else self.scale_BK[:, s : s + 1]
            turns.append(Turn(write, Ask(position_BS, scale_B1)))
            count_B = None if self.count_BK is None else self.count_BK[:, s]
            write = Write(position_BS, count_B, self.lengths[s + 1])
        return turns

    def positions(self) -> list[Tensor]:
        """`[B, S]` of each step, padded with N."""
        return [turn.ask.position_BS for turn in self._turns]

    def turn(self, state: State) -> Turn | None:
        """The step before enters the cache, and the next one is asked for."""
        if self._next == len(self._turns):
            return None
        self._next += 1
        return self._turns[self._next - 1]

    def keep(self, state: State, logits_RSV: Tensor, drawn_BS: Tensor) -> tuple[Tensor, None]:
        return drawn_BS, None


def _padded(order: tuple[int, ...], sizes: list[int], widths: list[int], padding: int) -> list[int]:
    """The positions of all steps, each filled up to its width."""
    if sizes == widths:
        return list(order)
    ends = list(itertools.accumulate(sizes, initial=0))
    parts = [order[a:b] for a, b in itertools.pairwise(ends)]
    return [x for part, width in zip(parts, widths, strict=True) for x in (*part, *[padding] * (width - len(part)))]
