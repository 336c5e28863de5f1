"""Token sets: the code ids of many images, in shards that are mapped into memory.

    FOLDER/
      tokens.json         what the set is, and its shards
      ids-00000.npy       uint16 (uint32 for more than 65536 codes), [n, views, N]
      labels-00000.npy    int32, [n]
      captions-00000.json a list of n texts, where the images have captions
      text.json, ...      the states of the captions, see text_states.py
      control-00000.npy   condition images, where there are some, see control_maps.py
      unfinished.json     only while it is being written: its settings, so that nothing else continues it

The published layout, CLASS_ID/NAME.npy with one image per file, is read as well.

Shapes: n images of a shard, N grid tokens, b batch.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arpg.config import CONTROLS, from_dict, to_dict
from arpg.data.control_maps import MapSet, control_name, map_shape, open_maps, pack_maps, shard_images
from arpg.errors import InputError, one_of, require
from arpg.files import write_whole

FORMAT = "arpg-tokens-1"
TOKENS, UNFINISHED = "tokens.json", "unfinished.json"
NO_CLASS = -1  # the label of what has none

Array = NDArray[Any]

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
    control: str = ""  # the kind of the condition images, where there are some
    control_size: tuple[int, int] = (0, 0)  # their height and width

    def __post_init__(self) -> None:
        for name in ("views", "vocab_size", "num_classes"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; expected 1 or more")
        require(min(self.grid) >= 1, f"grid is {self.grid}; expected two numbers of 1 or more")
        if self.control:
            one_of("control", self.control, CONTROLS)
            map_shape(self.control, self.control_size)
        require(
            len(self.classes) in (0, self.num_classes),
            f"classes has {len(self.classes)} names; num_classes is {self.num_classes}",
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True)
class Shard:
    ids: str
    labels: str
    num_images: int


class TokenSet:
    """Ids by image and view, over all shards."""

    def __init__(
        self,
        info: TokenInfo,
        ids: Sequence[Array],
        labels: Array,
        *,
        captions: Sequence[str] | None = None,
        folder: Path | None = None,
        views_of: Array | None = None,
        controls: Sequence[MapSet] = (),
    ) -> None:
        """`views_of`: how many views each image has, where that differs; `controls`: the condition images."""
        self.info, self.folder, self.controls = info, folder, tuple(controls)
        self.captions = captions
        self.views, self.grid, self.vocab_size = info.views, info.grid, info.vocab_size
        self.classes, self.num_classes = info.classes, info.num_classes
        self.labels: NDArray[np.int32] = labels.astype(np.int32, copy=False)
        self.num_images = len(labels)
        self.views_of = np.full(len(labels), info.views) if views_of is None else views_of
        self._ids = list(ids)
        self._ends = np.cumsum([len(shard) for shard in ids])

    def __len__(self) -> int:
        return self.num_images

    def gather(self, index: Array, view: Array) -> NDArray[np.int64]:
        """The ids `[b, N]` of images `[b]` in views `[b]`."""
        index, view = np.asarray(index), np.asarray(view)
        if index.size and not (index.min() >= 0 and index.max() < self.num_images):
            raise IndexError(f"image {index.min()} to {index.max()} of a set of {self.num_images}")
        if view.size and not (view.min() >= 0 and (view < self.views_of[index]).all()):
            raise IndexError(f"view {view.min()} to {view.max()} of a set with {self.views}")
        if len(self._ids) == 1:
            return self._ids[0][index, view].astype(np.int64)
        out = np.empty((len(index), math.prod(self.grid)), np.int64)
        shard = np.searchsorted(self._ends, index, side="right")
        for s in np.unique(shard).tolist():
            here = shard == s
            first = self._ends[s] - len(self._ids[s])
            out[here] = self._ids[s][index[here] - first, view[here]]
        return out


class TokenWriter:
    """Writes a token set shard by shard; on a folder that was left unfinished, it goes on after the whole shards."""

    def __init__(
        self,
        folder: Path,
        *,
        grid: tuple[int, int],
        vocab_size: int,
        classes: Sequence[str],
        views: int,
        shard_size: int = 65536,
        fingerprint: str = "",
        captioned: bool = False,
        control: str = "",
        control_size: tuple[int, int] = (0, 0),
    ) -> None:
        """`control`: the kind of condition images that come with the tokens, if any, and their height and width."""
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
            self.shard_size = min(shard_size, shard_images(control, control_size, views))
        self.shards: list[Shard] = []
        self._ids: list[Array] = []
        self._labels: list[Array] = []
        self._captions: list[str] = []
        self._maps: list[Array] = []
        while all((folder / name).exists() for name in self._names(len(self.shards))):
            ids, labels = self._names(len(self.shards))[:2]
            count = len(_load(folder / labels))
            _open_shard(folder, Shard(ids, labels, count), self.info)
            self.shards.append(Shard(ids, labels, count))
        unfinished = folder / UNFINISHED
        if self.shards and unfinished.exists():
            require(
                from_dict(TokenInfo, _read_json(unfinished), where=str(unfinished)) == self.info,
                f"{folder} was begun with another tokenizer, other images or other settings; "
                "delete it or choose another folder",
            )
        else:
            _write_json(unfinished, to_dict(self.info))

    @property
    def num_done(self) -> int:
        """Images in whole shards; those that were only added count when their shard is written."""
        return sum(shard.num_images for shard in self.shards)

    def _names(self, number: int) -> tuple[str, ...]:
        more = [caption_name(number)] if self.info.captioned else []
        return (*_shard_names(number), *more, *([control_name(number)] if self.info.control else []))

    def add(self, ids: Array, labels: Array, captions: Sequence[str] | None = None, maps: Array | None = None) -> None:
        """Ids `[n, views, N]`, labels `[n]` and, where the set has them, captions and condition images
        `[n, views, H, W]` of the next images.
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
        """Write what is left, and then tokens.json, which makes the set complete."""
        if sum(map(len, self._labels)):
            self._write_shard()
        require(bool(self.shards), f"{self.folder} would be a token set without images; add some")
        data = {"format": FORMAT, "num_images": self.num_done, **to_dict(self.info)}
        data["shards"] = [to_dict(shard) for shard in self.shards]
        _write_json(self.folder / TOKENS, data)
        (self.folder / UNFINISHED).unlink(missing_ok=True)

    def _write_shard(self) -> None:
        ids, labels = np.concatenate(self._ids), np.concatenate(self._labels)
        size = min(self.shard_size, len(labels))
        self._ids, self._labels = [ids[size:]], [labels[size:]]
        number, names = len(self.shards), _shard_names(len(self.shards))
        if self.info.captioned:  # the labels come last: with them the shard is whole
            _write_json(self.folder / caption_name(number), self._captions[:size])
            self._captions = self._captions[size:]
        if self.info.control:
            maps = np.concatenate(self._maps)
            self._maps = [maps[size:]]
            _write_array(self.folder / control_name(number), maps[:size])
        _write_array(self.folder / names[0], ids[:size])
        _write_array(self.folder / names[1], labels[:size])
        self.shards.append(Shard(*names, size))


def open_tokens(path: str | Path, *, vocab_size: int | None = None, num_classes: int | None = None) -> TokenSet:
    """Open a token set; `vocab_size` and `num_classes` are those of the model that is to learn from it."""
    folder = Path(path)
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
    if num_classes is not None:
        require(
            tokens.num_classes <= num_classes,
            f"{folder} has {tokens.num_classes} classes; expected at most {num_classes}; set the model's num_classes",
        )
    return tokens


def _open_shards(folder: Path) -> TokenSet:
    where = str(folder / TOKENS)
    data = _read_json(folder / TOKENS)
    require(data.pop("format", None) == FORMAT, f'{where} does not say "format": "{FORMAT}"')
    listed, num_images = data.pop("shards", None), data.pop("num_images", None)
    require(isinstance(listed, list) and bool(listed), f"{where} lists no shards; tokenize again")
    info = from_dict(TokenInfo, data, where=where)
    shards = [from_dict(Shard, item, where=f"{where}: shards") for item in listed]
    total = sum(shard.num_images for shard in shards)
    require(total == num_images, f"{where}: num_images is {num_images}, but its shards have {total}")
    arrays = [_open_shard(folder, shard, info) for shard in shards]
    captions = (
        [text for i, shard in enumerate(shards) for text in _captions(folder, i, shard)] if info.captioned else None
    )
    labels = np.concatenate([labels for _, labels in arrays])
    counts = [shard.num_images for shard in shards]
    controls = [open_maps(folder, info.control, info.control_size, counts, info.views)] if info.control else []
    ids = [part for part, _ in arrays]
    return TokenSet(info, ids, labels, captions=captions, folder=folder, controls=controls)


def _open_shard(folder: Path, shard: Shard, info: TokenInfo) -> tuple[Array, Array]:
    """A shard's ids and labels, checked against what tokens.json says of them."""
    again = "copy it again, or tokenize again"
    ids, labels = _load(folder / shard.ids), _load(folder / shard.labels)
    shape = (shard.num_images, info.views, math.prod(info.grid))
    for name, array, expected, dtype in (
        (shard.ids, ids, shape, info.dtype),
        (shard.labels, labels, shape[:1], np.dtype(np.int32)),
    ):
        require(array.shape == expected, f"{folder / name} has the shape {array.shape}; expected {expected}; {again}")
        require(array.dtype == dtype, f"{folder / name} holds {array.dtype}; expected {dtype}; {again}")
    _check_range(folder / shard.ids, ids, info.vocab_size, "vocab_size")
    _check_range(folder / shard.labels, labels, info.num_classes, "num_classes")
    return ids, labels


def _open_published(folder: Path, vocab_size: int | None) -> TokenSet:
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
    return TokenSet(info, [ids], labels)


def _load_published(path: Path) -> Array:
    """`[views, N]`; the files may have a leading axis of 1."""
    array = _load(path, mapped=False)
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    require(array.ndim == 2 and array.size > 0, f"{path} has the shape {array.shape}; expected (views, tokens)")
    require(array.dtype.kind in "iu", f"{path} holds {array.dtype}; expected whole numbers")
    return array


def _check_range(path: Path, array: Array, limit: int, name: str) -> None:
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    require(
        low >= 0 and high < limit, f"{path} has {low if low < 0 else high}; expected 0 to {limit - 1} ({name} {limit})"
    )


def _load(path: Path, *, mapped: bool = True) -> Array:
    require(path.is_file(), f"{path} does not exist; copy the whole token set, or tokenize again")
    try:
        array: Array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is not a whole .npy file ({error}); copy it again, or tokenize again") from None
    return array


def _captions(folder: Path, number: int, shard: Shard) -> list[str]:
    path = folder / caption_name(number)
    require(path.is_file(), f"{path} does not exist; copy the whole token set, or tokenize again")
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    right = isinstance(texts, list) and all(isinstance(text, str) for text in texts) and len(texts) == shard.num_images
    require(right, f"{path} is not a list of {shard.num_images} texts; copy it again, or tokenize again")
    return list(texts)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    require(isinstance(data, dict), f"{path} is {data!r}; expected an object")
    return dict(data)


def _write_json(path: Path, data: Any) -> None:
    write_whole(path, lambda temporary: temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8"))


def _write_array(path: Path, array: Array) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # np.save would add an ending to a name
            np.save(file, array)

    write_whole(path, write)


def caption_name(number: int) -> str:
    return f"captions-{number:05d}.json"


def _shard_names(number: int) -> tuple[str, str]:
    return f"ids-{number:05d}.npy", f"labels-{number:05d}.npy"
