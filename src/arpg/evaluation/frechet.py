"""Fréchet distance between Gaussians fitted to features: running moments in float64, the distance, and its noise.

Shapes: B batch, M samples, F features, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arpg.errors import require

# Eigenvalues below this share of the largest are rounding: float32 features leave about 1e-13 of noise.
RANK_TOLERANCE = 1e-12


@dataclass(frozen=True, eq=False)
class Statistics:
    """Mean and covariance (divided by n - 1), in float64; `n` is 0 where a file does not say how many."""

    mean_F: Tensor
    cov_FF: Tensor
    n: int

    def __post_init__(self) -> None:
        f = len(self.mean_F)
        require(
            self.mean_F.shape == (f,) and self.cov_FF.shape == (f, f),
            f"statistics have a mean {list(self.mean_F.shape)} and a covariance {list(self.cov_FF.shape)}; "
            "expected [F] and [F, F]",
        )
        finite = bool(torch.isfinite(self.mean_F).all() and torch.isfinite(self.cov_FF).all())
        require(finite, "statistics hold numbers that are not finite; compute them again")

    def to(self, device: torch.device | str) -> Statistics:
        return Statistics(self.mean_F.to(device), self.cov_FF.to(device), self.n)


class Moments:
    """Sums of features and of their products, so that memory does not grow with the number of samples."""

    def __init__(self, num_features: int, *, device: torch.device | str = "cpu") -> None:
        self.n = 0
        self.sum_F = torch.zeros(num_features, dtype=torch.float64, device=device)
        self.products_FF = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)

    def add(self, x_BF: Tensor) -> None:
        x_BF = x_BF.to(self.sum_F.device, torch.float64)
        self.n += len(x_BF)
        self.sum_F += x_BF.sum(0)
        self.products_FF.addmm_(x_BF.T, x_BF)

    def statistics(self) -> Statistics:
        require(self.n >= 2, f"there are {self.n} images; a covariance needs 2 or more")
        mean_F = self.sum_F / self.n
        cov_FF = (self.products_FF - self.n * torch.outer(mean_F, mean_F)) / (self.n - 1)
        return Statistics(mean_F, (cov_FF + cov_FF.T) / 2, self.n)


def statistics(x_MF: Tensor) -> Statistics:
    """Of features that are all in memory."""
    require(x_MF.ndim == 2, f"features are {list(x_MF.shape)}; expected [n, features]")
    moments = Moments(x_MF.shape[1], device=x_MF.device)
    for rows_BF in torch.split(x_MF, 4096):
        moments.add(rows_BF)
    return moments.statistics()


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """|mean difference|^2 + tr(A + B - 2 sqrt(AB)), on the device of `a`.

    tr sqrt(AB) is the sum of the roots of the eigenvalues of L'BL where A = LL'. Taking L over the range of A only
    leaves out directions in which the product is zero: they carry no distance, but the root of their rounding would.
    """
    b = _like(a, b)
    if 0 < b.n < a.n:  # the one of smaller rank has the smaller range
        a, b = b, a
    root_FR = _root(a.cov_FF)
    values_R = torch.linalg.eigvalsh(root_FR.T @ b.cov_FF @ root_FR)
    return max(_distance(a, b, values_R.clamp_min(0).sqrt().sum()), 0.0)


def frechet_influence(samples: Statistics, reference: Statistics, x_MF: Tensor) -> Tensor:
    """How much each sample moves the distance: d distance / d weight, of mean 0, in float64.

    The first-order (jackknife) expansion of the distance in the weights of the samples. With C = LL' for the samples,
    z = L^+ (x - mean) and T = L'RL: 2 d.(x - mean) + |x - mean|^2 - z' sqrt(T) z, less its mean.
    """
    reference = _like(samples, reference)
    values, vectors_FR = _spectrum(samples.cov_FF)
    root_FR = vectors_FR * values.sqrt()
    eigenvalues, basis_RR = torch.linalg.eigh(root_FR.T @ reference.cov_FF @ root_FR)
    half_RR = basis_RR * eigenvalues.clamp_min(0) ** 0.25
    apart_F = samples.mean_F - reference.mean_F
    parts = []
    for rows_BF in torch.split(x_MF, 4096):
        centred_BF = rows_BF.to(samples.mean_F) - samples.mean_F
        white_BR = centred_BF @ (vectors_FR / values.sqrt())
        transported_B = (white_BR @ half_RR).square().sum(1)
        parts.append(2 * centred_BF @ apart_F + centred_BF.square().sum(1) - transported_B)
    influence_M = torch.cat(parts)
    return influence_M - influence_M.mean()


def _distance(a: Statistics, b: Statistics, trace_of_root: Tensor) -> float:
    apart = (a.mean_F - b.mean_F).square().sum()
    return float(apart + a.cov_FF.trace() + b.cov_FF.trace() - 2 * trace_of_root)


def _like(a: Statistics, b: Statistics) -> Statistics:
    require(
        a.mean_F.shape == b.mean_F.shape,
        f"features have {len(a.mean_F)} and {len(b.mean_F)} dimensions; compare those of one network",
    )
    return b.to(a.mean_F.device)


def _root(cov_FF: Tensor) -> Tensor:
    """L with LL' = the covariance, of as many columns as it has rank."""
    values, vectors_FR = _spectrum(cov_FF)
    return vectors_FR * values.sqrt()


def _spectrum(cov_FF: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors_FF = torch.linalg.eigh(cov_FF)
    keep = values > RANK_TOLERANCE * values[-1].clamp_min(0)
    return values[keep], vectors_FF[:, keep]
