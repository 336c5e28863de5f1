"""`arpg tokenize`: encode images into a token set; an interrupted run continues where it stopped."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from arpg.data.crops import random_views
from arpg.data.images import ImageSet
from arpg.data.tokens import TOKENS, TokenSet, TokenWriter, open_tokens
from arpg.errors import require
from arpg.files import hash_tensors
from arpg.image import adm_crop, crop_views, ten_crop, to_images
from arpg.storage import AnyPath
from arpg.tasks.control_input import ControlInput
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
    shard_size: int = 65536,
    control: str = "",
) -> TokenSet:
    """Encode the centre crop (or ten crops) of every image into a token folder; `batch_size` counts crops.

    `views` above 1: the centre crop and `views` - 1 random ones, half of them mirrored, with `zoom` of random size; a
    function of the image's name and `seed`.
    `control`: the kind of condition images to extract from the crops and store with the tokens.
    """
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    require(views >= 1, f"views is {views}; expected 1 or more")
    require(not ten_crops or views == 1, f"views is {views} and ten crops are asked for; give one of them")
    grid, random = tokenizer.grid(size, size), f" {seed} {zoom}" if views > 1 else ""
    views = 10 if ten_crops else views
    expected = _fingerprint(tokenizer, images, size, control + random)
    if (folder / TOKENS).exists():
        tokens = open_tokens(folder)
        require(
            (tokens.info.fingerprint, tokens.views) == (expected, views),
            f"{folder} was made with another tokenizer, other images or other settings; "
            "delete it or choose another folder",
        )
        return tokens
    vocab_size = tokenizer.config.codebook_size
    writer = TokenWriter(
        folder,
        grid=grid,
        vocab_size=vocab_size,
        classes=images.classes,
        views=views,
        shard_size=shard_size,
        fingerprint=expected,
        captioned=images.captions is not None,
        control=control,
        control_size=(size, size) if control else (0, 0),
    )
    if writer.num_done:
        _log.info("%s: continuing after %d images", folder, writer.num_done)

    def prepare(index: int) -> Prepared:
        image = images.read(index)
        if ten_crops:
            crops = ten_crop(image, size)
        else:
            others = random_views(images.names[index], views - 1, size, seed=seed, zoom=zoom)
            crops = [adm_crop(image, size), *(crop_views(image, size, others) if others else ())]
        maps = (
            np.stack([np.asarray(ControlInput.from_image(crop, control).image) for crop in crops]) if control else None
        )
        return np.stack([np.asarray(crop) for crop in crops]), maps

    labels = np.array(images.labels, np.int32)
    per_batch = max(1, batch_size // views)
    done = writer.num_done
    for batch in _batches(prepare, range(done, len(images)), per_batch):
        ids = encode_pixels(tokenizer, np.concatenate([pixels for pixels, _ in batch]))
        part = slice(done, done + len(batch))
        maps = np.stack([maps for _, maps in batch if maps is not None]) if control else None
        writer.add(ids.reshape(len(batch), views, -1), labels[part], images.captions and images.captions[part], maps)
        done += len(batch)
        if progress is not None:
            progress(done, len(images))
    writer.close()
    return open_tokens(folder)


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
