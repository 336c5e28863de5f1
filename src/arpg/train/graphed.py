"""Forward and backward pass replayed from one CUDA graph: no work for the CPU, hardly a gap between two kernels.

Only gradients are made in the graph; clipping, AdamW and the average stay outside, where their numbers may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from arpg.train.batches import Batch

WARMUP = 3  # calls before the recording: they compile, and choose what is fastest


class GraphedGradients:
    """Call it like the loss. Gradients are in their parameters then, not added to what was there."""

    def __init__(self, loss: Callable[[Batch], Tensor], parameters: Iterable[nn.Parameter]) -> None:
        self.loss, self.parameters = loss, list(parameters)
        self._calls = 0
        self._batch: Batch | None = None  # the tensors that the graph reads
        self._replay: Callable[[], Any] = lambda: None
        self._value = torch.empty(0)
        self._gradients: list[Tensor | None] = []
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """The loss of a batch, detached. A batch of another shape than the recorded one is computed as ever."""
        if self._batch is None and self._calls >= WARMUP:
            self._record(batch)
        self._calls += 1
        for parameter in self.parameters:
            parameter.grad = None
        if self._batch is None or _shapes(batch) != _shapes(self._batch):
            return self._aside(lambda: self._compute(batch))
        for ours, given in zip(_tensors(self._batch), _tensors(batch), strict=True):
            ours.copy_(given)
        self._replay()
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._value.clone()

    def _record(self, batch: Batch) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        values: list[Any] = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        copies: list[Any] = [None if value is None else value.clone() for value in values]
        static = Batch(*copies)
        self._replay, self._value = record(lambda: self._compute(static), self._side_stream())
        self._gradients = [parameter.grad for parameter in self.parameters]
        self._batch = static

    def _compute(self, batch: Batch) -> Tensor:
        loss = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _aside(self, work: Callable[[], Tensor]) -> Tensor:
        """On the stream of the recording, which must not meet anything that another stream has begun."""
        side = self._side_stream()
        if side is None:
            return work()
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            value = work()
        main.wait_stream(side)
        return value

    def _side_stream(self) -> torch.cuda.Stream | None:
        if self._stream is None and self.parameters[0].is_cuda:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._stream


def record(work: Callable[[], Tensor], stream: torch.cuda.Stream | None) -> tuple[Callable[[], Any], Tensor]:
    """How to do the work again, and where its value will be. Nothing is computed yet."""
    graph = torch.cuda.CUDAGraph()
    # Other threads (snapshots, the watchdog of the process group) may call CUDA meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        value = work()
    return graph.replay, value


def _tensors(batch: Batch) -> list[Tensor]:
    values = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return [value for value in values if value is not None]


def _shapes(batch: Batch) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in _tensors(batch)]
