"""Worker threads beside the batcher: one that runs the tokenizer, and pools that prepare jobs and make previews.

Shapes: B images, N tokens.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arpg.pipeline import Pipeline
from arpg.serve.observability import Metrics
from arpg.text_encoder import PromptCache, PromptEncoder
from arpg.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(eq=False)
class TokenizerCall:
    """A call that a thread waits for: decode ids, or encode pixels where `grid` is None."""

    value: Tensor
    grid: tuple[int, int] | None
    known_BN: Tensor | None
    future: Future[Tensor]

    @property
    def key(self) -> tuple[Any, ...]:
        """Calls with the same key can share a batch."""
        return (self.grid, tuple(self.value.shape[1:]))


class TokenizerThread:
    """A `Tokenizer` for any thread: calls run in one thread, finished images before previews.

    Previews of several requests share a call of at most `max_batch` images. Finished images share one only with
    `share_finished`, where the model computes in less than float32: the last bit of a pixel can depend on the batch,
    and an image may be the input of the next stage, so a result depends on which other requests are being served.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, max_batch: int, threads: int | None = None, share_finished: bool = False
    ) -> None:
        self.config, self.device = tokenizer.config, tokenizer.device
        self._share_finished = share_finished
        self._tokenizer, self._max_batch, self._threads = tokenizer, max_batch, threads
        self._calls: queue.SimpleQueue[TokenizerCall | None] = queue.SimpleQueue()  # None: close
        self._lock = threading.Lock()  # no call is queued once the thread has ended
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="arpg-tokenizer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Tensor:
        """Return the images of code ids; with `known_BN`, as a preview."""
        return self._wait_for(TokenizerCall(ids_BN, grid, known_BN, Future()))

    def encode(self, image_B3HW: Tensor) -> Tensor:
        """Return the code ids of images."""
        return self._wait_for(TokenizerCall(image_B3HW, None, None, Future()))

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name."""
        return self._tokenizer.state_dict()

    def close(self) -> None:
        """Stop the thread after the calls that are waiting."""
        self._calls.put(None)
        self._thread.join()

    def _wait_for(self, call: TokenizerCall) -> Tensor:
        with self._lock:
            if self._ended is not None:
                raise RuntimeError("the tokenizer's thread has ended") from self._ended
            self._calls.put(call)
        return call.future.result()

    def _run(self) -> None:
        ended: BaseException = RuntimeError("the server is closed")
        pending: list[TokenizerCall] = []
        try:
            self._serve(pending)
        except BaseException as error:  # the thread ends: nobody may wait for it any more
            log.critical("the tokenizer's thread died", exc_info=error)
            ended = error
        with self._lock:
            self._ended = ended
        while not self._calls.empty():
            call = self._calls.get()
            pending += [] if call is None else [call]
        for call in pending:
            if not call.future.done():
                call.future.set_exception(RuntimeError("the tokenizer's thread has ended"))

    @torch.no_grad()
    def _serve(self, pending: list[TokenizerCall]) -> None:
        """Execute calls until `close`; `pending` holds those that are not finished."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        closing = False
        while pending or not closing:
            if not pending or not self._calls.empty():
                call = self._calls.get()
                if call is None:
                    closing = True
                else:
                    pending.append(call)
                continue
            chosen = self._choose(pending)
            self._execute(chosen)
            pending[:] = [call for call in pending if call not in chosen]

    def _choose(self, pending: list[TokenizerCall]) -> list[TokenizerCall]:
        """Choose the oldest call for finished images, else the oldest preview, and those that may share its batch."""
        first = next((call for call in pending if call.known_BN is None), pending[0])
        is_preview = first.known_BN is not None
        if first.grid is None or not (is_preview or self._share_finished):
            return [first]
        chosen, rows = [first], len(first.value)
        for call in pending:
            fits = call.key == first.key and rows + len(call.value) <= self._max_batch
            if call is not first and fits and (call.known_BN is not None) == is_preview:
                chosen.append(call)
                rows += len(call.value)
        return chosen

    def _execute(self, calls: list[TokenizerCall]) -> None:
        try:
            value = torch.cat([call.value for call in calls])
            if calls[0].grid is None:
                result = self._tokenizer.encode(value)
            else:
                known = [call.known_BN for call in calls if call.known_BN is not None]
                result = self._tokenizer.decode(value, calls[0].grid, known_BN=torch.cat(known) if known else None)
            parts = torch.split(result, [len(call.value) for call in calls])
        except Exception as error:  # raised in the waiting threads; this one continues
            for call in calls:
                call.future.set_exception(error)
            return
        for call, part in zip(calls, parts, strict=True):
            call.future.set_result(part)


class TokenizerLanes:
    """A `Tokenizer` for any thread, with threads for images of up to `max_pixels`, for larger ones, and for previews.

    The pixels of a large image take seconds on a CPU; those of small ones do not wait for them. Previews take one core:
    two teams of threads on the same cores would wait for each other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_pixels: int,
        max_batch: int,
        threads: int | None = None,
        share_finished: bool = False,
    ) -> None:
        self.config, self.device = tokenizer.config, tokenizer.device
        self.small = TokenizerThread(tokenizer, max_batch=max_batch, threads=threads, share_finished=share_finished)
        self.large = TokenizerThread(tokenizer, max_batch=max_batch, threads=threads)
        self.preview = TokenizerThread(tokenizer, max_batch=max_batch, threads=1)
        self._max_pixels = max_pixels

    @property
    def alive(self) -> bool:
        """Whether all threads run."""
        return self.small.alive and self.large.alive and self.preview.alive

    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Tensor:
        """Return the images of code ids; with `known_BN`, as a preview."""
        if known_BN is not None:
            return self.preview.decode(ids_BN, grid, known_BN=known_BN)
        return self._lane(grid[0] * grid[1] * self.config.stride**2).decode(ids_BN, grid)

    def encode(self, image_B3HW: Tensor) -> Tensor:
        """Return the code ids of images."""
        return self._lane(image_B3HW.shape[-2] * image_B3HW.shape[-1]).encode(image_B3HW)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name."""
        return self.small.state_dict()

    def close(self) -> None:
        """Stop the threads after the calls that are waiting."""
        for lane in (self.small, self.large, self.preview):
            lane.close()

    def _lane(self, pixels: int) -> TokenizerThread:
        return self.small if pixels <= self._max_pixels else self.large


class WorkerPools:
    """Threads that prepare jobs (read images, encode prompts), that make previews and PNG files, and that extract.

    The pools are separate, so that previews continue while images and prompts are read or condition images are
    extracted, and so that large tasks, whose work takes long, keep no thread from small ones. Images are finished in as
    many threads as there are cores: compression does not hold the interpreter lock, and waiting for pixels takes no
    core.
    """

    def __init__(self) -> None:
        self.prepare: Executor = ThreadPoolExecutor(4, thread_name_prefix="arpg-prepare")
        self.finish: Executor = ThreadPoolExecutor(max(4, os.cpu_count() or 1), thread_name_prefix="arpg-finish")
        self.large: Executor = ThreadPoolExecutor(2, thread_name_prefix="arpg-large")
        self.extract: Executor = ThreadPoolExecutor(2, thread_name_prefix="arpg-extract")

    def close(self) -> None:
        """Wait for the work that is running, and drop the rest."""
        for pool in (self.prepare, self.finish, self.large, self.extract):
            pool.shutdown(wait=True, cancel_futures=True)


class TimedTextEncoder:
    """A text encoder that records in the metrics how long each call takes."""

    def __init__(self, encoder: PromptEncoder, metrics: Metrics) -> None:
        self._encoder, self._metrics = encoder, metrics

    def states(self, prompts: Sequence[str]) -> list[Tensor]:
        """Return the states of each prompt."""
        with self._metrics.prompt.time():
            return self._encoder.states(prompts)


def serving_pipeline(pipeline: Pipeline, tokenizer: Tokenizer, metrics: Metrics) -> Pipeline:
    """Return `pipeline` with the tokenizer in a thread of its own and prompts that are cached in memory only.

    Clients could fill a cache on disk. The text encoder is loaded and run here, not at the first prompt: a server
    without it does not start, and its first call takes several times as long as the others.
    """
    own, prompts = pipeline.prompts, None
    if own is not None:
        own.encoder.states(["warm up"])
        encoder = TimedTextEncoder(own.encoder, metrics)
        prompts = PromptCache(own.config, load=lambda: encoder)
    return Pipeline(
        pipeline.model,
        tokenizer,
        sampling=pipeline.sampling,
        classes=pipeline.classes,
        license=pipeline.license,
        prompts=prompts,
    )
