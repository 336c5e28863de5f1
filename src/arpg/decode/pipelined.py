"""Pipelined decoding of many batches: while the device decodes one, the next is planned and sent.

On a GPU, pixels are decoded on a stream of their own, concurrently with the tokens of the next batch. Only the consumer
waits for the device, and by then the next batch has been launched. On a CPU batches are decoded one after the other.
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

Finish = Callable[[Tensor, tuple[int, int]], Tensor]  # from ids [B, N] on a grid to pixels
_IN_FLIGHT = 1  # batches that are launched before the one before them is consumed


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
