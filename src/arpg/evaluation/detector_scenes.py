"""What the detector learns from: scenes of every combination, drawn by many processes, some through a tokenizer."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

import numpy as np
import torch

from arpg.checkpoint import load_tokenizer
from arpg.data.asks import draw_ask
from arpg.data.composer import Composer
from arpg.errors import require
from arpg.evaluation.detector import DetectorConfig
from arpg.evaluation.detector_training import Scenes, to_arrays
from arpg.hub import resolve
from arpg.image import to_images, to_uint8

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
    for part in _drawn(sets, config, num, seed, processes):
        parts.append(part)
        if progress is not None:
            progress(sum(map(len, parts)))
    names = [field.name for field in dataclasses.fields(Scenes)]
    return Scenes(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def through_tokenizer(scenes: Scenes, name: str, *, device: torch.device, batch_size: int = 256) -> Scenes:
    """Every other scene as a tokenizer gives it back: that is how a model's pictures look."""
    tokenizer = load_tokenizer(resolve(name), device=device, dtype=torch.float32)
    pixels = scenes.pixels_nHW3.copy()
    index = np.arange(0, len(scenes), 2)
    with torch.inference_mode():
        for start in range(0, len(index), batch_size):
            part = index[start : start + batch_size]
            image = to_images(pixels[part], device)
            grid = tokenizer.grid(image.shape[2], image.shape[3])
            pixels[part] = to_uint8(tokenizer.decode(tokenizer.encode(image), grid)).cpu().numpy()
    return dataclasses.replace(scenes, pixels_nHW3=pixels)


def _drawn(sets: tuple[str, str], config: DetectorConfig, num: int, seed: int, processes: int) -> Iterator[Scenes]:
    ranges = iter([range(start, min(start + AT_ONCE, num)) for start in range(0, num, AT_ONCE)])
    if processes == 0:
        _start(*sets)
        yield from (_draw(part, seed, config) for part in ranges)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=sets) as pool:
        waiting = [pool.submit(_draw, part, seed, config) for part in islice(ranges, 4 * processes)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(_draw, part, seed, config) for part in islice(ranges, 1)]


def _start(fruits: str, emoji: str) -> None:
    global _composer
    _composer = Composer(fruits, emoji)


def _draw(numbers: range, seed: int, config: DetectorConfig) -> Scenes:
    assert _composer is not None
    scenes = []
    for number in numbers:
        rng = np.random.default_rng([seed, number, 1])
        scenes.append(_composer.compose(draw_ask(rng, extra=_composer.extra, everything=True), rng))
    return to_arrays(scenes, config.kinds, config.colours)
