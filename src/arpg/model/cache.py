"""The key-value cache: preallocated, owned by the caller, with a length per row where rows differ.

Shapes: L layers (Pass 1's, then Pass 2's one or more), B rows, S new slots, T slots, H heads, K head channels.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from arpg.kernels.ops import Limit, Packing, as_bytes


class KeyValue(NamedTuple):
    """Keys and values of a layer. The first `settled` slots are complete, whichever kernels still run."""

    key_BTHK: Tensor
    value_BTHK: Tensor
    settled: int = 0
    packing: Packing | None = None  # of the queries


@dataclass(frozen=True)
class CacheSlots:
    """Where one layer writes the keys and values of new slots, after those that its rows have."""

    key_BTHK: Tensor
    value_BTHK: Tensor
    first: int | Tensor  # the first new slot, of all rows or of each
    stop: int  # where the longest row ends with the new slots
    settled: int = 0  # slots before them that are complete, whichever kernels still run
    packing: Packing | None = None  # of the new slots

    def visible(self) -> KeyValue:
        """Keys and values of all slots up to the new ones."""
        return KeyValue(self.key_BTHK[:, : self.stop], self.value_BTHK[:, : self.stop], self.settled)


class Cache:
    """Slots 0..end-1 may be in use. `length_B` says how many each row really has; None: all have `end`.

    A ragged cache may hold anything beyond a row's length: those slots are masked, and overwritten by the next write.
    So rows with different numbers of tokens share one decode, and rolling back is setting the lengths. With a
    `packing`, the tokens of a call are packed; only attention sees them as rows. A float8 cache has no scales: keys and
    values are of the order of 1, and float8 has the same relative precision from 2^-6 to 448.
    """

    def __init__(
        self,
        num_layers: int,
        rows: int,
        slots: int,
        num_heads: int,
        head_dim: int,
        *,
        ragged: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (num_layers, rows, slots, num_heads, head_dim)
        # Ragged: zeros, since a masked slot still enters 0 * value, and garbage may be NaN.
        make = torch.zeros if ragged else torch.empty
        self.key_LBTHK = make(shape, device=device, dtype=dtype)
        self.value_LBTHK = make(shape, device=device, dtype=dtype)
        self.length_B = torch.zeros(rows, dtype=torch.long, device=device) if ragged else None
        self.end = 0
        self.packing: Packing | None = None
        self._settled = 0

    def select(self, rows_B: Tensor) -> Cache:
        """Return a cache with some of the rows."""
        made = copy.copy(self)
        made.key_LBTHK, made.value_LBTHK = (
            as_bytes(x)[:, rows_B].view(x.dtype) for x in (self.key_LBTHK, self.value_LBTHK)
        )
        made.length_B = None if self.length_B is None else self.length_B[rows_B]
        made._settled = 0
        return made

    def view(self, rows: slice, end: int, length_B: Tensor | None) -> Cache:
        """Return some rows with other lengths: of the longest row, and of each (None: all the same).

        It writes where this one does. What was written before must be complete, as after `settle`.
        """
        made = copy.copy(self)
        made.key_LBTHK, made.value_LBTHK = self.key_LBTHK[:, rows], self.value_LBTHK[:, rows]
        made.end, made.length_B, made._settled = end, length_B, end
        return made

    def copy_rows(self, source: Cache, rows: Sequence[int], to: Sequence[int], *, end: int) -> None:
        """Copy the first `end` slots of some rows of `source`, which may be this cache."""
        for mine, given in ((self.key_LBTHK, source.key_LBTHK), (self.value_LBTHK, source.value_LBTHK)):
            as_bytes(mine)[:, list(to), :end] = as_bytes(given)[:, list(rows), :end]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.key_LBTHK.shape[1]

    @property
    def slots(self) -> int:
        """The number of slots of each row that are allocated."""
        return self.key_LBTHK.shape[2]

    @property
    def settled(self) -> int:
        """How many slots, the first ones, are complete in all rows, whichever kernels still run.

        Rows of different lengths have none: what is new in one lies between the old slots of another.
        """
        return min(self._settled, self.end) if self.length_B is None else 0

    def settle(self) -> None:
        """Mark what has been written as complete: a kernel has been launched that waits for all before it."""
        self._settled = self.end

    def reserve(self, num_new: int) -> CacheWriter:
        """Reserve `num_new` slots in every row, after what the row has; packed tokens: as their longest row needs."""
        num_new = num_new if self.packing is None else self.packing.width
        if self.end + num_new > self.slots:
            raise ValueError(f"the cache has {self.slots} slots; {self.end} + {num_new} do not fit")
        self._settled = self.settled  # what is written now is not
        return CacheWriter(self, num_new)

    def commit(self, num_new: int, *, count_B: Tensor | None = None, end: int | None = None) -> None:
        """Make the first `count_B` (None: all) of the slots just written part of their rows.

        `end` is the greatest length any row then has, where the caller knows better than `end + num_new`.
        """
        if self.length_B is not None:
            self.length_B = self.length_B + (num_new if count_B is None else count_B)
        elif count_B is not None:
            raise ValueError("rows can only differ in a cache that was allocated as ragged")
        self.end = self.end + num_new if end is None else end

    def roll_back(self, length: int | Tensor) -> None:
        """Drop slots: keep a length for all rows, or (ragged) a length for each."""
        if isinstance(length, int):
            self.end = min(self.end, length)
        elif self.length_B is None:
            raise ValueError("rows can only differ in a cache that was allocated as ragged")
        if self.length_B is not None:
            self.length_B = self.length_B.clamp(max=length)

    def read(self, layer: int) -> KeyValue:
        """Return the keys and values of a layer, up to the longest row."""
        key_BTHK, value_BTHK = self.key_LBTHK[layer, :, : self.end], self.value_LBTHK[layer, :, : self.end]
        return KeyValue(key_BTHK, value_BTHK, self.settled, self.packing)


class CacheWriter:
    """Where one call's new slots are written, and what they see."""

    def __init__(self, cache: Cache, num_new: int) -> None:
        self.cache = cache
        self.num_new = num_new
        self.stop = cache.end + num_new

    def limit(self, *, causal: bool, count_B: Tensor | None) -> Limit:
        """Return what the new slots see: everything before them, and each other (block-wise) or only backwards."""
        end, length_B = self.cache.end, self.cache.length_B
        if causal and self.num_new > 1:
            if length_B is None and end == 0:
                return "causal"
            new_S = torch.arange(1, self.num_new + 1, device=self.cache.key_LBTHK.device)[None]
            return new_S + (end if length_B is None else length_B[:, None])
        if length_B is None:
            return None
        new: int | Tensor = self.num_new if count_B is None else count_B
        return (length_B + new)[:, None]

    def slots(self, layer: int) -> CacheSlots:
        """Return where a layer writes."""
        cache = self.cache
        first = cache.end if cache.length_B is None else cache.length_B
        return CacheSlots(
            cache.key_LBTHK[layer], cache.value_LBTHK[layer], first, self.stop, cache.settled, cache.packing
        )
