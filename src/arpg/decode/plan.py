"""Plans: which positions each step of each sample fills, and its guidance scale. Made without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from arpg.decode.order import make_order, order_words, resolve_order
from arpg.decode.schedule import guidance_scales, step_sizes
from arpg.errors import require
from arpg.settings import SamplingSettings


@dataclass(frozen=True)
class SamplePlan:
    """The plan of one sample: `order` (positions to fill), split into steps of `sizes`, with a guidance scale each."""

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        require(
            sum(self.sizes) == len(self.order) and len(self.sizes) == len(self.scales) and 0 not in self.sizes,
            f"steps of {self.sizes} tokens with {len(self.scales)} guidance scales do not fit "
            f"{len(self.order)} positions to fill",
        )
        require(len(set(self.order)) == len(self.order), "the order visits a position twice")


@dataclass(frozen=True)
class Plan:
    """The plans of a batch; the samples need not have the same number of tokens or steps."""

    samples: tuple[SamplePlan, ...]

    @property
    def num_steps(self) -> int:
        """Steps of the sample that has the most."""
        return max(len(sample.sizes) for sample in self.samples)

    @property
    def guided(self) -> bool:
        """Whether any step needs the unconditional logits; if not, the batch is not doubled."""
        return any(scale != 1.0 for sample in self.samples for scale in sample.scales)


def make_plan(grid: tuple[int, int], known_BN: Tensor, seeds: Sequence[int], settings: SamplingSettings) -> Plan:
    """Plan every sample with the same settings, each with its own mask and its own order from its seed."""
    samples, order = [], resolve_order(settings.order, grid)
    for known_N, words_N in zip(known_BN.numpy(), order_words(grid, seeds), strict=True):
        fill = np.flatnonzero(~known_N)
        sizes, scales = _steps(len(fill), settings)
        positions = make_order(order, grid, fill, sizes=sizes, words=words_N)
        samples.append(SamplePlan(tuple(positions.tolist()), sizes, scales))
    return Plan(tuple(samples))


def plan_sample(grid: tuple[int, int], known_N: Sequence[bool], seed: int, settings: SamplingSettings) -> SamplePlan:
    """Return the plan of one sample."""
    return make_plan(grid, torch.tensor([list(known_N)], dtype=torch.bool), [seed], settings).samples[0]


@lru_cache(maxsize=256)
def _steps(num_tokens: int, settings: SamplingSettings) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The sizes of the steps, and their guidance scales."""
    one_by_one = settings.decode != "steps"
    sizes = (1,) * num_tokens if one_by_one else step_sizes(settings.schedule, num_tokens, settings.steps)
    return sizes, guidance_scales(settings.guidance_schedule, settings.guidance, sizes)
