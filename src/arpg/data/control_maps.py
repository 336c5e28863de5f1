"""Condition images of a token set, one for each view, beside its ids and mapped into memory.

    control-00000.npy    8 bits, [n, views, H, W]; edges, which are black or white: 1 bit, [n, views, H, W / 8]

A set has one kind; a model of several learns from several sets at once.
Shapes: n images of a shard, H W pixels, b batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.errors import InputError, require

Array = NDArray[Any]
BITS = ("canny",)  # kinds that are stored as bits
RESIDENT = 24 << 30  # bytes that may lie on an accelerator for the whole run


def control_name(number: int) -> str:
    return f"control-{number:05d}.npy"


def map_shape(kind: str, size: tuple[int, int]) -> tuple[int, int]:
    """Of one image as it is stored."""
    if kind not in BITS:
        return size
    require(size[1] % 8 == 0, f"condition images are {size[1]} pixels wide; {kind} needs a multiple of 8")
    return size[0], size[1] // 8


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
        self.device = device
        self.size = sets[0].size
        for each in sets:
            require(
                each.size == self.size,
                f"condition images are {each.size[1]}x{each.size[0]} and {self.size[1]}x{self.size[0]} pixels; "
                "expected one size",
            )
        shards = [(kinds.index(each.kind), each.kind, shard) for each in sets for shard in each.shards]
        self._ends = np.cumsum([len(shard) for *_, shard in shards])
        resident = device.type != "cpu" and sum({id(shard): shard.nbytes for *_, shard in shards}.values()) <= RESIDENT
        where = device if resident else torch.device("cpu")
        placed: dict[int, Tensor] = {}  # a set that is there several times is stored once
        for *_, shard in shards:
            if id(shard) not in placed:
                placed[id(shard)] = _tensor(shard).to(where)
        self._shards = [(number, kind, placed[id(shard)]) for number, kind, shard in shards]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, index: NDArray[np.int64], view: Array) -> tuple[Tensor, Tensor]:
        """`[b, H, W]` in 8 bits and the number of each kind `[b]`, on the device."""
        shard_b = np.searchsorted(self._ends, index, side="right")
        parts, kinds, order = [], np.empty(len(index), np.int64), []
        for s in np.unique(shard_b).tolist():
            number, kind, stored = self._shards[s]
            (here,) = np.nonzero(shard_b == s)
            row = torch.from_numpy(index[here] - (self._ends[s] - len(stored))).to(stored.device)
            column = torch.from_numpy(np.asarray(view)[here].astype(np.int64)).to(stored.device)
            parts.append(unpack_maps(stored[row, column].to(self.device, non_blocking=True), kind))
            kinds[here] = number
            order.append(here)
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(self.device)
        return torch.cat(parts)[back], torch.from_numpy(kinds).to(self.device)


def _tensor(shard: Array) -> Tensor:
    """The mapped file itself, which nobody writes to: nothing is copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to
        return torch.from_numpy(np.asarray(shard))
