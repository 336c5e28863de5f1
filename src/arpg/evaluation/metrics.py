"""Metrics of feature sets: Fréchet distance, Inception Score, KID, precision and recall, and 95 % intervals.

Shapes: B batch, M samples, F features, R rank, K classes, S of a subset or block, Q queries of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.errors import require

RESAMPLES = 1000
NORMAL_95 = 1.959963984540054

Interval = tuple[float, float]


def bootstrap(value: float, influence_M: NDArray[np.floating[Any]], *, seed: int = 0) -> Interval:
    """Return the 95 % interval of a statistic that is, to first order, its value plus a mean of one number per sample.

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
    """Return the 95 % interval of a share; unlike the bootstrap it has a width at 0 and at 1, too."""
    share, z2 = hits / n, NORMAL_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(centre - half, 0.0), min(centre + half, 1.0)


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
        """Return the statistics on `device`."""
        return Statistics(self.mean_F.to(device), self.cov_FF.to(device), self.n)


class Moments:
    """Sums of features and of their products, so that memory does not grow with the number of samples."""

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        self.n = 0
        self.device = torch.device(device)
        self.sum_F = torch.empty(0)
        self.products_FF = torch.empty(0)

    def add(self, x_BF: Tensor) -> None:
        """Add a batch of features."""
        x_BF = x_BF.to(self.device, torch.float64)
        if not self.n:
            self.sum_F = x_BF.new_zeros(x_BF.shape[1])
            self.products_FF = x_BF.new_zeros(x_BF.shape[1], x_BF.shape[1])
        self.n += len(x_BF)
        self.sum_F += x_BF.sum(0)
        self.products_FF.addmm_(x_BF.T, x_BF)

    def statistics(self) -> Statistics:
        """Return mean and covariance of all features so far."""
        require(self.n >= 2, f"there are {self.n} images; a covariance needs 2 or more")
        mean_F = self.sum_F / self.n
        cov_FF = (self.products_FF - self.n * torch.outer(mean_F, mean_F)) / (self.n - 1)
        return Statistics(mean_F, (cov_FF + cov_FF.T) / 2, self.n)


def statistics(x_MF: Tensor) -> Statistics:
    """Return the statistics of features that are all in memory."""
    require(x_MF.ndim == 2, f"features are {list(x_MF.shape)}; expected [n, features]")
    moments = Moments(device=x_MF.device)
    for rows_BF in torch.split(x_MF, 4096):
        moments.add(rows_BF)
    return moments.statistics()


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """Return |mean difference|^2 + tr(A + B - 2 sqrt(AB)), on the device of `a`.

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
    """Return how much each sample moves the distance: d distance / d weight, of mean 0, in float64.

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
    """Return Q with orthonormal columns that span the range, and a lower triangular C: the covariance is (QC)(QC)'.

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


SPLIT = 5000  # images, in the order of the file, as in ADM's protocol


class InceptionScore(NamedTuple):
    """The mean over splits, and the standard deviation between them."""

    mean: float
    std: float
    splits: int


class RunningGains:
    """The gain of each image, split by split: only the logits of one split are held."""

    def __init__(self, *, split: int = SPLIT) -> None:
        require(split >= 1, f"split is {split}; expected 1 or more images")
        self.split = split
        self.waiting: list[Tensor] = []
        self.done: list[Tensor] = []

    def add(self, logits_BK: Tensor) -> None:
        """Add the logits of a batch."""
        while len(logits_BK):
            room = self.split - sum(map(len, self.waiting))
            self.waiting.append(logits_BK[:room])
            logits_BK = logits_BK[room:]
            if sum(map(len, self.waiting)) == self.split:
                self._close()

    def gains(self) -> Tensor:
        """Return the gains of all images so far."""
        if self.waiting:
            self._close()
        return torch.cat(self.done)

    def _close(self) -> None:
        device = self.waiting[-1].device  # those that an earlier process saved are on the CPU
        self.done.append(gains(torch.cat([logits.to(device) for logits in self.waiting])).cpu())
        self.waiting = []


def gains(logits_MK: Tensor) -> Tensor:
    """Return the KL divergence from each image's classes to those of all of them, in float64."""
    log_p_MK = logits_MK.double().log_softmax(1)
    log_mean_K = log_p_MK.logsumexp(0) - math.log(len(log_p_MK))
    return (log_p_MK.exp() * (log_p_MK - log_mean_K)).sum(1)


def inception_score(gain_M: Tensor, *, split: int = SPLIT) -> InceptionScore:
    """Return exp of the mean gain of each split, averaged over splits."""
    require(gain_M.ndim == 1 and len(gain_M) > 0, f"gains are {list(gain_M.shape)}; expected one number per image")
    scores = torch.stack([part.mean().exp() for part in torch.split(gain_M, split)])
    return InceptionScore(scores.mean().item(), scores.std(correction=0).item(), len(scores))


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
    """Return KID: the unbiased squared MMD under the kernel (x.y / F + 1)^3, over random subsets.

    Subsets are sampled without replacement and are no larger than the smaller set.
    """
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
    """Return the unbiased estimate: a sample is not compared with itself, so it can be below 0."""
    a_SF, b_SF = a_SF.double(), b_SF.double()

    def kernel(x_SF: Tensor, y_SF: Tensor) -> Tensor:
        return (x_SF @ y_SF.T / x_SF.shape[1] + 1) ** 3

    def within(x_SF: Tensor) -> Tensor:
        k_SS, n = kernel(x_SF, x_SF), len(x_SF)
        return (k_SS.sum() - k_SS.trace()) / (n * (n - 1))

    return within(a_SF) + within(b_SF) - 2 * kernel(a_SF, b_SF).mean()


NEIGHBOURS = 3  # ADM's choice
BLOCK = 4096


class PrecisionRecall(NamedTuple):
    """Which of the generated images are near real ones, and which of the real ones are near generated ones."""

    realistic_M: Tensor  # their share is the precision
    covered_M: Tensor  # the recall


def precision_recall(real_MF: Tensor, fake_MF: Tensor) -> PrecisionRecall:
    """Return precision (share of fakes in the union of real balls) and recall (share of reals in that of fake balls).

    A ball reaches to the k-th nearest neighbour of its centre, itself not counted: k is `NEIGHBOURS`.
    """
    require(
        real_MF.ndim == fake_MF.ndim == 2 and real_MF.shape[1] == fake_MF.shape[1],
        f"features are {list(real_MF.shape)} and {list(fake_MF.shape)}; expected [n, features] of one network",
    )
    fewest, k = min(len(real_MF), len(fake_MF)), NEIGHBOURS
    require(
        fewest > k, f"there are {len(real_MF)} real and {len(fake_MF)} images; k = {k} needs {k + 1} or more of each"
    )
    # Distances come from products, so the origin is moved to where rounding is smallest.
    centre_F = real_MF.float().mean(0)
    real_MF, fake_MF = (x.float() - centre_F.to(x.device) for x in (real_MF, fake_MF))
    fake_MF = fake_MF.to(real_MF.device)
    return PrecisionRecall(_within(fake_MF, real_MF, _radii(real_MF, k)), _within(real_MF, fake_MF, _radii(fake_MF, k)))


def _radii(x_MF: Tensor, k: int) -> Tensor:
    """Return the squared distance to the k-th nearest neighbour."""
    parts = []
    for start in range(0, len(x_MF), BLOCK):
        best_QK: Tensor | None = None
        for other in range(0, len(x_MF), BLOCK):
            block_QS = _squared(x_MF[start : start + BLOCK], x_MF[other : other + BLOCK])
            if start == other:
                block_QS.fill_diagonal_(0)  # itself, without rounding
            near_QK = block_QS.topk(min(k + 1, block_QS.shape[1]), largest=False).values
            near_QK = near_QK if best_QK is None else torch.cat([best_QK, near_QK], 1)
            best_QK = near_QK.topk(min(k + 1, near_QK.shape[1]), largest=False).values
        assert best_QK is not None
        parts.append(best_QK[:, k])
    return torch.cat(parts)


def _within(query_MF: Tensor, support_MF: Tensor, radii_M: Tensor) -> Tensor:
    parts = []
    for q_QF in torch.split(query_MF, BLOCK):
        inside_Q = torch.zeros(len(q_QF), dtype=torch.bool, device=q_QF.device)
        for s_SF, r_S in zip(torch.split(support_MF, BLOCK), torch.split(radii_M, BLOCK), strict=True):
            inside_Q |= (_squared(q_QF, s_SF) <= r_S).any(1)
        parts.append(inside_Q)
    return torch.cat(parts)


def _squared(a_QF: Tensor, b_SF: Tensor) -> Tensor:
    squares_QS = a_QF.square().sum(1)[:, None] + b_SF.square().sum(1)
    return squares_QS.addmm_(a_QF, b_SF.T, alpha=-2).clamp_min_(0)
