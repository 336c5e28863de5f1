"""`arpg tokenize`: encode images into a token set; an interrupted run continues where it stopped."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from arpg.data.crops import random_views
from arpg.data.images import ImageSet
from arpg.data.tokens import (
    SHARD_SIZE,
    TOKENS,
    Shard,
    TokenInfo,
    TokenSet,
    begin_tokens,
    finish_tokens,
    max_shard_images,
    open_tokens,
    pack_maps,
    write_shard,
)
from arpg.device import choose_device
from arpg.errors import require
from arpg.executor import RayOptions, Report, open_workers
from arpg.extractors import extract
from arpg.files import hash_tensors
from arpg.image import adm_crop, crop_views, ten_crop, to_images
from arpg.storage import AnyPath, Lease
from arpg.tokenizer import VQTokenizer

THREADS = 8
Prepared = tuple[NDArray[np.uint8], NDArray[np.uint8] | None]  # the crops of an image, and their condition images

_log = logging.getLogger(__name__)


def tokenize(
    tokenizer: VQTokenizer,
    images: ImageSet,
    folder: AnyPath,
    *,
    size: int,
    ten_crops: bool = False,
    views: int = 1,
    zoom: bool = False,
    seed: int = 0,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
    shard_size: int = SHARD_SIZE,
    control: str = "",
    depth: str | None = None,
    ray: RayOptions | None = None,
    device: str | None = None,
) -> TokenSet:
    """Encode the centre crop (or ten crops) of every image into a token folder; `batch_size` counts crops.

    `views` above 1: the centre crop and `views` - 1 random ones, half of them mirrored, with `zoom` of random size; a
    function of the image's name and `seed`.
    `control`: the kind of condition images to extract from the crops and store with the tokens; `depth` names the depth
    model, see `arpg.extractors.open_depth`.
    `ray`: encode on a Ray cluster, where workers move the tokenizer to `device`; the files are the same.
    """
    require(shard_size >= 1, f"shard_size is {shard_size}; expected 1 or more images")
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    require(views >= 1, f"views is {views}; expected 1 or more")
    require(not ten_crops or views == 1, f"views is {views} and ten crops are asked for; give one of them")
    grid, random = tokenizer.grid(size, size), f" {seed} {zoom}" if views > 1 else ""
    views = 10 if ten_crops else views
    expected = _fingerprint(tokenizer, images, size, control + (depth or "") + random)
    if (folder / TOKENS).exists():
        tokens = open_tokens(folder)
        require(
            (tokens.info.fingerprint, tokens.views) == (expected, views),
            f"{folder} was made with another tokenizer, other images or other settings; "
            "delete it or choose another folder",
        )
        return tokens
    info = TokenInfo(
        views,
        grid,
        tokenizer.config.codebook_size,
        images.classes,
        max(1, len(images.classes)),
        expected,
        images.captions is not None,
        control,
        (size, size) if control else (0, 0),
    )
    if control:
        shard_size = min(shard_size, max_shard_images(control, (size, size), views))
    encoder = ShardEncoder(tokenizer, folder, info, size, ten_crops, zoom, seed, batch_size, depth)
    parts = [range(start, min(start + shard_size, len(images))) for start in range(0, len(images), shard_size)]
    with Lease(folder) as lease:
        shards = begin_tokens(folder, info)
        for number, shard in shards.items():
            expected_size = len(parts[number]) if number < len(parts) else 0
            require(
                shard.num_images == expected_size,
                f"{folder / shard.labels} has {shard.num_images} images; expected {expected_size}; "
                f"continue with the shard_size that it was begun with (now {shard_size}), or delete the folder",
            )
        before = sum(shard.num_images for shard in shards.values())
        if before:
            _log.info("%s: continuing after %d images", folder, before)
        todo = [number for number in range(len(parts)) if number not in shards]
        jobs = ((number, images.only(parts[number])) for number in todo)
        with open_workers(partial(_start_encoder, encoder, device), ray) as workers:
            on_progress = None if progress is None else (lambda done: progress(before + done, len(images)))
            for number, shard in zip(todo, workers.map(jobs, on_progress=on_progress), strict=True):
                shards[number] = shard
        lease.check()
        finish_tokens(folder, info, [shards[number] for number in range(len(parts))])
    return open_tokens(folder)


@dataclass(frozen=True, eq=False)
class ShardEncoder:
    """Encodes the images of a shard and writes it: the work of one worker."""

    tokenizer: VQTokenizer
    folder: AnyPath
    info: TokenInfo
    size: int
    ten_crops: bool
    zoom: bool
    seed: int
    batch_size: int
    depth: str | None

    def __call__(self, job: tuple[int, ImageSet], report: Report) -> Shard:
        """Encode and write shard `job[0]`; batches are counted from its start, so nothing depends on other shards."""
        number, images = job
        ids, maps, done = [], [], 0
        per_batch = max(1, self.batch_size // self.info.views)
        for batch in _batches(partial(self._prepare, images), range(len(images)), per_batch):
            found = encode_pixels(self.tokenizer, np.concatenate([pixels for pixels, _ in batch]))
            ids.append(found.reshape(len(batch), self.info.views, -1).astype(self.info.dtype))
            if self.info.control:
                maps.append(pack_maps(np.stack([each for _, each in batch if each is not None]), self.info.control))
            done += len(batch)
            report(done)
        packed = np.concatenate(maps) if maps else None
        labels = np.array(images.labels, np.int32)
        return write_shard(self.folder, self.info, number, np.concatenate(ids), labels, images.captions or (), packed)

    def _prepare(self, images: ImageSet, index: int) -> Prepared:
        image, control = images.read(index), self.info.control
        if self.ten_crops:
            crops = ten_crop(image, self.size)
        else:
            name, count = images.names[index], self.info.views - 1
            others = random_views(name, count, self.size, seed=self.seed, zoom=self.zoom)
            crops = [adm_crop(image, self.size), *(crop_views(image, self.size, others) if others else ())]
        pixels = np.stack([np.asarray(crop) for crop in crops])
        if not control:
            return pixels, None
        return pixels, np.stack([np.asarray(extract(control, crop, depth=self.depth)) for crop in crops])


def _start_encoder(encoder: ShardEncoder, device: str | None) -> ShardEncoder:
    """Move the tokenizer to a worker's device; None: it is there."""
    if device is not None:
        encoder.tokenizer.to(choose_device(device))
    return encoder


@torch.inference_mode()
def encode_pixels(tokenizer: VQTokenizer, pixels_BHW3: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Encode 8-bit images to ids `[B, N]`."""
    images_B3HW = to_images(pixels_BHW3, tokenizer.device).to(tokenizer.dtype)
    ids_BN: NDArray[np.int64] = tokenizer.encode(images_B3HW).cpu().numpy()
    return ids_BN


def _batches(prepare: Callable[[int], Prepared], numbers: range, size: int) -> Iterator[list[Prepared]]:
    """Yield prepared images in order, `size` at a time, while threads prepare the next two batches."""
    waiting: deque[Future[Prepared]] = deque()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize") as pool:
        try:
            for start in range(0, len(numbers), size):
                ahead = numbers[start + len(waiting) : start + 3 * size]
                waiting.extend(pool.submit(prepare, number) for number in ahead)
                yield [waiting.popleft().result() for _ in numbers[start : start + size]]
        finally:
            for future in waiting:
                future.cancel()


def _fingerprint(tokenizer: VQTokenizer, images: ImageSet, size: int, control: str) -> str:
    """Hash what the set depends on: the weights, names, labels and captions of the images, the size, the maps."""
    digest = hashlib.sha256(f"{size} {images.classes} {images.labels}{control}".encode())
    digest.update("\n".join((*images.names, *(images.captions or ()))).encode())
    return fingerprint(tokenizer, digest)


def fingerprint(tokenizer: VQTokenizer, digest: hashlib._Hash) -> str:
    """Return the hash of `digest` and of the weights that encode."""
    return hash_tensors(tokenizer.state_dict(), digest, names_only=True)[:32]
