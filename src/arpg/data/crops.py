"""Crops of images for tokenizer training: a pure function of the seed and the sample number.

Sample number = step * batch size + index in the global batch. The source, image, window and mirroring of a sample are
hashes of (seed, sample number), so a run is the same on any number of processes and resumes at any step.

Samples come in cycles of 4096. In each cycle every source has its exact share of the samples, shuffled, so the sample
number also gives the index of a sample among those of its source. A source is read in passes: every image once per
pass, in a new permutation each time.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from arpg.data.images import ImageSet
from arpg.errors import require
from arpg.image import View, adm_crop, normalize, to_images, view_square

CYCLE = 4096
THREADS = 8  # that read images
PREFETCH = 2  # batches that are loaded ahead when the images do not fit into memory

Pixels = NDArray[np.uint8]

# What a hash is for; each purpose has its own stream of numbers.
_CYCLE, _PASS, _TOP, _LEFT, _MIRROR, _ZOOM = range(6)


class Window(NamedTuple):
    """One sample: an image (counted over all sources), a square in it, and whether it is mirrored."""

    image: int
    top: int
    left: int
    side: int
    mirror: bool


class CropStream:
    """Random crops of the images of several sources, each with a weight."""

    def __init__(
        self,
        sources: Sequence[tuple[ImageSet, float]],
        size: int,
        *,
        seed: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        margin: float = 1.1,
        scale: tuple[float, float] = (1.0, 1.0),
        memory_limit: int = 4 << 30,
    ) -> None:
        require(len(sources) >= 1, "there are no image sources; give at least one")
        require(size >= 1, f"size is {size}; expected 1 or more pixels")
        require(margin >= 1, f"margin is {margin}; expected 1 or more (1.1 leaves a tenth for moving the crop)")
        require(0 < scale[0] <= scale[1], f"scale is {scale}; expected two rising numbers above 0")
        require(
            batch_size >= 1 and batch_size % world_size == 0,
            f"batch_size is {batch_size}; expected a multiple of the number of processes, {world_size}",
        )
        assert 0 <= rank < world_size
        self.size, self.seed, self.batch_size, self.scale = size, seed, batch_size, scale
        self.square = int(margin * size)  # the side to which images are cropped before the random crop
        self._first, self._local = rank * (batch_size // world_size), batch_size // world_size
        self._sets = [images for images, _ in sources]
        self._sizes = np.array([len(images) for images in self._sets])
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
        self._counts = _shares([weight for _, weight in sources])
        self._pending: dict[int, list[Future[Pixels]]] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="crops")
        total = int(self._starts[-1])
        self._on_device: Tensor | None = None
        self._memory: Pixels | None = None
        if total * self.square**2 * 3 <= memory_limit:
            self._memory = np.empty((total, self.square, self.square, 3), np.uint8)
            _fill(self._memory, self._read)

    def batch(self, step: int) -> Pixels:
        """Return this process's part of a global batch, `[local batch, size, size, 3]`."""
        if self._memory is not None:
            return np.stack(list(self._pool.map(self._sample, self._windows(step))))
        wanted = range(step, step + 1 + PREFETCH)
        for other in set(self._pending) - set(wanted):
            for future in self._pending.pop(other):
                future.cancel()
        for ahead in wanted:
            if ahead not in self._pending:
                self._pending[ahead] = [self._pool.submit(self._sample, w) for w in self._windows(ahead)]
        return np.stack([future.result() for future in self._pending.pop(step)])

    def images(self, step: int, device: torch.device) -> Tensor:
        """Return the batch as images in [-1, 1] on a device, `[local batch, 3, size, size]`.

        On an accelerator the images are kept in its memory and it crops and resizes the windows: many times faster,
        and equal to `batch` but for the rounding of resized windows.
        """
        if self._memory is None or device.type == "cpu":
            return to_images(self.batch(step), device)
        if self._on_device is None:
            self._on_device = torch.from_numpy(self._memory).permute(0, 3, 1, 2).to(device)
        return normalize(crop_windows(self._on_device, torch.tensor(self._windows(step)).to(device), self.size))

    def _windows(self, step: int) -> list[Window]:
        number = step * self.batch_size + self._first + np.arange(self._local, dtype=np.int64)
        image = self._images(number)
        low, high = self.scale
        zoom = low + (high - low) * (self._hash(_ZOOM, number) >> np.uint64(11)) * 2.0**-53
        side = np.clip(np.rint(self.size / zoom).astype(np.int64), 1, self.square)
        room = (self.square - side + 1).astype(np.uint64)
        top, left = self._hash(_TOP, number) % room, self._hash(_LEFT, number) % room
        mirror = self._hash(_MIRROR, number) >> np.uint64(63) == 1
        return [Window(*w) for w in zip(*(a.tolist() for a in (image, top, left, side, mirror)), strict=True)]

    def _images(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the image of each sample, counted over all sources."""
        image = np.empty(len(number), np.int64)
        cycle = number // CYCLE
        for c in np.unique(cycle).tolist():
            here = np.flatnonzero(cycle == c)
            slot = number[here] % CYCLE
            sources, ranks = _cycle(self.seed, c, self._counts)
            for s in np.unique(sources[slot]).tolist():
                mine = sources[slot] == s
                size = int(self._sizes[s])
                rank = c * self._counts[s] + ranks[slot[mine]]  # index among the samples of its source
                passes = zip((rank // size).tolist(), (rank % size).tolist(), strict=True)
                image[here[mine]] = self._starts[s] + [_permutation(self.seed, s, n, size)[k] for n, k in passes]
        return image

    def _hash(self, purpose: int, number: NDArray[np.int64]) -> NDArray[np.uint64]:
        return _hash(self.seed, purpose, 0, number)

    def _read(self, image: int) -> Pixels:
        """Read the centre square of an image from its file."""
        source = int(np.searchsorted(self._starts, image, side="right")) - 1
        return np.asarray(adm_crop(self._sets[source].read(image - int(self._starts[source])), self.square))

    def _sample(self, w: Window) -> Pixels:
        square = self._read(w.image) if self._memory is None else self._memory[w.image]
        crop = square[w.top : w.top + w.side, w.left : w.left + w.side]
        if w.side != self.size:
            crop = np.asarray(Image.fromarray(crop).resize((self.size, self.size), Image.Resampling.BILINEAR))
        return crop[:, ::-1] if w.mirror else crop


def crop_windows(squares_N3SS: Tensor, window_B5: Tensor, size: int) -> Tensor:
    """Crop windows (image, top, left, side, mirror) and resize them bilinearly: `[B, 3, size, size]` in [0, 255]."""
    image, top, left, side, mirror = window_B5.unbind(1)
    whole = squares_N3SS.shape[-1]
    center = (torch.arange(size, device=window_B5.device) + 0.5) / size  # of each pixel, as a fraction of the window
    across = torch.where(mirror[:, None] == 1, 1.0 - center, center)
    x = (left[:, None] + across * side[:, None]) * (2.0 / whole) - 1.0
    y = (top[:, None] + center * side[:, None]) * (2.0 / whole) - 1.0
    grid = torch.stack((x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)), dim=-1)
    return F.grid_sample(squares_N3SS[image].float(), grid, mode="bilinear", padding_mode="border", align_corners=False)


def center_crops(source: ImageSet, size: int, limit: int | None = None) -> Pixels:
    """Read the centre crops of the first `limit` images (or of all), in order: `[n, size, size, 3]`."""
    count = len(source) if limit is None else min(limit, len(source))
    out = np.empty((count, size, size, 3), np.uint8)
    _fill(out, lambda index: np.asarray(adm_crop(source.read(index), size)))
    return out


def _fill(out: Pixels, read: Callable[[int], Pixels]) -> None:
    """Fill `out[i]` with `read(i)` for all i; the threads, and the files that they hold open, end with it."""

    def fill(index: int) -> None:
        out[index] = read(index)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="crops") as pool:
        for _ in pool.map(fill, range(len(out))):
            pass


def random_views(name: str, count: int, size: int, *, seed: int, zoom: bool) -> list[View]:
    """Choose `count` windows of the image `name`, a function of the name and the seed alone.

    Windows are as large as the image; with `zoom` from 7/8 of that up to the whole square they are cut from.
    """
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    number = np.arange(count, dtype=np.int64)
    square = view_square(size)

    def words(purpose: int) -> NDArray[np.uint64]:
        return _hash(seed, purpose, word, number)

    side = np.full(count, size, np.uint64)
    if zoom:
        smallest = size - size // 8
        side = smallest + words(_ZOOM) % np.uint64(square - smallest + 1)
    room = square - side + 1
    left, top, mirror = words(_LEFT) % room, words(_TOP) % room, words(_MIRROR) >> np.uint64(63) == 1
    return [View(*view) for view in zip(*(a.tolist() for a in (left, top, side, mirror)), strict=True)]


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Divide the samples of a cycle among the sources: whole numbers in proportion to the weights."""
    require(min(weights) > 0, f"the weights of the sources are {list(weights)}; expected numbers above 0")
    exact = np.array(weights, np.float64) / sum(weights) * CYCLE
    require(
        bool(exact.min() >= 1),
        f"the weights of the sources are {list(weights)}; the smallest must be at least 1/{CYCLE} of their sum",
    )
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: CYCLE - int(counts.sum())]] += 1
    return tuple(int(count) for count in counts)


@functools.lru_cache(maxsize=8)
def _cycle(seed: int, cycle: int, counts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each sample of a cycle, its source and how many samples of that source come before it."""
    shuffle = np.argsort(_hash(seed, _CYCLE, cycle, np.arange(CYCLE)), kind="stable")
    sources = np.repeat(np.arange(len(counts)), counts)[shuffle]
    ranks = np.empty(CYCLE, np.int64)
    for source, count in enumerate(counts):
        ranks[sources == source] = np.arange(count)
    return sources, ranks


@functools.lru_cache(maxsize=16)
def _permutation(seed: int, source: int, number_of_pass: int, size: int) -> NDArray[np.int32]:
    """Return the order in which a pass reads the images of a source."""
    number = number_of_pass * size + np.arange(size)
    return np.argsort(_hash(seed, _PASS, source, number), kind="stable").astype(np.int32)


def _hash(seed: int, purpose: int, which: int, number: NDArray[np.int64]) -> NDArray[np.uint64]:
    key = np.zeros(1, np.uint64)
    for word in (seed, purpose, which):
        key = _mix(key ^ np.uint64(word & 0xFFFFFFFFFFFFFFFF))
    return _mix(_mix(number.astype(np.uint64)) ^ key)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 (Steele et al., 2014): a bijection of 64-bit words that leaves no visible structure."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
