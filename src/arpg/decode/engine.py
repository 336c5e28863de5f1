"""The engine: the one decode loop, and how it is executed (eagerly, compiled, or replayed from CUDA graphs).

Each step, Pass 1 encodes the tokens sampled last, Pass 2 predicts the next positions, and the sampler samples them.
A `DecodeStrategy` says which positions those are and which tokens are accepted.

Many batches are pipelined: while the device decodes one, the next is planned and sent. On a GPU, pixels are decoded on
a stream of their own, concurrently with the tokens of the next batch. Only the consumer waits for the device, and by
then the next batch has been launched. On a CPU batches are decoded one after the other.
Shapes: B batch, N grid tokens, S tokens of a step, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from arpg.config import ENGINES
from arpg.decode.drafting import Exact, Speculative
from arpg.decode.graphs import CapturedGraphs, GraphCache, copy_tensors, graph_key, run_and_measure
from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.decode.sampling import sample
from arpg.decode.state import DecodeState, DecodeStrategy, PlanCursor, PlannedSteps, StepPlan, prefill, to_device
from arpg.device import nvidia_capability
from arpg.errors import one_of, require
from arpg.model import TokenDecoder
from arpg.settings import SamplingSettings

# Called after Pass 2 with the state, the step, the guided logits [B, S, V] and the sampled ids [B, S]; the ids it
# returns are used instead of the sampled ones (None: the sampled ones).
Hook = Callable[[DecodeState, StepPlan, Tensor, Tensor], Tensor | None]
Finish = Callable[[Tensor, tuple[int, int]], Tensor]  # from ids [B, N] on a grid to pixels

_BUCKETS = sorted({2**k for k in range(13)} | {3 * 2**k for k in range(11)})  # batch sizes that graphs are captured for
_IN_FLIGHT = 1  # pipelined batches that are launched before the one before them is consumed


@dataclass(frozen=True)
class Step:
    """The tokens after a step: one call of the network. The tensors are on its device and will not change."""

    index: int
    num_steps: int | None  # None: not known before the last one
    ids_BN: Tensor  # raster order; anything where not known
    known_BN: Tensor


def decode(
    model: TokenDecoder,
    request: Request,
    plan: Plan,
    settings: SamplingSettings,
    *,
    hook: Hook | None = None,
    strategy: DecodeStrategy | None = None,
) -> Iterator[Step]:
    """Fill the request as planned; yield after every step. `strategy`: None for the one that the settings name.

    A request in which everything is known yields one step that is the request itself.
    """
    check(model, request, plan)
    strategy = strategy or make_strategy(request, plan, settings, model.device)
    state = to_device(model, request, guided=plan.guided, ragged=strategy.ragged)
    return loop(model, state, strategy, settings, hook=hook)


@torch.no_grad()
def loop(
    model: TokenDecoder,
    state: DecodeState,
    strategy: DecodeStrategy,
    settings: SamplingSettings,
    *,
    hook: Hook | None = None,
) -> Generator[Step]:
    """The loop: prefill the cache, then run steps until the strategy has none left."""
    causal = settings.attention == "causal"
    state = prefill(model, state, causal=causal, num_slots=strategy.num_slots, ragged=strategy.ragged)
    index = 0
    while run_step(model, state, strategy, settings, hook=hook):
        yield Step(index, strategy.num_steps, *state.image())
        index += 1
    if index == 0:
        yield Step(0, 1, *state.image())


@torch.no_grad()
def run_step(
    model: TokenDecoder,
    state: DecodeState,
    strategy: DecodeStrategy,
    settings: SamplingSettings,
    *,
    hook: Hook | None = None,
) -> bool:
    """Run one step of the loop; False if there is none left."""
    step = strategy.next_step(state)
    if step is None:
        return False
    if step.encode is not None:
        state.encode(model, step.encode, causal=settings.attention == "causal")
    args = step.predict
    logits_BSV = state.predict(model, args)
    sampled_BS = sample(logits_BSV, settings, state.key_B2, args.position_BS, static=args.static)
    if hook is not None:
        replaced_BS = hook(state, step, logits_BSV, sampled_BS)
        sampled_BS = sampled_BS if replaced_BS is None else replaced_BS
    state.scatter(args.position_BS, *strategy.accept(state, logits_BSV, sampled_BS))
    return True


def make_strategy(
    request: Request, plan: Plan, settings: SamplingSettings, device: torch.device
) -> PlannedSteps | Exact | Speculative:
    """Return the strategy that `settings.decode` names."""
    if settings.decode == "exact":
        return Exact(request, plan, device, draft=settings.draft)
    if settings.decode == "speculative":
        return Speculative(request, plan, device, settings=settings)
    return PlannedSteps(PlanCursor(request, plan, device))


def check(model: TokenDecoder, request: Request, plan: Plan) -> None:
    """Raise an `InputError` unless plan, request and model fit each other."""
    num_B = plan.count_BK.sum(axis=1)
    require(
        len(num_B) == len(request.seeds),
        f"the plan is for {len(num_B)} samples; the request has {len(request.seeds)}",
    )
    open_BN, order_T = ~request.known_BN.numpy(), plan.order_T
    planned_BN, num_tokens = np.zeros(open_BN.shape, dtype=bool), request.num_tokens
    if order_T.min(initial=0) >= 0 and order_T.max(initial=0) < num_tokens:
        planned_BN.reshape(-1)[np.repeat(np.arange(len(num_B)) * num_tokens, num_B) + order_T] = True
    wrong_B = (planned_BN != open_BN).any(axis=1) | (num_B != open_BN.sum(axis=1))
    row = int(wrong_B.argmax())
    require(
        not wrong_B[row],
        f"the plan fills {num_B[row]} positions; they are not the {open_BN[row].sum()} positions that the request "
        "leaves open",
    )
    if request.ids_BN.device.type == "cpu" and not open_BN.all():
        known_ids = request.ids_BN[request.known_BN]
        low, high = int(known_ids.min()), int(known_ids.max())
        require(
            low >= 0 and high < model.config.vocab_size,
            f"known tokens run from {low} to {high}; expected codes from 0 to {model.config.vocab_size - 1}",
        )


def choose_mode(mode: str, device: torch.device) -> str:
    """Resolve `auto`: graph on an NVIDIA GPU, eager elsewhere, also on AMD's GPUs, whose graphs were never tried."""
    one_of("engine", mode, ENGINES)
    on_gpu = device.type == "cuda"
    require(on_gpu or mode != "graph", f"engine is 'graph', but the model is on {device}; CUDA graphs need a GPU")
    return ("eager" if nvidia_capability(device) is None else "graph") if mode == "auto" else mode


class Engine:
    """Decodes requests with one model, eagerly, compiled or from CUDA graphs; any number of threads may use it.

    `auto` is `graph` on a GPU and `eager` elsewhere. In `auto` a shape is captured when it comes for the second time,
    since a capture takes longer than one generation; in `graph` at once. Batches are padded to the next of 1, 2, 3, 4,
    6, 8, 12, ... samples. Exact and speculative decoding, whose steps depend on what is sampled, run eagerly.
    """

    def __init__(self, model: TokenDecoder, mode: str = "auto", *, graph_memory: int | None = None) -> None:
        """`graph_memory`: bytes that captured graphs may hold; None: a quarter of the GPU's memory."""
        self.model, self.mode = model, choose_mode(mode, model.device)
        self._arguments = (mode, graph_memory)
        if self.mode == "compiled":
            model.compile_blocks(dynamic=True)
        self.graphs: GraphCache[CapturedGraphs] = GraphCache(
            model.device, memory=graph_memory, capture_after=1 if mode == "auto" else 0
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the arguments, not the captured graphs."""
        mode, graph_memory = self._arguments
        return partial(Engine, graph_memory=graph_memory), (self.model, mode)

    def check_device(self, device: torch.device) -> None:
        """Raise an `InputError` if this kind of engine does not run on `device`."""
        choose_mode(self._arguments[0], device)

    def on_device_of_model(self) -> Engine:
        """Return an engine of the same kind, after the model was moved."""
        mode, graph_memory = self._arguments
        return Engine(self.model, mode, graph_memory=graph_memory)

    def make_strategy(self, request: Request, plan: Plan, settings: SamplingSettings) -> DecodeStrategy:
        """Return the strategy that the settings name; where graphs are captured, planned steps or a kind of them."""
        return make_strategy(request, plan, settings, self.model.device)

    def decode(
        self, request: Request, plan: Plan, settings: SamplingSettings, *, every_step: bool = True
    ) -> Iterator[Step]:
        """Decode as the function `decode` does. Not `every_step`: steps before the last may be left out."""
        if self.mode != "graph" or settings.decode != "steps" or plan.num_steps == 0:
            return decode(self.model, request, plan, settings, strategy=self.make_strategy(request, plan, settings))
        check(self.model, request, plan)
        return self._decode_graph(request, plan, settings, every_step=every_step)

    @torch.no_grad()
    def _decode_graph(
        self, request: Request, plan: Plan, settings: SamplingSettings, *, every_step: bool
    ) -> Iterator[Step]:
        batch = len(request.seeds)
        padded = pad_to_bucket(request, plan)
        state, strategy = self._start(*padded, settings)
        key = graph_key(state, strategy.cursor, settings, every_step=every_step)
        graphs = self.graphs.acquire(key)
        if graphs is None and self.graphs.worth_capturing(key):
            graphs = self.graphs.capture(key, lambda: self._capture(*padded, settings, every_step=every_step))
        steps: Generator[Step]
        if graphs is not None:
            steps = self._replay(graphs, state, strategy.cursor)
        else:  # without padding
            if batch != len(padded[0].seeds):
                state, strategy = self._start(request, plan, settings)
            steps = loop(self.model, state, strategy, settings)
        try:
            for step in steps:
                yield Step(step.index, step.num_steps, step.ids_BN[:batch], step.known_BN[:batch])
        finally:
            steps.close()
            if graphs is not None:
                graphs.busy.release()

    def _start(self, request: Request, plan: Plan, settings: SamplingSettings) -> tuple[DecodeState, PlannedSteps]:
        strategy = self.make_strategy(request, plan, settings)
        assert isinstance(strategy, PlannedSteps)
        return to_device(self.model, request, guided=plan.guided, ragged=strategy.ragged), strategy

    def _capture(self, request: Request, plan: Plan, settings: SamplingSettings, *, every_step: bool) -> CapturedGraphs:
        eager = loop(self.model, *self._start(request, plan, settings), settings)
        run_bytes = run_and_measure(eager, self.model.device)  # compiles the kernels
        state, strategy = self._start(request, plan, settings)
        state = copy_tensors(state)
        steps = loop(self.model, state, strategy, settings)
        return CapturedGraphs(state, strategy.cursor, steps, every_step=every_step, run_bytes=run_bytes)

    @staticmethod
    def _replay(graphs: CapturedGraphs, state: DecodeState, cursor: PlanCursor) -> Generator[Step]:
        first = cursor.num_steps - len(graphs.graphs)  # of one graph alone: the last step
        for index, (ids_BN, known_BN) in enumerate(graphs.replay(state, cursor), start=first):
            yield Step(index, cursor.num_steps, ids_BN, known_BN)


def pad_to_bucket(request: Request, plan: Plan) -> tuple[Request, Plan]:
    """Repeat the last sample up to the next batch size that graphs are captured for."""
    batch = len(request.seeds)
    size = next((size for size in _BUCKETS if size >= batch), batch)
    if size == batch:
        return request, plan
    rows = [*range(batch), *[batch - 1] * (size - batch)]
    return request.rows(rows), plan.rows(rows)


class DecodedBatch(NamedTuple):
    """The result of one batch."""

    result: Tensor  # on the device, complete
    seconds: float  # from planning on; of two batches at once, each moment counts once


@torch.no_grad()
def pipelined_decode(
    engine: Engine, batches: Iterable[tuple[Request, Plan]], settings: SamplingSettings, finish: Finish
) -> Iterator[DecodedBatch]:
    """Yield the batches, decoded and finished, in their order. A lazy iterable is planned while the device decodes.

    A result may be used on the stream that is current when it is consumed.
    """
    run = _overlapped if engine.model.device.type == "cuda" else _sequential
    yield from run(engine, iter(batches), settings, finish)


def _sequential(
    engine: Engine, batches: Iterator[tuple[Request, Plan]], settings: SamplingSettings, finish: Finish
) -> Iterator[DecodedBatch]:
    while True:
        started = time.perf_counter()
        if (batch := next(batches, None)) is None:
            return
        result = finish(_ids(engine, *batch, settings), batch[0].grid)
        yield DecodedBatch(result, time.perf_counter() - started)


def _overlapped(
    engine: Engine, batches: Iterator[tuple[Request, Plan]], settings: SamplingSettings, finish: Finish
) -> Iterator[DecodedBatch]:
    device = engine.model.device
    # Streams come from small pools, one for each priority. From this one no graph is recorded, and so no graph writes
    # into the scratch memory of the products on this stream.
    pixel_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    sent: deque[tuple[Tensor, Any, Any]] = deque()
    last = None  # the end of the batch before
    while True:
        main = torch.cuda.current_stream(device)
        started = _mark(main)
        batch = next(batches, None)
        if batch is not None:
            ids_BN = _ids(engine, *batch, settings)
            pixel_stream.wait_event(_mark(main))
            ids_BN.record_stream(pixel_stream)  # its memory is given away only when the other stream has read it
            with torch.cuda.stream(pixel_stream):
                result = finish(ids_BN, batch[0].grid)
            sent.append((result, started, _mark(pixel_stream)))
        if sent and (batch is None or len(sent) > _IN_FLIGHT):
            result, started, ended = sent.popleft()
            ended.synchronize()
            result.record_stream(torch.cuda.current_stream(device))
            since = [started.elapsed_time(ended)] + ([] if last is None else [last.elapsed_time(ended)])
            last = ended
            yield DecodedBatch(result, min(since) / 1000)
        elif batch is None:
            return


def _ids(engine: Engine, request: Request, plan: Plan, settings: SamplingSettings) -> Tensor:
    for step in engine.decode(request, plan, settings, every_step=False):
        ids_BN = step.ids_BN
    return ids_BN


def _mark(stream: torch.cuda.Stream) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
