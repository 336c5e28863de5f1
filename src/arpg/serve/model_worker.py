"""ModelWorker: the models of a server, the threads that work on its jobs, and the limit of their work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np
import torch
from prometheus_client import Metric
from prometheus_client.registry import Collector

from arpg.device import peak_bytes
from arpg.errors import InputError, present
from arpg.serve.admission import CostLimiter
from arpg.serve.api_error import ApiError, bad_request, internal_error
from arpg.serve.build_task import BuiltTask, FilteredImage, TaskBuilder
from arpg.serve.job import Accepted, Event, Job, JobSpec, Result
from arpg.serve.observability import WorkerMetrics
from arpg.serve.served_model import LoadedModel, ModelFacts, ServedModel
from arpg.serve.server_config import ServeSettings
from arpg.serve.task_run import TaskRun
from arpg.serve.workers import WorkerPools

log = logging.getLogger(__name__)


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
