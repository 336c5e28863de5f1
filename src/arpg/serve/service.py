"""ImageService: what the routes of a server share: its models, settings, keys, admission and metrics."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request

from arpg.device import choose_device
from arpg.errors import require
from arpg.serve.admission import AdmissionLimiter
from arpg.serve.api_error import ApiError, shorten
from arpg.serve.auth import ApiKeys
from arpg.serve.build_task import BuiltTask, FilteredImage, TaskBuilder
from arpg.serve.job import Encode, ImageFiles, JobSpec, JobStream, PreviewOptions
from arpg.serve.model_worker import ModelWorker
from arpg.serve.observability import HttpMetrics, tracer_from_environment
from arpg.serve.responses import base64_png
from arpg.serve.served_model import ModelFacts, ServedModel, loading_error
from arpg.serve.server_config import ServeSettings
from arpg.serve.upscaler import find_weights
from arpg.serve.worker_process import WorkerProcess


class ImageService:
    """The models of a server, the first of which is the default. Until `open` has loaded them, calls get a 503.

    Image files are encoded in as many threads as there are cores, four at least: compression does not hold the
    interpreter lock.
    """

    def __init__(
        self, models: Sequence[ServedModel], *, keys: ApiKeys | None = None, settings: ServeSettings | None = None
    ) -> None:
        self.names = [model.name for model in models]
        twice = next((name for name in self.names if self.names.count(name) > 1), None)
        require(twice is None, f"two models are named {twice!r}; rename the folder of one, requests choose by the name")
        self.settings = settings or ServeSettings()
        self.keys = keys or ApiKeys()
        make = WorkerProcess if self.settings.worker_process else ModelWorker
        self.worker: ModelWorker | WorkerProcess = make(models, self.settings)
        self.metrics = HttpMetrics(self.worker)
        self.tracer = tracer_from_environment()
        self.admission = AdmissionLimiter(self.settings, self.keys, self.metrics)
        self.encoders = ThreadPoolExecutor(max(4, os.cpu_count() or 1), thread_name_prefix="arpg-encode")
        self.stopping = False  # not ready any more, although requests are still accepted
        self._closed = False

    @classmethod
    def from_pretrained(cls, *models: str, keys: ApiKeys, settings: ServeSettings) -> ImageService:
        """Serve models by their names. Devices and folders are checked here; `open` loads the weights."""
        served = [ServedModel.from_pretrained(model, settings) for model in models]
        for text in settings.lora:
            used = any(text in model.lora for model in served)
            require(used, f"adapter {text} was trained for none of {', '.join(models)}; add its base with --model")
        if settings.worker_process is None:
            on_gpu = choose_device(settings.device).type == "cuda"
            settings = dataclasses.replace(settings, worker_process=on_gpu)
        return cls(served, keys=keys, settings=settings)

    def open(self) -> None:
        """Load the models; this takes a while."""
        self.worker.open()

    def close(self) -> None:
        """Stop the threads; jobs that are not finished end with an error."""
        self._closed = True
        self.worker.close()
        self.encoders.shutdown()

    @property
    def alive(self) -> bool:
        """Whether all models are loaded and their threads run."""
        return not self._closed and not self.broken and len(self.worker.facts) == len(self.names)

    @property
    def broken(self) -> bool:
        """Whether a thread of a model, or its process, has died: the server has to be started again."""
        return self.worker.broken

    @property
    def ready(self) -> bool:
        """Whether the service accepts work, and will for a while."""
        return self.alive and not self.stopping and not self.admission.draining

    def check_name(self, name: str | None) -> str:
        """Return the name of a model, None: of the default; raise a 404 that lists the names for an unknown one."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(map(repr, self.names))
            message = f"model {shorten(name)} is not served here; expected {known}"
            raise ApiError(404, message, param="model", code="model_not_found", nearest=self.names)
        return name

    def find(self, name: str | None) -> ModelFacts:
        """Return a model by its name, None: the default; raise a 404 for an unknown one, a 503 before it is loaded."""
        facts = self.worker.facts.get(self.check_name(name))
        if facts is None:
            raise loading_error()
        return facts

    def find_for(self, name: str | None, prompt: str | None) -> ModelFacts:
        """Return the model of a prompt of the OpenAI API: as `find`, but where the call names no model, a prompt that
        is no class of the default model goes to the first model that takes prompts, if there is one.
        """
        model = self.find(name)
        if name is not None or prompt is None or model.takes_text or model.names_class(prompt):
            return model
        return next((each for each in map(self.find, self.names) if each.takes_text), model)

    def info(self, name: str | None) -> dict[str, Any]:
        """Return the body of `/v1/arpg/info` for a model."""
        models = [self.find(each).entry(default=each == self.names[0]) for each in self.names]
        info = self.find(name).info(self.settings.limits)
        return {**info, "models": models, "upscales": find_weights() is not None}

    def start(
        self,
        call: Request,
        model: ModelFacts,
        build: Callable[[TaskBuilder], BuiltTask],
        *,
        reads_files: bool,
        stream: bool,
        previews: PreviewOptions | None,
        encode: Encode = base64_png,
    ) -> JobStream:
        """Start a job of a model for an HTTP call; see `JobSpec`. `encode` makes the files of its images."""
        about = {"reads_files": reads_files, "stream": stream, "previews": previews}
        return self._start(call, model, encode, build=build, **about)

    def start_filter(self, call: Request, model: ModelFacts, make: Callable[[TaskBuilder], FilteredImage]) -> JobStream:
        """Start a job that makes one image from another without sampling, in worker threads of its own."""
        return self._start(call, model, lambda image, _: base64_png(image), filter=make)

    def _start(self, call: Request, model: ModelFacts, encode: Encode, **work: Any) -> JobStream:
        state, traced = call.state, self.tracer is not None
        about = {"id": state.id, "tenant": state.tenant, "share": self.admission.share, "traced": traced}
        spec = JobSpec(**about, model=model.name, **work)
        stream = JobStream(
            spec,
            encode=encode,
            pool=self.encoders,
            deadline=self.settings.deadline,
            trace=state.trace,
            on_files=self._record,
        )
        stream.control = self.worker.run(spec, stream.put)
        return stream

    def _record(self, made: ImageFiles) -> None:
        if made.result.cost:
            self.admission.record(made.result.cost, made.seconds)
