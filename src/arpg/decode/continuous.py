"""Continuous batching: a batch that is decoded a step at a time, which samples join before a step and leave after one.

It is the loop of `engine.py` with its rows in the hands of the caller: a server decodes the images of many requests
together, each at a step of its own. Shapes: B samples, N grid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arpg.decode.engine import check, make_strategy, row_progress, run_step
from arpg.decode.exact import Exact
from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.decode.speculative import Speculative
from arpg.decode.state import DecodeState, prefill, to_device
from arpg.decode.steps import PlanCursor, PlannedSteps, RowProgress
from arpg.model import ARPG
from arpg.settings import SamplingSettings


class ContinuousBatch:
    """Samples that are decoded together; all have the same grid, attention and sampling settings."""

    @torch.no_grad()
    def __init__(self, model: ARPG, request: Request, plan: Plan, settings: SamplingSettings) -> None:
        check(model, request, plan)
        self.model, self.settings, self.num_tokens = model, settings, request.num_tokens
        self.rows, self.guided = row_progress(request, plan), plan.guided
        self.strategy: PlannedSteps | Exact | Speculative = make_strategy(request, plan, settings, model.device)
        state = to_device(model, request, guided=plan.guided, ragged=self.strategy.ragged)
        causal, strategy = settings.attention == "causal", self.strategy
        self.state = prefill(model, state, causal=causal, num_slots=strategy.num_slots, ragged=strategy.ragged)

    def step(self) -> None:
        """Run the next step of every sample that is not finished."""
        encoded = [len(row.positions(row.done - 1)) for row in self.rows]
        if not run_step(self.model, self.state, self.strategy, self.settings):
            return
        if isinstance(self.strategy, PlannedSteps):
            for row, count in zip(self.rows, encoded, strict=True):
                if not row.finished:
                    row.length, row.done = row.length + count, row.done + 1
                    row.finished = row.done == len(row.plan.sizes)
        else:
            cursor = self.strategy.cursor
            decided = zip(cursor.done_B.tolist(), cursor.total_B.tolist(), strict=True)
            for row, (done, total) in zip(self.rows, decided, strict=True):
                row.done, row.finished = row.done + 1, done == total

    @property
    def can_join(self) -> bool:
        """Whether other batches can join: the rows of exact and speculative batches draft and verify together."""
        return isinstance(self.strategy, PlannedSteps)

    @torch.no_grad()
    def join(self, other: ContinuousBatch) -> None:
        """Add the samples of another batch after ours; it must not be used any more."""
        assert self.can_join
        assert other.can_join
        parts: list[tuple[DecodeState, Sequence[int]]] = [
            (self.state, range(len(self.rows))),
            (other.state, range(len(other.rows))),
        ]
        self._gather(parts, [*self.rows, *other.rows])

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these samples."""
        if not self.can_join:
            assert isinstance(self.strategy, Exact | Speculative)
            self.strategy.select(torch.tensor(list(rows), device=self.model.device))
        self._gather([(self.state, rows)], [self.rows[i] for i in rows])

    def _gather(self, parts: Sequence[tuple[DecodeState, Sequence[int]]], rows: list[RowProgress]) -> None:
        self.rows = rows
        if self.can_join:
            cursor = PlanCursor(rows, num_tokens=self.num_tokens, device=self.model.device, guided=self.guided)
            self.strategy = PlannedSteps(cursor)
        self.state = DecodeState.gather(parts, num_slots=self.strategy.num_slots)
        if self.can_join:
            self.state.set_lengths([row.length for row in rows], ragged=self.strategy.ragged)

    def tokens(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids and known `[rows, N]` of some samples, on the CPU."""
        ids_BN, known_BN = self.state.image()
        index = torch.tensor(list(rows), device=ids_BN.device)
        return ids_BN[index].cpu(), known_BN[index].cpu()


def should_merge(first: ContinuousBatch, second: ContinuousBatch, *, call_overhead_tokens: float) -> bool:
    """Whether two batches are decoded faster as one: that saves calls of the network, but short rows are padded.

    `call_overhead_tokens`: the cost of a call, in tokens that could be computed in its time.
    """
    if not (first.can_join and second.can_join):
        return False
    apart = _computed_tokens(first.rows) + _computed_tokens(second.rows)
    together = _computed_tokens([*first.rows, *second.rows])
    saved = min(max(len(row.remaining) for row in batch.rows) for batch in (first, second))
    return together - apart < call_overhead_tokens * saved


def _computed_tokens(rows: Sequence[RowProgress]) -> int:
    """Tokens that are computed until all rows are finished, padding included, if finished rows leave at once."""
    total, remaining = 0, [row.remaining for row in rows]
    for step in range(max(map(len, remaining))):
        sizes = [sizes[step] for sizes in remaining if step < len(sizes)]
        total += len(sizes) * max(sizes)
    return total
