"""The key-value cache: preallocated, owned by the caller, with a length per sample when it must be.

Shapes: L layers (Pass 1's, then Pass 2's one or more), B rows, S new slots, T slots, H heads, K head channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# How many slots each query sees, the first ones: `[B, S]`, or 1 instead of either; "causal": as many as there are up to
# its own; None: all.
Limit = Tensor | Literal["causal"] | None


class KeyValue(NamedTuple):
    """Keys and values of a layer. The first `settled` slots are complete, whichever kernels still run."""

    key_BTHK: Tensor
    value_BTHK: Tensor
    settled: int = 0


@dataclass(frozen=True)
class Slots:
    """Where one layer puts the keys and values of new slots, behind those that its rows have."""

    key_BTHK: Tensor
    value_BTHK: Tensor
    first: int | Tensor  # the first new slot, of all rows or of each
    num_new: int
    stop: int  # where the last row ends with them
    settled: int = 0  # slots before them that are complete, whichever kernels still run

    def write(self, key_BSHK: Tensor, value_BSHK: Tensor) -> KeyValue:
        """Put them there; returns all of the layer's."""
        if isinstance(self.first, int):
            part = slice(self.first, self.stop)
            self.key_BTHK[:, part], self.value_BTHK[:, part] = key_BSHK, value_BSHK
        else:
            row_B1 = torch.arange(len(self.first), device=self.first.device)[:, None]
            slot_BS = self.first[:, None] + torch.arange(self.num_new, device=self.first.device)
            self.key_BTHK[row_B1, slot_BS], self.value_BTHK[row_B1, slot_BS] = key_BSHK, value_BSHK
        return self.all()

    def all(self) -> KeyValue:
        """Of all slots up to the new ones."""
        return KeyValue(self.key_BTHK[:, : self.stop], self.value_BTHK[:, : self.stop], self.settled)


class Cache:
    """Slots 0..end-1 may be in use. `length_B` says how many each row really has; None: all have `end`.

    A ragged cache may hold anything beyond a row's length: those slots are masked, and overwritten by the
    next write. So rows with different numbers of tokens share one decode, and rolling back is setting
    the lengths.
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
        self._settled = 0

    @classmethod
    def gather(cls, parts: Sequence[tuple[Cache, Tensor]], slots: int) -> Cache:
        """A new, ragged cache with some rows of some others, in this order."""
        like = parts[0][0].key_LBTHK
        num_layers, _, _, num_heads, head_dim = like.shape
        rows = sum(len(index) for _, index in parts)
        cache = cls(num_layers, rows, slots, num_heads, head_dim, ragged=True, device=like.device, dtype=like.dtype)
        assert cache.length_B is not None
        first = 0
        for part, index in parts:
            chosen, end = slice(first, first + len(index)), min(part.end, slots)  # a longer row may have left
            cache.key_LBTHK[:, chosen, :end] = part.key_LBTHK[:, index, :end]
            cache.value_LBTHK[:, chosen, :end] = part.value_LBTHK[:, index, :end]
            cache.length_B[chosen] = end if part.length_B is None else part.length_B[index]
            cache.end = max(cache.end, end)
            first += len(index)
        return cache

    @property
    def rows(self) -> int:
        return self.key_LBTHK.shape[1]

    @property
    def slots(self) -> int:
        return self.key_LBTHK.shape[2]

    def reserve(self, num_new: int) -> Writer:
        """Room for `num_new` slots in every row, after what the row already has."""
        if self.end + num_new > self.slots:
            raise ValueError(f"the cache has {self.slots} slots; {self.end} + {num_new} do not fit")
        self._settled = self.settled  # what is written now is not
        return Writer(self, num_new)

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
        """Forget slots: a length for all rows, or (ragged) a length for each."""
        if isinstance(length, int):
            self.end = min(self.end, length)
        elif self.length_B is None:
            raise ValueError("rows can only differ in a cache that was allocated as ragged")
        if self.length_B is not None:
            self.length_B = self.length_B.clamp(max=length)

    @property
    def settled(self) -> int:
        """The first so many slots of all rows are complete, whichever kernels still run: these may be read at once.

        Rows of different lengths have none: what is new in one lies between the old slots of another.
        """
        return min(self._settled, self.end) if self.length_B is None else 0

    def settle(self) -> None:
        """A kernel has been launched that waits for all before it: what has been written is complete for all after."""
        self._settled = self.end

    def read(self, layer: int) -> KeyValue:
        return KeyValue(self.key_LBTHK[layer, :, : self.end], self.value_LBTHK[layer, :, : self.end], self.settled)


class Writer:
    """Where one call's new slots go, and what they see."""

    def __init__(self, cache: Cache, num_new: int) -> None:
        self.cache = cache
        self.num_new = num_new
        self.stop = cache.end + num_new

    def limit(self, *, causal: bool, count_B: Tensor | None) -> Limit:
        """What the new slots see: everything before them, and each other (block-wise) or only backwards."""
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

    def slots(self, layer: int) -> Slots:
        cache = self.cache
        first = cache.end if cache.length_B is None else cache.length_B
        return Slots(cache.key_LBTHK[layer], cache.value_LBTHK[layer], first, self.num_new, self.stop, cache.settled)
