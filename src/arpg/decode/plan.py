"""Plans: which positions each step of each sample fills, and its guidance scale. Made without a model.

Shapes: B batch, N grid tokens, K steps, T positions of all samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.decode.order import Positions, fill_orders, resolve_order
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


class Plan:
    """The plans of a batch as arrays; the samples need not have the same number of tokens or steps."""

    order_T: Positions  # of all samples, one after the other
    count_BK: NDArray[np.int64]  # tokens of each step; 0 behind the last step of a sample
    scale_BK: NDArray[np.float64]  # guidance of each step; 1 behind the last

    def __init__(self, samples: Sequence[SamplePlan]) -> None:
        self.samples = tuple(samples)
        self.order_T = np.array([position for sample in samples for position in sample.order], dtype=np.int64)
        self.count_BK = _pad([sample.sizes for sample in samples], 0)
        self.scale_BK = _pad([sample.scales for sample in samples], 1.0)

    @classmethod
    def from_arrays(cls, order_T: Positions, count_BK: NDArray[np.int64], scale_BK: NDArray[np.float64]) -> Plan:
        """Return the plan of arrays that are right; no `SamplePlan` is made before somebody asks for it."""
        plan = cls.__new__(cls)
        plan.order_T, plan.count_BK, plan.scale_BK = order_T, count_BK, scale_BK
        return plan

    @cached_property
    def samples(self) -> tuple[SamplePlan, ...]:
        """The plan of each sample."""
        steps_B = np.count_nonzero(self.count_BK, axis=1)
        rows = zip(self._orders(), self.count_BK, self.scale_BK, steps_B, strict=True)
        return tuple(
            SamplePlan(tuple(order.tolist()), tuple(count_K[:k].tolist()), tuple(scale_K[:k].tolist()))
            for order, count_K, scale_K, k in rows
        )

    @property
    def num_steps(self) -> int:
        """Steps of the sample that has the most."""
        return int(self.count_BK.shape[1])

    @property
    def guided(self) -> bool:
        """Whether any step needs the unconditional logits; if not, the batch is not doubled."""
        return bool((self.scale_BK != 1.0).any())

    def rows(self, rows: Sequence[int]) -> Plan:
        """Return the plans of some of the samples, also repeated."""
        orders, index = self._orders(), list(rows)
        num_steps = np.count_nonzero(self.count_BK[index].any(axis=0))
        arrays = (self.count_BK[index, :num_steps], self.scale_BK[index, :num_steps])
        return Plan.from_arrays(np.concatenate([orders[row] for row in index]), *arrays)

    def _orders(self) -> list[Positions]:
        return np.split(self.order_T, self.count_BK.sum(axis=1).cumsum()[:-1])


def make_plan(grid: tuple[int, int], known_BN: Tensor, seeds: Sequence[int], settings: SamplingSettings) -> Plan:
    """Plan every sample with the same settings, each with its own mask and its own order from its seed."""
    open_BN, order = ~known_BN.numpy(), resolve_order(settings.order, grid)
    num_tokens, row_B = np.unique(open_BN.sum(axis=1), return_inverse=True)
    steps = [_steps(num, settings) for num in num_tokens.tolist()]
    order_T = fill_orders(order, grid, open_BN, seeds, sizes=[steps[row][0] for row in row_B])
    sizes, scales = zip(*steps, strict=True)
    return Plan.from_arrays(order_T, _pad(sizes, 0)[row_B], _pad(scales, 1.0)[row_B])


def plan_sample(grid: tuple[int, int], known_N: Sequence[bool], seed: int, settings: SamplingSettings) -> SamplePlan:
    """Return the plan of one sample."""
    return make_plan(grid, torch.tensor([list(known_N)], dtype=torch.bool), [seed], settings).samples[0]


@lru_cache(maxsize=256)
def _steps(num_tokens: int, settings: SamplingSettings) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The sizes of the steps, and their guidance scales."""
    one_by_one = settings.decode != "steps"
    sizes = (1,) * num_tokens if one_by_one else step_sizes(settings.schedule, num_tokens, settings.steps)
    return sizes, guidance_scales(settings.guidance_schedule, settings.guidance, sizes)


def step_sizes(schedule: str | tuple[int, ...], num_tokens: int, steps: int) -> tuple[int, ...]:
    """Tokens per step: all at least 1, and together `num_tokens`. More steps than tokens are clamped.

    `arccos` and `cosine` are the paper's: the share still masked after step s (from 0) is
    arccos((s+1)/S) / (pi/2) or cos(pi (s+1) / 2S). `linear` makes equal steps, the larger ones last.
    """
    require(steps >= 1, f"steps is {steps}; expected 1 or more")
    if not isinstance(schedule, str):
        require(
            sum(schedule) == num_tokens,
            f"schedule {list(schedule)} fills {sum(schedule)} tokens; there are {num_tokens} to fill",
        )
        return schedule
    if num_tokens == 0:
        return ()
    steps = min(steps, num_tokens)
    if schedule == "linear":
        edges = [num_tokens * s // steps for s in range(steps + 1)]
        return tuple(b - a for a, b in itertools.pairwise(edges))
    sizes: list[int] = []
    masked = num_tokens
    for s in range(1, steps):
        ratio = math.acos(s / steps) / (math.pi / 2) if schedule == "arccos" else math.cos(math.pi / 2 * s / steps)
        # At least one token now, and one for each step still to come.
        left = max(steps - s, min(math.floor(num_tokens * ratio), masked - 1))
        sizes.append(masked - left)
        masked = left
    return (*sizes, masked)


def guidance_scales(kind: str, guidance: float, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """The scale s of each step in uncond + s (cond - uncond); 1 leaves the conditional logits as they are.

    `linear` ramps from 1 to `guidance` with the share of tokens filled after the step. `cutoff` leaves the last quarter
    of the steps (rounded up) without guidance.
    """
    if kind == "none":
        return (1.0,) * len(sizes)
    if kind == "constant":
        return (guidance,) * len(sizes)
    if kind == "cutoff":
        last = -(-len(sizes) // 4)
        return (guidance,) * (len(sizes) - last) + (1.0,) * last
    total, done, scales = sum(sizes), 0, []
    for size in sizes:
        done += size
        scales.append(1.0 + (guidance - 1.0) * done / total)
    return tuple(scales)


def _pad(rows: Sequence[Sequence[Any]], padding: Any) -> NDArray[Any]:
    """`[rows, K]`: the rows, padded to the longest."""
    padded = np.full((len(rows), max(map(len, rows))), padding)
    for to, row in zip(padded, rows, strict=True):
        to[: len(row)] = row
    return padded
