"""Many batches, one after the other: while the device works on one, the next is planned and sent.

On a GPU, pixels are made on a stream of their own, beside the tokens of the next batch. Nothing waits for the device
but the one who takes a batch, and then the next one is already on its way. Elsewhere batches simply come in turn.
Shapes: B batch, N grid tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arpg.decode import Engine, Plan, Request
from arpg.settings import SamplingSettings

Finish = Callable[[Tensor, tuple[int, int]], Tensor]  # what becomes of ids [B, N] on a grid: pixels
AHEAD = 1  # batches that are sent before the one before them is taken


class Made(NamedTuple):
    result: Tensor  # on the device, whole
    seconds: float  # from planning on; of two batches at once, each moment counts once


@torch.no_grad()
def flow(
    engine: Engine, batches: Iterable[tuple[Request, Plan]], settings: SamplingSettings, finish: Finish
) -> Iterator[Made]:
    """The batches, decoded and finished, in their order. An iterable that plans only when asked is planned meanwhile.

    What comes out may be used on the stream that is current when it is taken.
    """
    run = _on_gpu if engine.model.device.type == "cuda" else _in_turn
    yield from run(engine, iter(batches), settings, finish)


def _in_turn(
    engine: Engine, batches: Iterator[tuple[Request, Plan]], settings: SamplingSettings, finish: Finish
) -> Iterator[Made]:
    while True:
        began = time.perf_counter()
        if (batch := next(batches, None)) is None:
            return
        result = finish(_ids(engine, *batch, settings), batch[0].grid)
        yield Made(result, time.perf_counter() - began)


def _on_gpu(
    engine: Engine, batches: Iterator[tuple[Request, Plan]], settings: SamplingSettings, finish: Finish
) -> Iterator[Made]:
    device = engine.model.device
    # Streams come from small pools, one for each priority. From this one no graph is recorded, and so no graph writes
    # into the scratch memory of the products on this stream.
    aside = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    sent: deque[tuple[Tensor, Any, Any]] = deque()
    last = None  # the end of the batch before
    while True:
        main = torch.cuda.current_stream(device)
        began = _mark(main)
        batch = next(batches, None)
        if batch is not None:
            ids_BN = _ids(engine, *batch, settings)
            aside.wait_event(_mark(main))
            ids_BN.record_stream(aside)  # its memory is given away only when the other stream has read it
            with torch.cuda.stream(aside):
                result = finish(ids_BN, batch[0].grid)
            sent.append((result, began, _mark(aside)))
        if sent and (batch is None or len(sent) > AHEAD):
            result, began, ended = sent.popleft()
            ended.synchronize()
            result.record_stream(torch.cuda.current_stream(device))
            since = [began.elapsed_time(ended)] + ([] if last is None else [last.elapsed_time(ended)])
            last = ended
            yield Made(result, min(since) / 1000)
        elif batch is None:
            return


def _ids(engine: Engine, request: Request, plan: Plan, settings: SamplingSettings) -> Tensor:
    for step in engine.decode(request, plan, settings, every=False):
        ids_BN = step.ids_BN
    return ids_BN


def _mark(stream: torch.cuda.Stream) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
