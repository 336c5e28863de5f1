"""ImageService: a served model with its pipeline, batcher, worker threads, limits, keys and metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from starlette.requests import Request
from torch import Tensor

from arpg.checkpoint import read_folder
from arpg.decode import Step, make_plan
from arpg.errors import InputError
from arpg.hub import resolve
from arpg.installed import installed_folder
from arpg.pipeline import Pipeline, choose_device
from arpg.serve.api_error import ApiError, bad_request, internal_error
from arpg.serve.auth import ApiKeys
from arpg.serve.batcher import Batcher, PendingRows
from arpg.serve.build_task import BuiltTask, TaskBuilder
from arpg.serve.middleware import AdmissionLimiter
from arpg.serve.observability import Metrics
from arpg.serve.responses import Job, Preview, Result, to_png
from arpg.serve.schemas import model_info
from arpg.serve.server_config import ServeSettings
from arpg.serve.workers import TokenizerThread, WorkerPools, serving_pipeline
from arpg.tasks.task import ImageTask

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_UNREAD_PREVIEWS = 8  # of a slow reader; more are left out
MAX_PREVIEW_LAG_S = 2.0  # previews of older steps are left out


@dataclass(frozen=True)
class LoadedModel:
    """The parts of a service that exist once its model is loaded."""

    pipeline: Pipeline
    tokenizer: TokenizerThread
    batcher: Batcher
    pools: WorkerPools
    builder: TaskBuilder


class ImageService:
    """A served model. `open` calls `load`, which returns the pipeline; until then, calls get a 503."""

    def __init__(
        self,
        load: Callable[[], Pipeline],
        *,
        name: str,
        folder: Path | None = None,
        keys: ApiKeys | None = None,
        settings: ServeSettings | None = None,
    ) -> None:
        self.settings = settings or ServeSettings()
        self.limits, self.name, self.folder, self.keys = self.settings.limits, name, folder, keys or ApiKeys()
        self.metrics = Metrics()
        self.admission = AdmissionLimiter(
            self.settings.max_pending_requests, self.metrics, estimate_wait=lambda: self.seconds_per_image
        )
        self.seconds_per_image = 1.0  # a moving average, for Retry-After
        self._load = load
        self._state: LoadedModel | None = None
        self._closed = False
        gauge = self.metrics.gauge
        gauge("arpg_rows_waiting", "Images not in a batch yet", lambda: self._rows("num_waiting"))
        gauge("arpg_rows_running", "Images being decoded", lambda: self._rows("num_running"))

    @classmethod
    def from_pretrained(cls, model: str, *, keys: ApiKeys, settings: ServeSettings) -> ImageService:
        """Serve a model by its name. The device and the folder are checked here; `open` loads the weights."""
        choose_device(settings.device)
        folder = resolve(model)

        def load() -> Pipeline:
            where = {"device": settings.device, "precision": settings.precision, "engine": settings.engine}
            return Pipeline.from_pretrained(folder, **where)

        return cls(load, name=Path(model).name or model, folder=folder, keys=keys, settings=settings)

    def open(self) -> None:
        """Load the model and start the threads; this takes a while."""
        settings, loaded = self.settings, self._load()
        size, threads = settings.max_batch, settings.threads
        tokenizer = TokenizerThread(loaded.tokenizer, max_batch=size, threads=threads)
        pipeline = serving_pipeline(loaded, tokenizer, self.metrics)
        max_wait = settings.max_wait_ms / 1000
        batcher = Batcher(pipeline.model, max_batch=size, max_wait=max_wait, threads=threads, metrics=self.metrics)
        builder = TaskBuilder(pipeline, self.name, self.limits)
        self._state = LoadedModel(pipeline, tokenizer, batcher, WorkerPools(), builder)
        log.info("ready", extra={"model": self.name, "device": str(pipeline.model.device)})

    def close(self) -> None:
        """Stop the threads; jobs that are not finished end with an error."""
        self._closed = True
        if self._state is not None:
            self._state.batcher.close()
            self._state.pools.close()
            self._state.tokenizer.close()

    @property
    def alive(self) -> bool:
        """Whether the model is loaded and its threads run."""
        state = self._state
        return state is not None and not self._closed and state.batcher.alive and state.tokenizer.alive

    @property
    def ready(self) -> bool:
        """Whether the service accepts work."""
        return self.alive and not self.admission.draining

    @property
    def loaded(self) -> LoadedModel:
        """The parts of the loaded model; raises a 503 before they exist."""
        if self._state is None:
            raise ApiError(503, "the model is still loading; try again in a moment", code="loading", retry_after=5)
        return self._state

    @property
    def thumbnails(self) -> Path | None:
        """The file with the thumbnails of the classes, if there is one."""
        return None if self.folder is None else find_thumbnails(self.folder)

    def info(self) -> dict[str, Any]:
        """Return the body of `/v1/arpg/info`."""
        pipe = self.loaded.pipeline
        return model_info(self.name, pipe.model.config, pipe.tokenizer.config, pipe.sampling, self.limits)

    def start(self, call: Request, build: Callable[[TaskBuilder], BuiltTask], *, previews: bool) -> Job:
        """Start a job for an HTTP call; `build` is called in a worker thread."""
        loaded = self.loaded
        job = Job(id=call.state.id, deadline=self.settings.deadline, previews=previews)
        self.submit(loaded.pools.prepare, job, lambda: _TaskRun(self, job, *build(loaded.builder)).submit_next())
        return job

    async def run_in_worker(self, work: Callable[[], T]) -> T:
        """Run `work`, which belongs to no job, in a worker thread."""
        try:
            return await asyncio.wrap_future(self.loaded.pools.prepare.submit(work))
        except InputError as error:
            raise bad_request(error) from None

    def submit(self, pool: Executor, job: Job, work: Callable[[], None]) -> None:
        """Run a part of a job in a worker thread; an exception ends the job."""

        def guarded() -> None:
            if job.should_stop:
                job.stop()
                return
            try:
                work()
            except ApiError as error:
                job.end(error)
            except InputError as error:
                job.end(bad_request(error))
            except Exception as error:
                self.fail(job, error)

        try:
            pool.submit(guarded)
        except RuntimeError:  # the pool is closed
            job.end(internal_error())

    def fail(self, job: Job, error: BaseException) -> None:
        """End a job with a 500; the log has the details."""
        log.error("generation failed", exc_info=error, extra={"id": job.id})
        job.end(internal_error())

    def record_images(self, count: int, seconds: float) -> None:
        """Record that a request for `count` images took `seconds`, in the metrics and for Retry-After."""
        self.metrics.images.inc(count)
        self.seconds_per_image += 0.2 * (seconds / count - self.seconds_per_image)

    def _rows(self, which: str) -> float:
        return 0.0 if self._state is None else float(getattr(self._state.batcher, which))


class _TaskRun:
    """Runs the task of one job: submits its requests to the batcher, makes previews of its steps, and its result."""

    def __init__(self, service: ImageService, job: Job, task: ImageTask, about: dict[str, Any]) -> None:
        self.service, self.job, self.task, self.about = service, job, task, about
        self.backlog: deque[Callable[[], None]] = deque()  # previews to make, and what follows them
        self.working = False
        self.lock = threading.Lock()
        self.preview_seconds = 0.0

    def submit_next(self) -> None:
        """Submit the next request of the task to the batcher; without one, the images are finished."""
        request = self.task.next_request()
        if request is None:
            self.finish()
            return
        settings = self.task.spec.settings
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        self.grid = request.grid
        self.decoded_at = torch.where(request.known_BN, -2, -1)
        job = self.job
        pending = PendingRows(job, request, plan, settings, lambda: job.should_stop, self.on_end)
        if job.previews:
            pending.on_step = self.on_step
        self.service.loaded.batcher.submit(pending)

    def on_step(self, pending: PendingRows) -> None:
        """In the batching thread: copy the tokens; a worker makes the preview."""
        step_B = torch.tensor(pending.steps_B)
        fresh = pending.known_BN & (self.decoded_at == -1)
        self.decoded_at = torch.where(fresh, (step_B - 1)[:, None], self.decoded_at)
        ids, known, decoded_at = pending.ids_BN.clone(), pending.known_BN.clone(), self.decoded_at
        counts = [len(plan.sizes) for plan in pending.plan.samples]
        done = sum(pending.steps_B) * max(counts) // max(1, sum(counts))
        if self.job.num_unread > MAX_UNREAD_PREVIEWS:
            return
        with self.lock:
            most = max(1, int(MAX_PREVIEW_LAG_S / max(1e-6, self.preview_seconds)))
            while len(self.backlog) >= most:
                self.backlog.popleft()
            self.backlog.append(lambda: self.preview(done, max(counts), ids, known, decoded_at))
        self._work_off()

    def on_end(self, pending: PendingRows, error: BaseException | None) -> None:
        """In the batching thread: the request is decoded, or it failed, or the job was stopped."""
        if error is not None:
            self.service.fail(self.job, error)
        elif pending.num_open == 0:
            step = Step(max(pending.steps_B), max(pending.steps_B) + 1, pending.ids_BN, pending.known_BN)
            with self.lock:
                self.backlog.append(lambda: self.accept(step))
            self._work_off()
        else:
            self.job.stop()

    def _work_off(self) -> None:
        """Run the backlog one by one in worker threads."""
        with self.lock:
            if self.working or not self.backlog:
                return
            self.working = True
            work = self.backlog.popleft()

        def run() -> None:
            try:
                work()
            finally:
                with self.lock:
                    self.working = False
            self._work_off()

        self.service.submit(self.service.loaded.pools.preview, self.job, run)

    def accept(self, step: Step) -> None:
        self.task.accept(step)
        self.submit_next()

    def preview(self, step: int, steps: int, ids_BN: Tensor, known_BN: Tensor, decoded_at: Tensor) -> None:
        start = time.monotonic()
        task, best_of = self.task, self.task.spec.best_of
        images = task.preview(Step(step - 1, steps + 1, ids_BN, known_BN))
        preview = Preview(
            step=step,
            steps=steps,
            window=task.index,
            windows=len(task),
            grid=self.grid,
            pngs=[to_png(image) for image in images[::best_of]],
            decoded_at=decoded_at[::best_of].tolist(),
        )
        self.preview_seconds = time.monotonic() - start
        self.job.send_preview(preview)

    def finish(self) -> None:
        images, seeds = self.task.images(), self.task.seeds
        settings = {**dataclasses.asdict(self.task.spec.settings), **self.about}
        pngs = [to_png(image, {**settings, "seed": seed}) for image, seed in zip(images, seeds, strict=True)]
        seconds = self.job.seconds
        self.service.record_images(len(images), seconds)
        self.job.end(Result(pngs, images, seeds, settings, seconds))


def find_thumbnails(folder: Path) -> Path | None:
    """Find the thumbnails of the classes in a model's folder, or in that of the model it is based on."""
    base = read_folder(folder).base
    folders = [folder, *([] if base is None else [installed_folder(base)])]
    return next((file for each in folders if (file := each / "thumbnails.webp").is_file()), None)
