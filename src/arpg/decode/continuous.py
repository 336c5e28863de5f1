"""Continuous batching: a batch that is decoded a step at a time, which samples join before a step and leave after one.

Each sample has a slot: its tokens and its rows of a cache that stays. Joining takes a free slot, leaving frees it;
nothing is copied. The tokens of a step are packed one after the other, so samples at different steps, of different
numbers of tokens, are not padded to the longest row. The host plans a step for all slots at once and sends its numbers
in one copy. With a `GraphCache` packed tokens, rows and widths are padded to buckets, each of which is captured as a
CUDA graph. A server decodes the images of many requests this way.
Shapes: B samples, S slots, N grid tokens, C copies of a sample (2 when guided), T packed tokens, R rows of the cache,
K steps, W tokens of a row.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.decode.drafting import Exact, Speculative
from arpg.decode.engine import check, make_strategy, run_step
from arpg.decode.graphs import CapturedStep, GraphCache, GraphPool
from arpg.decode.plan import Plan, SamplePlan
from arpg.decode.request import Request
from arpg.decode.sampling import sample
from arpg.decode.state import DecodeState, prefill, to_device
from arpg.device import send
from arpg.errors import require
from arpg.kernels.ops import Packing
from arpg.model import ARPG, Cache
from arpg.model.rope import NO_POSITION
from arpg.noise import seed_words
from arpg.settings import SamplingSettings

Ints = NDArray[np.int64]
BUCKET = 16  # the smallest bucket of packed tokens and of the width of a row: one tile of attention
_MAX_IN_FLIGHT = 2  # steps that are launched and not finished: more would only make new samples wait


def start_batch(
    model: ARPG,
    request: Request,
    plan: Plan,
    settings: SamplingSettings,
    *,
    graphs: GraphCache[CapturedStep] | None = None,
) -> ContinuousBatch | DraftingBatch:
    """Return a batch of the samples of a request; `graphs` as in `ContinuousBatch`."""
    if settings.decode == "steps":
        return ContinuousBatch(model, request, plan, settings, graphs=graphs)
    return DraftingBatch(model, request, plan, settings)


class TokenCopy:
    """Ids and known `[B, N]` of some samples on their way to the CPU."""

    def __init__(self, ids_BN: Tensor, known_BN: Tensor, rows: Sequence[int] | None = None) -> None:
        """Start the copy. `rows`: those of `ids_BN` that are wanted; None: all. `known_BN` is on the CPU."""
        self._rows, self._known_BN, self._copied = rows, known_BN, None
        if ids_BN.is_cuda:
            self._ids_BN = torch.empty(ids_BN.shape, dtype=ids_BN.dtype, pin_memory=True)
            self._ids_BN.copy_(ids_BN, non_blocking=True)
            self._copied = _mark(ids_BN.device)
        else:
            self._ids_BN = ids_BN.to("cpu", copy=True)

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once."""
        return self._copied is None or self._copied.query()

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return ids and known."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._ids_BN if self._rows is None else self._ids_BN[list(self._rows)], self._known_BN


class Slots:
    """The tensors of all samples on the device: slot i is row i of each, and rows C i to C i + C - 1 of the cache.

    `ids_X` are the ids of all slots, N + 1 each (the last one is for padding), then the id of each class, so that a
    class is embedded like a token. `pos_X2` are their positions, which all samples share.
    """

    def __init__(self, model: ARPG, request: Request, num_samples: int, cache_slots: int, *, copies: int) -> None:
        """Allocate as many samples of the shapes of `request`, with `cache_slots` slots of the cache each."""
        config, device, num_tokens = model.config, model.device, request.num_tokens
        self.copies, self.num_samples, self.num_tokens = copies, num_samples, num_tokens
        class_ids = torch.arange(config.first_class_id, config.null_class_id + 1, device=device)
        self.ids_X = torch.cat((class_ids.new_zeros(num_samples * (num_tokens + 1)), class_ids))
        self.ids_SN = self.ids_X[: -len(class_ids)].view(num_samples, -1)
        pos_N2 = torch.cat((request.positions(), torch.zeros(1, 2))).repeat(num_samples, 1)
        self.pos_X2 = send(torch.cat((pos_N2, torch.full((len(class_ids), 2), NO_POSITION))), device)
        self.query_CXD: Tensor | None = None
        if request.condition.query_BND is not None:  # [MASK] for the unconditional copies and for padding
            mask_D = model.embedding.weight[config.mask_id]
            self.query_CXD = mask_D.repeat(copies, num_samples * (num_tokens + 1), 1)
        self.cache: Cache = model.allocate_cache(copies * num_samples, cache_slots, ragged=True)

    def put(self, state: DecodeState, slots: Ints) -> None:
        """Copy the ids and the cache of the samples of a state."""
        num, copy = len(slots), np.arange(self.copies)
        self.ids_SN[slots] = state.ids_BN
        theirs = copy * num + np.arange(num)[:, None]  # all conditional ones first
        mine = self.copies * slots[:, None] + copy
        cache = state.filled_cache
        self.cache.copy_rows(cache, theirs.ravel().tolist(), mine.ravel().tolist(), end=cache.end)

    def put_query(self, slot: int, query_ND: Tensor) -> None:
        """Set what Pass 2 queries with for the conditional copy of a sample."""
        if self.query_CXD is not None:
            first = slot * (self.num_tokens + 1)
            self.query_CXD[0, first : first + self.num_tokens] = query_ND

    def copy_from(self, source: Slots, *, end: int) -> None:
        """Copy all samples of fewer slots, with the first `end` slots of the cache."""
        num, rows = source.num_samples, range(source.cache.rows)
        self.ids_SN[:num] = source.ids_SN
        if self.query_CXD is not None and source.query_CXD is not None:
            self.query_CXD[:, : source.query_CXD.shape[1]] = source.query_CXD
        self.cache.copy_rows(source.cache, rows, rows, end=end)


class StepShape(NamedTuple):
    """All that the kernels of a step depend on: two steps of one shape can share a CUDA graph."""

    first: int  # slot
    slots: int  # from there on
    encoded: int  # packed tokens of Pass 1
    encode_width: int  # of a row
    predicted: int  # packed tokens of Pass 2
    predict_width: int
    ragged: bool  # whether rows differ in length
    longest: int  # slots of the cache of the longest row, before and after Pass 1
    end: int

    @property
    def packed(self) -> bool:
        """Whether tokens are packed: those of one sample are its rows."""
        return self.slots > 1


class StepInputs(NamedTuple):
    """The numbers of a step: views of one array on the host, or of one tensor on the device."""

    length_R: Any  # of the cache, before Pass 1
    encode_start_R: Any  # `Packing` of Pass 1
    encode_count_R: Any
    encode_CT: Any  # indices into `ids_X`, as those below
    predict_start_R: Any  # `Packing` of Pass 2
    predict_count_R: Any
    predict_T: Any
    position_T: Any
    key_T2: Any  # seeds
    scale_T: Any  # guidance, as float32

    @classmethod
    def sizes(cls, shape: StepShape, copies: int) -> list[tuple[int, ...]]:
        """Return the shape of each field; two scales share a word."""
        rows, num = (copies * shape.slots,), shape.predicted
        return [rows, rows, rows, (copies, shape.encoded), rows, rows, (num,), (num,), (num, 2), ((num + 1) // 2,)]

    @classmethod
    def of(cls, flat: Any, shape: StepShape, copies: int) -> StepInputs:
        """Return the fields of an array or a tensor."""
        parts, first = [], 0
        for size in cls.sizes(shape, copies):
            stop = first + math.prod(size)
            parts.append(flat[first:stop].reshape(size))
            first = stop
        parts[-1] = parts[-1].view(torch.float32 if isinstance(flat, Tensor) else np.float32)[: shape.predicted]
        return cls(*parts)


class SlotPlans:
    """The plans of the samples in all slots as arrays, and how far each is. A slot without steps is free.

    Columns of `order_SN` are the tokens of a sample in the order in which they enter the cache: its class, then its
    positions. At step k Pass 1 encodes the columns from bound k to k + 1, Pass 2 predicts those up to bound k + 2.
    """

    def __init__(self, num_tokens: int, copies: int) -> None:
        self.num_tokens, self.copies = num_tokens, copies
        self.order_SN = np.zeros((0, num_tokens + 1), np.int64)
        self.bounds_SK = np.zeros((0, 3), np.int64)
        self.scale_SK = np.ones((0, 0), np.float32)
        self.steps_S, self.done_S = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.length_SC = np.ones((0, copies), np.int64)  # of the cache; 1 where a slot is free: attention needs one
        self.class_SC = np.zeros((0, copies), np.int64)  # classes, as indices behind the ids of the slots
        self.key_S2 = np.zeros((0, 2), np.int64)  # seeds
        self.known_SN = np.zeros((0, num_tokens), np.bool_)  # from the start

    def grow(self, num_slots: int, num_steps: int) -> None:
        """Make room for so many samples and steps."""
        num_slots, num_steps = max(num_slots, len(self.steps_S)), max(num_steps, self.scale_SK.shape[1])
        if (num_slots, num_steps) == self.scale_SK.shape:
            return
        for name, old in vars(self).items():
            if isinstance(old, np.ndarray):
                width = {"bounds_SK": (num_steps + 3,), "scale_SK": (num_steps,)}.get(name, old.shape[1:])
                new = np.full((num_slots, *width), int(name in ("scale_SK", "length_SC")), old.dtype)
                new[tuple(slice(size) for size in old.shape)] = old
                setattr(self, name, new)

    def put(self, slot: int, plan: SamplePlan, seed: int, known_N: Tensor) -> None:
        """Begin a sample of which nothing is in the cache."""
        num_steps = len(plan.sizes)
        self.order_SN[slot, 1 : len(plan.order) + 1] = plan.order
        self.bounds_SK[slot] = 1
        self.bounds_SK[slot, 1 : num_steps + 2] += np.cumsum((0, *plan.sizes))
        self.scale_SK[slot, :num_steps] = plan.scales
        self.steps_S[slot], self.done_S[slot] = num_steps, 0
        self.key_S2[slot], self.known_SN[slot] = seed_words(seed), known_N

    def put_class(self, slot: int, classes: Sequence[int]) -> None:
        """Let Pass 1 of the first step encode the class of each copy."""
        self.bounds_SK[slot, 0], self.length_SC[slot], self.class_SC[slot] = 0, 0, classes

    def free(self, slots: Iterable[int]) -> None:
        """Free slots."""
        index = list(slots)
        self.steps_S[index], self.length_SC[index] = 0, 1

    def known(self, slot: int) -> NDArray[np.bool_]:
        """`[N]`: which tokens of a sample are known by now."""
        known: NDArray[np.bool_] = self.known_SN[slot].copy()
        known[self.order_SN[slot, 1 : self.bounds_SK[slot, self.done_S[slot] + 1]]] = True
        return known

    def counts(self) -> Ints:
        """`[S, 2]`: how many tokens of each slot the next step encodes and predicts."""
        bounds_S3 = np.take_along_axis(self.bounds_SK, self.done_S[:, None] + np.arange(3), 1)
        return (bounds_S3[:, 1:] - bounds_S3[:, :-1]) * (self.done_S < self.steps_S)[:, None]

    def fill(self, inputs: StepInputs, shape: StepShape, count_S2: Ints) -> None:
        """Write the numbers of the next step; arrays are zero where there is padding."""
        here, slot_S = slice(shape.first, shape.first + shape.slots), np.arange(shape.slots)
        # Both passes at once, one after the other: [2 S] and [T].
        count, slot = count_S2[here].T.ravel(), np.tile(slot_S + shape.first, 2)
        column = self.bounds_SK[slot, self.done_S[slot] + np.repeat((0, 1), shape.slots)]
        first = np.cumsum(count) - count
        num, place = int(first[shape.slots]), np.arange(count.sum())
        slot_T, column_T = np.repeat(slot, count), place + np.repeat(column - first, count)
        position_T = self.order_SN[slot_T, column_T]
        index_T = slot_T * (self.num_tokens + 1) + position_T
        # Rows C i to C i + C - 1 are those of slot i; the copies of packed tokens stand one after the other.
        inputs.length_R[:] = self.length_SC[here].ravel()
        inputs.encode_count_R[:], inputs.predict_count_R[:] = np.repeat(count.reshape(2, -1), self.copies, axis=1)
        encode_S, predict_S, copy_C = first[: shape.slots], first[shape.slots :] - num, np.arange(self.copies)
        inputs.encode_start_R[:] = (encode_S[:, None] + shape.encoded * copy_C).ravel()
        inputs.predict_start_R[:] = (predict_S[:, None] + shape.predicted * copy_C).ravel()
        # Padding is the first class, and behind it the last place of the first slot. It belongs to no row (of a single
        # slot: to its rows, behind their end), and what becomes of it is never read.
        first_class = len(self.steps_S) * (self.num_tokens + 1)
        inputs.encode_CT[:, num:], inputs.encode_CT[:, :num] = first_class, index_T[:num]
        classes = np.flatnonzero(column_T[:num] == 0)
        inputs.encode_CT[:, classes] = first_class + self.class_SC[slot_T[classes]].T
        slot_T, end = slot_T[num:], len(index_T) - num
        inputs.predict_T[end:], inputs.predict_T[:end] = self.num_tokens, index_T[num:]
        inputs.position_T[:end], inputs.key_T2[:end] = position_T[num:], self.key_S2[slot_T]
        inputs.scale_T[:end] = self.scale_SK[slot_T, self.done_S[slot_T]]

    def advance(self, count_S2: Ints) -> None:
        """Count the step."""
        self.length_SC += count_S2[:, :1]
        self.done_S += self.done_S < self.steps_S


class SlotRow(NamedTuple):
    """A sample of a `ContinuousBatch`: its slot."""

    plans: SlotPlans
    slot: int

    @property
    def done(self) -> int:
        """Steps that are done, or launched."""
        return int(self.plans.done_S[self.slot])

    @property
    def finished(self) -> bool:
        """Whether no step follows."""
        return bool(self.plans.done_S[self.slot] == self.plans.steps_S[self.slot])


class ContinuousBatch:
    """Samples with planned steps that are decoded together; all have the same grid, attention and sampling settings."""

    def __init__(
        self,
        model: ARPG,
        request: Request,
        plan: Plan,
        settings: SamplingSettings,
        *,
        graphs: GraphCache[CapturedStep] | None = None,
    ) -> None:
        """`graphs`: captures each bucket of steps; None: steps are not padded, and run eagerly."""
        self.model, self.settings, self.graphs = model, settings, graphs
        self.guided = plan.guided
        self.copies = 2 if plan.guided and not model.takes_guidance else 1
        self.grid, self.pos_N2, self.num_tokens = request.grid, request.pos_N2, request.num_tokens
        self.rows: list[SlotRow] = []
        self._plans = SlotPlans(self.num_tokens, self.copies)
        self._pool: Slots | None = None
        self._longest_prefix = self._longest_step = 1  # of any sample so far
        self._graph_pool: GraphPool | None = None
        self._launched: deque[Any] = deque()  # the ends of steps
        self.device_idle = True  # whether it had nothing to do when the last step was launched
        self.waited_s = 0.0  # for the device, in all steps
        self.add(request, plan)

    def add(self, request: Request, plan: Plan) -> None:
        """Add the samples of a request after ours."""
        check(self.model, request, plan)
        self.add_rows([(request, row) for row in range(len(request.seeds))], plan.samples)

    @torch.no_grad()
    def add_rows(self, parts: Sequence[tuple[Request, int]], plans: Sequence[SamplePlan]) -> None:
        """Add samples of several requests after ours. A class alone waits for Pass 1 of the first step; other prefixes
        and known tokens are encoded here.
        """
        for request, _ in parts:
            same = request.pos_N2 is self.pos_N2 or (
                request.pos_N2 is not None and self.pos_N2 is not None and torch.equal(request.pos_N2, self.pos_N2)
            )
            require(request.grid == self.grid and same, "samples of one batch have the same grid and positions")
        prefilled = [i for i, (request, row) in enumerate(parts) if _label(request, row) is None]
        state, prefix = None, 1
        if prefilled:
            state, length_BC, prefix = self._prefill(Request.gather([parts[i] for i in prefilled]))
        free = np.flatnonzero(self._plans.steps_S == 0)[: len(parts)]
        slots = np.concatenate((free, len(self._plans.steps_S) + np.arange(len(parts) - len(free))))
        pool = self._make_room(parts[0][0], int(slots.max()) + 1, prefix, max(max(plan.sizes) for plan in plans))
        self._plans.grow(pool.num_samples, max(len(plan.sizes) for plan in plans))
        # The device first: where it fails, the slots are still free and the batch is as it was.
        for slot, (request, row) in zip(slots.tolist(), parts, strict=True):
            if request.condition.query_BND is not None:
                pool.put_query(slot, request.condition.query_BND[row])
        if state is not None:
            pool.put(state, slots[prefilled])
        for slot, (request, row), plan in zip(slots.tolist(), parts, plans, strict=True):
            self._plans.put(slot, plan, request.seeds[row], request.known_BN[row])
            if (label := _label(request, row)) is not None:
                self._plans.put_class(slot, (label, self.model.config.num_classes)[: self.copies])
            self.rows.append(SlotRow(self._plans, slot))
        if state is not None:
            self._plans.length_SC[slots[prefilled]] = length_BC

    def _prefill(self, request: Request) -> tuple[DecodeState, Ints, int]:
        """Return samples with their prefixes and known tokens in a cache, the length of each copy, and of the longest
        prefix.
        """
        known = request.known_BN.sum(1).tolist()
        prefixes = request.condition.lengths(guided=self.copies == 2)
        ragged = len(set(known)) > 1
        state = to_device(self.model, request, guided=self.guided, ragged=ragged)
        causal = self.settings.attention == "causal"
        state = prefill(self.model, state, causal=causal, num_slots=max(known), ragged=ragged)
        return state, np.array(prefixes).reshape(self.copies, -1).T + np.array(known)[:, None], max(prefixes)

    def _make_room(self, like: Request, num_samples: int, prefix: int, longest_step: int) -> Slots:
        """Return slots for as many samples, prefixes and steps: ours, or larger ones with our samples in them."""
        pool, text = self._pool, self.model.config.text
        prefix, longest_step = max(prefix, self._longest_prefix), max(longest_step, self._longest_step)
        if self.graphs is not None and text is not None:  # longer prompts will come
            prefix = max(prefix, text.max_tokens)
        # Rows are padded to the longest step of any of them, and written that far.
        cache_slots = prefix + self.num_tokens + self._width(longest_step)
        if pool is None or pool.num_samples < num_samples or pool.cache.slots < cache_slots:
            if pool is not None:
                enough = pool.num_samples >= num_samples
                num_samples = pool.num_samples if enough else max(num_samples, 2 * len(self.rows))
            made = Slots(self.model, like, num_samples, cache_slots, copies=self.copies)
            if pool is not None:
                made.copy_from(pool, end=int(self._plans.length_SC.max()))
            if self.graphs is not None:  # they write into the old ones
                self.graphs.clear()
            self._pool = pool = made
        self._longest_prefix, self._longest_step = prefix, longest_step
        return pool

    def _width(self, longest: int) -> int:
        """The width of rows with at most so many tokens."""
        return longest if self.graphs is None else max(BUCKET, _power_of_two(longest))

    @torch.no_grad()
    def step(self) -> None:
        """Launch the next step of every sample that is not finished."""
        count_S2 = self._plans.counts()
        if not count_S2[:, 1].any():
            return
        shape = self._shape(count_S2)
        flat = np.zeros(sum(map(math.prod, StepInputs.sizes(shape, self.copies))), np.int64)
        self._plans.fill(StepInputs.of(flat, shape, self.copies), shape, count_S2)
        self._launch(shape, torch.from_numpy(flat))
        self._plans.advance(count_S2)
        if self.model.device.type == "cuda":
            self.device_idle = not self._launched or self._launched[-1].query()
            self._launched.append(_mark(self.model.device))
            if len(self._launched) > _MAX_IN_FLIGHT:
                began = time.perf_counter()
                self._launched.popleft().synchronize()
                self.waited_s += time.perf_counter() - began

    def _shape(self, count_S2: Ints) -> StepShape:
        """Return the shape of a step; with graphs, the bucket that it falls into."""
        active_S, num_2, width_2 = np.flatnonzero(count_S2[:, 1]), count_S2.sum(0), count_S2.max(0)
        first, stop = int(active_S[0]), int(active_S[-1]) + 1
        if self.graphs is None:
            lengths, counts = self._plans.length_SC[first:stop], count_S2[first:stop, :1]
            ragged = bool((lengths != lengths[0, 0]).any() or (counts != counts[0]).any())
            longest, end = int(lengths.max()), int((lengths + counts).max())
            (encoded, predicted), (width, predict_width) = num_2.tolist(), width_2.tolist()
            return StepShape(first, stop - first, encoded, width, predicted, predict_width, ragged, longest, end)
        slots, width = min(_power_of_two(stop), self._filled.num_samples), self._width(int(width_2.max()))
        num = width if slots == 1 else _token_bucket(int(num_2.max()))
        end = self._filled.cache.slots - width  # no row is longer
        return StepShape(0, slots, num, width, num, width, True, end, end)

    def _launch(self, shape: StepShape, flat: Tensor) -> None:
        """Run a step eagerly, or replay its graph; the eager run before a capture compiles its kernels."""
        graph = None if self.graphs is None else self.graphs.acquire(shape)
        if graph is not None:
            graph.replay(flat)
            graph.busy.release()
            return
        inputs = send(flat, self.model.device)
        self._run(shape, inputs)
        if self.graphs is not None and self.graphs.worth_capturing(shape):
            if self._graph_pool is None or not self.graphs.captured:  # torch frees a pool with the last of its graphs
                self._graph_pool = GraphPool(self.model.device)
            pool = self._graph_pool
            made = self.graphs.capture(shape, lambda: CapturedStep(lambda: self._run(shape, inputs), inputs, pool))
            if made is not None:
                made.busy.release()

    def _run(self, shape: StepShape, flat: Tensor) -> None:
        """Encode the tokens sampled last, predict and sample the next ones. All that changes is in tensors."""
        model, pool, copies = self.model, self._filled, self.copies
        inputs = StepInputs.of(flat, shape, copies)
        rows = slice(copies * shape.first, copies * (shape.first + shape.slots))
        cache = pool.cache.view(rows, shape.longest, inputs.length_R if shape.ragged else None)
        if shape.encoded:
            rows_of = (inputs.encode_start_R, inputs.encode_count_R, shape.encode_width, (copies, shape.encoded))
            cache.packing = Packing.of(*rows_of, like=model.embedding.weight) if shape.packed else None
            ids_CX, pos_CX2 = pool.ids_X.expand(copies, -1), pool.pos_X2.expand(copies, -1, -1)
            x_CTD, pos = model.embed_at(ids_CX, pos_CX2, inputs.encode_CT, copies=1)
            causal, count_R = self.settings.attention == "causal", inputs.encode_count_R if shape.ragged else None
            model.encode(x_CTD, pos, cache, causal=causal, count_B=count_R, end=shape.end)
        rows_of = (inputs.predict_start_R, inputs.predict_count_R, shape.predict_width, (copies, shape.predicted))
        cache.packing = Packing.of(*rows_of, like=model.embedding.weight) if shape.packed else None
        index_T, query = inputs.predict_T, None if pool.query_CXD is None else pool.query_CXD[:, inputs.predict_T]
        pos = model.rope_at(pool.pos_X2[None], index_T[None], copies=copies)
        scale_1T = inputs.scale_T[None] if self.guided else None
        logits_1TV = model.predict(pos, query, cache, scale_BS=scale_1T)
        sampled_T1 = sample(logits_1TV.transpose(0, 1), self.settings, inputs.key_T2, inputs.position_T[:, None])
        pool.ids_X.index_copy_(0, index_T, sampled_T1[:, 0])

    @property
    def _filled(self) -> Slots:
        assert self._pool is not None
        return self._pool

    def finished(self) -> list[bool]:
        """Return of each sample whether no step follows."""
        finished_S = (self._plans.done_S == self._plans.steps_S).tolist()
        return [finished_S[row.slot] for row in self.rows]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these samples."""
        kept = [self.rows[i] for i in rows]
        self._plans.free({row.slot for row in self.rows} - {row.slot for row in kept})
        self.rows = kept

    def fetch(self, rows: Sequence[int]) -> TokenCopy:
        """Start to copy the tokens of some samples as they are after the steps launched so far."""
        slots = [self.rows[i].slot for i in rows]
        first, stop = min(slots), max(slots) + 1
        known_BN = torch.from_numpy(np.stack([self._plans.known(slot) for slot in slots]))
        return TokenCopy(self._filled.ids_SN[first:stop, :-1], known_BN, [slot - first for slot in slots])


def _label(request: Request, row: int) -> int | None:
    """The class of a sample whose class is all that is known of it, else None."""
    label_B = request.condition.label_B
    return None if label_B is None or request.known_BN[row].any() else int(label_B[row])


def _power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _token_bucket(num_tokens: int) -> int:
    """The next bucket of packed tokens: multiples of 16, beyond 256 of a sixteenth of the next power of two."""
    part = max(BUCKET, _power_of_two(num_tokens) // 16)
    return -(-num_tokens // part) * part


def _mark(device: torch.device) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass
class DraftingRow:
    """A sample of a `DraftingBatch`: how far it is."""

    done: int = 0  # steps
    finished: bool = False


class DraftingBatch:
    """Samples of exact or speculative decoding, which draft and verify together: none can join, each may leave."""

    device_idle, waited_s = False, 0.0  # a step ends with that of the device; how long it waits is not measured

    @torch.no_grad()
    def __init__(self, model: ARPG, request: Request, plan: Plan, settings: SamplingSettings) -> None:
        check(model, request, plan)
        self.model, self.settings, self.rows = model, settings, [DraftingRow() for _ in request.seeds]
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

    def finished(self) -> list[bool]:
        """Return of each sample whether no step follows."""
        return [row.finished for row in self.rows]

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these samples."""
        rows_B = torch.tensor(list(rows), dtype=torch.long, device=self.model.device)
        self.strategy.select(rows_B)
        self.rows, self.state = [self.rows[i] for i in rows], self.state.select(rows_B)

    def fetch(self, rows: Sequence[int]) -> TokenCopy:
        """Copy the tokens of some samples; waits for the device, as every step does."""
        ids_BN, known_BN = self.state.image()
        index = torch.tensor(list(rows), device=ids_BN.device)
        return TokenCopy(ids_BN[index].cpu(), known_BN[index].cpu())
