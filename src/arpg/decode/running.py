"""A running batch, a step at a time: samples may join it before a step and leave it after one.

It is the loop of `decode` with its rows in the hands of the caller: a server draws the images of many requests
together, each at a step of its own. Shapes: B samples, R rows of the network, N grid tokens, S tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arpg.decode.engine import advance, check, choose_way
from arpg.decode.exact import Exact
from arpg.decode.plan import Plan, SamplePlan
from arpg.decode.request import Request
from arpg.decode.speculative import Speculative
from arpg.decode.start import known_positions, pad, start
from arpg.decode.state import Ask, State, Write, gather
from arpg.decode.way import Turn
from arpg.model import ARPG
from arpg.settings import SamplingSettings


@dataclass
class Row:
    """Where one sample is in its plan."""

    plan: SamplePlan
    length: int  # image tokens in the cache
    done: int = 0  # steps
    finished: bool = False

    def part(self, step: int) -> tuple[int, ...]:
        """The positions of one step; none before the first and after the last."""
        sizes = self.plan.sizes
        if not 0 <= step < len(sizes):
            return ()
        first = sum(sizes[:step])
        return self.plan.order[first : first + sizes[step]]

    def left(self) -> tuple[int, ...]:
        """The sizes of the steps that are still to be taken."""
        return self.plan.sizes[self.done :]


class Rows:
    """The way of rows that are not at the same step: each writes what it drew last and asks for what comes next."""

    ragged = True
    num_steps: int | None = None

    def __init__(self, rows: list[Row], num_tokens: int) -> None:
        self.rows, self.num_tokens = rows, num_tokens
        self.tokens = max(row.length for row in rows)
        for turn in range(max(len(row.left()) for row in rows)):
            parts = [len(row.part(row.done + turn - 1)) if turn < len(row.left()) else 0 for row in rows]
            before = [row.length + sum(row.plan.sizes[max(0, row.done - 1) : row.done + turn - 1]) for row in rows]
            self.tokens = max(self.tokens, max(before) + max(parts))

    def turn(self, state: State) -> Turn | None:
        device, rows = state.ids_BN.device, self.rows
        if all(row.finished for row in rows):
            return None
        writes = [row.part(row.done - 1) if not row.finished else () for row in rows]
        asks = [row.part(row.done) for row in rows]
        state.set_lengths([row.length for row in rows], uniform=len({len(part) for part in writes}) == 1)
        write = None
        if any(writes):
            counts = [len(part) for part in writes]
            count_B = torch.tensor(counts, device=device) if state.cache.length_B is not None else None
            after = max(row.length + count for row, count in zip(rows, counts, strict=True))
            write = Write(pad(writes, self.num_tokens, device=device), count_B, after)
            for row, count in zip(rows, counts, strict=True):
                row.length += count
        scale_B1 = None
        if state.copies == 2:
            scales = [row.plan.scales[row.done] if not row.finished else 1.0 for row in rows]
            scale_B1 = torch.tensor(scales, device=device)[:, None]
        return Turn(write, Ask(pad(asks, self.num_tokens, device=device), scale_B1))

    def keep(self, state: State, logits_RSV: Tensor, drawn_BS: Tensor) -> tuple[Tensor, None]:
        for row in self.rows:
            row.done += not row.finished
            row.finished = row.done == len(row.plan.sizes)
        return drawn_BS, None


class Running:
    """Samples that are drawn together; all have the same grid, attention and way to draw a token."""

    @torch.no_grad()
    def __init__(self, model: ARPG, request: Request, plan: Plan, settings: SamplingSettings) -> None:
        check(model, request, plan)
        self.model, self.settings = model, settings
        self.rows = [Row(p, len(known)) for p, known in zip(plan.samples, known_positions(request), strict=True)]
        self.way: Rows | Exact | Speculative
        if settings.decode == "steps":
            self.way, ragged = Rows(self.rows, request.num_tokens), len({row.length for row in self.rows}) > 1
        else:
            way = choose_way(request, plan, settings, model.device)
            assert isinstance(way, Exact | Speculative)
            self.way, ragged = way, True
        causal, tokens = settings.attention == "causal", self.way.tokens
        self.state = start(model, request, guided=plan.guided, causal=causal, tokens=tokens, ragged=ragged)

    def step(self) -> None:
        """Every sample that is not finished takes its next step."""
        advance(self.model, self.state, self.way, self.settings)
        if not isinstance(self.way, Rows):
            decided = zip(self.way.queue.done_B.tolist(), self.way.queue.total_B.tolist(), strict=True)
            for row, (done, total) in zip(self.rows, decided, strict=True):
                row.done, row.finished = row.done + 1, done == total

    @property
    def can_join(self) -> bool:
        """Exact and speculative batches start together: their rows guess and check at the same time."""
        return isinstance(self.way, Rows)

    @torch.no_grad()
    def join(self, other: Running) -> None:
        """The samples of the other batch come after ours; it must not be used any more."""
        assert isinstance(self.way, Rows)
        assert isinstance(other.way, Rows)
        mine, theirs = range(len(self.rows)), range(len(other.rows))
        self.rows = [*self.rows, *other.rows]
        self.way = Rows(self.rows, self.way.num_tokens)
        self.state = gather([(self.state, mine), (other.state, theirs)], tokens=self.way.tokens)

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """All others leave."""
        self.rows = [self.rows[i] for i in rows]
        if isinstance(self.way, Rows):
            self.way = Rows(self.rows, self.way.num_tokens)
        else:
            self.way.keep_rows(torch.tensor(list(rows), device=self.model.device))
        self.state = gather([(self.state, rows)], tokens=self.way.tokens)

    def tokens(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids and known `[rows, N]` of some samples, on the CPU."""
        ids_BN, known_BN = self.state.image()
        index = torch.tensor(list(rows), device=ids_BN.device)
        return ids_BN[index].cpu(), known_BN[index].cpu()


def joining_pays(first: Running, second: Running, *, call: float) -> bool:
    """Whether two batches are drawn faster as one: it saves calls of the network, but short rows are padded.

    `call`: what a call costs, in tokens that could be computed in its time.
    """
    if not (first.can_join and second.can_join):
        return False
    alone = _padded(first.rows) + _padded(second.rows)
    together = _padded([*first.rows, *second.rows])
    saved = min(max(len(row.left()) for row in running.rows) for running in (first, second))
    return together - alone < call * saved


def _padded(rows: Sequence[Row]) -> int:
    """Tokens that are computed until all rows are finished, padding included, if finished rows leave at once."""
    total, left = 0, [row.left() for row in rows]
    for turn in range(max(map(len, left))):
        sizes = [sizes[turn] for sizes in left if turn < len(sizes)]
        total += len(sizes) * max(sizes)
    return total
