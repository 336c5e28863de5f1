"""Continuous batching: a batch that is decoded a step at a time, which samples join before a step and leave after one.

Each sample has a slot: its tokens and its rows of a cache that stays. Joining writes into free slots, leaving frees
them; nothing else is copied. The tokens of a step are packed one after the other, so samples at different steps, of
different numbers of tokens, cost no padding outside attention. A server decodes the images of many requests this way.
Shapes: B samples, N grid tokens, C copies of a sample (2 when guided), T packed tokens, R rows of the cache, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.decode.engine import check, make_strategy, row_progress, run_step
from arpg.decode.exact import Exact
from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.decode.sampling import sample
from arpg.decode.speculative import Speculative
from arpg.decode.state import DecodeState, prefill, to_device
from arpg.decode.steps import RowProgress
from arpg.device import send
from arpg.kernels import ops
from arpg.kernels.ops import Packing
from arpg.model import ARPG, Cache
from arpg.model.rope import BASE
from arpg.settings import SamplingSettings


def start_batch(
    model: ARPG, request: Request, plan: Plan, settings: SamplingSettings
) -> ContinuousBatch | DraftingBatch:
    """Return a batch of the samples of a request."""
    kind = ContinuousBatch if settings.decode == "steps" else DraftingBatch
    return kind(model, request, plan, settings)


class Slots:
    """The tensors of all samples: slot i is row i of each, and rows C i to C i + C - 1 of the cache."""

    def __init__(self, model: ARPG, like: DecodeState, num_samples: int, num_slots: int) -> None:
        """Allocate as many samples of the shapes of `like`, with `num_slots` slots of the cache each."""
        self.copies = like.copies
        self.ids_BN = like.ids_BN.new_zeros(num_samples, *like.ids_BN.shape[1:])
        self.known_BN = like.known_BN.new_zeros(num_samples, *like.known_BN.shape[1:])
        self.pos_BN2 = like.pos_BN2.new_zeros(num_samples, *like.pos_BN2.shape[1:])
        self.key_B2 = like.key_B2.new_zeros(num_samples, 2)
        self.query_CBND: Tensor | None = None
        if like.query_RND is not None:
            self.query_CBND = like.query_RND.new_zeros(self.copies, num_samples, *like.query_RND.shape[1:])
        self.cache: Cache = model.allocate_cache(self.copies * num_samples, num_slots, ragged=True)

    @property
    def num_samples(self) -> int:
        """Slots for samples."""
        return len(self.ids_BN)

    def put(self, state: DecodeState, to: Sequence[int]) -> None:
        """Copy the samples of a state."""
        index, num = list(to), len(to)
        self._put(state.ids_BN, state.known_BN, state.pos_BN2, state.key_B2, index)
        if self.query_CBND is not None and state.query_RND is not None:
            self.query_CBND[:, index] = state.query_RND.unflatten(0, (self.copies, num))  # type: ignore[no-untyped-call]
        rows = [copy * num + i for i in range(num) for copy in range(self.copies)]  # theirs: all conditional ones first
        self.cache.copy_rows(state.filled_cache, rows, self._rows(index), end=state.filled_cache.end)

    def move(self, source: Slots, slots: Sequence[int], to: Sequence[int], *, end: int) -> None:
        """Copy samples from other slots, which may be these, with the first `end` slots of the cache."""
        own, index = list(slots), list(to)
        self._put(source.ids_BN[own], source.known_BN[own], source.pos_BN2[own], source.key_B2[own], index)
        if self.query_CBND is not None and source.query_CBND is not None:
            self.query_CBND[:, index] = source.query_CBND[:, own]
        self.cache.copy_rows(source.cache, self._rows(own), self._rows(index), end=end)

    def _put(self, ids_BN: Tensor, known_BN: Tensor, pos_BN2: Tensor, key_B2: Tensor, index: list[int]) -> None:
        self.ids_BN[index], self.known_BN[index], self.pos_BN2[index], self.key_B2[index] = (
            ids_BN,
            known_BN,
            pos_BN2,
            key_B2,
        )

    def _rows(self, slots: Sequence[int]) -> list[int]:
        return [self.copies * slot + copy for slot in slots for copy in range(self.copies)]


@dataclass
class Place:
    """Where a sample is: its slot, and the prefix slots of its rows of the cache, one for each copy."""

    slot: int
    prefixes: tuple[int, ...]


class PackedTokens(NamedTuple):
    """Tokens of a call, on the device."""

    slot_T: Tensor  # of the sample
    position_T: Tensor
    index_T: Tensor  # over all slots and positions
    packing: Packing | None  # None: of one sample, which are its rows
    counts: list[int]  # of each slot


class ContinuousBatch:
    """Samples with planned steps that are decoded together; all have the same grid, attention and sampling settings."""

    @torch.no_grad()
    def __init__(self, model: ARPG, request: Request, plan: Plan, settings: SamplingSettings) -> None:
        self.model, self.settings, self.num_tokens = model, settings, request.num_tokens
        self.guided = plan.guided
        self.rows: list[RowProgress] = []
        self._places: list[Place] = []  # of the rows; their slots are the first ones, in any order
        self._pool: Slots | None = None
        self.add(request, plan)

    @torch.no_grad()
    def add(self, request: Request, plan: Plan) -> None:
        """Add the samples of a request after ours."""
        check(self.model, request, plan)
        rows, model = row_progress(request, plan), self.model
        guided = self.guided and not model.takes_guidance
        lengths = request.condition.lengths(guided=guided)
        first = len(self.rows)
        places = [Place(first + i, tuple(lengths[i :: len(rows)])) for i in range(len(rows))]
        known = [row.length for row in rows]
        causal, ragged = self.settings.attention == "causal", len(set(known)) > 1
        state = to_device(model, request, guided=self.guided, ragged=ragged)
        state = prefill(model, state, causal=causal, num_slots=max(known), ragged=ragged)
        # Rows are padded to the longest step of any of them, and written that far.
        longest_step = max(max(row.plan.sizes, default=0) for row in (*self.rows, *rows))
        num_slots = max(lengths) + self.num_tokens + longest_step
        self._make_room(state, first + len(rows), num_slots).put(state, [place.slot for place in places])
        self.rows, self._places = [*self.rows, *rows], [*self._places, *places]

    def _make_room(self, like: DecodeState, num_samples: int, num_slots: int) -> Slots:
        """Return slots for as many samples and slots of the cache: ours, or larger ones with our samples in them."""
        pool = self._pool
        if pool is not None:
            if pool.num_samples >= num_samples and pool.cache.slots >= num_slots:
                return pool
            num_slots = max(num_slots, pool.cache.slots)
            num_samples = pool.num_samples if num_samples <= pool.num_samples else max(num_samples, 2 * len(self.rows))
        made = Slots(self.model, like, num_samples, num_slots)
        if pool is not None and self.rows:
            slots = range(len(self.rows))
            made.move(pool, slots, slots, end=self._longest())
        self._pool = made
        return made

    def _longest(self) -> int:
        return max(row.length + max(place.prefixes) for row, place in zip(self.rows, self._places, strict=True))

    @torch.no_grad()
    def step(self) -> None:
        """Run the next step of every sample that is not finished."""
        if all(row.finished for row in self.rows):
            return
        model, pool = self.model, self._filled
        sampled_last = self._pack([row.positions(row.done - 1) if not row.finished else () for row in self.rows])
        cache = self._encode(sampled_last)
        asked = self._pack([row.positions(row.done) if not row.finished else () for row in self.rows])
        cache.packing = asked.packing
        scale_1T = None
        if self.guided:
            scales = [1.0] * len(self.rows)
            for row, place in zip(self.rows, self._places, strict=True):
                scales[place.slot] = 1.0 if row.finished else row.plan.scales[row.done]
            scale_1T = send(torch.tensor(scales), model.device)[asked.slot_T][None]
        index_1T, query = asked.index_T[None], None
        if pool.query_CBND is not None:
            query = pool.query_CBND.flatten(1, 2)[:, asked.index_T]
        pos = ops.rope_at(
            pool.pos_BN2.view(1, -1, 2),
            index_1T,
            model.embedding.weight,
            copies=pool.copies,
            head_dim=self._head_dim,
            base=BASE,
        )
        logits_1TV = model.predict(pos, query, cache, scale_BS=scale_1T)
        key_T2, position_T1 = pool.key_B2[asked.slot_T], asked.position_T[:, None]
        sampled_T1 = sample(logits_1TV.transpose(0, 1), self.settings, key_T2, position_T1)
        pool.ids_BN.view(-1)[asked.index_T] = sampled_T1[:, 0]
        pool.known_BN.view(-1)[asked.index_T] = True
        for row, place in zip(self.rows, self._places, strict=True):
            if not row.finished:
                row.length, row.done = row.length + sampled_last.counts[place.slot], row.done + 1
                row.finished = row.done == len(row.plan.sizes)

    def _encode(self, tokens: PackedTokens) -> Cache:
        """Pass 1 of the tokens sampled last; return the cache as Pass 2 reads it."""
        model, pool, device = self.model, self._filled, self.model.device
        lengths = [0] * (pool.copies * len(self.rows))
        for row, place in zip(self.rows, self._places, strict=True):
            first = pool.copies * place.slot
            lengths[first : first + pool.copies] = [row.length + prefix for prefix in place.prefixes]
        counts = [count for count in tokens.counts for _ in range(pool.copies)]
        ragged = len(set(lengths)) > 1 or len(set(counts)) > 1
        length_R = send(torch.tensor(lengths), device) if ragged else None
        cache = pool.cache.view(len(lengths), max(lengths), length_R)
        if sum(counts):
            cache.packing = tokens.packing
            x_CTD, pos = ops.embed_at(
                model.embedding.weight,
                pool.ids_BN.view(1, -1),
                pool.pos_BN2.view(1, -1, 2),
                tokens.index_T[None],
                copies=pool.copies,
                head_dim=self._head_dim,
                base=BASE,
            )
            count_R = send(torch.tensor(counts), device) if ragged else None
            end = max(a + b for a, b in zip(lengths, counts, strict=True))
            model.encode(x_CTD, pos, cache, causal=self.settings.attention == "causal", count_B=count_R, end=end)
        return cache

    def _pack(self, positions: Sequence[Sequence[int]]) -> PackedTokens:
        """Pack the tokens at some positions of each row, slot after slot."""
        by_slot: list[Sequence[int]] = [()] * len(self.rows)
        for place, each in zip(self._places, positions, strict=True):
            by_slot[place.slot] = each
        counts, device = np.array([len(each) for each in by_slot]), self.model.device
        slot_T = np.repeat(np.arange(len(counts)), counts)
        position_T = np.array([position for each in by_slot for position in each], np.int64)
        tokens_3T = np.stack((slot_T, position_T, slot_T * (self.num_tokens + 1) + position_T))
        slot, position, index = send(torch.from_numpy(tokens_3T), device).unbind(0)
        packing = None if len(counts) == 1 else _packing(counts, slot_T, self._filled.copies, device)
        return PackedTokens(slot, position, index, packing, counts.tolist())

    @property
    def _head_dim(self) -> int | None:
        config = self.model.config
        return config.head_dim if config.positions == "rope" else None

    @property
    def _filled(self) -> Slots:
        assert self._pool is not None
        return self._pool

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these samples. Those in the last slots move into the free ones before them."""
        self.rows, self._places = [self.rows[i] for i in rows], [self._places[i] for i in rows]
        free = sorted(set(range(len(rows))) - {place.slot for place in self._places})
        moved = [place for place in self._places if place.slot >= len(rows)]
        if moved:
            self._filled.move(self._filled, [place.slot for place in moved], free, end=self._longest())
            for place, slot in zip(moved, free, strict=True):
                place.slot = slot

    def tokens(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids and known `[rows, N]` of some samples, on the CPU."""
        index = [self._places[i].slot for i in rows]
        return self._filled.ids_BN[index, :-1].cpu(), self._filled.known_BN[index, :-1].cpu()


def _packing(counts: NDArray[np.int64], slot_T: NDArray[np.int64], copies: int, device: torch.device) -> Packing:
    """Return where packed tokens stand, of which each slot has so many: in rows C i to C i + C - 1 of slot i."""
    width, num_tokens, first = int(counts.max()), len(slot_T), np.cumsum(counts) - counts
    offset, copy = np.arange(width), np.arange(copies)[:, None]
    token = np.where(offset < counts[:, None], first[:, None] + offset, 0)
    token_RS = (token[:, None] + num_tokens * copy).reshape(copies * len(counts), width)
    place_CT = (copies * slot_T + copy) * width + np.arange(num_tokens) - first[slot_T]
    return Packing(*(send(torch.from_numpy(part), device) for part in (token_RS, place_CT)))


class DraftingBatch:
    """Samples of exact or speculative decoding, which draft and verify together: none can join, each may leave."""

    @torch.no_grad()
    def __init__(self, model: ARPG, request: Request, plan: Plan, settings: SamplingSettings) -> None:
        check(model, request, plan)
        self.model, self.settings, self.rows = model, settings, row_progress(request, plan)
        strategy = make_strategy(request, plan, settings, model.device)
        assert isinstance(strategy, Exact | Speculative)
        self.strategy = strategy
        state = to_device(model, request, guided=plan.guided, ragged=True)
        causal = settings.attention == "causal"
        self.state = prefill(model, state, causal=causal, num_slots=strategy.num_slots, ragged=True)

    def step(self) -> None:
        """Run the next call of every sample that is not finished."""
        if run_step(self.model, self.state, self.strategy, self.settings):
            cursor = self.strategy.cursor
            decided = zip(cursor.done_B.tolist(), cursor.total_B.tolist(), strict=True)
            for row, (done, total) in zip(self.rows, decided, strict=True):
                row.done, row.finished = row.done + 1, done == total

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these samples."""
        self.strategy.select(torch.tensor(list(rows), device=self.model.device))
        self.rows, self.state = [self.rows[i] for i in rows], self.state.select(rows)

    def tokens(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids and known `[rows, N]` of some samples, on the CPU."""
        ids_BN, known_BN = self.state.image()
        index = torch.tensor(list(rows), device=ids_BN.device)
        return ids_BN[index].cpu(), known_BN[index].cpu()
