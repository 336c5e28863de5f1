"""The planned way: a step fills as many positions as the plan says, all at once. Nothing waits for the device.

Shapes: B batch, S tokens of a step, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.decode.state import Ask, State, Write, known_positions, pad
from arpg.decode.way import Turn


class Planned:
    """Every index is on the device before the loop starts."""

    def __init__(self, request: Request, plan: Plan, device: torch.device) -> None:
        known = known_positions(request)
        steps = [[_part(p.order, p.sizes, s) for p in plan.samples] for s in range(plan.num_steps)]
        self.ragged = any(len({len(row) for row in rows}) > 1 for rows in (known, *steps))
        self.num_steps: int | None = len(steps)
        self.tokens = max(len(row) for row in known)
        self._turns: list[Turn] = []
        self._next = 0

        lengths = [len(row) for row in known]
        write: Write | None = None
        for s, rows in enumerate(steps):
            position_BS = pad(rows, request.num_tokens, device=device)
            scales = [p.scales[s] if s < len(p.scales) else 1.0 for p in plan.samples]
            scale_B1 = torch.tensor(scales, device=device)[:, None] if plan.guided else None
            self._turns.append(Turn(write, Ask(position_BS, scale_B1)))
            if s + 1 < len(steps):  # the last step's tokens are never looked at
                self.tokens = max(self.tokens, max(lengths) + position_BS.shape[1])
            lengths = [length + len(row) for length, row in zip(lengths, rows, strict=True)]
            count_B = torch.tensor([len(row) for row in rows], device=device) if self.ragged else None
            write = Write(position_BS, count_B, max(lengths))

    def turn(self, state: State) -> Turn | None:
        """The step before enters the cache, and the next one is asked for."""
        if self._next == len(self._turns):
            return None
        self._next += 1
        return self._turns[self._next - 1]

    def keep(self, state: State, logits_RSV: Tensor, drawn_BS: Tensor) -> tuple[Tensor, None]:
        return drawn_BS, None


def _part(order: tuple[int, ...], sizes: tuple[int, ...], step: int) -> list[int]:
    """The positions of one step; none once the sample is done."""
    start = sum(sizes[:step])
    return list(order[start : start + sizes[step]]) if step < len(sizes) else []
