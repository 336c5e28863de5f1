"""Composed scenes to token sets: many processes draw, one encodes; an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arpg.data.composer import Composer
from arpg.data.tokenize import encode_pixels, fingerprint
from arpg.data.tokens import TOKENS, TokenSet, TokenWriter, open_tokens
from arpg.errors import require
from arpg.extractors import depth_map
from arpg.tokenizer import VQTokenizer

Drawn = tuple[NDArray[np.uint8], list[str], NDArray[np.uint8]]  # pixels, captions, depth as condition images
AT_ONCE = 256  # scenes that a process draws before it hands them over
_composer: Composer | None = None  # of a worker process


def compose_tokens(
    tokenizer: VQTokenizer,
    sets: tuple[str, str],
    folder: Path,
    *,
    num: int,
    seed: int,
    size: int = 96,
    processes: int = 0,
    shard_size: int = 65536,
    progress: Callable[[int, int], None] | None = None,
    depth: bool = False,
) -> TokenSet:
    """Scenes `seed` to `seed + num - 1` of the fruit and emoji sets, with captions; 0 processes: in this one.

    `depth`: with their exact depth as condition images.
    """
    require(num >= 1, f"the number of scenes is {num}; expected 1 or more")
    digest = hashlib.sha256(f"scenes {sets} {seed} {num} {size}{' depth' if depth else ''}".encode())
    about = fingerprint(tokenizer, digest)
    if (folder / TOKENS).exists():
        tokens = open_tokens(folder)
        require(
            tokens.info.fingerprint == about,
            f"{folder} was made with another tokenizer, other sets or settings; delete it or choose another folder",
        )
        return tokens
    writer = TokenWriter(
        folder,
        grid=tokenizer.grid(size, size),
        vocab_size=tokenizer.config.codebook_size,
        classes=(),
        views=1,
        shard_size=shard_size,
        fingerprint=about,
        captioned=True,
        control="depth" if depth else "",
        control_size=(size, size) if depth else (0, 0),
    )
    starts = range(writer.num_done, num, AT_ONCE)
    ranges = [range(seed + start, seed + min(start + AT_ONCE, num)) for start in starts]
    done = writer.num_done
    for pixels_BHW3, captions, maps_BHW in _drawn(sets, size, ranges, processes):
        ids_BN = encode_pixels(tokenizer, pixels_BHW3)
        maps = maps_BHW[:, None] if depth else None
        writer.add(ids_BN[:, None], np.zeros(len(captions), np.int32), captions, maps)
        done += len(captions)
        if progress is not None:
            progress(done, num)
    writer.close()
    return open_tokens(folder)


def _drawn(sets: tuple[str, str], size: int, ranges: list[range], processes: int) -> Iterator[Drawn]:
    if processes == 0:
        _start(*sets, size)
        yield from map(_draw, ranges)
        return
    # Fresh processes: a copy of one that has touched a GPU could not use it, and threads do not survive copying.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(*sets, size)) as pool:
        ahead = 4 * processes
        waiting = [pool.submit(_draw, part) for part in ranges[:ahead]]
        for i in range(len(ranges)):
            yield waiting.pop(0).result()
            if i + ahead < len(ranges):
                waiting.append(pool.submit(_draw, ranges[i + ahead]))


def _start(fruits: str, emoji: str, size: int) -> None:
    global _composer
    _composer = Composer(fruits, emoji, size=size)


def _draw(seeds: range) -> Drawn:
    assert _composer is not None
    scenes = [_composer.scene(seed) for seed in seeds]
    maps = np.stack([depth_map(scene.depth_HW) for scene in scenes])
    return np.stack([scene.pixels_HW3 for scene in scenes]), [scene.caption for scene in scenes], maps
