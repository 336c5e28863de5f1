"""Pixels: one thread in which the tokenizer works, so that pictures that are finished at the same time share a call.

Shapes: B images, N tokens.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from arpg.tokenizer import VQTokenizer


@dataclass(eq=False)
class Call:
    """What somebody waits for: pixels of tokens, or (`grid` None) tokens of pixels."""

    value: Tensor
    grid: tuple[int, int] | None
    known_BN: Tensor | None
    future: Future[Tensor]

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.grid, self.known_BN is None, tuple(self.value.shape[1:]))


class SharedTokenizer:
    """Stands in for a `VQTokenizer`: `encode` and `decode` from any thread, in batches of at most `most` images."""

    def __init__(self, tokenizer: VQTokenizer, *, most: int, threads: int | None = None) -> None:
        self.config, self.device = tokenizer.config, tokenizer.device
        self._tokenizer, self._most, self._threads = tokenizer, most, threads
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="arpg-pixels", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Tensor:
        return self._ask(Call(ids_BN, grid, known_BN, Future()))

    def encode(self, image_B3HW: Tensor) -> Tensor:
        return self._ask(Call(image_B3HW, None, None, Future()))

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _ask(self, call: Call) -> Tensor:
        self._calls.put(call)
        return call.future.result()

    @torch.no_grad()
    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        waiting: list[Call] = []
        while True:
            if not waiting:
                first = self._calls.get()
                if first is None:
                    return
                waiting.append(first)
            closing = False
            while not self._calls.empty():
                call = self._calls.get()
                if call is None:
                    closing = True
                else:
                    waiting.append(call)
            chosen = self._choose(waiting)
            waiting = [call for call in waiting if call not in chosen]
            self._answer(chosen)
            if closing:
                self._calls.put(None)

    def _choose(self, waiting: list[Call]) -> list[Call]:
        """The oldest call (finished pictures before previews) and those of its kind that fit into the batch with it."""
        first = next((call for call in waiting if call.known_BN is None), waiting[0])  # previews come last
        chosen, rows = [first], len(first.value)
        for call in waiting:
            if call is not first and call.key == first.key and rows + len(call.value) <= self._most:
                chosen.append(call)
                rows += len(call.value)
        return chosen

    def _answer(self, calls: list[Call]) -> None:
        try:
            value = torch.cat([call.value for call in calls])
            if calls[0].grid is None:
                made = self._tokenizer.encode(value)
            else:
                known = None if calls[0].known_BN is None else torch.cat([cast(Tensor, c.known_BN) for c in calls])
                made = self._tokenizer.decode(value, calls[0].grid, known_BN=known)
            parts = torch.split(made, [len(call.value) for call in calls])
        except Exception as error:  # it belongs to those who asked; the thread goes on
            for call in calls:
                call.future.set_exception(error)
            return
        for call, part in zip(calls, parts, strict=True):
            call.future.set_result(part)
