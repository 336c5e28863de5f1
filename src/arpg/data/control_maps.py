"""Condition images of a token set, one for each view, beside its ids and mapped into memory.

    control-00000.npy    8 bits, [n, views, H, W]; edges, which are black or white: 1 bit, [n, views, H, W / 8]

A set has one kind; a model of several learns from several sets at once.
Shapes: n images of a shard, H W pixels, b batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.device import send
from arpg.errors import InputError, require

Array = NDArray[Any]
BITS = ("canny",)  # kinds that are stored as bits
SHARD = 1 << 30  # bytes of a shard, at most
RESIDENT = 24 << 30  # bytes that may lie on an accelerator for the whole run


def control_name(number: int) -> str:
    return f"control-{number:05d}.npy"


def map_shape(kind: str, size: tuple[int, int]) -> tuple[int, int]:
    """Of one image as it is stored."""
    if kind not in BITS:
        return size
    require(size[1] % 8 == 0, f"condition images are {size[1]} pixels wide; {kind} needs a multiple of 8")
    return size[0], size[1] // 8


def shard_images(kind: str, size: tuple[int, int], views: int) -> int:
    """How many images a shard may have, so that it fits into memory while it is written."""
    return max(1, SHARD // (views * math.prod(map_shape(kind, size))))


def pack_maps(maps_HW: Array, kind: str) -> NDArray[np.uint8]:
    """`[..., H, W]` in 8 bits as it is stored."""
    if kind not in BITS:
        return maps_HW.astype(np.uint8, copy=False)
    packed: NDArray[np.uint8] = np.packbits(maps_HW >= 128, axis=-1)
    return packed


def unpack_maps(stored: Tensor, kind: str) -> Tensor:
    """`[..., H, W]` in 8 bits again, wherever it lies."""
    if kind not in BITS:
        return stored
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=stored.device)
    return ((stored[..., None] >> shifts & 1) * 255).flatten(-2)


@dataclass(frozen=True, eq=False)
class MapSet:
    """The condition images of one token set: its kind, and its shards as they are stored."""

    kind: str
    size: tuple[int, int]  # height and width
    shards: Sequence[Array]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def open_maps(folder: Path, kind: str, size: tuple[int, int], counts: Sequence[int], views: int) -> MapSet:
    """The condition images of a set whose shards have so many images."""
    shards: list[Array] = []
    for number, count in enumerate(counts):
        path, expected = folder / control_name(number), (count, views, *map_shape(kind, size))
        try:
            shards.append(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path} is not a whole .npy file ({error}); copy it again, or tokenize again") from None
        right = shards[-1].shape == expected and shards[-1].dtype == np.uint8
        found = f"{shards[-1].shape} of {shards[-1].dtype}"
        require(right, f"{path} is {found}; expected {expected} of uint8; copy it again, or tokenize again")
    return MapSet(kind, size, shards)


class ControlMaps:
    """Condition images by image and view, over one or several sets. They stay on the device where they fit."""

    def __init__(self, sets: Sequence[MapSet], kinds: Sequence[str], device: torch.device) -> None:
        """`kinds`: those of the model, in its order."""
        for each in sets:
            require(
                each.kind in kinds, f"there are condition images of kind {each.kind!r}; the model takes {list(kinds)}"
            )
        self.device, self.kinds = device, tuple(kinds)
        self.size = sets[0].size
        for each in sets:
            require(
                each.size == self.size,
                f"condition images are {each.size[1]}x{each.size[0]} and {self.size[1]}x{self.size[0]} pixels; "
                "expected one size",
            )
        distinct = {id(each): each for each in sets}  # one that is there several times is stored once
        resident = device.type != "cpu" and sum(each.nbytes for each in distinct.values()) <= RESIDENT
        self._stores: list[tuple[int, Tensor]] = []
        placed: dict[int, list[int]] = {}  # the stores of a set
        for key, each in distinct.items():
            tensors = [_tensor(shard) for shard in each.shards]
            tensors = [torch.cat([part.to(device) for part in tensors])] if resident else tensors
            placed[key] = list(range(len(self._stores), len(self._stores) + len(tensors)))
            self._stores += [(kinds.index(each.kind), tensor) for tensor in tensors]
        self._store = np.array([store for each in sets for store in placed[id(each)]])
        self._ends = np.cumsum([len(self._stores[store][1]) for store in self._store])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, index: NDArray[np.int64], view: Array) -> tuple[Tensor, Tensor]:
        """`[b, H, W]` in 8 bits and the number of each kind `[b]`, on the device."""
        place_b = np.searchsorted(self._ends, index, side="right")
        store_b = self._store[place_b]
        row_b = index - np.concatenate(([0], self._ends))[place_b]
        found: dict[int, list[Tensor]] = {}  # by kind: what is stored, sent together
        order: dict[int, list[NDArray[np.int64]]] = {}
        for s in np.unique(store_b).tolist():
            number, stored = self._stores[s]
            (here,) = np.nonzero(store_b == s)
            row_column = torch.from_numpy(np.stack((row_b[here], np.asarray(view)[here])).astype(np.int64))
            row, column = send(row_column, stored.device)
            found.setdefault(number, []).append(stored[row, column])
            order.setdefault(number, []).append(here)
        maps = [unpack_maps(send(torch.cat(parts), self.device), self.kinds[k]) for k, parts in found.items()]
        index_b = np.concatenate([np.concatenate(parts) for parts in order.values()])
        kind_b = np.concatenate([np.full(sum(map(len, parts)), k) for k, parts in order.items()])
        back_b = np.argsort(index_b)
        both = send(torch.from_numpy(np.stack((back_b, kind_b[back_b]))), self.device)
        return torch.cat(maps)[both[0]], both[1]


def _tensor(shard: Array) -> Tensor:
    """The mapped file itself, which nobody writes to: nothing is copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to
        return torch.from_numpy(np.asarray(shard))
