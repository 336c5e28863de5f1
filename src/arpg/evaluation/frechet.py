"""Fréchet distance between Gaussians fitted to features: running moments in float64, the distance, and its noise.

Shapes: B batch, M samples, F features, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arpg.errors import require

RANK_TOLERANCE = 1e-12  # eigenvalues below this share of the largest are rounding


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

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        self.n = 0
        self.device = torch.device(device)
        self.sum_F = torch.empty(0)
        self.products_FF = torch.empty(0)

    def add(self, x_BF: Tensor) -> None:
        x_BF = x_BF.to(self.device, torch.float64)
        if not self.n:
            self.sum_F = x_BF.new_zeros(x_BF.shape[1])
            self.products_FF = x_BF.new_zeros(x_BF.shape[1], x_BF.shape[1])
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
    moments = Moments(device=x_MF.device)
    for rows_BF in torch.split(x_MF, 4096):
        moments.add(rows_BF)
    return moments.statistics()


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """|mean difference|^2 + tr(A + B - 2 sqrt(AB)), on the device of `a`.

    tr sqrt(AB) is the sum of the roots of the eigenvalues of L'BL, where A = LL'. L spans the range of A only: other
    directions carry no distance, but the root of their rounding would. So A is the one with fewer samples.
    """
    b = _like(a, b)
    if b.n > 0 and (b.n < a.n or a.n == 0):
        a, b = b, a
    basis_FR, lower_RR = _factor(a)
    root_FR = basis_FR @ lower_RR
    values_R = torch.linalg.eigvalsh(root_FR.T @ b.cov_FF @ root_FR)
    apart = (a.mean_F - b.mean_F).square().sum()
    traces = a.cov_FF.trace() + b.cov_FF.trace() - 2 * values_R.clamp_min(0).sqrt().sum()
    return max(float(apart + traces), 0.0)


def frechet_influence(samples: Statistics, reference: Statistics, x_MF: Tensor) -> Tensor:
    """How much each sample moves the distance: d distance / d weight, of mean 0, in float64.

    The first-order (jackknife) expansion in the weights of the samples. With C = LL' the samples' covariance, R the
    reference's, z = L^+ (x - mean) and T = L'RL, the term of x is, up to its mean,
    2 (mean - mean of the reference).(x - mean) + |x - mean|^2 - z' sqrt(T) z.
    """
    reference = _like(samples, reference)
    basis_FR, lower_RR = _factor(samples)
    root_FR = basis_FR @ lower_RR
    values_R, vectors_RR = torch.linalg.eigh(root_FR.T @ reference.cov_FF @ root_FR)
    fourth_RR = vectors_RR * values_R.clamp_min(0) ** 0.25
    apart_F = samples.mean_F - reference.mean_F
    parts = []
    for rows_BF in torch.split(x_MF, 4096):
        centred_BF = rows_BF.to(samples.mean_F) - samples.mean_F
        z_RB = torch.linalg.solve_triangular(lower_RR, (centred_BF @ basis_FR).T, upper=False)
        transported_B = (fourth_RR.T @ z_RB).square().sum(0)
        parts.append(2 * centred_BF @ apart_F + centred_BF.square().sum(1) - transported_B)
    influence_M = torch.cat(parts)
    return influence_M - influence_M.mean()


def _like(a: Statistics, b: Statistics) -> Statistics:
    require(
        a.mean_F.shape == b.mean_F.shape,
        f"features have {len(a.mean_F)} and {len(b.mean_F)} dimensions; compare those of one network",
    )
    return b.to(a.mean_F.device)


def _factor(s: Statistics) -> tuple[Tensor, Tensor]:
    """Q with orthonormal columns that span the range, and a lower triangular C: the covariance is (QC)(QC)'.

    By Cholesky, which takes a small part of the time of an eigendecomposition. n samples have rank n - 1 at most, and
    then random combinations of the columns span the range. What is singular beyond that needs the eigenvectors.
    """
    cov_FF, f = s.cov_FF, len(s.mean_F)
    basis_FR = torch.eye(f, dtype=cov_FF.dtype, device=cov_FF.device)
    if 0 < s.n <= f:
        generator = torch.Generator().manual_seed(0)
        mix = torch.randn(f, s.n - 1, generator=generator, dtype=cov_FF.dtype).to(cov_FF.device)
        basis_FR = torch.linalg.qr(cov_FF @ mix).Q
    lower_RR, failed = torch.linalg.cholesky_ex(basis_FR.T @ cov_FF @ basis_FR)
    if not failed:
        return basis_FR, lower_RR
    values, vectors_FF = torch.linalg.eigh(cov_FF)
    keep = values > RANK_TOLERANCE * values[-1].clamp_min(0)
    return vectors_FF[:, keep], torch.diag(values[keep].sqrt())
