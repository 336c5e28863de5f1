"""ServedModel: one model of a server by its name, what exists of it once it is loaded, and what responses say of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arpg.checkpoint import MODEL, FolderConfig, installed_folder, installed_models, read_folder
from arpg.classes import ClassNames
from arpg.config import DEFAULT_MODEL, ModelConfig, TokenizerConfig
from arpg.decode.engine import choose_mode
from arpg.errors import InputError, present
from arpg.files import hash_file
from arpg.hub import resolve
from arpg.lora import parse_lora, read_adapter
from arpg.pipeline import Pipeline, choose_device, load_with_adapters
from arpg.serve.api_error import ApiError
from arpg.serve.batcher import Batcher, BatcherLanes, choose_max_batch, choose_max_wait, choose_pause, warm_up
from arpg.serve.build_task import TaskBuilder
from arpg.serve.observability import WorkerMetrics
from arpg.serve.schemas import model_info
from arpg.serve.server_config import Limits, ServeSettings
from arpg.serve.workers import MAX_PIXEL_BATCH, TokenizerLanes, WorkerThread
from arpg.settings import SamplingDefaults
from arpg.storage import AnyPath, fetch
from arpg.text_encoder import PromptCache, PromptEncoder, missing_encoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What responses say of a loaded model. It can be pickled: its weights may be in another process."""

    name: str
    config: ModelConfig
    tokenizer: TokenizerConfig
    sampling: SamplingDefaults
    classes: ClassNames
    weight_bytes: int  # of memory
    about: str = ""
    examples: tuple[str, ...] = ()
    thumbnails: Path | None = None  # one small image of each class

    @property
    def takes_text(self) -> bool:
        """Whether the model takes prompts instead of classes."""
        return self.config.text is not None

    def names_class(self, prompt: str) -> bool:
        """Return whether a prompt is the name or the id of a class of the model."""
        if prompt not in self.classes and not prompt.strip().isdecimal():
            return False  # at once: for an unknown name, `find` would search for similar ones
        try:
            self.classes.find(prompt)
        except InputError:
            return False
        return True

    def info(self, limits: Limits) -> dict[str, Any]:
        """Return what `/v1/arpg/info` says of this model."""
        parts = (self.name, self.config, self.tokenizer, self.sampling, limits)
        return model_info(*parts, about=self.about, examples=self.examples)

    def entry(self, *, default: bool) -> dict[str, Any]:
        """Return the line of this model in the list of all models."""
        return {
            "name": self.name,
            "takes": "prompts" if self.takes_text else "classes",
            "control": self.config.control is not None,
            "default": default,
            "weight_bytes": self.weight_bytes,
        }


@dataclass(frozen=True)
class LoadedModel:
    """The parts of a served model that exist once it is loaded."""

    pipeline: Pipeline
    codec: TokenizerLanes
    batcher: BatcherLanes
    builder: TaskBuilder
    facts: ModelFacts

    @property
    def threads(self) -> list[WorkerThread]:
        """The threads in the order in which they are closed: those that decode use the tokenizer's."""
        lanes = self.codec
        return [self.batcher.small, self.batcher.large, lanes.small, lanes.large, lanes.preview]


class ServedModel:
    """A model by its name. `open` calls `load`, which returns the pipeline, and starts the threads that decode it.

    Each model has its own threads: one that decodes images of up to the model's size and one for larger ones, and the
    same for their pixels. Work of another model, or on a larger image, takes its share of the device and nothing more.
    """

    def __init__(
        self, name: str, load: Callable[[], Pipeline], *, folder: AnyPath | None = None, lora: Sequence[str] = ()
    ) -> None:
        """`lora`: the adapters that `load` merges into the weights."""
        self.name, self.folder, self.lora = name, folder, tuple(lora)
        self._load = load
        self._state: LoadedModel | None = None
        self._closed = False

    @classmethod
    def from_pretrained(cls, model: str, settings: ServeSettings) -> ServedModel:
        """Serve a model by its name. The device and the folder are checked here; `open` loads the weights."""
        choose_mode(settings.engine, choose_device(settings.device))
        folder = resolve(model)
        lora = [text for text in settings.lora if _is_base(folder, parse_lora(text)[0])]
        options = {name: getattr(settings, name) for name in ("device", "precision", "engine", "kv_cache_dtype")}
        load = partial(load_with_adapters, folder, [parse_lora(text) for text in lora], **options)
        return cls(Path(model).name or model, load, folder=folder, lora=lora)

    def open(self, settings: ServeSettings, metrics: WorkerMetrics, num_jobs: Callable[[], int] = lambda: 0) -> None:
        """Load the model and start its threads; this takes a while. `num_jobs`: how many jobs there are in all."""
        loaded = self._load()
        size, threads = settings.max_batch or choose_max_batch(loaded.model), settings.threads
        max_wait = choose_max_wait(loaded.model) if settings.max_wait_ms is None else settings.max_wait_ms / 1000
        tokens, stride = math.prod(loaded.model.config.grid), loaded.tokenizer.config.stride
        codec = TokenizerLanes(
            loaded.graphed_tokenizer,
            settings.limits,
            max_pixels=tokens * stride**2,
            max_batch=min(size, MAX_PIXEL_BATCH),
            threads=threads,
            share_finished=loaded.dtype != torch.float32,
        )
        pipeline = _serving_pipeline(loaded, codec, metrics)
        make_batcher = partial(
            Batcher,
            pipeline.model,
            max_batch=size,
            max_wait=max_wait,
            threads=threads,
            metrics=metrics,
            engine=settings.engine,
            pause=choose_pause(pipeline.model),
            num_jobs=num_jobs,
        )
        batcher = BatcherLanes(make_batcher, max_tokens=tokens)
        if batcher.captures:
            task = pipeline.generate_task(["an image"] if pipeline.model.text is not None else [0])
            warm_up(batcher, present(task.next_request(), "a new task has a request"), task.spec.settings)
        if loaded.device.type == "cuda":
            codec.warm_up(loaded.model.config.grid)
        described = FolderConfig() if self.folder is None else read_folder(self.folder)
        facts = ModelFacts(
            name=self.name,
            config=loaded.model.config,
            tokenizer=loaded.tokenizer.config,
            sampling=loaded.sampling,
            classes=loaded.classes,
            weight_bytes=_tensor_bytes(loaded.model, loaded.tokenizer),
            about=described.about,
            examples=described.examples,
            thumbnails=None if self.folder is None else find_thumbnails(self.folder),
        )
        builder = TaskBuilder(pipeline, self.name, settings.limits)
        self._state = LoadedModel(pipeline, codec, batcher, builder, facts)
        about = {"model": self.name, "device": str(pipeline.model.device)}
        log.info("loaded", extra={**about, "weight_bytes": facts.weight_bytes, "max_batch": size})

    def close(self) -> None:
        """Stop the threads; requests that are not finished end with an error."""
        self._closed = True
        for thread in self._state.threads if self._state is not None else ():
            thread.close()

    @property
    def broken(self) -> bool:
        """Whether one of its threads has died; it cannot be mended, since the state of the device is unknown."""
        return self.is_loaded and not self._closed and not all(thread.alive for thread in self.loaded.threads)

    @property
    def is_loaded(self) -> bool:
        """Whether `loaded` exists."""
        return self._state is not None

    @property
    def loaded(self) -> LoadedModel:
        """The parts of the loaded model; raises a 503 before they exist."""
        if self._state is None:
            raise loading_error()
        return self._state


def loading_error() -> ApiError:
    """Return the 503 for a model that is not loaded yet."""
    return ApiError(503, "the model is still loading; try again in a moment", code="loading", retry_after=5)


class TimedTextEncoder:
    """A text encoder that records in the metrics how long each call takes."""

    def __init__(self, encoder: PromptEncoder, metrics: WorkerMetrics) -> None:
        self._encoder, self._metrics = encoder, metrics

    def states(self, prompts: Sequence[str]) -> list[Tensor]:
        """Return the states of each prompt."""
        with self._metrics.prompt.time():
            return self._encoder.states(prompts)


def _serving_pipeline(pipeline: Pipeline, codec: TokenizerLanes, metrics: WorkerMetrics) -> Pipeline:
    """Return `pipeline` with the tokenizer in threads of its own and prompts that are cached in memory only.

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
        pipeline.tokenizer,
        sampling=pipeline.sampling,
        classes=pipeline.classes,
        license=pipeline.license,
        prompts=prompts,
        codec=codec,
    )


def _tensor_bytes(*parts: object) -> int:
    """Sum the memory of the tensors of networks, also of those that are no parameters (packed weights)."""
    tensors: dict[int, Tensor] = {}
    for part in parts:
        for module in part.modules() if isinstance(part, nn.Module) else ():
            own = vars(module)
            values = (*own["_parameters"].values(), *own["_buffers"].values(), *own.values())
            tensors |= {id(value): value for value in values if isinstance(value, Tensor)}
    return sum(value.numel() * value.element_size() for value in tensors.values())


def default_models() -> dict[str, str]:
    """Return the installed models by name, the default one first, with the reason why one cannot be served here."""
    found = {}
    for name, model in installed_models().items():
        config = None if model.folder is None else read_folder(model.folder).model
        text = None if config is None else config.text
        found[name] = model.problem or ("" if text is None else missing_encoder(text))
    return {DEFAULT_MODEL: found.pop(DEFAULT_MODEL, ""), **found}


def find_thumbnails(folder: AnyPath) -> Path | None:
    """Find the thumbnails of the classes in a model's folder, or in that of the model it is based on."""
    base = read_folder(folder).base
    folders = [folder, *([] if base is None else [installed_folder(base)])]
    files = (each / "thumbnails.webp" for each in folders)
    return next((fetch(file) for file in files if file.is_file()), None)


def _is_base(folder: AnyPath, adapter: str) -> bool:
    """Return whether a model is the base of an adapter, or may be, where the adapter does not say."""
    expected = read_adapter(adapter).config.base_hash
    return not expected or expected == hash_file(folder / MODEL)
