"""Token sets: the code ids of many images, with labels, captions and condition images, in memory-mapped shards.

    FOLDER/
      tokens.json         what the set is, and its shards
      ids-00000.npy       uint16 (uint32 for more than 65536 codes), [n, views, N]
      labels-00000.npy    int32, [n]
      captions-00000.json a list of n texts, where the images have captions
      control-00000.npy   condition images, where there are some: 8 bits, [n, views, H, W];
                          canny, which is black or white: 1 bit, [n, views, H, W / 8]
      text.json, ...      the states of the captions, see dataset.py
      unfinished.json     only while it is being written: its settings, so that nothing else continues it

The published layout, CLASS_ID/NAME.npy with one image per file, is read as well.

Shapes: n images of a shard, N grid tokens, b batch, H W pixels.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.config import from_dict, to_dict
from arpg.errors import InputError, one_of, require, require_positive
from arpg.files import read_array, read_json, write_array, write_json
from arpg.settings import CONTROL_KINDS
from arpg.storage import AnyPath, as_path, list_files

FORMAT = "arpg-tokens-1"
TOKENS, UNFINISHED = "tokens.json", "unfinished.json"
NO_CLASS = -1  # the label of images without a class
ONE_BIT_KINDS = ("canny",)  # condition images that are stored as bits
CHECKED_SHARDS = 64  # a local set of at most so many shards is checked when it is opened, a larger one shard by shard
THREADS = 16
SHARD_SIZE = 8192  # images: the unit of work of a tokenizer, and of shuffling
MAX_CONTROL_BYTES = 1 << 30  # of a shard of condition images

Array = NDArray[Any]

_AGAIN = "copy it again, or tokenize again"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenInfo:
    """What a token set is, apart from its shards."""

    views: int
    grid: tuple[int, int]
    vocab_size: int
    classes: tuple[str, ...]
    num_classes: int
    fingerprint: str = ""  # of the tokenizer and the images, where the writer knows them
    captioned: bool = False
    control: str = ""  # the kind of the condition images, if any
    control_size: tuple[int, int] = (0, 0)  # height and width of the condition images

    def __post_init__(self) -> None:
        require_positive(self, "views", "vocab_size", "num_classes")
        require(min(self.grid) >= 1, f"grid is {self.grid}; expected two numbers of 1 or more")
        if self.control:
            one_of("control", self.control, CONTROL_KINDS)
            stored_shape(self.control, self.control_size)
        require(
            len(self.classes) in (0, self.num_classes),
            f"classes has {len(self.classes)} names; num_classes is {self.num_classes}",
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every code id."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True)
class Shard:
    """One shard of a token set: file names, number of images, and CRC-32 of both arrays (none in older sets)."""

    ids: str
    labels: str
    num_images: int
    ids_crc32: int | None = None
    labels_crc32: int | None = None

    @classmethod
    def named(cls, number: int, num_images: int) -> Shard:
        """Name the files of shard `number`."""
        return cls(f"ids-{number:05d}.npy", f"labels-{number:05d}.npy", num_images)

    @classmethod
    def of(cls, number: int, ids: Array, labels: Array) -> Shard:
        """Describe the arrays of shard `number`."""
        return replace(cls.named(number, len(labels)), ids_crc32=_crc32(ids), labels_crc32=_crc32(labels))


class LazyShards:
    """The arrays of a set by shard number: opened when they are used (or ahead of it), and closed on demand."""

    def __init__(self, counts: Sequence[int], open_: Callable[[int], Array]) -> None:
        """`counts`: the images of each shard."""
        self.counts, self._open = list(counts), open_
        self.ends = np.cumsum(self.counts)
        self._arrays: dict[int, Array] = {}
        self._lock = threading.Lock()
        self._opening = [threading.Lock() for _ in self.counts]  # a shard that two threads want is read once

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, number: int) -> Array:
        found = self._arrays.get(number)
        if found is None:
            with self._opening[number]:
                found = self._arrays.get(number)
                if found is None:
                    found = self._open(number)
                    with self._lock:
                        self._arrays[number] = found
        return found

    @property
    def num_open(self) -> int:
        """The number of shards that are open."""
        return len(self._arrays)

    def of_images(self, ranges: Sequence[tuple[int, int]]) -> set[int]:
        """Return the shards that have images of any of the ranges [first, stop)."""
        found: set[int] = set()
        for first, stop in ranges:
            low, high = np.searchsorted(self.ends, (first, stop - 1), side="right").tolist()
            found.update(range(low, high + 1))
        return found

    def retain(self, numbers: set[int]) -> None:
        """Close all other shards."""
        with self._lock:
            self._arrays = {number: array for number, array in self._arrays.items() if number in numbers}

    def split(self, index: Array) -> Iterator[tuple[int, NDArray[np.bool_], Array]]:
        """Yield, for every shard with some of the images `index` `[b]`: its number, which they are, and their rows."""
        shard = np.searchsorted(self.ends, index, side="right")
        for number in np.unique(shard).tolist():
            here = shard == number
            yield number, here, index[here] - (self.ends[number] - self.counts[number])

    @staticmethod
    def join(parts: Sequence[LazyShards]) -> LazyShards:
        """Return the shards of several sets one after the other."""
        members = [(part, number) for part in parts for number in range(len(part))]
        first: dict[tuple[int, int], int] = {}  # where a shard is listed first: a set that is there twice is open once
        for number, (part, own) in enumerate(members):
            first.setdefault((id(part), own), number)

        def open_(number: int) -> Array:
            part, own = members[number]
            return joined[first[id(part), own]] if first[id(part), own] != number else part._open(own)

        joined = LazyShards([part.counts[number] for part, number in members], open_)
        return joined


@dataclass(frozen=True, eq=False)
class MapSet:
    """The condition images of one token set, as stored."""

    kind: str
    size: tuple[int, int]  # height and width
    shards: LazyShards
    views: int

    @property
    def nbytes(self) -> int:
        """The bytes of all condition images, as stored."""
        return sum(self.shards.counts) * self.views * math.prod(stored_shape(self.kind, self.size))


class TokenSet:
    """Ids by image and view, over all shards."""

    def __init__(
        self,
        info: TokenInfo,
        ids: LazyShards,
        labels: Array,
        *,
        captions: Sequence[str] | None = None,
        folder: AnyPath | None = None,
        views_of: Array | None = None,
        controls: Sequence[MapSet] = (),
    ) -> None:
        """`views_of`: the number of views of each image, where it differs; `controls`: the condition images."""
        self.info, self.folder, self.controls = info, folder, tuple(controls)
        self.captions = captions
        self.views, self.grid, self.vocab_size = info.views, info.grid, info.vocab_size
        self.classes, self.num_classes = info.classes, info.num_classes
        self.labels: NDArray[np.int32] = labels.astype(np.int32, copy=False)
        self.num_images = len(labels)
        self.views_of = np.broadcast_to(info.views, len(labels)) if views_of is None else views_of
        self.shards = ids

    def __len__(self) -> int:
        return self.num_images

    def gather(self, index: Array, view: Array) -> NDArray[np.int64]:
        """Return the ids `[b, N]` of the images `index` `[b]` in the views `view` `[b]`."""
        index, view = np.asarray(index), np.asarray(view)
        if index.size and not (index.min() >= 0 and index.max() < self.num_images):
            raise IndexError(f"image {index.min()} to {index.max()} of a set of {self.num_images}")
        if view.size and not (view.min() >= 0 and (view < self.views_of[index]).all()):
            raise IndexError(f"view {view.min()} to {view.max()} of a set with {self.views}")
        out = np.empty((len(index), math.prod(self.grid)), np.int64)
        for number, here, row in self.shards.split(index):
            out[here] = self.shards[number][row, view[here]]
        return out


class Captions(Sequence[str]):
    """The captions of a set; the shard that was used last is in memory."""

    def __init__(self, counts: Sequence[int], read: Callable[[int], list[str]]) -> None:
        self._ends = np.cumsum(counts)
        self._counts, self._read = list(counts), functools.lru_cache(maxsize=2)(read)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return one caption, or a list of them."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"caption {index} of {len(self)}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return self._read(shard)[index - int(self._ends[shard]) + self._counts[shard]]


class TokenWriter:
    """Writes a token set shard by shard; in a folder that was left unfinished, continues after the complete shards."""

    def __init__(
        self,
        folder: AnyPath,
        *,
        grid: tuple[int, int],
        vocab_size: int,
        classes: Sequence[str],
        views: int,
        shard_size: int = SHARD_SIZE,
        fingerprint: str = "",
        captioned: bool = False,
        control: str = "",
        control_size: tuple[int, int] = (0, 0),
    ) -> None:
        """`control`: the kind of the condition images, if any; `control_size`: their height and width."""
        require(shard_size >= 1, f"shard_size is {shard_size}; expected 1 or more images")
        require(not (folder / TOKENS).exists(), f"{folder} is a finished token set; delete it or choose another folder")
        self.folder, self.shard_size = folder, shard_size
        self.info = TokenInfo(
            views,
            grid,
            vocab_size,
            tuple(classes),
            max(1, len(classes)),
            fingerprint,
            captioned,
            control,
            control_size,
        )
        if control:
            self.shard_size = min(shard_size, max_shard_images(control, control_size, views))
        self.shards: list[Shard] = []
        self._ids: list[Array] = []
        self._labels: list[Array] = []
        self._captions: list[str] = []
        self._maps: list[Array] = []
        done = begin_tokens(folder, self.info)
        while len(self.shards) in done:
            self.shards.append(done[len(self.shards)])

    @property
    def num_done(self) -> int:
        """The number of images in complete shards, which is where an interrupted run continues."""
        return sum(shard.num_images for shard in self.shards)

    def add(self, ids: Array, labels: Array, captions: Sequence[str] | None = None, maps: Array | None = None) -> None:
        """Add the next images: ids `[n, views, N]`, labels `[n]` and, where the set has them, captions and condition
        images `[n, views, H, W]`.
        """
        if (maps is not None) != bool(self.info.control):
            raise ValueError(f"control is {self.info.control!r}, but the maps are {maps if maps is None else 'given'}")
        if maps is not None:
            expected = (len(labels), self.info.views, *self.info.control_size)
            if maps.shape != expected:
                raise ValueError(f"maps are {maps.shape}, not {expected}")
            self._maps.append(pack_maps(maps, self.info.control))
        if (len(captions) if captions is not None else 0) != (len(labels) if self.info.captioned else 0):
            raise ValueError(
                f"{len(captions or ())} captions for {len(labels)} images, captioned={self.info.captioned}"
            )
        self._captions += captions or []
        shape = (len(labels), self.info.views, math.prod(self.info.grid))
        if ids.shape != shape:
            raise ValueError(f"ids are {ids.shape}, not {shape}")
        if ids.size and not (ids.min() >= 0 and ids.max() < self.info.vocab_size):
            raise ValueError(f"ids go from {ids.min()} to {ids.max()}, not below {self.info.vocab_size}")
        self._ids.append(ids.astype(self.info.dtype))
        self._labels.append(np.asarray(labels, np.int32))
        while sum(map(len, self._labels)) >= self.shard_size:
            self._write_shard()

    def close(self) -> None:
        """Write the last shard, and then tokens.json, which makes the set complete."""
        if sum(map(len, self._labels)):
            self._write_shard()
        finish_tokens(self.folder, self.info, self.shards)

    def _write_shard(self) -> None:
        ids, labels = np.concatenate(self._ids), np.concatenate(self._labels)
        size = min(self.shard_size, len(labels))
        self._ids, self._labels = [ids[size:]], [labels[size:]]
        captions, self._captions = self._captions[:size], self._captions[size:]
        maps = np.concatenate(self._maps) if self.info.control else None
        self._maps = [] if maps is None else [maps[size:]]
        part = None if maps is None else maps[:size]
        number = len(self.shards)
        self.shards.append(write_shard(self.folder, self.info, number, ids[:size], labels[:size], captions, part))


def begin_tokens(folder: AnyPath, info: TokenInfo) -> dict[int, Shard]:
    """Begin a token set, or continue one of the same settings; return its complete shards by number."""
    found, unfinished = set(list_files(folder)) if folder.is_dir() else set(), folder / UNFINISHED
    require(TOKENS not in found, f"{folder} is a finished token set; delete it or choose another folder")
    numbers = sorted(int(name[7:12]) for name in found if re.fullmatch(r"labels-\d{5}\.npy", name))
    if numbers and UNFINISHED in found:
        require(
            from_dict(TokenInfo, _read_object(unfinished), where=str(unfinished)) == info,
            f"{folder} was begun with another tokenizer, other images or other settings; "
            "delete it or choose another folder",
        )
    else:
        write_json(unfinished, to_dict(info))
    shards = {}
    for number in numbers:
        begun = Shard.named(number, 0)
        if found.issuperset((begun.ids, *_optional_files(number, info))):
            begun = replace(begun, num_images=len(read_array(folder / begun.labels, advice=_AGAIN)))
            shards[number] = Shard.of(number, _open_ids(folder, begun, info), _open_labels(folder, begun, info))
    return shards


def write_shard(
    folder: AnyPath,
    info: TokenInfo,
    number: int,
    ids: Array,
    labels: Array,
    captions: Sequence[str] = (),
    maps: Array | None = None,
) -> Shard:
    """Write one shard; `maps` are condition images as `pack_maps` returns them."""
    ids, labels = ids.astype(info.dtype, copy=False), labels.astype(np.int32, copy=False)
    shard = Shard.of(number, ids, labels)
    if info.captioned:  # the labels are written last: they make the shard complete
        write_json(folder / _caption_name(number), list(captions))
    if maps is not None:
        write_array(folder / _control_name(number), maps)
    write_array(folder / shard.ids, ids)
    write_array(folder / shard.labels, labels)
    return shard


def finish_tokens(folder: AnyPath, info: TokenInfo, shards: Sequence[Shard]) -> None:
    """Write tokens.json, which makes the set complete."""
    require(bool(shards), f"{folder} would be a token set without images; add some")
    data = {"format": FORMAT, "num_images": sum(shard.num_images for shard in shards), **to_dict(info)}
    data["shards"] = [to_dict(shard) for shard in shards]
    write_json(folder / TOKENS, data)
    (folder / UNFINISHED).unlink(missing_ok=True)


def open_tokens(path: str | AnyPath, *, vocab_size: int | None = None) -> TokenSet:
    """Open a token set; `vocab_size` is that of the model to train on it."""
    folder = as_path(path)
    require(folder.is_dir(), f"{folder} is not a folder; expected a token set, as `arpg tokenize` writes it")
    if (folder / TOKENS).exists():
        tokens = _open_shards(folder)
    else:
        require(
            not (folder / UNFINISHED).exists(), f"{folder} is an unfinished token set; tokenize again, which continues"
        )
        tokens = _open_published(folder, vocab_size)
    require(
        vocab_size in (None, tokens.vocab_size),
        f"{folder} has ids of {tokens.vocab_size} codes; expected {vocab_size}; use the tokenizer that made them",
    )
    return tokens


def _open_shards(folder: AnyPath) -> TokenSet:
    where = str(folder / TOKENS)
    data = _read_object(folder / TOKENS)
    require(data.pop("format", None) == FORMAT, f'{where} does not say "format": "{FORMAT}"')
    listed, num_images = data.pop("shards", None), data.pop("num_images", None)
    require(isinstance(listed, list) and bool(listed), f"{where} lists no shards; tokenize again")
    info = from_dict(TokenInfo, data, where=where)
    shards = [from_dict(Shard, item, where=f"{where}: shards") for item in listed]
    total = sum(shard.num_images for shard in shards)
    require(total == num_images, f"{where}: num_images is {num_images}, but its shards have {total}")
    found = set(list_files(folder))
    for number, shard in enumerate(shards):
        for name in (shard.ids, shard.labels, *_optional_files(number, info)):
            require(name in found, f"{folder / name} does not exist; {_AGAIN}")
    counts = [shard.num_images for shard in shards]
    ids = LazyShards(counts, lambda number: _open_ids(folder, shards[number], info))
    with ThreadPoolExecutor(THREADS) as pool:  # small files, from far away perhaps
        labels = np.concatenate(list(pool.map(lambda shard: _open_labels(folder, shard, info), shards)))
    captions = Captions(counts, lambda i: _captions(folder, i, shards[i])) if info.captioned else None
    controls = [_open_maps(folder, info, counts)] if info.control else []
    tokens = TokenSet(info, ids, labels, captions=captions, folder=folder, controls=controls)
    if len(shards) <= CHECKED_SHARDS and isinstance(folder, Path):
        for number in range(len(shards)):
            for part in (ids, *(maps.shards for maps in controls)):
                part[number]
            if captions is not None:
                captions._read(number)
    return tokens


def _open_ids(folder: AnyPath, shard: Shard, info: TokenInfo) -> Array:
    shape = (shard.num_images, info.views, math.prod(info.grid))
    return _open_array(folder / shard.ids, shape, info.dtype, info.vocab_size, "vocab_size", shard.ids_crc32)


def _open_labels(folder: AnyPath, shard: Shard, info: TokenInfo) -> Array:
    path, shape, dtype = folder / shard.labels, (shard.num_images,), np.dtype(np.int32)
    return _open_array(path, shape, dtype, info.num_classes, "num_classes", shard.labels_crc32)


def _crc32(array: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data)


def _open_array(
    path: AnyPath, shape: tuple[int, ...], dtype: np.dtype[Any], limit: int, name: str, crc32: int | None
) -> Array:
    array = read_array(path, advice=_AGAIN)
    require(array.shape == shape, f"{path} has the shape {array.shape}; expected {shape}; {_AGAIN}")
    require(array.dtype == dtype, f"{path} holds {array.dtype}; expected {dtype}; {_AGAIN}")
    _check_range(path, array, limit, name)
    require(  # a file of another set may have the same shape
        crc32 is None or _crc32(array) == crc32,
        f"{path} is not the shard of this set: its checksum differs from that in {TOKENS}; {_AGAIN}",
    )
    return array


def _open_published(folder: AnyPath, vocab_size: int | None) -> TokenSet:
    paths = [p for p in folder.glob("*/*.npy") if p.parent.name.isdecimal() and not p.name.startswith(".")]
    require(bool(paths), f"{folder} has no {TOKENS} and no CLASS_ID/NAME.npy files; expected a token set")
    if vocab_size is None:
        raise InputError(
            f"{folder} has no {TOKENS} that says how many codes there are; give vocab_size (16384 for VQ-16)"
        )
    paths.sort(key=lambda p: (int(p.parent.name), p.name))
    labels = np.array([int(p.parent.name) for p in paths], np.int32)
    first = _load_published(paths[0])
    views, length = first.shape
    side = math.isqrt(length)
    require(
        side * side == length,
        f"{paths[0]} has {length} tokens per view, which is no square; write a {TOKENS} that gives the grid",
    )
    info = TokenInfo(views, (side, side), vocab_size, (), int(labels.max()) + 1)
    ids = np.empty((len(paths), views, length), info.dtype)
    for i, path in enumerate(paths):
        array = _load_published(path)
        require(array.shape == first.shape, f"{path} has the shape {array.shape}; {paths[0]} has {first.shape}")
        _check_range(path, array, vocab_size, "vocab_size")
        ids[i] = array
        if (i + 1) % 50_000 == 0:
            _log.info("%s: %d of %d files read", folder, i + 1, len(paths))
    return TokenSet(info, LazyShards([len(ids)], lambda number: ids), labels)


def _load_published(path: AnyPath) -> Array:
    """Read one image of the published layout, `[views, N]`; the files may have a leading axis of 1."""
    array = read_array(path, advice=_AGAIN, mmap=False)
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    require(array.ndim == 2 and array.size > 0, f"{path} has the shape {array.shape}; expected (views, tokens)")
    require(array.dtype.kind in "iu", f"{path} holds {array.dtype}; expected whole numbers")
    return array


def _check_range(path: AnyPath, array: Array, limit: int, name: str) -> None:
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    require(
        low >= 0 and high < limit, f"{path} has {low if low < 0 else high}; expected 0 to {limit - 1} ({name} {limit})"
    )


def _open_maps(folder: AnyPath, info: TokenInfo, counts: Sequence[int]) -> MapSet:
    """Open the condition images of a set whose shards have `counts` images."""

    def open_(number: int) -> Array:
        path = folder / _control_name(number)
        expected = (counts[number], info.views, *stored_shape(info.control, info.control_size))
        array = read_array(path, advice=_AGAIN)
        valid = array.shape == expected and array.dtype == np.uint8
        found = f"{array.shape} of {array.dtype}"
        require(valid, f"{path} is {found}; expected {expected} of uint8; {_AGAIN}")
        return array

    return MapSet(info.control, info.control_size, LazyShards(counts, open_), info.views)


def _captions(folder: AnyPath, number: int, shard: Shard) -> list[str]:
    path = folder / _caption_name(number)
    require(path.is_file(), f"{path} does not exist; {_AGAIN}")
    texts = read_json(path)
    valid = isinstance(texts, list) and all(isinstance(text, str) for text in texts) and len(texts) == shard.num_images
    require(valid, f"{path} is not a list of {shard.num_images} texts; {_AGAIN}")
    return list(texts)


def _read_object(path: AnyPath) -> dict[str, Any]:
    data = read_json(path)
    require(isinstance(data, dict), f"{path} is {data!r}; expected an object")
    return dict(data)


def stored_shape(kind: str, size: tuple[int, int]) -> tuple[int, int]:
    """Return the shape in which one condition image is stored."""
    if kind not in ONE_BIT_KINDS:
        return size
    require(size[1] % 8 == 0, f"condition images are {size[1]} pixels wide; {kind} needs a multiple of 8")
    return size[0], size[1] // 8


def max_shard_images(kind: str, size: tuple[int, int], views: int) -> int:
    """Return how many images a shard may have, so that its condition images fit into memory while it is written."""
    return max(1, MAX_CONTROL_BYTES // (views * math.prod(stored_shape(kind, size))))


def pack_maps(maps_HW: Array, kind: str) -> NDArray[np.uint8]:
    """Convert condition images `[..., H, W]` of 8 bits to how they are stored."""
    if kind not in ONE_BIT_KINDS:
        return maps_HW.astype(np.uint8, copy=False)
    packed: NDArray[np.uint8] = np.packbits(maps_HW >= 128, axis=-1)
    return packed


def unpack_maps(stored: Tensor, kind: str) -> Tensor:
    """Convert stored condition images to `[..., H, W]` of 8 bits, on their device."""
    if kind not in ONE_BIT_KINDS:
        return stored
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=stored.device)
    return ((stored[..., None] >> shifts & 1) * 255).flatten(-2)


def _optional_files(number: int, info: TokenInfo) -> list[str]:
    """Return the files that a shard has beside its ids and labels."""
    captions = [_caption_name(number)] if info.captioned else []
    return captions + ([_control_name(number)] if info.control else [])


def _caption_name(number: int) -> str:
    return f"captions-{number:05d}.json"


def _control_name(number: int) -> str:
    return f"control-{number:05d}.npy"
