"""Inception Score: how sure the network is of each image, and how many classes there are over all of them.

Shapes: B batch, M samples, K classes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from arpg.errors import require

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
        while len(logits_BK):
            room = self.split - sum(map(len, self.waiting))
            self.waiting.append(logits_BK[:room])
            logits_BK = logits_BK[room:]
            if sum(map(len, self.waiting)) == self.split:
                self._close()

    def gains(self) -> Tensor:
        if self.waiting:
            self._close()
        return torch.cat(self.done)

    def _close(self) -> None:
        self.done.append(gains(torch.cat(self.waiting)).cpu())
        self.waiting = []


def gains(logits_MK: Tensor) -> Tensor:
    """KL divergence from each image's classes to those of all of them, in float64."""
    log_p_MK = logits_MK.double().log_softmax(1)
    log_mean_K = log_p_MK.logsumexp(0) - math.log(len(log_p_MK))
    return (log_p_MK.exp() * (log_p_MK - log_mean_K)).sum(1)


def inception_score(gain_M: Tensor, *, split: int = SPLIT) -> InceptionScore:
    """exp of the mean gain of each split, averaged."""
    require(gain_M.ndim == 1 and len(gain_M) > 0, f"gains are {list(gain_M.shape)}; expected one number per image")
    scores = torch.stack([part.mean().exp() for part in torch.split(gain_M, split)])
    return InceptionScore(scores.mean().item(), scores.std(correction=0).item(), len(scores))
