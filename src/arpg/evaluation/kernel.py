"""Kernel distance (KID): the unbiased squared MMD of features under a cubic kernel, over random subsets.

Shapes: M samples, S of a subset, F features.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from arpg.errors import require

SUBSETS, SUBSET_SIZE = 100, 1000


class KernelDistance(NamedTuple):
    """The mean over subsets, and the standard deviation between them (the noise of one subset, not of the mean)."""

    mean: float
    std: float
    subsets: int
    size: int


def kernel_distance(
    a_MF: Tensor, b_MF: Tensor, *, subsets: int = SUBSETS, size: int = SUBSET_SIZE, seed: int = 0
) -> KernelDistance:
    """Kernel (x.y / F + 1)^3. Subsets are drawn without replacement and are no larger than the smaller set."""
    require(
        a_MF.ndim == b_MF.ndim == 2 and a_MF.shape[1] == b_MF.shape[1],
        f"features are {list(a_MF.shape)} and {list(b_MF.shape)}; expected [n, features] of one network",
    )
    require(subsets >= 1 and size >= 2, f"subsets is {subsets}, size {size}; expected 1 and 2 or more")
    size = min(size, len(a_MF), len(b_MF))
    require(size >= 2, f"there are {len(a_MF)} and {len(b_MF)} images; KID needs 2 or more of each")
    if size == len(a_MF) == len(b_MF):
        subsets = 1  # they would all be the same
    # The old generator: its stream never changes, and with seed 2020 the subsets are those of torch-fidelity.
    rng = np.random.RandomState(seed)
    values = []
    for _ in range(subsets):
        rows = (torch.from_numpy(rng.choice(len(x), size, replace=False)).to(x.device) for x in (a_MF, b_MF))
        values.append(squared_mmd(*(x[i].to(a_MF.device) for x, i in zip((a_MF, b_MF), rows, strict=True))))
    found = torch.stack(values)
    return KernelDistance(found.mean().item(), found.std(correction=0).item(), subsets, size)


def squared_mmd(a_SF: Tensor, b_SF: Tensor) -> Tensor:
    """The unbiased estimate: a sample is not compared with itself, so it can be below 0."""
    a_SF, b_SF = a_SF.double(), b_SF.double()

    def kernel(x_SF: Tensor, y_SF: Tensor) -> Tensor:
        return (x_SF @ y_SF.T / x_SF.shape[1] + 1) ** 3

    def within(x_SF: Tensor) -> Tensor:
        k_SS, n = kernel(x_SF, x_SF), len(x_SF)
        return (k_SS.sum() - k_SS.trace()) / (n * (n - 1))

    return within(a_SF) + within(b_SF) - 2 * kernel(a_SF, b_SF).mean()
