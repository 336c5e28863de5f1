"""How different images are: LPIPS between images of a class, and to the nearest of other images.

Shapes: B pairs in a batch, Q queries, R references, K candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from arpg.errors import require
from arpg.image import Pixels, check_pixels, to_images
from arpg.tokenizer.losses import LPIPS

Labels = NDArray[np.integer[Any]]
Index = NDArray[np.int64]

THUMBNAIL = 16


def mean_pairwise_lpips(
    pixels: Pixels, labels: Labels, lpips: LPIPS, *, pairs_per_class: int, seed: int, batch_size: int = 64
) -> dict[str, Any]:
    """`mean` over classes and `per_class` (class -> mean LPIPS of its pairs); 0 where all images are alike.

    All pairs of a class, or `pairs_per_class` different ones. A class with one image has no pair and does not count.
    """
    check_pixels(pixels)
    _check_labels(labels, len(pixels), what="labels")
    require(pairs_per_class >= 1, f"pairs_per_class is {pairs_per_class}; expected 1 or more")
    owners, firsts, seconds = [], [], []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        # Drawn per class, so that the pairs of one class do not depend on which others there are.
        a, b = _pairs(len(members), pairs_per_class, np.random.default_rng([seed, int(label)]))
        owners.append(np.full(len(a), label))
        firsts.append(members[a])
        seconds.append(members[b])
    owner = np.concatenate(owners)
    require(len(owner) > 0, "no class has two images, so there is no pair to compare; give more images per class")
    distance = _distances(lpips, pixels, np.concatenate(firsts), pixels, np.concatenate(seconds), batch_size)
    per_class = {int(label): float(distance[owner == label].mean()) for label in np.unique(owner)}
    return {"mean": float(np.mean(list(per_class.values()))), "per_class": per_class}


def nearest_lpips(
    queries: Pixels,
    references: Pixels,
    lpips: LPIPS,
    *,
    labels_q: Labels,
    labels_r: Labels,
    candidates: int = 16,
    batch_size: int = 64,
) -> NDArray[np.float64]:
    """For each query, the LPIPS to the nearest reference of its class.

    LPIPS is computed for the `candidates` that are nearest as 16x16 thumbnails only.
    """
    check_pixels(queries, what="queries")
    check_pixels(references, what="references")
    require(
        queries.shape[1:] == references.shape[1:],
        f"queries are {list(queries.shape[1:])} and references {list(references.shape[1:])}; resize them to one size",
    )
    _check_labels(labels_q, len(queries), what="labels_q")
    _check_labels(labels_r, len(references), what="labels_r")
    require(candidates >= 1, f"candidates is {candidates}; expected 1 or more")
    alone = sorted({int(label) for label in labels_q} - {int(label) for label in labels_r})
    require(not alone, f"no reference image has class {', '.join(map(str, alone[:12]))}; give references for it")

    small_Q, small_R = (_thumbnails(array, lpips.device, batch_size) for array in (queries, references))
    firsts, seconds = [], []
    for label in np.unique(labels_q):
        q, r = np.flatnonzero(labels_q == label), np.flatnonzero(labels_r == label)
        here = torch.from_numpy(q).to(lpips.device), torch.from_numpy(r).to(lpips.device)
        apart_QR = torch.cdist(small_Q[here[0]], small_R[here[1]], compute_mode="donot_use_mm_for_euclid_dist")
        near_QK = apart_QR.topk(min(candidates, len(r)), largest=False).indices.cpu().numpy()
        firsts.append(np.repeat(q, near_QK.shape[1]))
        seconds.append(r[near_QK].reshape(-1))
    first = np.concatenate(firsts)
    distance = _distances(lpips, queries, first, references, np.concatenate(seconds), batch_size)
    nearest = np.full(len(queries), np.inf)
    np.minimum.at(nearest, first, distance)
    return nearest


def _pairs(n: int, most: int, rng: np.random.Generator) -> tuple[Index, Index]:
    """Different pairs (a, b), a < b < n: all of them, or `most`."""
    total = n * (n - 1) // 2
    chosen = np.sort(rng.choice(total, most, replace=False)) if total > most else np.arange(total)
    # Pairs in the order (0,1), (0,2), (1,2), (0,3), ...: those with a second member below b number b (b - 1) / 2.
    starts = np.arange(n + 1) * (np.arange(n + 1) - 1) // 2
    b = np.searchsorted(starts, chosen, side="right") - 1
    return (chosen - starts[b]).astype(np.int64), b.astype(np.int64)


@torch.no_grad()
def _distances(
    lpips: LPIPS, a: Pixels, index_a: Index, b: Pixels, index_b: Index, batch_size: int
) -> NDArray[np.float64]:
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    parts: list[Tensor] = []
    for start in range(0, len(index_a), batch_size):
        part = slice(start, start + batch_size)
        parts.append(lpips(to_images(a[index_a[part]], lpips.device), to_images(b[index_b[part]], lpips.device)))
    return torch.cat(parts).double().cpu().numpy()


@torch.no_grad()
def _thumbnails(pixels: Pixels, device: torch.device, batch_size: int) -> Tensor:
    parts = []
    for start in range(0, len(pixels), batch_size):
        image_B3HW = to_images(pixels[start : start + batch_size], device)
        parts.append(F.adaptive_avg_pool2d(image_B3HW, THUMBNAIL).flatten(1))
    return torch.cat(parts)


def _check_labels(labels: Labels, n: int, *, what: str) -> None:
    whole = np.issubdtype(labels.dtype, np.integer)
    require(
        labels.shape == (n,) and whole and bool((labels >= 0).all()),
        f"{what} are {labels.dtype} {list(labels.shape)}; expected one whole number of 0 or more per image, [{n}]",
    )
