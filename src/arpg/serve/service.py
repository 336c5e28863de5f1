"""ImageService: the served models with what they share: worker threads, limits, keys, admission and metrics."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import torch
from starlette.requests import Request
from torch import Tensor

from arpg.decode import Step, make_plan
from arpg.errors import InputError, require
from arpg.serve.admission import AdmissionLimiter, own_tokens, task_cost
from arpg.serve.api_error import ApiError, bad_request, internal_error, shorten
from arpg.serve.auth import ApiKeys
from arpg.serve.batcher import PendingRows
from arpg.serve.build_task import BuiltTask, TaskBuilder
from arpg.serve.observability import Metrics, peak_rss_bytes
from arpg.serve.responses import Accepted, Job, Preview, Result, to_png
from arpg.serve.schemas import ExtractCondition
from arpg.serve.served_model import LoadedModel, ServedModel
from arpg.serve.server_config import ServeSettings
from arpg.serve.workers import WorkerPools
from arpg.tasks.task import ImageTask

log = logging.getLogger(__name__)

MAX_UNREAD_PREVIEWS = 8  # of a slow reader; more are left out
MAX_PREVIEW_LAG_S = 2.0  # previews of older steps are left out


class ImageService:
    """The models of a server, the first of which is the default. Until `open` has loaded them, calls get a 503."""

    def __init__(
        self, models: Sequence[ServedModel], *, keys: ApiKeys | None = None, settings: ServeSettings | None = None
    ) -> None:
        names = [model.name for model in models]
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, f"two models are named {twice!r}; rename the folder of one, requests choose by the name")
        self.settings = settings or ServeSettings()
        self.limits, self.keys = self.settings.limits, keys or ApiKeys()
        self.models = {model.name: model for model in models}
        self.metrics = Metrics()
        self.pools = WorkerPools()
        self.admission = AdmissionLimiter(self.settings, self.metrics, num_keys=lambda: len(self.keys))
        self._closed = False
        for name, meaning, count in (
            ("arpg_rows_waiting", "Images not in a batch yet", lambda loaded: loaded.batcher.num_waiting),
            ("arpg_rows_running", "Images being decoded", lambda loaded: loaded.batcher.num_running),
            ("arpg_model_weight_bytes", "Memory of the weights of a model", lambda loaded: loaded.weight_bytes),
        ):
            for model in models:
                value = partial(_of_loaded, model, count)
                self.metrics.gauge(name, meaning, value, model=model.name)

    @classmethod
    def from_pretrained(cls, *models: str, keys: ApiKeys, settings: ServeSettings) -> ImageService:
        """Serve models by their names. Devices and folders are checked here; `open` loads the weights."""
        return cls([ServedModel.from_pretrained(model, settings) for model in models], keys=keys, settings=settings)

    def open(self) -> None:
        """Load the models, one after the other, and start their threads; this takes a while."""
        for model in self.models.values():
            model.open(self.settings, self.metrics)
        log.info("ready", extra={"models": list(self.models), "peak_rss_bytes": peak_rss_bytes()})

    def close(self) -> None:
        """Stop the threads; jobs that are not finished end with an error."""
        self._closed = True
        for model in self.models.values():
            model.close()
        self.pools.close()

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return next(iter(self.models.values()))

    @property
    def loaded(self) -> LoadedModel:
        """The parts of the default model; raises a 503 before they exist."""
        return self.default.loaded

    @property
    def alive(self) -> bool:
        """Whether all models are loaded and their threads run."""
        return not self._closed and not self.broken and all(model.is_loaded for model in self.models.values())

    @property
    def broken(self) -> bool:
        """Whether a thread of a model has died: the process has to be started again."""
        return any(model.broken for model in self.models.values())

    @property
    def ready(self) -> bool:
        """Whether the service accepts work."""
        return self.alive and not self.admission.draining

    def find(self, name: str | None) -> ServedModel:
        """Return a model by its name, None: the default; raise a 404 that lists the names for an unknown one."""
        if name is None:
            return self.default
        if name not in self.models:
            known = ", ".join(repr(each) for each in self.models)
            message = f"model {shorten(name)} is not served here; expected {known}"
            raise ApiError(404, message, param="model", code="model_not_found", nearest=list(self.models))
        return self.models[name]

    def find_for(self, name: str | None, prompt: str) -> ServedModel:
        """Return the model of a prompt of the OpenAI API: as `find`, but where the call names no model, a prompt that
        is no class of the default model goes to the first model that takes prompts, if there is one.
        """
        model = self.find(name)
        if name is not None or model.takes_text or model.names_class(prompt):
            return model
        return next((each for each in self.models.values() if each.takes_text), model)

    def info(self, name: str | None) -> dict[str, Any]:
        """Return the body of `/v1/arpg/info` for a model."""
        info, default = self.find(name).info(self.settings), self.default
        return {**info, "models": [model.entry(default=model is default) for model in self.models.values()]}

    def start(
        self, call: Request, model: ServedModel, build: Callable[[TaskBuilder], BuiltTask], *, previews: bool
    ) -> Job:
        """Start a job of a model for an HTTP call; `build` is called in a worker thread."""
        loaded = model.loaded
        job = Job(id=call.state.id, key=call.state.key, deadline=self.settings.deadline, previews=previews)

        def prepare() -> None:
            run = _TaskRun(self, loaded, job, *build(loaded.builder))
            job.on_end(self.admission.reserve(job.key, run.cost, large=run.large))
            job.send(Accepted())
            self.submit(run.pool, job, run.submit_next)

        self.submit(self.pools.prepare, job, prepare)
        return job

    def start_extraction(self, call: Request, model: ServedModel, params: ExtractCondition) -> Job:
        """Start a job that extracts a condition image, in worker threads of its own; its kind is in the settings."""
        builder = model.loaded.builder
        job = Job(id=call.state.id, key=call.state.key, deadline=self.settings.deadline, previews=False)

        def extract() -> None:
            image, kind = builder.extract_condition(params)
            job.end(Result([to_png(image)], [image], [], {"kind": kind}, job.seconds))

        self.submit(self.pools.extract, job, extract)
        return job

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
            except BaseException as error:  # whatever it is: nobody may wait for the job any more
                self.fail(job, error)

        try:
            pool.submit(guarded)
        except RuntimeError:  # the pool is closed
            job.end(internal_error())

    def fail(self, job: Job, error: BaseException) -> None:
        """End a job with a 500; the log has the details."""
        log.error("generation failed", exc_info=error, extra={"id": job.id})
        job.end(internal_error())


def _of_loaded(model: ServedModel, value: Callable[[LoadedModel], float]) -> float:
    """Return a number of a model; 0 while it is not loaded."""
    return float(value(model.loaded)) if model.is_loaded else 0.0


class _TaskRun:
    """Runs the task of one job: submits its requests to the batcher, makes previews of its steps, and its result."""

    def __init__(
        self, service: ImageService, loaded: LoadedModel, job: Job, task: ImageTask, about: dict[str, Any]
    ) -> None:
        self.service, self.loaded, self.job, self.task, self.about = service, loaded, job, task, about
        self.cost = task_cost(task, loaded.pipeline)
        tokens = max(stage.grid[0] * stage.grid[1] for stage in task.stages)
        self.large = tokens > own_tokens(loaded.pipeline)
        self.pool = service.pools.large if self.large else service.pools.finish
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
        if self.task.starts_grid:
            self.decoded_at_Bhw = torch.where(self.task.known_grid, -2, -1)
        self.earlier_steps = max(0, int(self.decoded_at_Bhw.max()) + 1)  # of the windows before
        job = self.job
        pending = PendingRows(job, request, plan, settings, lambda: job.should_stop, self.on_end, tenant=job.key)
        if job.previews:
            pending.on_step = self.on_step
        self.loaded.batcher.submit(pending)

    def on_step(self, pending: PendingRows) -> None:
        """In the batching thread: copy the tokens; a worker makes the preview."""
        step_B = torch.tensor(pending.steps_B)
        decoded_at = self.decoded_at_Bhw.clone()  # workers read the one before
        window = decoded_at[:, *self.task.window]
        fresh = pending.known_BN.cpu().reshape(window.shape) & (window == -1)
        window.copy_(torch.where(fresh, (self.earlier_steps + step_B - 1)[:, None, None], window))
        self.decoded_at_Bhw = decoded_at
        ids, known = pending.ids_BN.clone(), pending.known_BN.clone()
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

        self.service.submit(self.pool, self.job, run)

    def accept(self, step: Step) -> None:
        self.task.accept(step)
        self.submit_next()

    def preview(self, step: int, steps: int, ids_BN: Tensor, known_BN: Tensor, decoded_at_Bhw: Tensor) -> None:
        start = time.monotonic()
        task, best_of = self.task, self.task.spec.best_of
        images = task.preview(Step(step - 1, steps + 1, ids_BN, known_BN))
        preview = Preview(
            step=step,
            steps=steps,
            window=task.index,
            windows=len(task),
            grid=(decoded_at_Bhw.shape[1], decoded_at_Bhw.shape[2]),
            pngs=[to_png(image) for image in images[::best_of]],
            decoded_at=decoded_at_Bhw[::best_of].flatten(1).tolist(),
        )
        self.preview_seconds = time.monotonic() - start
        self.job.send(preview)

    def finish(self) -> None:
        images, seeds = self.task.images(), self.task.seeds
        settings = {**dataclasses.asdict(self.task.spec.settings), **self.about}
        pngs = [to_png(image, {**settings, "seed": seed}) for image, seed in zip(images, seeds, strict=True)]
        seconds = self.job.seconds
        self.service.metrics.images.inc(len(images))
        self.service.admission.record(self.cost, seconds)
        self.job.end(Result(pngs, images, seeds, settings, seconds))
