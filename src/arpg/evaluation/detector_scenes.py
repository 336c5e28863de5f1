"""What judges learn from: scenes of every combination, drawn by many processes, some through a tokenizer."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from arpg.checkpoint import load_tokenizer
from arpg.data.asks import draw_ask
from arpg.data.composer import SIZE, Composer, Scene
from arpg.errors import require
from arpg.evaluation.detector import DetectorConfig
from arpg.evaluation.detector_training import Scenes, to_arrays
from arpg.hub import resolve
from arpg.image import Pixels, to_images, to_uint8
from arpg.tokenizer import VQTokenizer

T = TypeVar("T")
AT_ONCE = 256
_composer: Composer | None = None  # of a worker process


def draw_scenes(
    sets: tuple[str, str],
    config: DetectorConfig,
    *,
    num: int,
    seed: int = 0,
    processes: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Scenes:
    """Scenes of whatever can be asked, held out or not: a judge has to know everything. 0 processes: in this one."""
    require(num >= 1, f"the number of scenes is {num}; expected 1 or more")
    parts: list[Scenes] = []
    pack = partial(to_arrays, kinds=config.kinds, colours=config.colours)
    for part in draw_parts(sets, pack, num=num, seed=seed, processes=processes):
        parts.append(part)
        if progress is not None:
            progress(sum(map(len, parts)))
    names = [field.name for field in dataclasses.fields(Scenes)]
    return Scenes(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def through_tokenizer(scenes: Scenes, name: str, *, device: torch.device, batch_size: int = 256) -> Scenes:
    """Every other scene as a tokenizer gives it back: that is how a model's pictures look."""
    pixels = half_tokenized(scenes.pixels_nHW3, name, device=device, batch_size=batch_size)
    return dataclasses.replace(scenes, pixels_nHW3=pixels)


def half_tokenized(pixels_nHW3: Pixels, name: str, *, device: torch.device, batch_size: int = 256) -> Pixels:
    """Every other image as the tokenizer of a model gives it back."""
    tokenizer = load_tokenizer(resolve(name), device=device, dtype=torch.float32)
    pixels = pixels_nHW3.copy()
    pixels[::2] = tokenized(pixels[::2], tokenizer, batch_size=batch_size)
    return pixels


@torch.inference_mode()
def tokenized(pixels_nHW3: Pixels, tokenizer: VQTokenizer, *, batch_size: int = 256) -> Pixels:
    """Images as a tokenizer gives them back."""
    again = np.empty_like(pixels_nHW3)
    for start in range(0, len(again), batch_size):
        image = to_images(pixels_nHW3[start : start + batch_size], tokenizer.device).to(tokenizer.dtype)
        grid = tokenizer.grid(image.shape[2], image.shape[3])
        again[start : start + batch_size] = to_uint8(tokenizer.decode(tokenizer.encode(image), grid)).cpu().numpy()
    return again


def draw_parts(
    sets: tuple[str, str],
    pack: Callable[[list[Scene]], T],
    *,
    num: int,
    seed: int,
    size: int = SIZE,
    processes: int = 0,
) -> Iterator[T]:
    """Scenes in parts of 256, each packed where it was drawn (so `pack` must be one that can be sent there)."""
    ranges = iter([range(start, min(start + AT_ONCE, num)) for start in range(0, num, AT_ONCE)])
    if processes == 0:
        _start(*sets, size)
        yield from (_draw(part, seed, pack) for part in ranges)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(*sets, size)) as pool:
        waiting = [pool.submit(_draw, part, seed, pack) for part in islice(ranges, 4 * processes)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(_draw, part, seed, pack) for part in islice(ranges, 1)]


def _start(fruits: str, emoji: str, size: int) -> None:
    global _composer
    _composer = Composer(fruits, emoji, size=size)


def _draw(numbers: range, seed: int, pack: Callable[[list[Scene]], T]) -> T:
    assert _composer is not None
    scenes = []
    for number in numbers:
        rng = np.random.default_rng([seed, number, 1])
        scenes.append(_composer.compose(draw_ask(rng, extra=_composer.extra, everything=True), rng))
    return pack(scenes)
