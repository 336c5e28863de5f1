"""Continuous batching: one thread decodes the rows (images) of all requests, as many as possible in one batch.

Rows that can share a batch (same grid, attention and sampling) are decoded together; new ones join a running batch
before a step, and each row leaves when it is finished. Batches take turns.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arpg.decode import Plan, Request, SamplePlan, make_plan
from arpg.decode.continuous import BUCKET, ContinuousBatch, DraftingBatch, TokenCopy, start_batch
from arpg.decode.engine import choose_mode
from arpg.decode.graphs import CapturedStep, GraphCache
from arpg.model import ARPG
from arpg.serve.observability import WorkerMetrics
from arpg.serve.workers import WorkerThread
from arpg.settings import SamplingSettings

log = logging.getLogger(__name__)
MAX_BYPASS_S = 2.0  # after this time no row is admitted before one that waits for more room
GPU_PAUSE_S, _MAX_PAUSE_S = 0.0002, 0.003  # between two steps: for each job that is in no batch, and at most
_MAX_IDLE = 4  # batches without rows that are kept for their captured steps
CPU_BATCH, GPU_BATCH = 16, 128  # images decoded together at most, where the user gives no number
_CACHE_SHARE = 0.25  # of the free memory of a GPU, for the caches of one full batch


@dataclass(eq=False)
class PendingRows:
    """The rows of one decoding request, from its submission to its end.

    The batcher calls `should_stop` before every step, `on_step` after each step of a row, and `on_end` once, all from
    its own thread: they must return quickly.
    """

    owner: Hashable  # owners are served in turn
    request: Request
    plan: Plan
    settings: SamplingSettings
    should_stop: Callable[[], bool]
    on_end: Callable[[PendingRows, BaseException | None], None]  # open rows and no error: it was stopped
    on_step: Callable[[PendingRows], None] | None = None
    tenant: Hashable = None  # whose owners share a turn: the label of API keys
    ids_BN: Tensor = field(init=False)  # on the CPU; of finished rows, and of all rows where there is an `on_step`
    known_BN: Tensor = field(init=False)
    steps_B: list[int] = field(init=False)
    num_open: int = field(init=False)  # rows that are not finished
    num_tokens: int = field(init=False)  # of each row
    ended: bool = False
    since: float = field(default_factory=time.monotonic)
    started: float | None = None  # when its first row was admitted to a batch

    def __post_init__(self) -> None:
        self.ids_BN, self.known_BN = self.request.ids_BN.cpu().clone(), self.request.known_BN.clone()
        self.num_open, self.num_tokens = len(self.request.seeds), self.request.num_tokens
        self.steps_B = [0] * self.num_open

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Rows with the same key can be decoded together, however long their prompts are."""
        s, request, condition = self.settings, self.request, self.request.condition
        pos = None if request.pos_N2 is None else request.pos_N2.numpy().tobytes()
        sampling = (s.attention, s.temperature, s.top_k, s.top_p, s.decode, s.draft)
        return (request.grid, pos, condition.query_BND is None, self.plan.guided, sampling)


class RowRef(NamedTuple):
    """One row of a `PendingRows`."""

    pending: PendingRows
    row: int

    @property
    def plan(self) -> SamplePlan:
        """The plan of the row."""
        return self.pending.plan.samples[self.row]


@dataclass(eq=False)
class Batch:
    """Rows that are decoded together."""

    key: tuple[Any, ...]
    decode: ContinuousBatch | DraftingBatch
    rows: list[RowRef]


class Delivery(NamedTuple):
    """Tokens of rows on their way to the CPU, with the steps that each row has done and whether it is finished."""

    copy: TokenCopy
    rows: list[tuple[RowRef, int, bool]]


class Batcher(WorkerThread):
    """The batching thread. `submit` may be called from any thread.

    It is closed after the current step; requests that are not finished end with an error.
    """

    def __init__(
        self,
        model: ARPG,
        *,
        max_batch: int = 16,
        max_wait: float = 0.01,
        threads: int | None = None,
        metrics: WorkerMetrics | None = None,
        engine: str = "auto",
        pause: float = 0.0,
        num_jobs: Callable[[], int] = lambda: 0,
    ) -> None:
        """`max_wait`: seconds that an idle batcher waits for more rows. `engine`: `auto` is `graph` on an NVIDIA GPU;
        there a bucket of steps is captured when it first occurs.

        `pause`: seconds between two steps for each job that is in no batch, if the device is idle; `num_jobs`: how many
        jobs there are.
        """
        self.model, self.max_batch, self.max_wait = model, max_batch, max_wait
        self._pause, self._num_jobs, self._device_idle = pause, num_jobs, True
        self.metrics = metrics or WorkerMetrics()
        self._grid_tokens = math.prod(model.config.grid)
        self._arrived: list[PendingRows] = []
        self._open: dict[PendingRows, None] = {}  # queued, running or finished, and not ended
        self._waiting: OrderedDict[Hashable, deque[RowRef]] = OrderedDict()  # by owner; the next to be served is first
        self._batches: deque[Batch] = deque()
        self.captures = choose_mode(engine, model.device) == "graph"
        self._idle: OrderedDict[tuple[Any, ...], Batch] = OrderedDict()  # by key; without rows, with captured steps
        self._deliveries: deque[Delivery] = deque()
        self._lap_began = time.perf_counter()
        self._turns, self._last_turn = 0, dict[Hashable, int]()  # admitted rows; the last one of each tenant
        super().__init__("batcher", threads=threads)

    @property
    def num_waiting(self) -> int:
        """Rows that are not in a batch yet."""
        return sum(len(rows) for rows in list(self._waiting.values())) + sum(p.num_open for p in list(self._arrived))

    @property
    def queue_seconds(self) -> float:
        """How long the oldest row has waited that is not in a batch yet; 0 if there is none."""
        waiting = [ref.pending for rows in list(self._waiting.values()) for ref in list(rows)[:1]]
        now = time.monotonic()
        return max((now - pending.since for pending in (*waiting, *list(self._arrived))), default=0.0)

    @property
    def num_running(self) -> int:
        """Rows in batches."""
        return sum(len(batch.rows) for batch in list(self._batches))

    def submit(self, pending: PendingRows) -> None:
        """Queue the rows of a request; where the thread has ended, the request ends at once with an error."""
        with self._wake:
            ended = self._ended
            if ended is None:
                self._arrived.append(pending)
                self._wake.notify()
        if ended is not None:
            self._end(pending, ended)

    # Everything below runs in the batching thread, which alone touches the batches.

    def _work(self) -> None:
        while self._collect_arrivals():
            self._lap("idle")
            try:
                self._admit()
                self._lap("admit")
                self._step()
                self._pause_for_others()
                self._lap("pause")
            except Exception as error:  # a bug in the batcher: these requests fail, later ones may not
                log.exception("the batcher failed")
                self._fail_all(error)

    def _lap(self, part: str, *, device_s: float = 0.0) -> None:
        """Count the time since the last call for a part of the loop; of it, the wait for the device as such."""
        now = time.perf_counter()
        self.metrics.decode_thread.labels(part).inc(max(0.0, now - self._lap_began - device_s))
        if device_s:
            self.metrics.decode_thread.labels("device").inc(device_s)
        self._lap_began = now

    def _pause_for_others(self) -> None:
        """Sleep while jobs that are in no batch run Python, so that more of them share the next step.

        Launching a step of few rows takes the interpreter as long as one of many. While the device is busy, more of
        them arrive anyway.
        """
        if self._pause and self._device_idle and len(self._batches) == 1:
            outside = self._num_jobs() - len(self._open)
            if outside > 0:
                time.sleep(min(self._pause * outside, _MAX_PAUSE_S))

    def _collect_arrivals(self) -> bool:
        """Queue what has arrived; wait for it where there is nothing to do. Return False when closing."""
        with self._wake:
            idle = not self._batches and not self._waiting
            if idle:
                self._wake.wait_for(lambda: self._arrived or self._closing)
                until = time.monotonic() + self.max_wait
                while not self._closing and sum(p.num_open for p in self._arrived) < self.max_batch:
                    if not self._wake.wait(max(0.0, until - time.monotonic())) or time.monotonic() >= until:
                        break
            arrived, self._arrived = self._arrived, []
            closing = self._closing
        for pending in arrived:
            self._open[pending] = None
            rows = self._waiting.setdefault(pending.owner, deque())
            rows.extend(RowRef(pending, row) for row in range(pending.num_open))
        return not closing

    def _admit(self) -> None:
        """Admit rows one by one, tenants and their owners in turn.

        The last quarter of the batch is for owners that have no row in it.
        """
        self._remove({pending: None for pending in self._open if pending.should_stop()})
        busy = {ref.pending.owner for batch in self._batches for ref in batch.rows}
        room = self.max_batch - sum(self._weight(ref.pending) for batch in self._batches for ref in batch.rows)
        reserved = self.max_batch // 4
        admitted: list[RowRef] = []
        skipped: set[Hashable] = set()
        while room > 0 and (owner := self._next_owner(skipped)) is not None:
            rows = self._waiting[owner]
            pending = rows[0].pending
            weight = self._weight(pending)
            alone = not self._batches and not admitted
            if not alone and room < weight and time.monotonic() - pending.since > MAX_BYPASS_S:
                break  # no row is admitted before there is room for this large one
            if not alone and (room < weight or (owner in busy and room - weight < reserved)):
                skipped.add(owner)
                continue
            admitted.append(rows.popleft())
            busy.add(owner)
            if pending.started is None:
                pending.started = time.monotonic()
                self.metrics.queue.observe(pending.started - pending.since)
            room -= weight
            self._turns += 1
            self._last_turn[pending.tenant] = self._turns
            if rows:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
        groups: dict[tuple[Any, ...], list[RowRef]] = {}
        for ref in admitted:
            groups.setdefault(ref.pending.key, []).append(ref)
        for key, group in groups.items():
            self._start(key, group)

    def _next_owner(self, skipped: set[Hashable]) -> Hashable | None:
        """Return the waiting owner whose turn it is: tenants in turn, and the owners of a tenant in turn."""
        waiting = [owner for owner in self._waiting if owner not in skipped]
        if not waiting:
            return None
        return min(waiting, key=lambda owner: self._last_turn.get(self._waiting[owner][0].pending.tenant, 0))

    def _weight(self, pending: PendingRows) -> int:
        """Count a row of a larger grid than the model's as several."""
        return min(self.max_batch, -(-pending.num_tokens // self._grid_tokens))

    def _start(self, key: tuple[Any, ...], rows: list[RowRef]) -> None:
        """Add new rows to a running batch, or start a batch with them."""
        for ref in rows:
            if not ref.plan.sizes:  # all of its tokens are known
                self._finish_row(ref.pending)
        rows = [ref for ref in rows if ref.plan.sizes]
        if not rows:
            return
        running = (each for each in self._batches if each.key == key and isinstance(each.decode, ContinuousBatch))
        batch = next(running, None) or self._idle.pop(key, None)
        try:
            try:
                batch = self._join(batch, key, rows)
            except torch.OutOfMemoryError:
                if not self._idle:
                    raise
                self._drop_idle()
                batch = self._join(batch, key, rows)
        except Exception as error:
            self._fail(rows, error)
            return
        batch.rows += rows
        if batch not in self._batches:
            self._batches.appendleft(batch)

    def _join(self, batch: Batch | None, key: tuple[Any, ...], rows: list[RowRef]) -> Batch:
        """Add rows to what a batch decodes, or to a new one. Where this fails, the batch is as it was."""
        parts, plans = [(ref.pending.request, ref.row) for ref in rows], tuple(ref.plan for ref in rows)
        if batch is not None:
            assert isinstance(batch.decode, ContinuousBatch)
            batch.decode.add_rows(parts, plans)
            return batch
        graphs: GraphCache[CapturedStep] | None = GraphCache(self.model.device) if self.captures else None
        settings = rows[0].pending.settings
        return Batch(key, start_batch(self.model, Request.gather(parts), Plan(plans), settings, graphs=graphs), [])

    def _step(self) -> None:
        """Launch one step of the first batch, then move it to the end. Deliver what the steps before it have made: the
        device has work meanwhile.
        """
        launched = len(self._deliveries)
        if self._batches:
            batch = self._batches[0]
            self.metrics.batch.observe(len(batch.rows))
            start, waited_s = time.perf_counter(), batch.decode.waited_s
            try:
                batch.decode.step()
                self._collect(batch)
            except Exception as error:  # also out of memory: this batch fails, the server continues
                self._batches.remove(batch)
                self._fail(batch.rows, error)
            else:
                self.metrics.step.observe(time.perf_counter() - start)
                self._device_idle = batch.decode.device_idle
                self._batches.rotate(-1)
                if not batch.rows:
                    self._retire(batch)
            self._lap("launch", device_s=batch.decode.waited_s - waited_s)
        while self._deliveries and (launched > 0 or not self._batches or self._deliveries[0].copy.ready):
            self._deliver(self._deliveries.popleft())
            self._lap("deliver")
            launched -= 1

    def _collect(self, batch: Batch) -> None:
        """Start to copy the tokens of finished and watched rows; finished rows leave."""
        states, finished = batch.decode.rows, batch.decode.finished()
        shown = [i for i, ref in enumerate(batch.rows) if finished[i] or ref.pending.on_step]
        if not shown:
            return
        copy = batch.decode.fetch(shown)
        self._deliveries.append(Delivery(copy, [(batch.rows[i], states[i].done, finished[i]) for i in shown]))
        if any(finished):
            self._keep(batch, [i for i, end in enumerate(finished) if not end])

    def _deliver(self, delivery: Delivery) -> None:
        """Hand the tokens of a step to their `PendingRows`."""
        rows = delivery.rows
        try:
            # In numpy: each operation of torch releases the interpreter lock, and then has to wait for it.
            ids_BN, known_BN = (found.numpy() for found in delivery.copy.wait())
            self._lap("device")
            for (ref, done, _), ids_N, known_N in zip(rows, ids_BN, known_BN, strict=True):
                pending, row = ref
                if not pending.ended:
                    pending.ids_BN.numpy()[row], pending.known_BN.numpy()[row] = ids_N, known_N
                    pending.steps_B[row] = done
            for pending in dict.fromkeys(ref.pending for ref, _, _ in rows):
                if pending.on_step is not None and not pending.ended:
                    pending.on_step(pending)
        except Exception as error:
            self._fail([ref for ref, _, _ in rows], error)
            return
        for ref, _, finished in rows:
            if finished and not ref.pending.ended:
                self._finish_row(ref.pending)

    def _retire(self, batch: Batch) -> None:
        """Remove a batch without rows; one with captured steps is kept for the next rows of its key."""
        self._batches.remove(batch)
        if isinstance(batch.decode, ContinuousBatch) and batch.decode.graphs is not None:
            batch.rows = []
            batch.decode.keep([])
            self._idle[batch.key] = batch
            while len(self._idle) > _MAX_IDLE:
                self._idle.popitem(last=False)

    def _keep(self, batch: Batch, rows: list[int]) -> None:
        """Drop all other rows of a batch."""
        batch.rows = [batch.rows[i] for i in rows]
        if rows:
            batch.decode.keep(rows)

    def _finish_row(self, pending: PendingRows) -> None:
        pending.num_open -= 1
        if pending.num_open == 0:
            self._end(pending, None)

    def _remove(self, gone: dict[PendingRows, None]) -> None:
        """Remove the rows of `gone`, waiting or running, and end them."""
        if not gone:
            return
        for owner, rows in list(self._waiting.items()):
            self._waiting[owner] = deque(ref for ref in rows if ref.pending not in gone)
            if not self._waiting[owner]:
                del self._waiting[owner]
        for batch in list(self._batches):
            stay = [i for i, ref in enumerate(batch.rows) if ref.pending not in gone]
            if not stay:
                self._retire(batch)
            elif len(stay) < len(batch.rows):
                self._keep(batch, stay)
        for pending in gone:
            self._end(pending, None)

    def _fail(self, rows: Sequence[RowRef], error: BaseException) -> None:
        """End the requests that had rows in a failed batch, and remove their other rows."""
        log.error("a batch of %d rows failed", len(rows), exc_info=error)
        self.metrics.failures.inc()
        failed = dict.fromkeys(ref.pending for ref in rows)
        for pending in failed:
            self._end(pending, error)
        self._remove(failed)
        if isinstance(error, torch.OutOfMemoryError):
            self._drop_idle()

    def _drop_idle(self) -> None:
        """Free the memory of batches without rows."""
        self._idle.clear()
        torch.cuda.empty_cache()

    def _fail_all(self, error: BaseException) -> None:
        with self._wake:
            failed, self._arrived = [*self._open, *self._arrived], []
        self._batches.clear()
        self._deliveries.clear()
        self._waiting.clear()
        for pending in failed:
            self._end(pending, error)

    def _end(self, pending: PendingRows, error: BaseException | None) -> None:
        """Call `on_end` once, whatever happens."""
        if not pending.ended:
            pending.ended = True
            self._open.pop(pending, None)
            pending.on_end(pending, error)


def choose_max_batch(model: ARPG) -> int:
    """Return how many images to decode together: as many as a quarter of a GPU's free memory holds the caches of."""
    if model.device.type != "cuda":
        return CPU_BATCH
    config, copies = model.config, 1 if model.takes_guidance else 2
    prefix = 1 if config.text is None else config.text.max_tokens
    cache = model.allocate_cache(copies, prefix + math.prod(config.grid) + BUCKET)
    each = cache.key_LBTHK.nbytes + cache.value_LBTHK.nbytes
    free, _ = torch.cuda.mem_get_info(model.device)
    chosen = max(1, min(GPU_BATCH, int(_CACHE_SHARE * free / each)))
    log.info("max_batch chosen", extra={"max_batch": chosen, "cache_bytes": chosen * each, "free_bytes": free})
    return chosen


def choose_max_wait(model: ARPG) -> float:
    """Return the seconds that an idle batcher waits for more rows: on a GPU a step is short, others join the next."""
    return 0.0 if model.device.type == "cuda" else 0.01


def choose_pause(model: ARPG) -> float:
    """Return the seconds between two steps for each job that is in no batch: none where the model itself takes longer
    than the host.
    """
    return GPU_PAUSE_S if model.device.type == "cuda" else 0.0


def warm_up(batcher: Batcher | BatcherLanes, request: Request, settings: SamplingSettings) -> None:
    """Decode batches of 1, 2, 4, ... samples up to a full one: begun together, then joining step by step.

    Where every bucket is captured when it first occurs, the usual ones then are before the first request.
    """
    plan, ended = make_plan(request.grid, request.known_BN, request.seeds, settings), threading.Semaphore(0)

    def submit(groups: Iterator[int]) -> None:
        """Submit a group of samples; the first step of the last of them submits the next group."""
        size = next(groups, 0)
        for i in range(size):
            rows = PendingRows(object(), request, plan, settings, lambda: False, end)
            if i == size - 1:
                rows.on_step = partial(go_on, groups)
            batcher.submit(rows)

    def go_on(groups: Iterator[int], rows: PendingRows) -> None:
        rows.on_step = None
        submit(groups)

    def end(rows: PendingRows, error: BaseException | None) -> None:
        if rows.on_step is not None:  # it failed before its first step
            rows.on_step(rows)
        ended.release()

    num = 1
    while num <= batcher.max_batch:
        joining = -(-num // len(plan.samples[0].sizes))  # at each step, so that about `num` are decoded at a time
        for groups in ([num], [joining] * (2 * num // joining)):
            submit(iter(groups))
            for _ in range(sum(groups)):
                ended.acquire()
        num *= 2


class BatcherLanes:
    """Two batchers of one model: requests of up to `max_tokens` each, and larger ones.

    A step over a large grid takes seconds on a CPU and cannot be interrupted; in a thread of its own it takes its share
    of the device from the others, but makes none wait for its end. Grids of different sizes never share a batch, so
    batches are as full as with one thread.
    """

    def __init__(self, make: Callable[[], Batcher], *, max_tokens: int) -> None:
        self.small, self.large, self._max_tokens = make(), make(), max_tokens
        self.max_batch, self.captures = self.small.max_batch, self.small.captures

    @property
    def num_waiting(self) -> int:
        """Rows that are not in a batch yet."""
        return self.small.num_waiting + self.large.num_waiting

    @property
    def queue_seconds(self) -> float:
        """How long the oldest row has waited that is not in a batch yet."""
        return max(self.small.queue_seconds, self.large.queue_seconds)

    @property
    def num_running(self) -> int:
        """Rows in batches."""
        return self.small.num_running + self.large.num_running

    def submit(self, pending: PendingRows) -> None:
        """Queue the rows of a request."""
        (self.small if pending.request.num_tokens <= self._max_tokens else self.large).submit(pending)
