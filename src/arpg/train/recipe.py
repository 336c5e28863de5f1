"""Recipes: TOML files read into frozen dataclasses. Unknown keys are an error; `--set a.b=value` overrides."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from arpg.config import ModelConfig, TokenizerConfig, from_dict
from arpg.errors import InputError, one_of, require, require_file, require_positive
from arpg.lora import AdapterConfig
from arpg.settings import SamplingDefaults

T = TypeVar("T")
SCHEDULES = ("cosine", "linear", "constant")
PARALLEL = ("none", "ddp", "fsdp", "hsdp")
SHARDED = ("fsdp", "hsdp")


@dataclass(frozen=True)
class OptimRecipe:
    """AdamW and its learning rate: a linear warm-up, then `schedule` down to `min_lr`."""

    lr: float
    schedule: str = "cosine"
    min_lr: float = 1e-5
    warmup: float = 0.25  # share of the run; 1.0 is a ramp over all of it
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.05  # on tensors of two or more dimensions
    clip: float = 1.0  # largest norm of the whole gradient; 0: no clipping
    ema: float = 0.9999  # decay of the moving average of the weights; 0: no average

    def __post_init__(self) -> None:
        one_of("optim.schedule", self.schedule, SCHEDULES)
        require(self.lr > 0, f"optim.lr is {self.lr}; expected more than 0")
        require(0 <= self.warmup <= 1, f"optim.warmup is {self.warmup}; expected a share of the run, 0 to 1")
        require(0 <= self.ema < 1, f"optim.ema is {self.ema}; expected 0 <= ema < 1")


@dataclass(frozen=True)
class RunRecipe:
    """Length, batch, precision, parallelism and intervals of a run."""

    steps: int
    batch_size: int  # over all processes and accumulation steps
    accumulate: int = 1
    precision: str = "auto"  # bf16 where the device multiplies it in hardware, else float32
    compile: bool = True
    graph: bool = True  # on one GPU, without accumulation: a model's gradients are replayed from a CUDA graph
    parallel: str = "none"
    log_every: int = 50
    validate_every: int = 1000
    sample_every: int = 1000
    save_every: int = 1000
    keep: int = 2
    max_minutes: float = 0.0  # the run is stopped after this time, saved and exported; 0: no limit
    progress_s: float = 10.0  # seconds without a line after which one says how far the run is
    patience: int = 0  # validations without a lower loss before the run ends; it exports the best. 0: runs to the end

    def __post_init__(self) -> None:
        one_of("run.precision", self.precision, ("auto", "bf16", "float32"))
        one_of("run.parallel", self.parallel, PARALLEL)
        counts = ("steps", "batch_size", "accumulate", "log_every", "validate_every", "sample_every", "save_every")
        require_positive(self, *counts, prefix="run.")
        require(self.patience >= 0, f"run.patience is {self.patience}; expected 0 or more validations")
        require(self.max_minutes >= 0, f"run.max_minutes is {self.max_minutes}; expected 0 (no limit) or more")
        require(self.keep >= 1, f"run.keep is {self.keep}; expected 1 or more snapshots")
        require(
            self.batch_size % self.accumulate == 0,
            f"run.batch_size {self.batch_size} cannot be cut into run.accumulate {self.accumulate} equal parts",
        )


@dataclass(frozen=True)
class TokenData:
    """Token folders, as `arpg tokenize` writes them. Several are joined; one that is named twice is used twice.

    More than `shuffle` images are shuffled in windows of so many (see `TokenBatches`). With `orders`, an npy file of
    raster positions `[images, views, N]`, a share `orders_share` of the samples is trained in the order of its image
    and view; the others, and validation, have random orders.
    """

    train: str | tuple[str, ...]
    validation: str | tuple[str, ...] | None = None
    shuffle: int = 1 << 21
    orders: str | None = None
    orders_share: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.orders_share <= 1, f"data.orders_share is {self.orders_share}; expected 0 < orders_share <= 1")


@dataclass(frozen=True)
class ModelRecipe:
    """`arpg train`: a model of classes, or (with `model.text`) of captions; `model.control`: with condition images."""

    model: ModelConfig
    data: TokenData
    optim: OptimRecipe
    run: RunRecipe
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    tokenizer: str | None = None  # a model folder: for the sample sheets, and copied into the result
    init_from: str | None = None  # a model to start from; the weights that fit are copied
    lora: AdapterConfig | None = None  # train an adapter of `init_from` alone
    guidance_scales: tuple[float, float] | None = None  # match `init_from`, guided with scales from this range
    label_drop: float = 0.1  # share of samples whose class or caption is dropped, and the condition image with it
    control_drop: float = 0.0  # of the others, the share whose condition image alone is dropped
    seed: int = 0
    license: str = "unknown"

    def __post_init__(self) -> None:
        require(
            self.lora is None or (self.init_from is not None and self.run.parallel not in SHARDED),
            "lora is set; expected init_from, the model that it adapts, and run.parallel none or ddp",
        )
        require(
            self.run.patience == 0 or self.data.validation is not None,
            f"run.patience is {self.run.patience} and data.validation is not set; expected both, or neither",
        )
        require(
            (self.guidance_scales is not None) == self.model.guidance_input,
            f"guidance_scales are {self.guidance_scales} and model.guidance_input is {self.model.guidance_input}; "
            "expected both, to distill guidance, or neither",
        )
        if self.guidance_scales is not None:
            low, high = self.guidance_scales
            require(0 <= low < high, f"guidance_scales are {low}, {high}; expected 0 <= low < high, such as 1, 10")
            require(
                self.init_from is not None and self.lora is None,
                "guidance_scales are set; expected init_from, the model whose guidance is distilled, and no lora",
            )
        require(0 <= self.label_drop < 1, f"label_drop is {self.label_drop}; expected 0 <= label_drop < 1")
        require(
            self.control_drop == 0 or (0 < self.control_drop < 1 and self.model.control is not None),
            f"control_drop is {self.control_drop}; expected 0 <= control_drop < 1, and 0 without [model.control]",
        )


@dataclass(frozen=True)
class ImageSource:
    """An image folder, a zip or a path into one, and its weight in the mix of sources."""

    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class PixelData:
    """Image sources of a tokenizer, and how crops are taken from them."""

    size: int
    sources: tuple[ImageSource, ...]
    validation: tuple[ImageSource, ...] = ()
    validation_images: int = 512  # of each validation source
    margin: float = 1.1  # crops come from a square this much larger
    scale: tuple[float, float] = (1.0, 1.0)  # range of the random zoom


@dataclass(frozen=True)
class TokenizerLoss:
    """Weights of the loss terms. The adversarial term starts after a share of the run.

    `adaptive`: the adversarial weight is multiplied by the ratio of the norms of the gradients that the reconstruction
    and the adversarial term have at the pixels, so that neither outweighs the other.
    """

    lpips_weights: str
    mse: float = 1.0
    lpips: float = 1.0
    commitment: float = 0.25
    adversarial: float = 0.5
    adversarial_start: float = 0.5
    adaptive: bool = False
    discriminator_lr: float = 1e-4
    restart_every: int = 0  # steps between replacing codes that were not used meanwhile; 0: never


@dataclass(frozen=True)
class TokenizerRecipe:
    """`arpg train-tokenizer`: a VQ tokenizer, or its decoder alone, which leaves all tokens as they are."""

    tokenizer: TokenizerConfig
    data: PixelData
    loss: TokenizerLoss
    optim: OptimRecipe
    run: RunRecipe
    init_from: str | None = None
    decoder_only: bool = False
    seed: int = 0
    license: str = "unknown"

    def __post_init__(self) -> None:
        if self.decoder_only:
            require(self.init_from is not None, "decoder_only trains the decoder of a tokenizer; name it in init_from")
            require(
                self.loss.restart_every == 0,
                f"loss.restart_every is {self.loss.restart_every}; decoder_only keeps all codes, so it must be 0",
            )


def read_recipe(path: Path, cls: type[T], overrides: Sequence[str] = ()) -> T:
    """Read a recipe, with `a.b=value` overrides (values as in TOML; bare words are strings)."""
    require_file(path, "a recipe (a TOML file, see recipes/)")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None
    return make_recipe(data, cls, overrides, where=str(path))


def make_recipe(data: dict[str, Any], cls: type[T], overrides: Sequence[str], *, where: str) -> T:
    """Build a recipe from nested values and `a.b=value` overrides; "none" unsets a value that is optional."""
    data = copy.deepcopy(data)
    for override in overrides:
        _override(data, override)
    return from_dict(cls, data, where=where)


def _override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    require(bool(key.strip()) and equals == "=", f"--set {override!r} is no key=value, like optim.lr=3e-4")
    *parents, last = key.strip().split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        require(isinstance(data, dict), f"--set {override!r}: {parent} is a value, not a section")
    try:
        data[last] = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        data[last] = text.strip()
