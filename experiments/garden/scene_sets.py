"""Sets of composed scenes: composed by several processes, encoded to token folders, reconstructed by a tokenizer."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from arpg.checkpoint import load_tokenizer
from arpg.data.tokenize import encode_pixels, fingerprint
from arpg.data.tokens import TOKENS, TokenSet, TokenWriter, open_tokens
from arpg.device import choose_device, usable_cpus
from arpg.errors import require
from arpg.hub import resolve
from arpg.image import Pixels, check_output, save, sheet
from arpg.tokenizer import VQTokenizer
from experiments.garden.composer import SIZE, Composer, Scene
from experiments.garden.scene_spec import sample_spec
from experiments.photos import reconstruct

T = TypeVar("T")
Scenes = TypeVar("Scenes", bound=Any)
Sets = tuple[str, str]  # the paths of the fruit set and of the emoji set
CHUNK = 256  # scenes that a process composes before it hands them over
SHEET = 64  # scenes on a sheet, at most

log = logging.getLogger("garden")
_composer: tuple[tuple[str, str, int], Composer] | None = None  # of a worker process, with what it was made of


def compose_parts(
    sets: Sets, make: Callable[[Composer, range], T], *, num: int, first: int = 0, size: int = SIZE, processes: int = 0
) -> Iterator[T]:
    """Yield `make(composer, numbers)` for scenes `first` to `num - 1` in parts of 256; 0 processes: in this one.

    With processes, `make` and its results must be picklable.
    """
    require(num >= 1, f"the number of scenes is {num}; expected 1 or more")
    ranges = iter([range(start, min(start + CHUNK, num)) for start in range(first, num, CHUNK)])
    run = partial(_run, make, (*sets, size))
    if processes == 0:
        yield from map(run, ranges)
        return
    # Spawned: a forked copy of a process that has used a GPU cannot use it, and threads do not survive forking.
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        with _ignored_interrupts():  # the processes inherit this: Ctrl-C is for the one that started them
            waiting = [pool.submit(run, part) for part in islice(ranges, 4 * processes)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(run, part) for part in islice(ranges, 1)]
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(make: Callable[[Composer, range], T], source: tuple[str, str, int], numbers: range) -> T:
    """Call `make`; an error of the composer's data passes to the process that asked, unlike one at a worker's start."""
    global _composer
    if _composer is None or _composer[0] != source:
        _composer = (source, Composer(*source[:2], size=source[2]))
    return make(_composer[1], numbers)


def any_scenes(composer: Composer, numbers: range, *, seed: int) -> list[Scene]:
    """Compose scenes of all combinations, held out or not: scorers are trained on everything."""
    scenes = []
    for number in numbers:
        rng = np.random.default_rng([seed, number, 1])
        scenes.append(composer.compose(sample_spec(rng, extra=composer.extra, everything=True), rng))
    return scenes


def num_processes(num_scenes: int, requested: int | None = None) -> int:
    """Return `requested` processes, or by default one for each core; 0 (this process) for a few scenes."""
    if requested is not None:
        return requested
    return len(usable_cpus()) if num_scenes > 2000 else 0


def compose_tokens(
    tokenizer: VQTokenizer,
    sets: Sets,
    folder: Path,
    *,
    num: int,
    seed: int,
    size: int = SIZE,
    processes: int = 0,
    shard_size: int = 65536,
    progress: Callable[[int, int], None] | None = None,
    depth: bool = False,
) -> TokenSet:
    """Encode scenes `seed` to `seed + num - 1` with their captions; an interrupted run continues where it stopped.

    With `depth`, their exact depth is stored as condition images.
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
    done = writer.num_done
    make = partial(_training_scenes, seed=seed)
    parts = compose_parts(sets, make, num=num, first=done, size=size, processes=processes)
    for pixels_BHW3, captions, maps_BHW in parts:
        ids_BN = encode_pixels(tokenizer, pixels_BHW3)
        maps = maps_BHW[:, None] if depth else None
        writer.add(ids_BN[:, None], np.zeros(len(captions), np.int32), captions, maps)
        done += len(captions)
        if progress is not None:
            progress(done, num)
    writer.close()
    return open_tokens(folder)


def depth_map(depth_HW: NDArray[np.floating]) -> Pixels:
    """Convert known depth from 0 (near) to 1 (far), such as that of composed scenes, to 255..0 without scaling."""
    good = bool(np.isfinite(depth_HW).all()) and float(depth_HW.min()) >= 0 and float(depth_HW.max()) <= 1
    require(good, "the depth has values outside of 0 to 1; expected 0 (near) to 1 (far)")
    return np.round(255 * (1 - depth_HW)).astype(np.uint8)


def _training_scenes(composer: Composer, numbers: range, *, seed: int) -> tuple[Pixels, list[str], NDArray[np.uint8]]:
    """Return pixels, captions and depth as condition images."""
    scenes = [composer.scene(seed + number) for number in numbers]
    maps = np.stack([depth_map(scene.depth_HW) for scene in scenes])
    return np.stack([scene.pixels_HW3 for scene in scenes]), [scene.caption for scene in scenes], maps


def reconstruct_half(scenes: Scenes, model: str, *, device: torch.device) -> Scenes:
    """Return scenes, every other one as the tokenizer of `model` reconstructs it, which is how generated images look.

    `scenes`: a dataclass of arrays with `pixels_nHW3`.
    """
    tokenizer = load_tokenizer(resolve(model), device=device, dtype=torch.float32)
    pixels = scenes.pixels_nHW3.copy()
    pixels[::2] = reconstruct(pixels[::2], tokenizer)
    return dataclasses.replace(scenes, pixels_nHW3=pixels)


def add_set_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --fruits and --emoji."""
    parser.add_argument("--fruits", required=required, help="The fruit set: class folders on white.")
    parser.add_argument("--emoji", required=required, help="The emoji set, with its captions.json.")


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add --processes and --device."""
    parser.add_argument("--processes", type=int, help="Processes that compose; 0: this one. Default: one per core.")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:0.")


def add_training_options(parser: argparse.ArgumentParser, *, num: int, steps: int) -> None:
    """Add the options of verbs that train a scorer on scenes; `num` and `steps` are their defaults."""
    add_set_options(parser)
    parser.add_argument("--out", "-o", type=Path, required=True, help="The folder of the network.")
    parser.add_argument("--num", "-n", type=int, default=num, help="Training scenes.")
    parser.add_argument("--steps", type=int, default=steps, help="Training steps.")
    parser.add_argument("--batch-size", type=int, default=256, help="Scenes per step.")
    parser.add_argument("--width", type=int, default=32, help="Channels of the first level.")
    parser.add_argument("--tokenizer", "-t", help="A model: its tokenizer reconstructs half of the scenes.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the scenes and of the training.")
    add_process_options(parser)


def training_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_training_options` as arguments of `train_and_save`."""
    return {
        "num": options.num,
        "steps": options.steps,
        "device": choose_device(options.device),
        "batch_size": options.batch_size,
        "width": options.width,
        "tokenizer": options.tokenizer,
        "seed": options.seed,
        "processes": num_processes(options.num, options.processes),
    }


def compose(arguments: Sequence[str] | None = None) -> None:
    """Compose captioned scenes from cut-outs, as tokens for `arpg train`; continues where it stopped."""
    parser = argparse.ArgumentParser(prog="experiments.garden compose", description=compose.__doc__)
    add_set_options(parser)
    parser.add_argument("--out", "-o", type=Path, help="The token folder to write.")
    parser.add_argument("--num", "-n", type=int, default=16, help="Number of scenes.")
    parser.add_argument("--tokenizer", "-t", default="garden", help="A model folder with a tokenizer.")
    parser.add_argument("--sheet", type=Path, help=f"Also write up to {SHEET} scenes with captions as one image.")
    parser.add_argument("--seed", type=int, default=0, help="Scene i has seed SEED + i.")
    parser.add_argument("--size", type=int, default=SIZE, help="Side of a scene in pixels.")
    parser.add_argument("--depth", action="store_true", help="Also store their exact depth as condition images.")
    add_process_options(parser)
    options = parser.parse_args(arguments)
    require(options.out or options.sheet, "neither --out nor --sheet is given; there is nothing to write")
    if options.sheet is not None:
        check_output(options.sheet, folder=False)
        composer = Composer(options.fruits, options.emoji, size=options.size)
        scenes = [composer.scene(options.seed + i) for i in range(min(options.num, SHEET))]
        save(sheet([s.image for s in scenes], captions=[s.caption for s in scenes]), options.sheet)
        log.info("wrote %s", options.sheet)
    if options.out is None:
        return
    tokenizer = load_tokenizer(resolve(options.tokenizer), device=choose_device(options.device), dtype=torch.float32)
    tokens = compose_tokens(
        tokenizer,
        (options.fruits, options.emoji),
        options.out,
        num=options.num,
        seed=options.seed,
        size=options.size,
        depth=options.depth,
        processes=num_processes(options.num, options.processes),
        progress=lambda done, total: log.info("composed %d of %d", done, total),
    )
    log.info("%d scenes of %dx%d tokens in %s", tokens.num_images, *tokens.grid, options.out)
