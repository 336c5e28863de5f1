"""ImageService: the served models with what they share: worker threads, limits, keys, admission and metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import torch
from PIL import Image
from starlette.requests import Request

from arpg.device import peak_bytes
from arpg.errors import InputError, require
from arpg.serve.admission import AdmissionLimiter
from arpg.serve.api_error import ApiError, bad_request, internal_error, shorten
from arpg.serve.auth import ApiKeys
from arpg.serve.build_task import BuiltTask, TaskBuilder
from arpg.serve.observability import Metrics, tracer_from_environment
from arpg.serve.responses import Accepted, Encode, Job, PreviewOptions, Result, base64_png
from arpg.serve.served_model import LoadedModel, ServedModel
from arpg.serve.server_config import ServeSettings
from arpg.serve.task_run import TaskRun
from arpg.serve.upscaler import find_weights
from arpg.serve.workers import WorkerPools

log = logging.getLogger(__name__)


class ImageService:
    """The models of a server, the first of which is the default. Until `open` has loaded them, calls get a 503."""

    def __init__(
        self, models: Sequence[ServedModel], *, keys: ApiKeys | None = None, settings: ServeSettings | None = None
    ) -> None:
        names = [model.name for model in models]
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, f"two models are named {twice!r}; rename the folder of one, requests choose by the name")
        self.settings = settings or ServeSettings()
        self.keys = keys or ApiKeys()
        self.models = {model.name: model for model in models}
        self.metrics = Metrics()
        self.tracer = tracer_from_environment()
        self.pools = WorkerPools()
        self.admission = AdmissionLimiter(self.settings, self.keys, self.metrics)
        self.stopping = False  # not ready any more, although requests are still accepted
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
        served = [ServedModel.from_pretrained(model, settings) for model in models]
        for text in settings.lora:
            used = any(text in model.lora for model in served)
            require(used, f"adapter {text} was trained for none of {', '.join(models)}; add its base with --model")
        return cls(served, keys=keys, settings=settings)

    def open(self) -> None:
        """Load the models, one after the other, and start their threads; this takes a while."""
        for model in self.models.values():
            model.open(self.settings, self.metrics)
        log.info("ready", extra={"models": list(self.models), "peak_rss_bytes": peak_bytes(torch.device("cpu"))})

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
        """Whether the service accepts work, and will for a while."""
        return self.alive and not self.stopping and not self.admission.draining

    def find(self, name: str | None) -> ServedModel:
        """Return a model by its name, None: the default; raise a 404 that lists the names for an unknown one."""
        if name is None:
            return self.default
        if name not in self.models:
            known = ", ".join(repr(each) for each in self.models)
            message = f"model {shorten(name)} is not served here; expected {known}"
            raise ApiError(404, message, param="model", code="model_not_found", nearest=list(self.models))
        return self.models[name]

    def find_for(self, name: str | None, prompt: str | None) -> ServedModel:
        """Return the model of a prompt of the OpenAI API: as `find`, but where the call names no model, a prompt that
        is no class of the default model goes to the first model that takes prompts, if there is one.
        """
        model = self.find(name)
        if name is not None or prompt is None or model.takes_text or model.names_class(prompt):
            return model
        return next((each for each in self.models.values() if each.takes_text), model)

    def info(self, name: str | None) -> dict[str, Any]:
        """Return the body of `/v1/arpg/info` for a model."""
        info, default = self.find(name).info(self.settings), self.default
        models = [model.entry(default=model is default) for model in self.models.values()]
        return {**info, "models": models, "upscales": find_weights() is not None}

    def start(
        self,
        call: Request,
        model: ServedModel,
        build: Callable[[TaskBuilder], BuiltTask],
        *,
        reads_files: bool,
        stream: bool,
        previews: PreviewOptions | None,
        encode: Encode = base64_png,
    ) -> Job:
        """Start a job of a model for an HTTP call; `build` and `encode` are called in worker threads.

        `reads_files`: whether `build` reads images. `previews`: None: no steps.
        """
        loaded = model.loaded
        job = self._new_job(call, stream=stream, previews=previews, encode=encode)

        def prepare() -> None:
            start = time.monotonic()
            run = TaskRun(self, loaded, job, *build(loaded.builder))
            job.trace.add("prepare", start, time.monotonic())
            job.on_end(self.admission.reserve(job.tenant, run.cost, large=run.large))
            job.on_end(lambda: self._count_images(job, len(run.task.spec.labels)))
            job.send(Accepted(loaded.batcher.num_waiting))
            if run.large:
                self.submit(run.pool, job, run.submit_next)
            else:
                run.submit_next()

        self.submit(self.pools.prepare if reads_files or model.takes_text else self.pools.prepare_light, job, prepare)
        return job

    def start_filter(self, call: Request, make: Callable[[], tuple[Image.Image, dict[str, Any]]]) -> Job:
        """Start a job that makes one image from another without sampling, in worker threads of its own.

        `make` returns the image and what the response says of it.
        """
        job = self._new_job(call)

        def run() -> None:
            image, about = make()
            job.end(Result([base64_png(image)], image.size, [], about, job.seconds))

        self.submit(self.pools.extract, job, run)
        return job

    def _new_job(self, call: Request, **options: Any) -> Job:
        state = call.state
        return Job(id=state.id, tenant=state.tenant, trace=state.trace, deadline=self.settings.deadline, **options)

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
