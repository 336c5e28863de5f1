"""The batcher: one thread that draws the rows of all requests, as many as possible in one running decode.

Rows that can share a decode (same grid, attention and way to draw a token) run in a batch; new ones join it before a
step where that is faster than a batch of their own, and each leaves when it is finished. Batches take turns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from arpg.decode import Plan, Request
from arpg.decode.continuous import ContinuousBatch, should_merge
from arpg.model import ARPG
from arpg.serve.metrics import Metrics
from arpg.settings import SamplingSettings

log = logging.getLogger(__name__)
LONG = 2.0  # seconds after which a row that needs more room than others is let in before them


@dataclass(eq=False)
class Ticket:
    """The rows of one request on their way. The functions are called from the batcher's thread: they must be quick."""

    owner: Hashable  # whose turn it is goes by owner
    request: Request
    plan: Plan
    settings: SamplingSettings
    stop: Callable[[], bool]  # looked at before every step
    end: Callable[[Ticket, BaseException | None], None]
    stepped: Callable[[Ticket], None] | None = None
    ids_BN: Tensor = field(init=False)  # on the CPU; of finished rows, and of all before `stepped`
    known_BN: Tensor = field(init=False)
    steps_B: list[int] = field(init=False)
    open: int = field(init=False)  # rows that are not finished
    ended: bool = False
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.ids_BN, self.known_BN = self.request.ids_BN.cpu().clone(), self.request.known_BN.clone()
        self.open = len(self.request.seeds)
        self.steps_B = [0] * self.open

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Rows with the same key can be drawn together, however long their prompts are."""
        s, request, condition = self.settings, self.request, self.request.condition
        place = None if request.pos_N2 is None else request.pos_N2.numpy().tobytes()
        drawn = (s.attention, s.temperature, s.top_k, s.top_p, s.decode, s.draft)
        return (request.grid, place, condition.query_BND is None, self.plan.guided, drawn)


Place = tuple[Ticket, int]  # a row of a ticket


@dataclass(eq=False)
class Batch:
    key: tuple[Any, ...]
    running: ContinuousBatch
    places: list[Place]


class Batcher:
    def __init__(
        self,
        model: ARPG,
        *,
        max_batch: int = 16,
        max_wait: float = 0.01,
        call: float | None = None,
        threads: int | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`max_wait`: how long an idle batcher waits for company; `call`: see `should_merge`."""
        self.model, self.max_batch, self.max_wait = model, max_batch, max_wait
        self.call = call if call is not None else (16.0 if model.device.type == "cpu" else 4096.0)
        self.metrics = metrics or Metrics()
        self._threads = threads
        self._wake = threading.Condition()
        self._arrived: list[Ticket] = []
        self._waiting: OrderedDict[Hashable, deque[Place]] = OrderedDict()  # by owner; the next to be served is first
        self._batches: deque[Batch] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="arpg-batcher", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Rows that are not drawn yet."""
        return sum(len(places) for places in list(self._waiting.values())) + sum(t.open for t in list(self._arrived))

    @property
    def running(self) -> int:
        """Rows that are being drawn."""
        return sum(len(batch.places) for batch in list(self._batches))

    def put(self, ticket: Ticket) -> None:
        with self._wake:
            self._arrived.append(ticket)
            self._wake.notify()

    def close(self) -> None:
        """Stop after the current step; whatever is not finished ends with an error."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # The thread. Everything below runs in it, and nothing else touches the batches.

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while self._listen():
            try:
                self._admit()
                self._turn()
            except Exception as error:  # our own mistake: these requests are lost, the next ones need not be
                log.exception("the batcher failed")
                self._abandon(error)
        self._abandon(RuntimeError("the server is closed"))

    def _listen(self) -> bool:
        """Take what has arrived; without anything to do, wait for it. False: it is time to go."""
        with self._wake:
            idle = not self._batches and not self._waiting
            if idle:
                self._wake.wait_for(lambda: self._arrived or self._closing)
                until = time.monotonic() + self.max_wait
                while not self._closing and sum(t.open for t in self._arrived) < self.max_batch:
                    if not self._wake.wait(max(0.0, until - time.monotonic())) or time.monotonic() >= until:
                        break
            arrived, self._arrived = self._arrived, []
            closing = self._closing
        for ticket in arrived:
            places = self._waiting.setdefault(ticket.owner, deque())
            places.extend((ticket, row) for row in range(ticket.open))
        return not closing

    def _admit(self) -> None:
        """Rows enter one by one, each owner in turn. The last quarter of the batch is kept for owners with none."""
        self._leave({ticket: None for ticket in self._tickets() if ticket.stop()})
        busy = {ticket.owner for batch in self._batches for ticket, _ in batch.places}
        room = self.max_batch - sum(self._weight(ticket) for batch in self._batches for ticket, _ in batch.places)
        kept = self.max_batch // 4
        new: list[Place] = []
        passed = 0
        while self._waiting and room > 0 and passed < len(self._waiting):
            owner, places = next(iter(self._waiting.items()))
            weight = self._weight(places[0][0])
            alone = not self._batches and not new
            if not alone and room < weight and time.monotonic() - places[0][0].since > LONG:
                break  # a large row has waited long enough: nobody enters until there is room for it
            if not alone and (room < weight or (owner in busy and room - weight < kept)):
                self._waiting.move_to_end(owner)
                passed += 1
                continue
            new.append(places.popleft())
            busy.add(owner)
            room, passed = room - weight, 0
            if places:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
        groups: dict[tuple[Any, ...], list[Place]] = {}
        for place in new:
            groups.setdefault(place[0].key, []).append(place)
        for key, group in groups.items():
            self._start(key, group)

    def _weight(self, ticket: Ticket) -> int:
        """Rows of a larger grid than the model's take the room of several."""
        height, width = self.model.config.grid
        return min(self.max_batch, -(-ticket.request.num_tokens // (height * width)))

    def _start(self, key: tuple[Any, ...], places: list[Place]) -> None:
        """A batch of its own for new rows, or room in one that is running."""
        open_places = [place for place in places if place[0].plan.samples[place[1]].sizes]
        for ticket, row in places:
            if not ticket.plan.samples[row].sizes:  # everything is known
                self._finish(ticket, row)
        if not open_places:
            return
        try:
            request = Request.gather([(ticket.request, row) for ticket, row in open_places])
            plan = Plan(tuple(ticket.plan.samples[row] for ticket, row in open_places))
            batch = Batch(key, ContinuousBatch(self.model, request, plan, open_places[0][0].settings), open_places)
            for other in self._batches:
                if other.key == key and should_merge(other.running, batch.running, call_overhead_tokens=self.call):
                    other.running.join(batch.running)
                    other.places += batch.places
                    return
        except Exception as error:
            self._fail(open_places, error)
            return
        self._batches.appendleft(batch)

    def _turn(self) -> None:
        """The batch whose turn it is takes a step."""
        if not self._batches:
            return
        batch = self._batches[0]
        self.metrics.batch.observe(len(batch.places))
        began = time.perf_counter()
        try:
            batch.running.step()
            self._collect(batch)
        except Exception as error:  # also out of memory: this batch is lost, the server goes on
            self._batches.remove(batch)
            self._fail(batch.places, error)
            return
        self.metrics.step.observe(time.perf_counter() - began)
        self._batches.rotate(-1)
        if not batch.places:
            self._batches.remove(batch)

    def _collect(self, batch: Batch) -> None:
        """Give each ticket what its rows have become; finished rows leave."""
        rows = batch.running.rows
        shown = [i for i, (ticket, _) in enumerate(batch.places) if rows[i].finished or ticket.stepped]
        ids_BN, known_BN = batch.running.tokens(shown) if shown else (torch.empty(0), torch.empty(0))
        watching: dict[Ticket, None] = {}
        for j, i in enumerate(shown):
            ticket, row = batch.places[i]
            ticket.ids_BN[row], ticket.known_BN[row] = ids_BN[j], known_BN[j]
            ticket.steps_B[row] = rows[i].done
            watching[ticket] = None
        for ticket in watching:
            if ticket.stepped is not None and not ticket.ended:
                ticket.stepped(ticket)
        finished = [place for i, place in enumerate(batch.places) if rows[i].finished]
        stay = [i for i, row in enumerate(rows) if not row.finished]
        if finished:
            batch.places = [batch.places[i] for i in stay]
            if stay:
                batch.running.keep(stay)
        for ticket, row in finished:
            self._finish(ticket, row)

    def _finish(self, ticket: Ticket, row: int) -> None:
        ticket.steps_B[row] = len(ticket.plan.samples[row].sizes)
        ticket.open -= 1
        if ticket.open == 0:
            self._end(ticket, None)

    def _leave(self, gone: dict[Ticket, None]) -> None:
        """Their rows go, whether they wait or run."""
        if not gone:
            return
        for owner, places in list(self._waiting.items()):
            self._waiting[owner] = deque(place for place in places if place[0] not in gone)
            if not self._waiting[owner]:
                del self._waiting[owner]
        for batch in list(self._batches):
            stay = [i for i, (ticket, _) in enumerate(batch.places) if ticket not in gone]
            if not stay:
                self._batches.remove(batch)
            elif len(stay) < len(batch.places):
                batch.places = [batch.places[i] for i in stay]
                batch.running.keep(stay)
        for ticket in gone:
            self._end(ticket, None)

    def _tickets(self) -> dict[Ticket, None]:
        running = dict.fromkeys(ticket for batch in self._batches for ticket, _ in batch.places)
        return running | dict.fromkeys(ticket for places in self._waiting.values() for ticket, _ in places)

    def _fail(self, places: Sequence[Place], error: BaseException) -> None:
        """A batch failed: the requests that had rows in it end, and their other rows go."""
        log.error("a batch of %d failed", len(places), exc_info=error)
        self.metrics.failures.inc()
        failed = dict.fromkeys(ticket for ticket, _ in places)
        for ticket in failed:
            self._end(ticket, error)
        self._leave(failed)
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()

    def _abandon(self, error: BaseException) -> None:
        tickets = self._tickets()
        with self._wake:
            tickets |= dict.fromkeys(self._arrived)
            self._arrived = []
        self._batches.clear()
        self._waiting.clear()
        for ticket in tickets:
            self._end(ticket, error)

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        """Once, whatever happens; without an error and with open rows it was stopped."""
        if not ticket.ended:
            ticket.ended = True
            ticket.end(ticket, error)
