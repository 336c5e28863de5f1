"""Plan: which positions each step of each sample fills, and how it is guided. Made without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from arpg.config import SamplingSettings
from arpg.decode.order import make_order
from arpg.decode.schedule import guidance_scales, step_sizes
from arpg.errors import require


@dataclass(frozen=True)
class SamplePlan:
    """One sample's way: `order` (positions to fill), cut into steps of `sizes`, guided by `scales`."""

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
        return max(len(sample.sizes) for sample in self.samples)

    @property
    def guided(self) -> bool:
        """Whether any step needs the unconditional logits; if not, the batch is not doubled."""
        return any(scale != 1.0 for sample in self.samples for scale in sample.scales)


def plan_sample(grid: tuple[int, int], known_N: Sequence[bool], seed: int, settings: SamplingSettings) -> SamplePlan:
    fill = np.flatnonzero(~np.asarray(known_N, dtype=bool))
    one_by_one = settings.decode != "steps"
    sizes = (1,) * len(fill) if one_by_one else step_sizes(settings.schedule, len(fill), settings.steps)
    order = make_order(settings.order, grid, fill, sizes=sizes, seed=seed)
    scales = guidance_scales(settings.guidance_schedule, settings.guidance, sizes)
    return SamplePlan(tuple(order.tolist()), sizes, scales)


def make_plan(grid: tuple[int, int], known_BN: Tensor, seeds: Sequence[int], settings: SamplingSettings) -> Plan:
    """The same settings for every sample, each with its own mask and its own order from its seed."""
    rows = known_BN.tolist()
    return Plan(tuple(plan_sample(grid, row, seed, settings) for row, seed in zip(rows, seeds, strict=True)))
