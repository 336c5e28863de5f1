"""The key-value cache: preallocated, owned by the caller, with a length per sample when it must be.

Shapes: L layers (Pass 1's, then Pass 2's one or more), B rows, S new slots, T slots, H heads, K head channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arpg.model.layers import KeyValue, Mask


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
        # Zeros, not empty: a masked slot still enters 0 * value, and garbage may be NaN.
        self.key_LBTHK = torch.zeros(shape, device=device, dtype=dtype)
        self.value_LBTHK = torch.zeros(shape, device=device, dtype=dtype)
        self.length_B = torch.zeros(rows, dtype=torch.long, device=device) if ragged else None
        self.end = 0

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

    def read(self, layer: int) -> KeyValue:
        return self.key_LBTHK[layer, :, : self.end], self.value_LBTHK[layer, :, : self.end]


def sees(limit_BS: Tensor, num_slots: int) -> Tensor:
    """The mask `[B, 1, S, T]` under which each query sees its first `limit` slots."""
    slot_T = torch.arange(num_slots, device=limit_BS.device)
    return (slot_T < limit_BS[..., None])[:, None]


class Writer:
    """Writes the keys and values of one call's new slots, layer by layer."""

    def __init__(self, cache: Cache, num_new: int) -> None:
        self.cache = cache
        self.num_new = num_new
        self.stop = cache.end + num_new
        device = cache.key_LBTHK.device
        new_S = torch.arange(num_new, device=device)
        if cache.length_B is None:
            self.slot_BS = cache.end + new_S[None]
        else:
            self.slot_BS = cache.length_B[:, None] + new_S
            self.row_B1 = torch.arange(len(cache.length_B), device=device)[:, None]

    def mask(self, *, causal: bool, count_B: Tensor | None) -> Mask:
        """What the new slots see: everything before them, and each other (block-wise) or only backwards."""
        if causal:
            if self.cache.length_B is None and self.cache.end == 0:
                return "causal"
            return sees(self.slot_BS + 1, self.stop)
        if self.cache.length_B is None:
            return None
        new: int | Tensor = self.num_new if count_B is None else count_B
        return sees((self.cache.length_B + new)[:, None], self.stop)

    def write(self, layer: int, key_BSHK: Tensor, value_BSHK: Tensor) -> KeyValue:
        """Store them and return all of the layer's slots up to the new ones."""
        key, value = self.cache.key_LBTHK[layer], self.cache.value_LBTHK[layer]
        if self.cache.length_B is None:
            key[:, self.cache.end : self.stop] = key_BSHK
            value[:, self.cache.end : self.stop] = value_BSHK
        else:
            key[self.row_B1, self.slot_BS] = key_BSHK
            value[self.row_B1, self.slot_BS] = value_BSHK
        return key[:, : self.stop], value[:, : self.stop]
