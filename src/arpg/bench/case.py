"""Cases: one model with one set of settings each; lists of settings make a grid of cases."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arpg import tasks
from arpg.checkpoint import prepare, read_folder
from arpg.config import MODELS, SAMPLING, TOKENIZERS, ModelConfig, TokenizerConfig
from arpg.decode import Plan, Request, make_plan
from arpg.device import choose_device
from arpg.errors import present, require
from arpg.hub import resolve
from arpg.model import ARPG, TokenDecoder
from arpg.pipeline import Pipeline
from arpg.quantization.precision import to_precision
from arpg.settings import SamplingDefaults, SamplingSettings
from arpg.tokenizer import VQTokenizer


@dataclass(frozen=True)
class Case:
    """What one row of a benchmark measures."""

    model: str  # its name, for the record
    batch: int
    settings: SamplingSettings
    grid: tuple[int, int]

    def __post_init__(self) -> None:
        require(self.batch >= 1, f"batch is {self.batch}; expected 1 or more")
        tokens = self.grid[0] * self.grid[1]
        require(
            self.settings.steps <= tokens,
            f"steps is {self.settings.steps}, but there are only {tokens} tokens; take fewer steps",
        )

    @property
    def tokens(self) -> int:
        """The tokens of one image."""
        return self.grid[0] * self.grid[1]

    def request(self, model: TokenDecoder, first_seed: int) -> tuple[Request, Plan]:
        """Return a batch with seeds from `first_seed` on, one class after the other, and its plan."""
        seeds = range(first_seed, first_seed + self.batch)
        labels = [seed % model.config.num_classes for seed in seeds]
        request = tasks.generate(model, labels, seeds, grid=self.grid)
        return request, make_plan(request.grid, request.known_BN, request.seeds, self.settings)


def make_cases(
    model: str,
    defaults: SamplingDefaults,
    *,
    grids: Sequence[tuple[int, int]],
    batches: Sequence[int],
    settings: Mapping[str, Sequence[Any]],
) -> list[Case]:
    """Return a case for every combination; a setting without values takes the model's own."""
    given = {name: values for name, values in settings.items() if values}
    combinations = [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]
    return [
        Case(model, batch, defaults.settings(**chosen), grid)
        for grid in grids
        for chosen in combinations
        for batch in batches
    ]


def square_grid(tokens: int) -> tuple[int, int]:
    """Return the square grid with `tokens` tokens."""
    side = round(max(tokens, 0) ** 0.5)
    require(side >= 1 and side * side == tokens, f"tokens is {tokens}; expected a square number, like 64 or 256")
    return side, side


def open_pipeline(
    name: str,
    *,
    random: bool,
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "auto",
    kv_cache_dtype: str = "auto",
) -> Pipeline:
    """Open a model with its weights, or with random ones: speed does not depend on them, and nothing is downloaded."""
    if not random:
        return Pipeline.from_pretrained(
            name, device=device, precision=dtype, engine=engine, kv_cache_dtype=kv_cache_dtype
        )
    on = choose_device(device)
    model_config, tokenizer_config, sampling = _configs(name)
    model = ARPG(model_config).init_weights(seed=0)
    torch.nn.init.normal_(model.head.weight, std=0.02, generator=torch.Generator().manual_seed(1))  # otherwise zero
    tokenizer = VQTokenizer(tokenizer_config).eval().to(on)
    model = to_precision(model, dtype, on, kv_cache_dtype=kv_cache_dtype).eval()
    prepare(model, tokenizer, engine=engine)
    return Pipeline(model, tokenizer, sampling=sampling, license="none: random weights", engine=engine)


def _configs(name: str) -> tuple[ModelConfig, TokenizerConfig, SamplingDefaults]:
    if name in MODELS:
        return MODELS[name], TOKENIZERS["vq-16"], SAMPLING[name]
    folder = read_folder(resolve(name))
    model = present(folder.model, f"{name} has no model, only a tokenizer; name a folder with a model")
    tokenizer = present(folder.tokenizer, f"{name} has no tokenizer; `arpg convert tokenizer` adds one")
    return model, tokenizer, folder.sampling or SamplingDefaults()
