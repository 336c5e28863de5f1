"""Edges that agree: precision, recall and F1 with a tolerance, and the picture of a set whose edges agree best.

Shapes: n conditions, B batch, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from arpg.errors import require
from arpg.extractors import canny
from arpg.image import Pixels, check_pixels

TOLERANCE = 2  # pixels between two edges that count as one, as the crow flies

Edges = NDArray[np.bool_]


def edge_maps(pixels_nHW3: Pixels) -> Edges:
    """Where Canny sees an edge."""
    check_pixels(pixels_nHW3)
    return np.stack([canny(pixels) for pixels in pixels_nHW3]) > 0


@dataclass(frozen=True, eq=False)
class Agreement:
    """How far edges agree with a condition, for each image."""

    precision_n: NDArray[np.float64]  # the share of found edges that are wanted
    recall_n: NDArray[np.float64]  # the share of wanted edges that are found

    @property
    def f1_n(self) -> NDArray[np.float64]:
        both = self.precision_n + self.recall_n
        return np.divide(2 * self.precision_n * self.recall_n, both, out=np.zeros_like(both), where=both > 0)


def agreement(wanted_nHW: Edges, found_nHW: Edges, *, tolerance: int = TOLERANCE) -> Agreement:
    """Of two sets of edge maps, image by image. Where there are no edges in both, all is 1; in one of them, 0."""
    require(
        wanted_nHW.shape == found_nHW.shape and wanted_nHW.ndim == 3,
        f"edges are {list(wanted_nHW.shape)} and {list(found_nHW.shape)}; expected two alike, [n, H, W]",
    )
    wanted, found = torch.from_numpy(wanted_nHW), torch.from_numpy(found_nHW)
    hits = (found & thicken(wanted, tolerance)).sum((1, 2)), (wanted & thicken(found, tolerance)).sum((1, 2))
    shares = _shares(*hits, wanted.sum((1, 2)), found.sum((1, 2)))
    return Agreement(*(share.numpy() for share in shares))


def thicken(edges_BHW: Tensor, tolerance: int = TOLERANCE) -> Tensor:
    """All pixels that have an edge no farther away than the tolerance."""
    require(tolerance >= 0, f"tolerance is {tolerance}; expected 0 or more pixels")
    away = torch.arange(-tolerance, tolerance + 1, device=edges_BHW.device)
    disc = (away[:, None] ** 2 + away**2 <= tolerance**2).float()
    return F.conv2d(edges_BHW[:, None].float(), disc[None, None], padding=tolerance)[:, 0] > 0.5


def nearest(
    wanted_nHW: Edges,
    batches: Iterable[Pixels],
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For each condition the number of the picture whose F1 with it is greatest (the first of several), and that F1.

    Every picture is compared with every condition: overlaps of all pairs are two matrix products.
    """
    n, height, width = wanted_nHW.shape
    wanted = torch.from_numpy(wanted_nHW).to(device)
    lines_nP, room_nP = wanted.flatten(1).float(), thicken(wanted).flatten(1).float()
    best, index = torch.full((n,), -1.0, dtype=torch.float64, device=device), torch.zeros(n, dtype=torch.int64)
    index = index.to(device)
    done = 0
    for pixels_BHW3 in batches:
        found = torch.from_numpy(edge_maps(pixels_BHW3)).to(device)
        require(
            found.shape[1:] == (height, width),
            f"pictures are {found.shape[2]}x{found.shape[1]} pixels, conditions {width}x{height}; expected the same",
        )
        hits = found.flatten(1).float() @ room_nP.T, thicken(found).flatten(1).float() @ lines_nP.T
        precision, recall = _shares(*hits, lines_nP.sum(1)[None], found.sum((1, 2))[:, None])
        f1_Bn = torch.nan_to_num(2 * precision * recall / (precision + recall))
        value, row = f1_Bn.max(0)
        index = torch.where(value > best, row + done, index)
        best = torch.maximum(best, value)
        done += len(pixels_BHW3)
        if progress is not None:
            progress(done)
    require(done > 0, "there are no pictures to choose the nearest from")
    return index.cpu().numpy(), best.cpu().numpy()


def _shares(found_hits: Tensor, wanted_hits: Tensor, wanted: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Precision and recall, also where there is nothing to divide by."""
    wanted, found = wanted.double(), found.double()
    blank = ((wanted == 0) & (found == 0)).double()
    precision = torch.where(found > 0, found_hits.double() / found.clamp_min(1), blank)
    recall = torch.where(wanted > 0, wanted_hits.double() / wanted.clamp_min(1), blank)
    return precision, recall
