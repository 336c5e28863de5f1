"""Images for an evaluation in one npz file, from any number of processes and batch sizes, resumed if interrupted.

Image i has seed `seed + i` and the i-th label, in whichever process. Finished batches are in OUT.parts/ as
FIRST-STOP.npy until all are there; then they become one npz with ADM's layout: `arr_0`, uint8 [N, H, W, 3], and
`arr_1`, the labels. Shapes: B batch, N images, H W pixels, C classes.
"""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from arpg import tasks
from arpg.classes import ClassNames
from arpg.config import to_dict
from arpg.data.images import ImageSet
from arpg.decode import Plan, Request, make_plan
from arpg.decode.engine import pipelined_decode
from arpg.errors import InputError, present, require
from arpg.executor import RayOptions, Report, open_workers
from arpg.files import hash_tensors, read_array, write_array, write_json, write_whole
from arpg.image import to_uint8
from arpg.pipeline import Pipeline
from arpg.quantization.precision import kv_cache_dtype_of, precision_of
from arpg.settings import SamplingSettings
from arpg.storage import AnyPath, Lease, fetch, remove_folder

FORMAT = "arpg-samples-1"
SETTINGS = "settings.json"
UNIT = 16  # images whose pixels are made together in a file: convolutions round differently in another batch
RAY_BATCHES = 4  # batches of a job on Ray: within a job the next batch is planned while one is decoded
POLL_SECONDS = 0.5  # between two checks for the parts of other processes

Labels = NDArray[np.int64]
Progress = Callable[[int, int], None]


def balanced_labels(num: int, num_classes: int) -> Labels:
    """Return every class equally often, interleaved; the remainder goes to evenly spaced classes."""
    require(num >= 1, f"the number of images is {num}; expected 1 or more")
    require(num_classes >= 1, "the model has no classes: it takes prompts; expected one with classes")
    each, rest = divmod(num, num_classes)
    classes = np.arange(num_classes)
    return interleave(each + (classes * rest % num_classes < rest).astype(np.int64))


def labels_like(counts_C: Sequence[int] | NDArray[np.int64], num: int) -> Labels:
    """Return classes as often as in a set with these counts: shares of `num`, rounded by the largest remainders."""
    require(num >= 1, f"the number of images is {num}; expected 1 or more")
    counts = np.asarray(counts_C, dtype=np.int64)
    require(bool(counts.sum() > 0 and (counts >= 0).all()), "the set to follow has no image of any class")
    whole, rest = np.divmod(counts * num, counts.sum())
    whole[np.argsort(-rest, kind="stable")[: num - int(whole.sum())]] += 1
    return interleave(whole)


def interleave(counts_C: NDArray[np.int64]) -> Labels:
    """Spread each class evenly over the whole, so that any part of it has about the same shares."""
    labels = np.repeat(np.arange(len(counts_C)), counts_C)
    index = np.concatenate([np.arange(count) for count in counts_C])  # of an image within its class
    share = (index + 0.5) / np.maximum(counts_C, 1)[labels]
    return labels[np.lexsort((labels, share))]


def count_classes(images: ImageSet, classes: ClassNames) -> NDArray[np.int64]:
    """Count the images of each of the model's classes in a set whose folders are named like the classes."""
    require(bool(images.classes), f"{images.where} has no class folders, so it does not say how often a class occurs")
    ids = np.array([classes.find(name) for name in images.classes])
    return np.bincount(ids[np.asarray(images.labels)], minlength=len(classes))


class PixelBatches:
    """Images of labels, batch by batch: uint8 [B, H, W, 3] on the model's device. Nothing goes through PIL.

    While the device decodes a batch, the next one is planned and sent (`pipelined_decode`). Pixels are made `unit`
    images at a time (None: the batch at once, which is fastest).
    """

    def __init__(
        self,
        pipe: Pipeline,
        labels: Labels,
        settings: SamplingSettings,
        *,
        seeds: Sequence[int],
        batch_size: int,
        unit: int | None = None,
    ) -> None:
        require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
        assert len(labels) == len(seeds)
        self.pipe, self.labels, self.settings, self.seeds = pipe, labels, settings, seeds
        self.batch_size, self.unit = batch_size, unit
        self.times: list[tuple[int, float]] = []  # images and seconds of each batch

    @property
    def rate(self) -> float:
        """Return images per second from labels to pixels, without the first of several batches, which warms up.

        The second one captures its graph where graphs are captured.
        """
        counted = (self.times[2:] if self.pipe.engine.mode == "graph" else []) or self.times[1:] or self.times
        return sum(images for images, _ in counted) / max(sum(seconds for _, seconds in counted), 1e-9)

    @torch.no_grad()
    def __iter__(self) -> Iterator[Tensor]:
        plans = map(self._plan, range(0, len(self.labels), self.batch_size))
        for pixels_BHW3, seconds in pipelined_decode(self.pipe.engine, plans, self.settings, self._pixels):
            self.times.append((len(pixels_BHW3), seconds))
            yield pixels_BHW3

    def _pixels(self, ids_BN: Tensor, grid: tuple[int, int]) -> Tensor:
        count, unit = len(ids_BN), self.unit or len(ids_BN)
        ids_BN = torch.cat((ids_BN, ids_BN[-1:].expand(-count % unit, -1)))  # whole units only
        parts = [to_uint8(self.pipe.graphed_tokenizer.decode(ids_UN, grid)) for ids_UN in torch.split(ids_BN, unit)]
        return torch.cat(parts)[:count]

    def _plan(self, start: int) -> tuple[Request, Plan]:
        part = slice(start, start + self.batch_size)
        request = tasks.generate(self.pipe.model, self.labels[part].tolist(), self.seeds[part])
        return request, make_plan(request.grid, request.known_BN, request.seeds, self.settings)


@dataclass(frozen=True)
class Share:
    """The rank of this process among `size`. Batch k belongs to process k mod `size`."""

    rank: int = 0
    size: int = 1


def sample_images(
    pipe: Pipeline | None,
    out: AnyPath,
    *,
    labels: Labels,
    seed: int = 0,
    batch_size: int = 32,
    share: Share | None = None,
    progress: Progress | None = None,
    ray: RayOptions | None = None,
    load: Callable[[], Pipeline] | None = None,
    **settings: Any,
) -> None:
    """Write `out`: an npz with one image per label. Call it again to continue; other settings are refused.

    `progress(images done, images to do)` is about this process's share. Process 0 waits for the others' parts (in a
    folder that all can reach) and puts them together. `ray`: sample on a Ray cluster, where every worker calls `load`.
    """
    share = share or Share()
    require(out.suffix == ".npz", f"{out} does not end in .npz; expected the name of an npz file")
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    require(len(labels) >= 1, "there are no labels; expected one for each image")
    parts, num = out.parent / f"{out.name}.parts", len(labels)
    make = load or (lambda: present(pipe, "there is no pipeline; give one, or a function that loads it"))
    start = partial(_start_sampler, make, parts, labels, seed, batch_size, settings)
    with open_workers(start, ray) as workers:
        (about,) = workers.map([None])
        if out.exists():
            _check_same(about, _read_about(out), where=out)
            return
        with Lease(parts) if share.rank == 0 else nullcontext():
            path = parts / SETTINGS
            if path.exists():
                _check_same(about, path.read_text(encoding="utf-8"), where=parts)
            else:
                write_json(path, about)
            mine = [(i, min(i + batch_size, num)) for i in range(0, num, batch_size)][share.rank :: share.size]
            covered = _covered(parts, num)
            todo = [(first, stop) for first, stop in mine if not covered[first:stop].all()]
            total = sum(stop - first for first, stop in mine)
            before = total - sum(stop - first for first, stop in todo)
            if progress is not None:
                progress(before, total)
            each = max(1, len(todo)) if ray is None else RAY_BATCHES
            jobs = [todo[i : i + each] for i in range(0, len(todo), each)]
            on_progress = None if progress is None else (lambda done: progress(before + done, total))
            for _ in workers.map(jobs, on_progress=on_progress):
                pass
            if share.rank == 0:
                while not _covered(parts, num).all():
                    time.sleep(POLL_SECONDS)
                _merge(parts, out, labels, about)
    if share.rank == 0:
        remove_folder(parts)


def _start_sampler(
    load: Callable[[], Pipeline],
    parts: AnyPath,
    labels: Labels,
    seed: int,
    batch_size: int,
    settings: dict[str, Any],
) -> Sampler:
    pipe = load()
    return Sampler(pipe, parts, labels, seed, batch_size, pipe.sampling.settings(**settings))


@dataclass(frozen=True, eq=False)
class Sampler:
    """Samples batches and writes them as parts: the work of one worker."""

    pipe: Pipeline
    parts: AnyPath
    labels: Labels
    seed: int
    batch_size: int
    settings: SamplingSettings

    def __call__(self, job: Sequence[tuple[int, int]] | None, report: Report) -> dict[str, Any] | None:
        """Write the images of every (first, stop) in `job`; without a job, return all that determines the images."""
        if job is None:
            return _about(self.pipe, self.labels, self.seed, self.settings)
        index = np.concatenate([np.arange(*bounds) for bounds in job])
        seeds = [self.seed + i for i in index.tolist()]
        batches = PixelBatches(
            self.pipe, self.labels[index], self.settings, seeds=seeds, batch_size=self.batch_size, unit=UNIT
        )
        done = 0
        for (first, stop), pixels_BHW3 in zip(job, batches, strict=True):
            write_array(self.parts / f"{first:08d}-{stop:08d}.npy", pixels_BHW3.cpu().numpy())
            done += stop - first
            report(done)
        return None


def _about(pipe: Pipeline, labels: Labels, seed: int, settings: SamplingSettings) -> dict[str, Any]:
    """Return all that determines the images."""
    return {
        "format": FORMAT,
        "model": fingerprint(pipe),
        "num": len(labels),
        "labels": hashlib.sha256(np.ascontiguousarray(labels, dtype="<i8").tobytes()).hexdigest()[:32],
        "seed": seed,
        **to_dict(settings),
    }


def json_settings(settings: SamplingSettings) -> dict[str, Any]:
    """Return settings as they come back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(to_dict(settings)))
    return found


def fingerprint(pipe: Pipeline) -> str:
    """Return a hash of the weights of network and tokenizer, as they are in memory."""
    digest = hashlib.sha256()
    if (precision := precision_of(pipe.model)) in ("fp8", "int8"):  # equal weights give other results then
        digest.update(precision.encode())
    if (cached := kv_cache_dtype_of(pipe.model)) != "auto":
        digest.update(f"cache {cached}".encode())
    hash_tensors(pipe.model.state_dict(), digest)
    return hash_tensors(pipe.tokenizer.state_dict(), digest)[:32]


def _check_same(wanted: dict[str, Any], text: str, *, where: AnyPath) -> None:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    require(
        isinstance(found, dict) and found.get("format") == FORMAT,
        f"{where} is there already and was not made here; choose another --output",
    )
    now = json.loads(json.dumps(wanted))
    found = json_settings(SamplingSettings()) | found  # a setting that did not exist yet had its default
    other = [f"{key} {found.get(key)}, not {now[key]}" for key in now if found.get(key) != now[key]]
    require(
        not other,
        f"{where} was made with other settings ({'; '.join(other)}); delete it or choose another --output",
    )


def _read_about(out: AnyPath) -> str:
    try:
        with zipfile.ZipFile(fetch(out)) as archive:
            return archive.comment.decode("utf-8", errors="replace")
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{out} is not a whole npz file ({error}); delete it or choose another --output") from None


def _ranges(parts: AnyPath) -> list[tuple[int, int, AnyPath]]:
    found = []
    for path in parts.glob("[0-9]*-[0-9]*.npy"):
        first, stop = path.stem.split("-")
        found.append((int(first), int(stop), path))
    return sorted(found)


def _covered(parts: AnyPath, num: int) -> NDArray[np.bool_]:
    covered = np.zeros(num, bool)
    for first, stop, _ in _ranges(parts):
        covered[first:stop] = True
    return covered


def _merge(parts: AnyPath, out: AnyPath, labels: Labels, about: dict[str, Any]) -> None:
    """Write the parts one after the other into a zip file, so that memory holds one at a time."""
    ranges = _ranges(parts)
    shape = _open_part(ranges[0][2], ranges[0][1] - ranges[0][0], None).shape[1:]

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            with _member(archive, "arr_0.npy") as file:
                _header(file, (len(labels), *shape), np.dtype(np.uint8))
                done = 0
                while done < len(labels):
                    first, stop, part = max((r for r in ranges if r[0] <= done < r[1]), key=lambda r: r[1])
                    pixels = _open_part(part, stop - first, shape)
                    file.write(np.ascontiguousarray(pixels[done - first :]).data)
                    done = stop
            with _member(archive, "arr_1.npy") as file:
                _header(file, labels.shape, np.dtype("<i8"))
                file.write(np.ascontiguousarray(labels, dtype="<i8").tobytes())
            archive.comment = json.dumps(about).encode()

    write_whole(out, write)


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """Open a member with a fixed date, so that the same images are the same file."""
    return archive.open(zipfile.ZipInfo(name), "w", force_zip64=True)


def _header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    about = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, about)


def _open_part(path: AnyPath, count: int, shape: tuple[int, ...] | None) -> NDArray[np.uint8]:
    pixels = read_array(path, advice="delete it and run the command again")
    good = pixels.dtype == np.uint8 and len(pixels) == count and shape in (None, pixels.shape[1:])
    require(good, f"{path} holds {pixels.dtype} {list(pixels.shape)}, not {count} images; delete it and run again")
    return pixels
