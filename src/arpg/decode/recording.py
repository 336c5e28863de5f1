"""A generation recorded once as CUDA graphs, one for each step, and replayed for every request of its shape.

The GPU then runs the steps without being told each kernel, which for small steps takes longer than the kernels. The
recorded code is the loop's own. Shapes: B batch, N grid tokens.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from arpg.decode.engine import Step, advance
from arpg.decode.planned import Planned
from arpg.decode.start import Inputs, begin
from arpg.model import ARPG
from arpg.settings import SamplingSettings

Shape = tuple[Any, ...]


def shape_of(inputs: Inputs, way: Planned, settings: SamplingSettings) -> Shape:
    """All that the kernels of a generation depend on; two requests with the same can share a recording."""
    drawn = (settings.attention, settings.temperature, settings.top_k, settings.top_p)
    return _structure(inputs), _structure(_tensors(way)), tuple(way.widths), tuple(way.lengths), drawn


class Recording:
    """The graphs with the memory that they work in. One generation at a time: `busy` says that one is going on."""

    @torch.no_grad()
    def __init__(self, model: ARPG, inputs: Inputs, way: Planned, settings: SamplingSettings) -> None:
        """The way becomes the recording's own. A run of the same shape must have come before: it compiles kernels."""
        self.busy = threading.Lock()
        self.inputs, self.way = _copy(inputs), way
        self.steps: list[tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = []
        before, began = torch.cuda.memory_allocated(model.device), time.perf_counter()
        causal, pool = settings.attention == "causal", torch.cuda.graph_pool_handle()
        state = None
        stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(model.device))
        with torch.cuda.stream(stream), _own_scratch():
            for _ in range(len(way.widths)):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    if state is None:
                        state = begin(model, self.inputs, causal=causal, tokens=way.tokens, ragged=way.ragged)
                    advance(model, state, way, settings)
                finally:
                    graph.capture_end()
                self.steps.append((graph, *state.image()))
        torch.cuda.current_stream(model.device).wait_stream(stream)
        self.state = state  # the cache must live as long as the graphs
        # What kernels work in is free again for the next graph of the pool, but for nobody else.
        self.live_bytes = torch.cuda.memory_allocated(model.device) - before
        self.bytes = max(self.live_bytes, _pool_bytes(pool))
        self.seconds = time.perf_counter() - began
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def replay(self, inputs: Inputs, way: Planned, *, every: bool = True) -> Generator[Step]:
        """The steps of another request of the same shape, or the last alone: what is handed out is copied, and each
        copy waits its turn between two graphs. The caller holds `busy`, and gives it back.
        """
        stream = torch.cuda.current_stream(inputs.ids_BN.device)
        stream.wait_event(self._done)  # the last one may have run on another stream
        try:
            own, new = [*_leaves(self.inputs), *_tensors(self.way)], [*_leaves(inputs), *_tensors(way)]
            for mine, given in zip(own, new, strict=True):
                mine.copy_(given)
            for index, (graph, ids_BN, known_BN) in enumerate(self.steps):
                graph.replay()
                if every or index + 1 == len(self.steps):
                    yield Step(index, len(self.steps), ids_BN.clone(), known_BN.clone())
        finally:
            self._done.record(stream)


@contextmanager
def _own_scratch() -> Iterator[None]:
    """Matrix products inside work in scratch memory of their own, not in that of another recording which may run at the
    same time: torch keeps one for each stream, and hands out the same streams again and again.
    """
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    forget()
    try:
        yield
    finally:
        forget()


def _pool_bytes(pool: Any) -> int:
    """All that the pool of the graphs has taken."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(part["total_size"] for part in segments if tuple(part.get("segment_pool_id", ())) == tuple(pool))


def _tensors(way: Planned) -> list[Tensor]:
    return [x for x in (way.position_BT, way.scale_BK, way.count_BK) if x is not None]


def _leaves(x: Any) -> Iterator[Tensor]:
    """The tensors in a dataclass of tensors and dataclasses, in order."""
    if isinstance(x, Tensor):
        yield x
    elif dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            yield from _leaves(getattr(x, field.name))


def _copy(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = dataclasses.fields(x)
        return dataclasses.replace(x, **{field.name: _copy(getattr(x, field.name)) for field in fields})
    return x


def _structure(x: Any) -> Any:
    """What is not in the tensors themselves."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype
    if isinstance(x, list):
        return tuple(map(_structure, x))
    if dataclasses.is_dataclass(x):
        return tuple(_structure(getattr(x, field.name)) for field in dataclasses.fields(x))
    return x
