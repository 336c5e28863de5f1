"""The images that control is judged by: which are chosen, what is drawn for them, what training has that is nearest.

Shapes: n m images, B batch, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from arpg.data.images import ImageSet
from arpg.errors import require
from arpg.evaluation.edges import Edges, nearest
from arpg.evaluation.features import from_images
from arpg.image import Pixels, adm_crop, save

NO_CLASS = -1
CHUNK = 250  # images that are read together

Labels = NDArray[np.int64]
Grey = NDArray[np.uint8]
Told = Callable[[int, int], None] | None  # done, of how many


class Generate(Protocol):
    """What draws: images uint8 [B, H, W, 3] of conditions uint8 [B, H, W]; a label of -1 is no class, strength 0 no
    control.
    """

    def __call__(
        self, conditions_BHW: Grey, labels_B: Labels, *, kind: str, seeds: Sequence[int], strength: float
    ) -> Pixels: ...


def choose_evenly(labels: Sequence[int], num: int) -> NDArray[np.int64]:
    """The numbers of `num` images: as many of each class as there can be, evenly spaced within it. Always the same."""
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


def read_images(images: ImageSet, numbers: Sequence[int] | NDArray[np.int64], size: int) -> Pixels:
    """Centre crops, as models see images."""
    return np.stack([np.asarray(adm_crop(images.read(int(i)), size)) for i in numbers])


def draw(
    generate: Generate,
    conditions_nHW: Grey,
    labels_n: Labels,
    folder: Path,
    *,
    kind: str,
    strength: float = 1.0,
    seed: int = 0,
    batch_size: int = 64,
    progress: Told = None,
) -> Pixels:
    """Image i has condition i, label i and seed `seed + i`. What the folder has already is read from there."""
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    paths = [folder / f"{i:04d}.png" for i in range(len(conditions_nHW))]
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    for start in range(0, len(missing), batch_size):
        part = missing[start : start + batch_size]
        seeds = [seed + i for i in part]
        pixels = generate(conditions_nHW[part], labels_n[part], kind=kind, seeds=seeds, strength=strength)
        for i, array in zip(part, pixels, strict=True):
            save(Image.fromarray(array), paths[i])
        if progress is not None:
            progress(len(paths) - len(missing) + start + len(part), len(paths))
    return read_files(paths)


def nearest_depth(near_nHW: Grey, others_mHW: Grey) -> NDArray[np.int64]:
    """For each depth the number of the other that is nearest to it in squares."""
    a, b = (torch.from_numpy(x).flatten(1).float() / 255 for x in (near_nHW, others_mHW))
    index_n: NDArray[np.int64] = torch.cdist(a, b).argmin(1).numpy()
    return index_n


def nearest_image(
    wanted_nHW: Edges,
    training: ImageSet,
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    progress: Told = None,
) -> Pixels:
    """The training images whose edges agree best, of all classes; what the folder has is read from there."""
    paths = [folder / f"{i:04d}.png" for i in range(len(wanted_nHW))]
    if not all(path.exists() for path in paths):
        size = wanted_nHW.shape[1]
        told = None if progress is None else (lambda done: progress(done, len(training)))
        batches = from_images(training, size=size).batches(CHUNK)
        index, _ = nearest(wanted_nHW, batches, device=device, progress=told)
        for path, array in zip(paths, read_images(training, index, size), strict=True):
            save(Image.fromarray(array), path)
    return read_files(paths)


def keep(pictures_nHW: Grey, folder: Path) -> None:
    """Into files, where they are not there yet."""
    for i, picture in enumerate(pictures_nHW):
        path = folder / f"{i:04d}.png"
        if not path.exists():
            save(Image.fromarray(picture), path)


def read_files(paths: Sequence[Path]) -> Pixels:
    """RGB, as the files have it."""
    arrays = []
    for path in paths:
        with Image.open(path) as image:
            arrays.append(np.asarray(image.convert("RGB")))
    return np.stack(arrays)
