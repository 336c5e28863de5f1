"""ModelWorker: the models of a server and the threads that work on its jobs; TaskRun: one job, from task to images.

Shapes: B candidates, N tokens, h w grid.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from prometheus_client import Metric
from prometheus_client.registry import Collector
from torch import Tensor

from arpg.decode import Step, make_plan
from arpg.device import peak_bytes
from arpg.errors import InputError, present
from arpg.serve.admission import CostLimiter, task_cost
from arpg.serve.api_error import ApiError, bad_request, internal_error
from arpg.serve.batcher import PendingRows
from arpg.serve.build_task import BuiltTask, FilteredImage, TaskBuilder
from arpg.serve.job import Accepted, Event, Job, JobSpec, Result, StepEvent, Usage
from arpg.serve.observability import WorkerMetrics
from arpg.serve.responses import base64_png
from arpg.serve.served_model import LoadedModel, ModelFacts, ServedModel
from arpg.serve.server_config import ServeSettings
from arpg.serve.workers import WorkerPools
from arpg.tasks.task import ImageTask, StepTokens

log = logging.getLogger(__name__)

MAX_UNREAD_EVENTS = 64  # of a slow reader; further steps are left out


class ModelWorker(Collector):
    """The models of a server by name. `run` starts jobs of those that `open` has loaded."""

    def __init__(self, models: Sequence[ServedModel], settings: ServeSettings) -> None:
        self.models = {model.name: model for model in models}
        self.settings = settings
        self.metrics = WorkerMetrics()
        self.pools = WorkerPools()
        self.costs = CostLimiter(settings, self.metrics)
        self._jobs: set[Job] = set()  # that have not ended
        for name, meaning, count in (
            ("arpg_rows_waiting", "Images not in a batch yet", lambda loaded: loaded.batcher.num_waiting),
            ("arpg_rows_running", "Images being decoded", lambda loaded: loaded.batcher.num_running),
            ("arpg_model_weight_bytes", "Memory of the weights of a model", lambda loaded: loaded.facts.weight_bytes),
        ):
            for model in models:
                self.metrics.gauge(name, meaning, partial(_of_loaded, model, count), model=model.name)

    def open(self) -> None:
        """Load the models, one after the other, and start their threads; this takes a while."""
        for model in self.models.values():
            model.open(self.settings, self.metrics, lambda: len(self._jobs))
        log.info("ready", extra={"models": list(self.models), "peak_rss_bytes": peak_bytes(torch.device("cpu"))})

    def close(self) -> None:
        """Stop the threads; jobs that are not finished end with an error."""
        for model in self.models.values():
            model.close()
        self.pools.close()

    @property
    def facts(self) -> dict[str, ModelFacts]:
        """The facts of the models that are loaded."""
        return {name: model.loaded.facts for name, model in self.models.items() if model.is_loaded}

    @property
    def loaded(self) -> LoadedModel:
        """The parts of the first model; raises a 503 before they exist."""
        return next(iter(self.models.values())).loaded

    @property
    def broken(self) -> bool:
        """Whether a thread of a model has died: the process has to be started again."""
        return any(model.broken for model in self.models.values())

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self.metrics.registry.collect()

    def run(self, spec: JobSpec, deliver: Callable[[Event], None]) -> Job:
        """Start a job of a loaded model; its events go to `deliver`, from any thread."""
        loaded = self.models[spec.model].loaded
        job = Job(spec, deadline=self.settings.deadline, deliver=deliver)
        self._jobs.add(job)
        job.on_end(lambda: self._jobs.discard(job))
        if spec.filter is not None:
            self.submit(self.pools.extract, job, partial(self._filter, loaded, job, spec.filter))
        else:
            heavy = spec.reads_files or loaded.facts.takes_text
            self.submit(
                self.pools.prepare if heavy else self.pools.prepare_light,
                job,
                partial(self._prepare, loaded, job, present(spec.build, "a job builds a task or filters an image")),
            )
        return job

    def _prepare(self, loaded: LoadedModel, job: Job, build: Callable[[TaskBuilder], BuiltTask]) -> None:
        """Build the task of a job, admit its work and submit its first request."""
        start = time.monotonic()
        run = TaskRun(self, loaded, job, *build(loaded.builder))
        job.add_span("prepare", start, time.monotonic())
        job.on_end(self.costs.reserve(job.tenant, run.cost, share=job.spec.share, large=run.large))
        job.on_end(lambda: self._count_images(job, len(run.task.spec.labels)))
        job.send(Accepted(loaded.batcher.num_waiting))
        if run.large:
            self.submit(run.pool, job, run.submit_next)
        else:
            run.submit_next()

    def _filter(self, loaded: LoadedModel, job: Job, make: Callable[[TaskBuilder], FilteredImage]) -> None:
        """Make one image from another without sampling."""
        image, about = make(loaded.builder)
        job.end(Result([np.asarray(image)], [], about))

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

    def _count_images(self, job: Job, count: int) -> None:
        self.metrics.images.labels(job.outcome).inc(count)
        if job.outcome == "ok":
            self.metrics.key_images.labels(job.tenant).inc(count)

    def fail(self, job: Job, error: BaseException) -> None:
        """End a job with a 500; the log has the details."""
        log.error("generation failed", exc_info=error, extra={"id": job.id})
        job.end(internal_error())


def _of_loaded(model: ServedModel, value: Callable[[LoadedModel], float]) -> float:
    """Return a number of a model; 0 while it is not loaded."""
    return float(value(model.loaded)) if model.is_loaded else 0.0


@dataclass(frozen=True, eq=False)
class StepState:
    """The state of a request after a step; `due`: its preview has to be made."""

    step: int
    steps: int | None
    window: int
    tokens: StepTokens
    decoded_at_Bhw: Tensor  # of the whole grid
    due: bool


class TaskRun:
    """Submits the requests of a task to the batcher, reports their steps and makes the result.

    Previews are made in worker threads, never in that of the batcher, and no faster than they are read: of the steps
    that were finished meanwhile only the last one gets a preview, and none where the reader has an event to read. The
    result does not wait for them. A job that wants a number of previews gets them all, at evenly spread steps.
    """

    def __init__(
        self, worker: ModelWorker, loaded: LoadedModel, job: Job, task: ImageTask, about: dict[str, Any]
    ) -> None:
        self.worker, self.loaded, self.job, self.task, self.about = worker, loaded, job, task, about
        self.cost = task_cost(task, loaded.pipeline)
        own_tokens = math.prod(loaded.pipeline.model.config.grid)
        self.large = any(math.prod(stage.grid) > own_tokens for stage in task.stages)
        self.pool = worker.pools.large if self.large else worker.pools.finish
        self._states: list[StepState] = []  # to report, in order
        self._decoded: Step | None = None  # the result of the current request, where previews come before it
        self._reporting = False  # whether a worker runs `_report`
        self._lock = threading.Lock()
        self._num_due = self._num_made = 0  # previews

    def submit_next(self) -> None:
        """Submit the next request of the task to the batcher; without one, the images are finished."""
        request = self.task.next_request()
        if request is None:
            self._finish()
            return
        settings = self.task.spec.settings
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        if self.task.starts_grid:
            self._decoded_at_Bhw = torch.where(self.task.known_grid, -2, -1)
        self._earlier_steps = max(0, int(self._decoded_at_Bhw.max()) + 1)  # of the windows before
        job = self.job
        pending = PendingRows(job, request, plan, settings, lambda: job.should_stop, self._on_end, tenant=job.tenant)
        if job.spec.previews is not None:
            pending.on_step = self._on_step
        self.loaded.batcher.submit(pending)

    def _on_step(self, pending: PendingRows) -> None:
        """In the batching thread: copy the tokens; a worker reports the step."""
        step_B = torch.tensor(pending.steps_B)
        decoded_at = self._decoded_at_Bhw.clone()  # workers read the one before
        window = decoded_at[:, *self.task.window]
        fresh = pending.known_BN.cpu().reshape(window.shape) & (window == -1)
        window.copy_(torch.where(fresh, (self._earlier_steps + step_B - 1)[:, None, None], window))
        self._decoded_at_Bhw = decoded_at
        counts = [len(plan.sizes) for plan in pending.plan.samples]
        steps: int | None = max(counts)
        done = sum(pending.steps_B) * max(counts) // max(1, sum(counts))
        share = done / max(1, max(counts))
        if pending.settings.decode != "steps":  # the network decides how many tokens a step decodes
            steps, done = None, max(pending.steps_B)
            before, now = int(pending.request.known_BN.sum()), int(pending.known_BN.sum())
            share = (now - before) / max(1, pending.known_BN.numel() - before)
        due = self._is_due((self.task.index + share) / len(self.task))
        if self.job.num_unread > MAX_UNREAD_EVENTS and not due:
            return
        tokens = self.task.tokens_after(Step(done - 1, None, pending.ids_BN, pending.known_BN))
        state = StepState(done, steps, self.task.index, tokens, decoded_at, due)
        with self._lock:
            self._states.append(state)
        self._start_reporting()

    def _is_due(self, share: float) -> bool:
        """Return whether the next of the wanted number of previews is due, when `share` of the task is decoded."""
        assert self.job.spec.previews is not None
        most = self.job.spec.previews.most
        due = most is not None and share < 1 and self._num_due < most and share * (most + 1) >= self._num_due + 1
        self._num_due += due
        return due

    def _on_end(self, pending: PendingRows, error: BaseException | None) -> None:
        """In the batching thread: the request is decoded, or it failed, or the job was stopped."""
        now = time.monotonic()
        if pending.started is not None:
            self.job.add_span("queue", pending.since, pending.started)
            self.job.add_span("decode", pending.started, now, rows=len(pending.steps_B), steps=max(pending.steps_B))
        if error is not None:
            self.worker.fail(self.job, error)
        elif pending.num_open == 0:
            steps = max(pending.steps_B)
            decoded = Step(steps, steps + 1, pending.ids_BN, pending.known_BN)
            with self._lock:
                waits = any(state.due for state in self._states)
                if waits:
                    self._decoded = decoded
                else:
                    overtaken, self._states = self._states, []
            if waits:
                self._start_reporting()
            else:
                self.worker.submit(self.pool, self.job, lambda: self._accept(decoded, overtaken))
        else:
            self.job.stop()

    def _start_reporting(self) -> None:
        """Let a worker thread report the steps that are waiting, unless one does."""
        with self._lock:
            if self._reporting or not (self._states or self._decoded):
                return
            self._reporting = True
        self.worker.submit(self.pool, self.job, self._report)

    def _report(self) -> None:
        """Send the events of the steps that are waiting, unless the result overtakes them; then take the result."""
        assert self.job.spec.previews is not None
        with self._lock:
            states = list(self._states)
        for state in states:
            read = state is states[-1] and self.job.spec.previews.most is None and self.job.num_unread == 0
            pngs = self._preview(state, self.job.spec.previews.size) if state.due or read else []
            with self._lock:
                if state in self._states:
                    self._states.remove(state)
                    self._send(state, pngs)
        with self._lock:
            self._reporting = False
            decoded = None
            if not self._states:
                decoded, self._decoded = self._decoded, None
        if decoded is not None:
            self._accept(decoded, [])
        else:
            self._start_reporting()

    def _accept(self, decoded: Step, overtaken: list[StepState]) -> None:
        """Take the result of a request, and report the steps that it has overtaken without previews."""
        for state in overtaken:
            self._send(state, [])
        self.task.accept(decoded)
        self.submit_next()

    def _preview(self, state: StepState, size: int | None) -> list[bytes]:
        pngs: list[bytes] = []
        for image in self.task.render(state.tokens, state.tokens.rows[:: self.task.spec.best_of]):
            if size is not None:
                image.thumbnail((size, size))
            pngs.append(base64_png(image))
        return pngs

    def _send(self, state: StepState, pngs: list[bytes]) -> None:
        event = StepEvent(
            step=state.step,
            steps=state.steps,
            window=state.window,
            windows=len(self.task),
            grid=(state.decoded_at_Bhw.shape[1], state.decoded_at_Bhw.shape[2]),
            previews=pngs,
            decoded_at=state.decoded_at_Bhw[:: self.task.spec.best_of].flatten(1).tolist(),
        )
        self.job.send(event)
        if pngs and self._num_made == 0:
            self.worker.metrics.first_preview.observe(self.job.seconds)
        self._num_made += bool(pngs)

    def _finish(self) -> None:
        start = time.monotonic()
        images = self.task.pixels()
        self.job.add_span("pixels", start, time.monotonic(), images=len(images))
        settings = {**dataclasses.asdict(self.task.spec.settings), **self.about}
        self.worker.costs.record(self.cost, self.job.seconds)
        self.job.end(Result(images, self.task.seeds, settings, self.cost, self._usage()))

    def _usage(self) -> Usage:
        """Count the tokens of the task; a class is one."""
        about, prompts = self.about, self.loaded.pipeline.prompts
        if prompts is not None:
            texts = [about[name] for name in ("prompt", "negative") if about.get(name) is not None]
            text_tokens = sum(len(prompts.states(text)) for text in texts)
        else:
            text_tokens = int(about.get("class") is not None)
        known = int(self.task.stages[0].known_hw.sum())
        return Usage(text_tokens, known, math.prod(self.task.stages[-1].grid) * len(self.task.spec.labels))
