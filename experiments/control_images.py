"""Images for scoring control: edge agreement, depth errors, choice of test images, generation, nearest images.

Depth is 0 (near) to 1 (the background). Shapes: n m images, B batch, H W pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from arpg import ControlInput, Pipeline
from arpg.errors import require
from arpg.extractors import canny
from arpg.image import Pixels, check_pixels, save

# The rows of a report: with control, without it, another model without control, and what bounds them.
CONTROL, PLAIN, BASE = "control", "no control", "base model"
NEAREST, CEILING = "nearest in training", "tokenizer"
TOLERANCE = 2  # pixels (Euclidean) between two edges that count as one

Edges = NDArray[np.bool_]
Grey = NDArray[np.uint8]
Depth = NDArray[np.float32]
Labels = NDArray[np.int64]

log = logging.getLogger("experiments")


def edge_maps(pixels_nHW3: Pixels) -> Edges:
    """Return where Canny finds an edge."""
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
    """Compare two sets of edge maps, image by image. Without edges in both the result is 1, in one of them 0."""
    require(
        wanted_nHW.shape == found_nHW.shape and wanted_nHW.ndim == 3,
        f"edges are {list(wanted_nHW.shape)} and {list(found_nHW.shape)}; expected two alike, [n, H, W]",
    )
    wanted, found = torch.from_numpy(wanted_nHW), torch.from_numpy(found_nHW)
    hits = (found & thicken(wanted, tolerance)).sum((1, 2)), (wanted & thicken(found, tolerance)).sum((1, 2))
    shares = _shares(*hits, wanted.sum((1, 2)), found.sum((1, 2)))
    return Agreement(*(share.numpy() for share in shares))


def thicken(edges_BHW: Tensor, tolerance: int = TOLERANCE) -> Tensor:
    """Return the pixels that have an edge within the tolerance."""
    require(tolerance >= 0, f"tolerance is {tolerance}; expected 0 or more pixels")
    away = torch.arange(-tolerance, tolerance + 1, device=edges_BHW.device)
    disc = (away[:, None] ** 2 + away**2 <= tolerance**2).float()
    return F.conv2d(edges_BHW[:, None].float(), disc[None, None], padding=tolerance)[:, 0] > 0.5


def nearest(
    wanted_nHW: Edges, batches: Iterable[Pixels], *, device: torch.device | str = "cpu"
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return for each condition the index of the image with the greatest F1 (the first of several), and that F1.

    Every image is compared with every condition: overlaps of all pairs are two matrix products.
    """
    n, height, width = wanted_nHW.shape
    wanted = torch.from_numpy(wanted_nHW).to(device)
    lines_nP, room_nP = wanted.flatten(1).float(), thicken(wanted).flatten(1).float()
    best = torch.full((n,), -1.0, dtype=torch.float64, device=device)
    index = torch.zeros(n, dtype=torch.int64, device=device)
    done = 0
    for pixels_BHW3 in batches:
        found = torch.from_numpy(edge_maps(pixels_BHW3)).to(device)
        require(
            found.shape[1:] == (height, width),
            f"images are {found.shape[2]}x{found.shape[1]} pixels, conditions {width}x{height}; expected the same",
        )
        hits = found.flatten(1).float() @ room_nP.T, thicken(found).flatten(1).float() @ lines_nP.T
        precision, recall = _shares(*hits, lines_nP.sum(1)[None], found.sum((1, 2))[:, None])
        f1_Bn = torch.nan_to_num(2 * precision * recall / (precision + recall))
        value, row = f1_Bn.max(0)
        index = torch.where(value > best, row + done, index)
        best = torch.maximum(best, value)
        done += len(pixels_BHW3)
    require(done > 0, "there are no images to choose the nearest from")
    return index.cpu().numpy(), best.cpu().numpy()


def _shares(found_hits: Tensor, wanted_hits: Tensor, wanted: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Return precision and recall, defined where there is nothing to divide by."""
    wanted, found = wanted.double(), found.double()
    blank = ((wanted == 0) & (found == 0)).double()
    precision = torch.where(found > 0, found_hits.double() / found.clamp_min(1), blank)
    recall = torch.where(wanted > 0, wanted_hits.double() / wanted.clamp_min(1), blank)
    return precision, recall


def to_depth(near_nHW: Grey) -> Depth:
    """Return the depth of condition images: 0 near, 1 the background."""
    return 1 - near_nHW.astype(np.float32) / np.float32(255)


def rmse(depth_nHW: Depth, other_nHW: Depth) -> NDArray[np.float64]:
    """Return the root of the mean squared difference over the pixels of each image."""
    require(
        depth_nHW.shape == other_nHW.shape and depth_nHW.ndim == 3,
        f"depths are {list(depth_nHW.shape)} and {list(other_nHW.shape)}; expected two alike, [n, H, W]",
    )
    squares = (depth_nHW.astype(np.float64) - other_nHW.astype(np.float64)) ** 2
    errors: NDArray[np.float64] = np.sqrt(squares.mean((1, 2)))
    return errors


NO_CLASS = -1


Generate = Callable[..., Pixels]  # `generate_pixels` of a pipeline


def generate_pixels(
    pipe: Pipeline,
    conditions_BHW: Grey,
    labels_B: Labels,
    *,
    kind: str,
    seeds: Sequence[int],
    strength: float | None,
    **settings: Any,
) -> Pixels:
    """Generate images `[B, H, W, 3]` of conditions; label -1: no class. Strength None: conditions are not given."""
    control = None
    if strength is not None:
        control = [ControlInput(Image.fromarray(condition), kind, strength) for condition in conditions_BHW]
    classes: list[Any] = [None if label < 0 else int(label) for label in labels_B]
    made = pipe.generate(classes, seed=list(seeds), batch_size=len(classes), control=control, **settings)
    return np.stack([np.asarray(image.convert("RGB")) for image in made])


def strength_zero_is_plain(generate: Generate, *, size: int, kind: str) -> bool:
    """Return whether at strength 0 every pixel of a few images is that without conditions."""
    seeds = range(8)
    conditions = np.zeros((len(seeds), size, size), np.uint8)
    conditions[:, size // 4 : size // 2] = 255
    none = np.full(len(seeds), NO_CLASS, np.int64)
    a, b = (generate(conditions, none, kind=kind, seeds=seeds, strength=strength) for strength in (0.0, None))
    return np.array_equal(a, b)


def choose_evenly(labels: Sequence[int], num: int) -> NDArray[np.int64]:
    """Return the indices of `num` images: equally many of each class if possible, evenly spaced within it."""
    label_n = np.asarray(labels)
    require(
        1 <= num <= len(label_n), f"the number of images is {num}; expected 1 to {len(label_n)}, as many as there are"
    )
    members = [np.flatnonzero(label_n == label) for label in np.unique(label_n)]
    sizes = np.array([len(some) for some in members])
    counts = np.zeros_like(sizes)
    while (left := num - int(counts.sum())) > 0:
        open_ = np.flatnonzero(counts < sizes)
        each = min(left // len(open_), int((sizes - counts)[open_].min()))
        if each:
            counts[open_] += each
        else:  # fewer than classes: at even distances
            counts[open_[np.arange(left) * len(open_) // left]] += 1
    chosen = [some[(2 * np.arange(k) + 1) * len(some) // (2 * k)] for some, k in zip(members, counts, strict=True) if k]
    return np.concatenate(chosen)


def generate_missing(
    generate: Generate,
    conditions_nHW: Grey,
    labels_n: Labels,
    folder: Path | None,
    *,
    kind: str,
    strength: float | None = 1.0,
    seed: int = 0,
    batch_size: int = 64,
) -> Pixels:
    """Generate image i from condition i, label i and seed `seed + i`, unless the folder has it; return all images.

    Without a folder, none is kept.
    """
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    made_nHW3 = np.empty((*conditions_nHW.shape, 3), np.uint8)
    paths = [] if folder is None else [folder / f"{i:04d}.png" for i in range(len(made_nHW3))]
    kept = [i for i, path in enumerate(paths) if path.exists()]
    for i in kept:
        with Image.open(paths[i]) as image:
            made_nHW3[i] = np.asarray(image.convert("RGB"))
    missing = sorted(set(range(len(made_nHW3))).difference(kept))
    for start in range(0, len(missing), batch_size):
        part = missing[start : start + batch_size]
        seeds = [seed + i for i in part]
        made_nHW3[part] = generate(conditions_nHW[part], labels_n[part], kind=kind, seeds=seeds, strength=strength)
        if folder is not None:
            for i in part:
                save(Image.fromarray(made_nHW3[i]), paths[i])
            done = len(kept) + start + len(part)
            log.info("%s, %s: %d of %d", folder.parent.name, folder.name, done, len(made_nHW3))
    return made_nHW3


def nearest_by_depth(near_nHW: Grey, others_mHW: Grey) -> NDArray[np.int64]:
    """Return for each depth map the index of the other one with the least squared difference."""
    a, b = (torch.from_numpy(x).flatten(1).float() / 255 for x in (near_nHW, others_mHW))
    index_n: NDArray[np.int64] = torch.cdist(a, b).argmin(1).numpy()
    return index_n
