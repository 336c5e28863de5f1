"""Pixels: one thread in which the tokenizer works, finished pictures first; previews of several requests share a call.

The last bit of a pixel can depend on what else is in a call, and a picture may be the start of the next stage. So only
previews share one: what a request is answered does not depend on who else is there.

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
        return (self.grid, tuple(self.value.shape[1:]))


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
        """The oldest call for something finished; else the oldest preview, and others that fit into a batch with it."""
        for call in waiting:
            if call.known_BN is None:
                return [call]
        chosen, rows = [waiting[0]], len(waiting[0].value)
        for call in waiting[1:]:
            if call.key == waiting[0].key and rows + len(call.value) <= self._most:
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
