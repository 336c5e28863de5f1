"""The studio: turns jobs into drawings, has the batcher draw their rows, and makes PNG files of them."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import torch
from PIL import Image, PngImagePlugin
from torch import Tensor

from arpg.decode import Step, make_plan
from arpg.errors import InputError
from arpg.pipeline import Pipeline
from arpg.serve.batcher import Batcher, Ticket
from arpg.serve.jobs import Job, Preview, Result
from arpg.serve.metrics import Metrics
from arpg.serve.pixels import SharedTokenizer
from arpg.serve.problem import Problem, failed, wrong
from arpg.serve.prompts import shared_prompts
from arpg.tasks.task import ImageTask
from arpg.tokenizer import VQTokenizer

log = logging.getLogger(__name__)
Build = Callable[[], tuple[ImageTask, dict[str, Any]]]  # checks what was asked; also gives what to tell about it
T = TypeVar("T")

UNREAD = 8  # previews that a slow reader may have waiting
LAG = 2.0  # seconds that previews may be behind; beyond that some steps are left out


class Studio:
    """Threads: the batcher's, the tokenizer's, and a few that prepare and finish. None of them is the event loop's."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        max_batch: int = 16,
        max_wait: float = 0.01,
        threads: int | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics or Metrics()
        self.tokenizer = SharedTokenizer(pipeline.tokenizer, most=max_batch, threads=threads)
        # The same pipeline, except that everything it does with pixels happens in one thread.
        self.pipeline = Pipeline(
            pipeline.model,
            cast(VQTokenizer, self.tokenizer),
            sampling=pipeline.sampling,
            classes=pipeline.classes,
            license=pipeline.license,
            prompts=shared_prompts(pipeline, self.metrics),
        )
        self.batcher = Batcher(
            pipeline.model, max_batch=max_batch, max_wait=max_wait, threads=threads, metrics=self.metrics
        )
        # New jobs have threads of their own: while pictures and prompts are read, previews go on.
        self._preparing = ThreadPoolExecutor(4, thread_name_prefix="arpg-prepare")
        self._painting = ThreadPoolExecutor(4, thread_name_prefix="arpg-paint")
        self._closed = False
        self.seconds_per_image = 1.0  # of late, for Retry-After

    @property
    def alive(self) -> bool:
        return not self._closed and self.batcher.alive and self.tokenizer.alive

    def start(self, job: Job, build: Build) -> None:
        """Draw what `build` makes; it is called in another thread."""
        self._do(self._preparing, job, lambda: _JobRun(self, job, *build()).next_request())

    async def aside(self, work: Callable[[], T]) -> T:
        """Something that belongs to no job, in one of the threads that prepare them."""
        try:
            return await asyncio.wrap_future(self._preparing.submit(work))
        except InputError as error:
            raise wrong(error) from None

    def paint(self, job: Job, work: Callable[[], None]) -> None:
        """Make pictures of what a job has so far, in another thread."""
        self._do(self._painting, job, work)

    def close(self) -> None:
        self._closed = True
        self.batcher.close()
        for pool in (self._preparing, self._painting):
            pool.shutdown(wait=True, cancel_futures=True)
        self.tokenizer.close()

    def _do(self, pool: Executor, job: Job, work: Callable[[], None]) -> None:
        """In another thread, as a part of the job: whatever goes wrong there is how the job ends."""

        def guarded() -> None:
            if job.stop:
                job.give_up()
                return
            try:
                work()
            except Problem as problem:
                job.end(problem)
            except InputError as error:
                job.end(wrong(error))
            except Exception as error:
                self.lose(job, error)

        try:
            pool.submit(guarded)
        except RuntimeError:  # the pool is closed
            job.end(failed())

    def lose(self, job: Job, error: BaseException) -> None:
        log.error("drawing failed", exc_info=error, extra={"id": job.id})
        job.end(failed())


class _JobRun:
    """The way of one job through the studio: its requests to the batcher, its steps to previews, its end to files."""

    def __init__(self, studio: Studio, job: Job, drawing: ImageTask, about: dict[str, Any]) -> None:
        self.studio, self.job, self.drawing, self.about = studio, job, drawing, about
        self.snapshots: deque[Callable[[], None]] = deque()
        self.painting = False
        self.lock = threading.Lock()
        self.preview_seconds = 0.0

    def next_request(self) -> None:
        """Hand the next request of the drawing to the batcher; without one, the pictures are finished."""
        request = self.drawing.next_request()
        if request is None:
            self.finish()
            return
        settings = self.drawing.spec.settings
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        self.decoded_at = torch.where(request.known_BN, -2, -1)
        job = self.job
        ticket = Ticket(job, request, plan, settings, lambda: job.stop, self.drawn)
        if job.previews:
            ticket.stepped = self.stepped
        self.studio.batcher.put(ticket)

    def stepped(self, ticket: Ticket) -> None:
        """In the batcher's thread: note what is there; it becomes a picture in another."""
        step_B = torch.tensor(ticket.steps_B)
        fresh = ticket.known_BN & (self.decoded_at == -1)
        self.decoded_at = torch.where(fresh, (step_B - 1)[:, None], self.decoded_at)
        ids, known, decoded_at = ticket.ids_BN.clone(), ticket.known_BN.clone(), self.decoded_at
        counts = [len(plan.sizes) for plan in ticket.plan.samples]
        done = sum(ticket.steps_B) * max(counts) // max(1, sum(counts))
        if self.job.mailbox.unread > UNREAD:
            return
        with self.lock:
            behind = max(1, int(LAG / max(1e-6, self.preview_seconds)))
            while len(self.snapshots) >= behind:
                self.snapshots.popleft()
            self.snapshots.append(lambda: self.preview(done, max(counts), ids, known, decoded_at))
        self._paint()

    def drawn(self, ticket: Ticket, error: BaseException | None) -> None:
        """In the batcher's thread: the request is filled, or it failed, or the job was stopped."""
        if error is not None:
            self.studio.lose(self.job, error)
        elif ticket.open == 0:
            step = Step(max(ticket.steps_B), max(ticket.steps_B) + 1, ticket.ids_BN, ticket.known_BN)
            with self.lock:
                self.snapshots.append(lambda: self.take(step))
            self._paint()
        else:
            self.job.give_up()

    def _paint(self) -> None:
        """Previews and what follows them are made one after the other, in some thread."""
        with self.lock:
            if self.painting or not self.snapshots:
                return
            self.painting = True
            work = self.snapshots.popleft()

        def run() -> None:
            try:
                work()
            finally:
                with self.lock:
                    self.painting = False
            self._paint()

        self.studio.paint(self.job, run)

    def take(self, step: Step) -> None:
        self.drawing.accept(step)
        self.next_request()

    def preview(self, step: int, steps: int, ids_BN: Tensor, known_BN: Tensor, decoded_at: Tensor) -> None:
        began = time.monotonic()
        drawing, each = self.drawing, self.drawing.spec.best_of
        images = drawing.preview(Step(step - 1, steps + 1, ids_BN, known_BN))
        grid = drawing.stages[0].window if drawing._request is None else drawing._request.grid
        preview = Preview(
            step=step,
            steps=steps,
            window=drawing.index,
            windows=len(drawing),
            grid=grid,
            pngs=[png(image) for image in images[::each]],
            decoded_at=decoded_at[::each].tolist(),
        )
        self.preview_seconds = time.monotonic() - began
        self.job.show(preview)

    def finish(self) -> None:
        images = self.drawing.images()
        settings = {**dataclasses.asdict(self.drawing.spec.settings), **self.about}
        seeds = self.drawing.seeds
        pngs = [png(image, {**settings, "seed": seed}) for image, seed in zip(images, seeds, strict=True)]
        self.studio.metrics.images.inc(len(images))
        seconds = self.job.seconds
        self.studio.seconds_per_image += 0.2 * (seconds / len(images) - self.studio.seconds_per_image)
        self.job.end(Result(pngs, images, seeds, settings, seconds))


def png(image: Image.Image, about: dict[str, Any] | None = None) -> bytes:
    """A PNG file; `about` becomes its text `arpg`. Small pictures: speed matters more than the last percent."""
    text = PngImagePlugin.PngInfo()
    if about is not None:
        text.add_text("arpg", json.dumps(about))
    file = io.BytesIO()
    image.save(file, format="PNG", pnginfo=text, compress_level=6 if about is not None else 1)
    return file.getvalue()
