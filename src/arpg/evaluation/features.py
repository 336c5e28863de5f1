"""Features of image sets: image sources, collection batch by batch, npz files, and the cache of references.

Shapes: B batch, M images, F features.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from arpg.data.images import ImageSet, open_images
from arpg.errors import InputError, describe_broken, require, require_file
from arpg.evaluation.inception import Activations, Inception
from arpg.evaluation.metrics import Moments, RunningGains, Statistics
from arpg.executor import RayOptions, Report, open_workers
from arpg.files import hash_file, read_pickle, write_whole
from arpg.image import Pixels, adm_crop, check_pixels
from arpg.pipeline import choose_device
from arpg.storage import AnyPath, as_path, fetch, home, list_files

ARRAY = "arr_0"  # where np.savez puts what it is given, and where ADM's files have their images
THREADS = 8
NamedShape = tuple[str, tuple[int, ...]]  # the name and the shape of an image
SAVE_SECONDS = 60.0  # between two saves of the sums of a long collection
CHUNK = 250  # images that go through the networks together


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Images that can be read in batches, any number of times."""

    count: int
    batches: Callable[[int], Iterator[Pixels]]
    images: ImageSet | None = None  # where they are image files

    def jobs(self, batch_size: int) -> Iterator[Pixels | ImageSet]:
        """Yield what a worker needs for each batch: the image files to read, or else the pixels."""
        if self.images is None:
            yield from self.batches(batch_size)
            return
        for start in range(0, self.count, batch_size):
            yield self.images.only(range(start, min(start + batch_size, self.count)))


def open_source(path: str | AnyPath, *, size: int | None = None) -> ImageSource:
    """Open an npz file with images in arr_0 (uint8 [n, H, W, 3]), or a folder or zip file of image files.

    With a size, image files are cropped to that square as ADM prepares ImageNet; an npz file must have it already.
    """
    path = as_path(path)
    require(size is None or size >= 1, f"size is {size}; expected 1 or more pixels")
    return _open_npz(path, size) if path.suffix == ".npz" else from_images(open_images(path), size=size)


def from_array(pixels: Pixels, *, where: str = "images") -> ImageSource:
    """Return a source of images that are in memory."""
    check_pixels(pixels, what=where)

    def batches(batch_size: int) -> Iterator[Pixels]:
        for start in range(0, len(pixels), batch_size):
            yield pixels[start : start + batch_size]

    return ImageSource(len(pixels), batches)


def from_images(images: ImageSet, *, size: int | None = None) -> ImageSource:
    """Return a source of image files, read by several threads; with a size, cropped to that square."""

    def batches(batch_size: int) -> Iterator[Pixels]:
        require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
        first: NamedShape | None = None
        for start in range(0, len(images), batch_size):
            part = images.only(range(start, min(start + batch_size, len(images))))
            pixels = _read_batch(part, size=size, first=first)
            first = (images.names[0], pixels.shape[1:])
            yield pixels

    return ImageSource(len(images), batches, images)


def _read_batch(images: ImageSet, *, size: int | None, first: NamedShape | None) -> Pixels:
    """Read image files, all of the shape of the set's `first` (here if None): `[B, H, W, 3]`."""

    def read(index: int) -> Pixels:
        image = images.read(index)
        return np.asarray(image if size is None else adm_crop(image, size))

    with ThreadPoolExecutor(THREADS) as pool:
        arrays = list(pool.map(read, range(len(images))))
    name, shape = first or (images.names[0], arrays[0].shape)
    for i, array in enumerate(arrays):
        require(
            array.shape == shape,
            f"{images.where}: {images.names[i]} is {array.shape[1]}x{array.shape[0]} pixels, but "
            f"{name} is {shape[1]}x{shape[0]}; give a size to crop to",
        )
    return np.stack(arrays)


def npz_names(path: AnyPath) -> set[str]:
    """Return the names of the arrays in an npz file."""
    require_file(path, "an npz file")
    try:
        with zipfile.ZipFile(fetch(path)) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(describe_broken(path, "an npz file", error, starts=(b"PK",))) from None


def _open_npz(path: AnyPath, size: int | None) -> ImageSource:
    names = npz_names(path)
    require(
        ARRAY in names, f"{path} has no {ARRAY}, only {', '.join(sorted(names)) or 'nothing'}; expected images in it"
    )
    shape, dtype = _header(path)
    require(
        dtype == np.uint8 and len(shape) == 4 and shape[-1] == 3 and min(shape) > 0,
        f"{path}: {ARRAY} is {dtype} {list(shape)}; expected images as uint8 [n, height, width, 3], from 0 to 255",
    )
    require(
        size is None or shape[1:3] == (size, size),
        f"{path}: images are {shape[2]}x{shape[1]} pixels, not {size}x{size}; only image files are cropped",
    )
    bytes_each = shape[1] * shape[2] * shape[3]

    def batches(batch_size: int) -> Iterator[Pixels]:
        require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
        try:
            with zipfile.ZipFile(fetch(path)) as archive, archive.open(f"{ARRAY}.npy") as file:
                _skip_header(file)
                for start in range(0, shape[0], batch_size):
                    n = min(batch_size, shape[0] - start)
                    data = file.read(n * bytes_each)
                    require(
                        len(data) == n * bytes_each, f"{path} ends after {start} of {shape[0]} images; make it again"
                    )
                    # bytearray: torch wants memory that it could write to
                    yield np.frombuffer(bytearray(data), np.uint8).reshape(n, *shape[1:])
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"{path} is damaged ({error}); make or copy it again") from None

    return ImageSource(shape[0], batches)


def _header(path: AnyPath) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    try:
        with zipfile.ZipFile(fetch(path)) as archive, archive.open(f"{ARRAY}.npy") as file:
            shape, fortran, dtype = _skip_header(file)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} is damaged ({error}); make or copy it again") from None
    require(not fortran, f"{path}: {ARRAY} is stored column by column; save np.ascontiguousarray of it")
    return shape, dtype


def _skip_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    return read(file)


FORMAT = "arpg features 1"
KEYS = ("network", "n", "mu", "sigma", "mu_s", "sigma_s", "pool", "gains")


@dataclass(frozen=True, eq=False)
class Features:
    """Statistics in float64, from float32 features; the pooled features themselves are kept in float16, on the CPU.

    A file of statistics alone (`mu`, `sigma`) has no features, so only distances of Gaussians can be had from it.
    """

    pool: Statistics
    spatial: Statistics | None
    pool_MF: Tensor | None
    gain_M: Tensor | None  # of the Inception Score; None where the network has no logits
    network: str  # the identity of the network; empty where a file does not say

    def __post_init__(self) -> None:
        for name, x in (("features", self.pool_MF), ("gains", self.gain_M)):
            require(
                x is None or bool(torch.isfinite(x).all()), f"{name} hold numbers that are not finite; make them again"
            )

    @property
    def n(self) -> int:
        """Return the number of images that there are features of."""
        return self.pool.n if self.pool_MF is None else len(self.pool_MF)

    def save(self, path: AnyPath) -> None:
        """Write an npz file; `mu`, `sigma`, `mu_s` and `sigma_s` have the names of ADM's reference files."""
        arrays: dict[str, Any] = {"format": FORMAT, "network": self.network, "n": self.pool.n}
        arrays |= {"mu": self.pool.mean_F, "sigma": self.pool.cov_FF}
        if self.spatial is not None:
            arrays |= {"mu_s": self.spatial.mean_F, "sigma_s": self.spatial.cov_FF}
        if self.pool_MF is not None:
            arrays["pool"] = self.pool_MF
        if self.gain_M is not None:
            arrays["gains"] = self.gain_M
        plain: Any = {key: value.cpu().numpy() if isinstance(value, Tensor) else value for key, value in arrays.items()}

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.savez(file, **plain)

        write_whole(path, write)

    @staticmethod
    def load(path: AnyPath) -> Features:
        """Read a file of `save`, or one of statistics (`mu`, `sigma`, and for sFID `mu_s`, `sigma_s`)."""
        require_file(path, "an npz file of features or statistics")
        try:
            # Opened here: np.load leaves a damaged file open.
            with path.open("rb") as stream, np.load(stream) as file:
                arrays = {key: file[key] for key in file.files if key in KEYS}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(describe_broken(path, "an npz file", error, starts=(b"PK",))) from None
        network = str(arrays.pop("network", ""))
        found = {key: torch.from_numpy(np.asarray(array)) for key, array in arrays.items()}
        require("mu" in found and "sigma" in found, f"{path} has no mu and sigma; expected features or statistics")
        n = int(found["n"]) if "n" in found else 0

        def statistics(suffix: str) -> Statistics | None:
            if f"mu{suffix}" not in found or f"sigma{suffix}" not in found:
                return None
            return Statistics(found[f"mu{suffix}"].double(), found[f"sigma{suffix}"].double(), n)

        pool = statistics("")
        assert pool is not None
        return Features(pool, statistics("_s"), found.get("pool"), found.get("gains"), network)


class Collector:
    """Collects the features of uint8 images [B, H, W, 3] batch by batch; memory grows by 4 kB per image."""

    def __init__(self, inception: Inception) -> None:
        # Sums in double precision: on a GPU where there is one, but not every accelerator has float64.
        exact = inception.device if inception.device.type == "cuda" else torch.device("cpu")
        self.inception = inception
        self.pool, self.spatial = Moments(device=exact), Moments(device=exact)
        self.gains = RunningGains() if inception.has_logits else None
        self.kept: list[Tensor] = []

    def add(self, pixels_BHW3: Pixels | Tensor) -> None:
        """Add the features of a batch of images."""
        self.add_activations(self.inception.features(pixels_BHW3))

    def add_activations(self, found: Activations) -> None:
        """Add the features of a batch."""
        self.pool.add(found.pool)
        self.spatial.add(found.spatial)
        self.kept.append(found.pool.half().cpu())
        if self.gains is not None and found.logits is not None:
            self.gains.add(found.logits)

    def state(self) -> dict[str, Any]:
        """Return the sums and features so far, for `load_state`."""
        sums = [(moments.n, moments.sum_F, moments.products_FF) for moments in (self.pool, self.spatial)]
        gains = None if self.gains is None else (self.gains.waiting, self.gains.done)
        return {"sums": sums, "kept": self.kept, "gains": gains}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        for moments, (n, sum_F, products_FF) in zip((self.pool, self.spatial), state["sums"], strict=True):
            moments.n = n
            moments.sum_F, moments.products_FF = sum_F.to(moments.device), products_FF.to(moments.device)
        self.kept = list(state["kept"])
        if self.gains is not None:
            self.gains.waiting, self.gains.done = map(list, state["gains"])

    def features(self) -> Features:
        """Return the features of all batches so far."""
        require(self.pool.n >= 2, f"there are {self.pool.n} images; a covariance needs 2 or more")
        return Features(
            self.pool.statistics().to("cpu"),
            self.spatial.statistics().to("cpu"),
            torch.cat(self.kept),
            None if self.gains is None else self.gains.gains(),
            self.inception.identity,
        )


@dataclass(frozen=True, eq=False)
class FeatureExtractor:
    """Computes the features of a batch of pixels or image files: the work of one worker."""

    inception: Inception
    size: int | None = None
    first: NamedShape | None = None  # of the image files
    to_cpu: bool = False

    def __call__(self, job: Pixels | Tensor | ImageSet, report: Report) -> Activations:
        """Return the features of a batch."""
        pixels = _read_batch(job, size=self.size, first=self.first) if isinstance(job, ImageSet) else job
        found = self.inception.features(pixels)
        if not self.to_cpu:
            return found
        logits = None if found.logits is None else found.logits.cpu()
        return Activations(found.pool.cpu(), found.spatial.cpu(), logits)


def _start_extractor(extractor: FeatureExtractor, device: str) -> FeatureExtractor:
    """Move the network to a worker's device."""
    extractor.inception.network.to(choose_device(device))
    return extractor


def collect(
    inception: Inception,
    batches: Iterable[Pixels | Tensor | ImageSet],
    *,
    progress: Callable[[int], None] | None = None,
    start: Callable[[], FeatureExtractor] | None = None,
    ray: RayOptions | None = None,
    resume: Path | None = None,
) -> Features:
    """Return the features of all batches; `progress(images done)` is called after each.

    `ray`: the workers of a Ray cluster, which `start` makes, compute the features. Sums are made here and in order, so
    the statistics are the same. `resume`: a file with the sums so far, from which an interrupted call with the same
    batches continues.
    """
    collector, done, saved = Collector(inception), 0, time.monotonic()
    if resume is not None and resume.is_file():
        try:
            state = read_pickle(resume)
            collector.load_state(state)
            done = state["batches"]
        except InputError as error:
            log.warning("%s; computing the features from the start", error)
    with open_workers(start or (lambda: FeatureExtractor(inception)), ray) as workers:
        for found in workers.map(itertools.islice(batches, done, None)):
            collector.add_activations(found)
            done += 1
            if progress is not None:
                progress(collector.pool.n)
            if resume is not None and time.monotonic() - saved >= SAVE_SECONDS:
                write_whole(resume, partial(torch.save, {"batches": done, **collector.state()}))
                saved = time.monotonic()
    if resume is not None:
        resume.unlink(missing_ok=True)
    return collector.features()


log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


def has_features(path: AnyPath) -> bool:
    """Return whether the file holds features or statistics and no images, so that no network is needed."""
    return path.suffix == ".npz" and "mu" in (names := npz_names(path)) and ARRAY not in names


def read_features(
    path: AnyPath,
    inception: Inception,
    *,
    size: int | None = None,
    batch_size: int = 64,
    keep: bool = False,
    progress: Progress | None = None,
    ray: RayOptions | None = None,
) -> Features:
    """Return the features of an npz file, a folder or a zip file; with `keep`, cached in the user's cache folder.

    With `keep` or `ray`, an interrupted call continues.

    ADM's reference files hold images and the statistics of many more: distances then use those, as ADM does.
    """
    if has_features(path):
        return Features.load(path)
    source = open_source(path, size=size)
    key = _key(path, inception, size) if keep or ray is not None else None
    cached = home() / "features" / f"{key}.npz" if keep else None
    resume = None if key is None else home() / "features" / f"{key}-{batch_size}.partial"
    features = None
    if cached is not None and cached.is_file():
        try:
            features = Features.load(cached)
        except InputError as error:
            log.warning("%s; computing the features again", error)
    if features is None:
        first = None
        if source.images is not None and size is None:
            first = (source.images.names[0], np.asarray(source.images.read(0)).shape)
        extractor = FeatureExtractor(inception, size, first, to_cpu=ray is not None)
        start = (lambda: extractor) if ray is None else partial(_start_extractor, extractor, "auto")
        on_batch = None if progress is None else (lambda done: progress(done, source.count))
        jobs = source.jobs(batch_size)
        features = collect(inception, jobs, progress=on_batch, start=start, ray=ray, resume=resume)
        if cached is not None:
            features.save(cached)
    if path.suffix == ".npz" and "mu" in npz_names(path):
        given = Features.load(path)
        features = dataclasses.replace(features, pool=given.pool, spatial=given.spatial)
    return features


def _key(path: AnyPath, inception: Inception, size: int | None) -> str:
    """Return a hash of the bytes of the images, of the network and of the crop."""
    digest = hashlib.sha256(f"{FORMAT} {inception.identity} {size}\n".encode())
    if path.is_dir():
        files: list[tuple[str, AnyPath]] = [(name, path / name) for name in sorted(list_files(path))]
    else:
        archive = next(p for p in (path, *path.parents) if p.is_file())
        files = [(str(path).removeprefix(str(archive)).lstrip("/") or ".", archive)]
    for name, file in files:  # a store knows the version of a file without its bytes
        digest.update(f"{name} {hash_file(file) if isinstance(file, Path) else file.version}\n".encode())
    return digest.hexdigest()


def reference_features(
    inception: Inception,
    images: ImageSet,
    size: int,
    *,
    keep: AnyPath | None = None,
    progress: Progress | None = None,
) -> Features:
    """Return the features of the centre crops of real images at the model's size, which it was trained to generate.

    In the folder `keep` they are kept under a hash of all the pixels, so that other images are not taken for them.
    """
    source = from_images(images, size=size)
    path = None if keep is None else keep / f"reference-{_digest(source, inception)}.npz"
    if path is not None and path.exists():
        return Features.load(path)
    on_batch = None if progress is None else (lambda done: progress(done, len(images)))
    features = collect(inception, source.batches(CHUNK), progress=on_batch)
    if path is not None:
        features.save(path)
    return features


def _digest(source: ImageSource, inception: Inception) -> str:
    digest = hashlib.sha256(inception.identity.encode())
    for pixels_BHW3 in source.batches(CHUNK):
        digest.update(f"{pixels_BHW3.shape[1:]}".encode())
        digest.update(np.ascontiguousarray(pixels_BHW3).data)
    return digest.hexdigest()[:16]
