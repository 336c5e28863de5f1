"""How far a number would move if the samples were drawn again: bootstrap and Wilson intervals of 95 %."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
NORMAL_95 = 1.959963984540054

Interval = tuple[float, float]


def bootstrap(value: float, influence_M: NDArray[np.floating[Any]], *, seed: int = 0) -> Interval:
    """The interval of a statistic that is, to first order, its value plus the mean of one number per sample.

    For a statistic with a bias that depends on the number of samples (FID, Inception Score) resampling it as a whole
    would add the bias a second time: a resample holds fewer different images. The first-order form leaves that out,
    so the interval is about the noise of these samples and lies around the value.
    """
    rng = np.random.default_rng(seed)
    m = len(influence_M)
    means = [influence_M[rng.integers(0, m, m)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    centre = influence_M.mean()
    return float(value + low - centre), float(value + high - centre)


def wilson(hits: int, n: int) -> Interval:
    """The interval of a share; unlike the bootstrap it has a width at 0 and at 1, too."""
    share, z2 = hits / n, NORMAL_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(centre - half, 0.0), min(centre + half, 1.0)
