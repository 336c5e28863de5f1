"""Features of what a user names: a file of features or statistics, or images, whose features are kept for next time."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from arpg.data.images import open_images
from arpg.errors import InputError
from arpg.evaluation.features import FORMAT, Features, collect
from arpg.evaluation.image_source import ARRAY, npz_names, open_source
from arpg.evaluation.inception import Inception
from arpg.files import hash_file
from arpg.hub import home

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


def has_features(path: Path) -> bool:
    """Whether the file holds features or statistics and no images, so that no network is needed."""
    return path.suffix == ".npz" and "mu" in (names := npz_names(path)) and ARRAY not in names


def read_features(
    path: Path,
    inception: Inception,
    *,
    size: int | None = None,
    batch_size: int = 64,
    keep: bool = False,
    progress: Progress | None = None,
) -> Features:
    """Of an npz file, a folder or a zip file; with `keep`, features of images are kept in the user's cache folder.

    ADM's reference files hold images and the statistics of many more: distances then use those, as ADM does.
    """
    if has_features(path):
        return Features.load(path)
    features = _of_images(path, inception, size=size, batch_size=batch_size, keep=keep, progress=progress)
    if path.suffix == ".npz" and "mu" in npz_names(path):
        given = Features.load(path)
        features = dataclasses.replace(features, pool=given.pool, spatial=given.spatial)
    return features


def _of_images(
    path: Path, inception: Inception, *, size: int | None, batch_size: int, keep: bool, progress: Progress | None
) -> Features:
    source = open_source(path, size=size)
    place = home() / "features" / f"{_key(path, inception, size)}.npz" if keep else None
    if place is not None and place.is_file():
        try:
            return Features.load(place)
        except InputError as error:
            log.warning("%s; computing the features again", error)
    told = None if progress is None else (lambda done: progress(done, source.count))
    features = collect(inception, source.batches(batch_size), progress=told)
    if place is not None:
        features.save(place)
    return features


def _key(path: Path, inception: Inception, size: int | None) -> str:
    """Changes with every byte of the images, with the network and with the crop, and with nothing else."""
    digest = hashlib.sha256(f"{FORMAT} {inception.identity} {size}\n".encode())
    if path.is_dir():
        for name in open_images(path).names:
            digest.update(f"{name} {hash_file(path / name)}\n".encode())
    else:
        archive = next(p for p in (path, *path.parents) if p.is_file())
        digest.update(f"{path.relative_to(archive)} {hash_file(archive)}\n".encode())
    return digest.hexdigest()
