"""Improved precision and recall: which samples lie within the k-nearest-neighbour balls of the other set.

Shapes: M samples, Q queries of a block, S supports of a block, F features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from arpg.errors import require

NEIGHBOURS = 3  # ADM's choice
BLOCK = 4096


class PrecisionRecall(NamedTuple):
    """Which of the generated images are near real ones, and which of the real ones are near generated ones."""

    realistic_M: Tensor
    covered_M: Tensor

    @property
    def precision(self) -> float:
        return self.realistic_M.double().mean().item()

    @property
    def recall(self) -> float:
        return self.covered_M.double().mean().item()


def precision_recall(real_MF: Tensor, fake_MF: Tensor, *, k: int = NEIGHBOURS) -> PrecisionRecall:
    """Precision: the share of fakes in the union of real balls; recall: the share of reals in that of fake balls.

    A ball reaches to the k-th nearest neighbour of its centre, itself not counted.
    """
    require(
        real_MF.ndim == fake_MF.ndim == 2 and real_MF.shape[1] == fake_MF.shape[1],
        f"features are {list(real_MF.shape)} and {list(fake_MF.shape)}; expected [n, features] of one network",
    )
    fewest = min(len(real_MF), len(fake_MF))
    require(
        fewest > k, f"there are {len(real_MF)} real and {len(fake_MF)} images; k = {k} needs {k + 1} or more of each"
    )
    # Distances come from products, so the origin is moved to where rounding is smallest.
    centre_F = real_MF.float().mean(0)
    real_MF, fake_MF = (x.float() - centre_F.to(x.device) for x in (real_MF, fake_MF))
    fake_MF = fake_MF.to(real_MF.device)
    return PrecisionRecall(_within(fake_MF, real_MF, _radii(real_MF, k)), _within(real_MF, fake_MF, _radii(fake_MF, k)))


def _radii(x_MF: Tensor, k: int) -> Tensor:
    """The squared distance to the k-th nearest neighbour."""
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
