"""Worker threads beside the batcher: those that run the tokenizer, and pools that prepare jobs and make previews.

Shapes: B images, N tokens.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arpg.image import Pixels
from arpg.serve.server_config import Limits
from arpg.tokenizer import PixelCodec, Tokenizer

log = logging.getLogger(__name__)
MAX_PIXEL_BATCH = 16  # images of one call of the tokenizer: their activations take memory beside the cache
SWITCH_INTERVAL_S = 0.0005  # after which a thread gives up the interpreter lock; Python's own is ten times as long


def freeze_heap() -> None:
    """Leave all objects that exist now out of garbage collections, which stop every thread while they scan.

    For a process whose model is loaded: a full collection of its hundreds of thousands of objects takes 0.1 s.
    """
    gc.collect()
    gc.freeze()


@dataclass(eq=False)
class TokenizerCall:
    """A call that a thread waits for: decode ids, or encode pixels where `grid` is None."""

    value: Any  # ids [B, N], or pixels [B, H, W, 3]
    grid: tuple[int, int] | None = None
    known_BN: Tensor | None = None  # of a preview
    future: Future[Any] = field(default_factory=Future)

    @property
    def key(self) -> tuple[Any, ...]:
        """Calls with the same key can share a batch."""
        return (self.grid, self.known_BN is None, self.value.shape[1:])


class WorkerThread(ABC):
    """A thread that works on what other threads hand to it under `_wake`, until it is closed or dies."""

    def __init__(self, name: str, *, threads: int | None) -> None:
        """Start the thread, so a subclass calls this last. `threads`: CPU threads of what it computes."""
        self._threads = threads
        self._wake = threading.Condition()
        self._closing = False
        self._ended: BaseException | None = None  # why the thread has ended
        self._thread = threading.Thread(target=self._run, name=f"arpg-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread and wait for its end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        ended: BaseException = RuntimeError("the server is closed")
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            self._work()
        except BaseException as error:  # the thread ends: nobody may wait for it any more
            log.critical("%s died", self._thread.name, exc_info=error)
            ended = error
        with self._wake:
            self._ended = ended
        self._fail_all(ended)

    @abstractmethod
    def _work(self) -> None:
        """Work until `_closing`."""

    @abstractmethod
    def _fail_all(self, error: BaseException) -> None:
        """End everything that was handed over and is not finished."""


class TokenizerThread(WorkerThread):
    """A thread that runs the calls of a tokenizer, the oldest first; those that are waiting also when it is closed.

    Calls that decode share a batch of at most `max_batch` images; 1: each is alone. `stream`: of a GPU.
    """

    def __init__(
        self,
        codec: PixelCodec,
        *,
        max_batch: int = 1,
        threads: int | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._codec, self.max_batch, self._stream = codec, max_batch, stream
        self._calls: list[TokenizerCall] = []  # that wait, the oldest first
        super().__init__("tokenizer", threads=threads)

    def run(self, call: TokenizerCall) -> Any:
        """Wait for the result of a call."""
        with self._wake:
            if self._ended is not None:
                raise RuntimeError("the tokenizer's thread has ended")
            self._calls.append(call)
            self._wake.notify()
        return call.future.result()

    def _work(self) -> None:
        while calls := self._next_calls():
            try:
                with torch.cuda.stream(self._stream):
                    parts = self._execute(calls)
            except BaseException as error:  # raised in the waiting threads
                for call in calls:
                    call.future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            else:
                for call, part in zip(calls, parts, strict=True):
                    call.future.set_result(part)

    def _fail_all(self, error: BaseException) -> None:
        for call in self._calls:
            call.future.set_exception(error)

    def _next_calls(self) -> list[TokenizerCall]:
        """Wait for calls; return the oldest and those that share its batch, none when closing."""
        with self._wake:
            self._wake.wait_for(lambda: self._calls or self._closing)
            chosen = self._calls[:1]
            rows = sum(len(call.value) for call in chosen)
            for call in self._calls[1:]:
                same = call.grid is not None and call.key == chosen[0].key
                if same and rows + len(call.value) <= self.max_batch:
                    chosen.append(call)
                    rows += len(call.value)
            self._calls = [call for call in self._calls if call not in chosen]
        return chosen

    def _execute(self, calls: list[TokenizerCall]) -> Sequence[Any]:
        if (grid := calls[0].grid) is None:
            return [self._codec.encode(calls[0].value)]
        ids_BN = torch.cat([call.value for call in calls])
        known = [call.known_BN for call in calls if call.known_BN is not None]
        pixels_BHW3 = self._codec.decode(ids_BN, grid, known_BN=torch.cat(known) if known else None)
        return np.split(pixels_BHW3, np.cumsum([len(call.value) for call in calls])[:-1])


class TokenizerLanes(PixelCodec):
    """A `PixelCodec` for any thread, with threads for images of up to `max_pixels`, for larger ones, and for previews.

    The pixels of a large image take seconds on a CPU; those of small ones do not wait for them. Previews take one core:
    two teams of threads on the same cores would wait for each other.

    Previews of several requests share a call of at most `max_batch` images. Finished images share one only with
    `share_finished`, where the model computes in less than float32: the last bit of a pixel can depend on the batch,
    and an image may be the input of the next stage, so a result depends on which other requests are being served.

    On a GPU the threads have a stream of their own: pixels and decoding steps run at the same time, and a thread that
    waits for pixels does not wait for the steps that were launched before them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        max_pixels: int,
        max_batch: int,
        threads: int | None = None,
        share_finished: bool = False,
    ) -> None:
        super().__init__(tokenizer)
        codec, stream = PixelCodec(tokenizer), _pixel_stream(tokenizer.device)
        finished = max_batch if share_finished else 1
        self.small = TokenizerThread(codec, max_batch=finished, threads=threads, stream=stream)
        self.large = TokenizerThread(codec, threads=threads, stream=stream)
        self.preview = TokenizerThread(codec, max_batch=max_batch, threads=1, stream=stream)
        self._limits, self._max_pixels = limits, max_pixels

    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Pixels:
        """Return the images of code ids; with `known_BN`, as a preview."""
        lane = self._lane(grid[0] * grid[1] * self.config.stride**2) if known_BN is None else self.preview
        pixels_BHW3: Pixels = lane.run(TokenizerCall(ids_BN, grid, known_BN))
        return pixels_BHW3

    def encode(self, pixels_BHW3: Pixels) -> Tensor:
        """Return the code ids of images; too large ones are refused first, since they take much time and memory."""
        pixels, stride = pixels_BHW3.shape[1] * pixels_BHW3.shape[2], self.config.stride
        self._limits.check_tokens(pixels // stride**2, stride=stride)
        ids_BN: Tensor = self._lane(pixels).run(TokenizerCall(pixels_BHW3))
        return ids_BN

    def warm_up(self, grid: tuple[int, int]) -> None:
        """Decode 1, 2, 4, ... images of a grid twice each, in the thread that decodes finished ones.

        A size is tuned and captured when it comes for the second time, which takes longer than many images.
        """
        num = 1
        while num <= self.small.max_batch:
            ids_BN = torch.zeros(num, math.prod(grid), dtype=torch.long)
            for _ in range(2):
                self.small.run(TokenizerCall(ids_BN, grid))
            num *= 2

    def _lane(self, pixels: int) -> TokenizerThread:
        return self.small if pixels <= self._max_pixels else self.large


def _pixel_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream on which the weights are complete, as in `pipelined_decode`; None without a GPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


class WorkerPools:
    """Threads that prepare jobs (read images, encode prompts), wait for pixels, make previews, and extract.

    The pools are separate, so that previews continue while images and prompts are read or condition images are
    extracted, and so that large tasks, whose work takes long, keep no thread from small ones. Images are finished in as
    many threads as can wait for two full calls of the tokenizer, or as there are cores, for previews. Jobs without a
    file or a prompt are prepared in one thread: each takes less than a millisecond of Python, in which several threads
    would only wait for each other.
    """

    def __init__(self) -> None:
        self.prepare: Executor = ThreadPoolExecutor(4, thread_name_prefix="arpg-prepare")
        self.prepare_light: Executor = ThreadPoolExecutor(1, thread_name_prefix="arpg-prepare")
        finish = max(2 * MAX_PIXEL_BATCH, os.cpu_count() or 1)
        self.finish: Executor = ThreadPoolExecutor(finish, thread_name_prefix="arpg-finish")
        self.large: Executor = ThreadPoolExecutor(2, thread_name_prefix="arpg-large")
        self.extract: Executor = ThreadPoolExecutor(2, thread_name_prefix="arpg-extract")

    def close(self) -> None:
        """Wait for the work that is running, and drop the rest."""
        for pool in (self.prepare, self.prepare_light, self.finish, self.large, self.extract):
            pool.shutdown(wait=True, cancel_futures=True)
