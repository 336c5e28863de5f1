"""DecodeState: a batch that is being decoded, on the device; and its steps: what each encodes, predicts and accepts.

Shapes: B batch, R rows (B, or 2B when guided: conditional, then unconditional), N grid tokens, S tokens of a step,
P prefix slots, D width, V vocabulary, T positions of all steps, K steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.device import send_all
from arpg.kernels import ops
from arpg.model import Cache, Condition, TokenDecoder
from arpg.noise import seed_keys


@dataclass(frozen=True)
class EncodeArgs:
    """Tokens that Pass 1 writes to the cache, named by position; rows are padded with position N."""

    position_BS: Tensor
    count_B: Tensor | None = None  # how many of a row's positions are real; None: all
    longest: int | None = None  # image tokens of the longest row after this; None: all that are written
    static: bool = False  # the tensors were written before the decode started


@dataclass(frozen=True)
class PredictArgs:
    """Positions that Pass 2 predicts, padded with N."""

    position_BS: Tensor
    scale_BS: Tensor | None  # guidance, one for each position or for each row; None: not guided
    visible_BS: Tensor | None = None  # image tokens of the cache that each sees; None: all that its row has
    static: bool = False  # the tensors were written before the decode started


@dataclass(frozen=True)
class StepPlan:
    """One call of the network: Pass 1 encodes (None: nothing yet), then Pass 2 predicts."""

    encode: EncodeArgs | None
    predict: PredictArgs


@dataclass
class DecodeState:
    """All that belongs to the samples of a batch, one row each.

    The prefix, the queries and the cache have the unconditional rows, too. Column N of ids, known and positions is for
    padding. `to_device` makes the state of a request, `prefill` adds the cache.
    """

    ids_BN: Tensor  # raster order; anything where not known
    known_BN: Tensor
    pos_BN2: Tensor  # grid positions
    key_B2: Tensor  # the seeds
    prefix_RPD: Tensor
    prefix_pos_RP2: Tensor
    prefix_length_R: Tensor | None  # real prefix slots of each row, where rows differ
    query_RND: Tensor | None  # what Pass 2 queries with, where it is not [MASK]
    known: EncodeArgs | None  # the tokens that are known from the start
    cache: Cache | None = None

    @property
    def num_prefix(self) -> int:
        """Prefix slots of the row that has the most."""
        return self.prefix_RPD.shape[1]

    @property
    def copies(self) -> int:
        """Rows of the network for each sample: 2 when guided."""
        return len(self.prefix_RPD) // len(self.ids_BN)

    @property
    def filled_cache(self) -> Cache:
        """The cache, which a state has after `prefill`."""
        assert self.cache is not None
        return self.cache

    def encode(self, model: TokenDecoder, args: EncodeArgs, *, causal: bool) -> None:
        """Pass 1: write the tokens at these positions to the cache."""
        x_RSD, pos = model.embed_at(self.ids_BN, self.pos_BN2, args.position_BS, copies=self.copies, static=args.static)
        count_R = None if args.count_B is None else ops.repeat_rows(args.count_B, self.copies)
        end = None if args.longest is None else self.num_prefix + args.longest
        model.encode(x_RSD, pos, self.filled_cache, causal=causal, count_B=count_R, end=end)

    def predict(self, model: TokenDecoder, args: PredictArgs) -> Tensor:
        """Pass 2: guided logits `[B, S, V]` of the positions."""
        position_BS, num_predicted = args.position_BS, args.position_BS.shape[1]
        if self.query_RND is None and args.visible_BS is None and model.same_logits(self.filled_cache):
            position_BS = position_BS[:, :1]
        query_RSD = visible_RS = None
        if self.query_RND is not None:
            index_RS = ops.repeat_rows(position_BS, self.copies)
            query_RSD = self.query_RND.take_along_dim(index_RS[..., None], dim=1)
        if args.visible_BS is not None:
            visible_RS = self._prefix_lengths() + ops.repeat_rows(args.visible_BS, self.copies)
        pos = model.rope_at(self.pos_BN2, position_BS, copies=self.copies, static=args.static)
        logits_BSV = model.predict(pos, query_RSD, self.filled_cache, visible_RS, scale_BS=args.scale_BS)
        return logits_BSV.expand(-1, num_predicted, -1)

    def scatter(self, position_BS: Tensor, ids_BS: Tensor, kept_BS: Tensor | None) -> None:
        """Set the tokens at these positions; they are known where they are kept (None: all)."""
        self.ids_BN, self.known_BN = ops.scatter_tokens(self.ids_BN, self.known_BN, position_BS, ids_BS, kept_BS)
        self.filled_cache.settle()  # this kernel starts when all that has written into the cache has ended

    def roll_back(self, length_B: Tensor, longest: int) -> None:
        """Keep the first `length_B` image tokens of each row in the cache; `longest` is the greatest of them."""
        length_R1 = self._prefix_lengths() + ops.repeat_rows(length_B[:, None], self.copies)
        self.filled_cache.roll_back(length_R1[:, 0])
        self.filled_cache.roll_back(self.num_prefix + longest)

    def image(self) -> tuple[Tensor, Tensor]:
        """Ids and known `[B, N]`, without the padding."""
        return self.ids_BN[:, :-1], self.known_BN[:, :-1]

    def _prefix_lengths(self) -> Tensor:
        """`[R, 1]`: the prefix slots of each row."""
        if self.prefix_length_R is not None:
            return self.prefix_length_R[:, None]
        return torch.full((len(self.prefix_RPD), 1), self.num_prefix, device=self.ids_BN.device)

    def select(self, rows_B: Tensor) -> DecodeState:
        """Return the state of some of the samples."""
        rows_R = torch.cat([copy * len(self.ids_BN) + rows_B for copy in range(self.copies)])
        return dataclasses.replace(
            self,
            **{name: getattr(self, name)[rows_B] for name in ("ids_BN", "known_BN", "pos_BN2", "key_B2")},
            **{name: getattr(self, name)[rows_R] for name in ("prefix_RPD", "prefix_pos_RP2")},
            prefix_length_R=None if self.prefix_length_R is None else self.prefix_length_R[rows_R],
            query_RND=None if self.query_RND is None else self.query_RND[rows_R],
            known=None,
            cache=self.filled_cache.select(rows_R),
        )


def to_device(model: TokenDecoder, request: Request, *, guided: bool, ragged: bool) -> DecodeState:
    """Put a request on the model's device. `ragged`: rows may come to differ in length.

    `guided`: with unconditional rows, unless the model takes the scale as an input.
    """
    guided = guided and not model.takes_guidance
    device, batch = model.device, len(request.seeds)
    condition = request.condition
    lengths = condition.lengths(guided=guided)
    uniform = len(set(lengths)) == 1
    prefix_RPD = torch.cat((condition.prefix_BPD, condition.null_prefix_BPD)) if guided else condition.prefix_BPD
    prefix_pos = torch.cat((condition.pos_BP2, condition.pos_BP2)) if guided else condition.pos_BP2
    known_BN, num_tokens = request.known_BN.numpy(), request.num_tokens
    arrays: dict[str, NDArray[Any]] = {
        "ids_BN": np.zeros((batch, num_tokens + 1), dtype=np.int64),
        "known_BN": np.ones((batch, num_tokens + 1), dtype=bool),
        "pos_N2": np.zeros((num_tokens + 1, 2), dtype=np.float32),
        "key_B2": seed_keys(request.seeds).numpy(),
    }
    arrays["ids_BN"][:, :-1] = request.ids_BN.numpy(force=True)
    arrays["known_BN"][:, :-1] = known_BN
    arrays["pos_N2"][:-1] = request.positions().numpy(force=True)
    if not uniform:
        arrays["prefix_length_R"] = np.array(lengths)
    count_B = known_BN.sum(axis=1)
    most = int(count_B.max())
    if most:
        position_BS = np.argsort(~known_BN, axis=1, kind="stable")[:, :most]
        arrays["known_BS"] = np.where(np.arange(most) < count_B[:, None], position_BS, num_tokens)
        if ragged or not uniform:
            arrays["count_B"] = count_B
    sent = send_all(arrays, device)
    return DecodeState(
        ids_BN=sent["ids_BN"],
        known_BN=sent["known_BN"],
        pos_BN2=sent["pos_N2"].repeat(batch, 1, 1),
        key_B2=sent["key_B2"],
        prefix_RPD=prefix_RPD[:, : max(lengths)],
        prefix_pos_RP2=prefix_pos[:, : max(lengths)],
        prefix_length_R=sent.get("prefix_length_R"),
        query_RND=_queries(model, condition, guided=guided),
        known=EncodeArgs(sent["known_BS"], sent.get("count_B"), most) if most else None,
    )


def prefill(model: TokenDecoder, state: DecodeState, *, causal: bool, num_slots: int, ragged: bool) -> DecodeState:
    """Return the state with a cache that holds the condition and the known tokens.

    `num_slots`: image tokens that the cache must hold, padding included.
    """
    rows, num_prefix = state.prefix_RPD.shape[:2]
    length_R = state.prefix_length_R
    cache = model.allocate_cache(rows, num_prefix + num_slots, ragged=ragged or length_R is not None)
    model.encode(state.prefix_RPD, state.prefix_pos_RP2, cache, causal=True, count_B=length_R)
    state = dataclasses.replace(state, cache=cache)
    if state.known is not None:
        state.encode(model, state.known, causal=causal)
    return state


def _queries(model: TokenDecoder, condition: Condition, *, guided: bool) -> Tensor | None:
    """`[R, N + 1, D]`: the condition's queries; plain [MASK] for the unconditional rows and for padding."""
    query_BND = condition.query_BND
    if query_BND is None:
        return None
    mask_D = model.embedding.weight[model.config.mask_id]
    if guided:
        query_BND = torch.cat((query_BND, mask_D.expand_as(query_BND)))
    return torch.cat((query_BND, mask_D.expand(len(query_BND), 1, -1)), dim=1)


class DecodeStrategy(Protocol):
    """Decides what each step encodes and predicts, and which of the sampled tokens are accepted.

    The loop calls `next_step` and `accept` alternately, until there is no next step.
    """

    ragged: bool  # rows may hold different numbers of tokens
    num_slots: int  # image tokens that the cache must hold, padding included
    num_steps: int | None  # steps in all; None: not known yet

    def next_step(self, state: DecodeState) -> StepPlan | None:
        """Return the next step, or None after the last."""
        ...

    def accept(self, state: DecodeState, logits_BSV: Tensor, sampled_BS: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the ids for the positions just predicted, and which of them are final (None: all)."""
        ...


class PlanCursor:
    """The steps of a batch as padded tensors on the device, and which step comes next.

    `position_BT` holds the positions of each step; every group is as wide as its longest row and padded with position
    N. The first group is empty: it is what is encoded before the first step. All rows move together.
    """

    def __init__(self, request: Request, plan: Plan, device: torch.device, *, lookahead: int = 0) -> None:
        """`lookahead`: columns of padding behind the last step."""
        self.num_steps, count_BK = plan.num_steps, plan.count_BK
        known_B, width_K = request.known_BN.numpy().sum(axis=1), count_BK.max(axis=0)
        self.widths: list[int] = [0, *width_K.tolist(), *[1] * lookahead]
        self.ragged = bool((known_B != known_B[0]).any() or (count_BK != width_K).any())
        position_BT = np.full((len(count_BK), sum(self.widths)), request.num_tokens)
        group_T = np.repeat(np.arange(self.num_steps), width_K)
        offset_T = np.arange(len(group_T)) - (width_K.cumsum() - width_K)[group_T]
        position_BT[:, : len(group_T)][offset_T < count_BK[:, group_T]] = plan.order_T
        arrays: dict[str, NDArray[Any]] = {"position_BT": position_BT}
        if plan.guided:
            arrays["scale_BK"] = np.ones((len(count_BK), self.num_steps + lookahead), dtype=np.float32)
            arrays["scale_BK"][:, : self.num_steps] = plan.scale_BK
        if self.ragged:
            arrays["count_BK"] = count_BK
        sent = send_all(arrays, device)
        self.position_BT, self.scale_BK, self.count_BK = sent["position_BT"], sent.get("scale_BK"), sent.get("count_BK")
        # Image tokens of the longest row before each group is encoded, and after the last.
        first, length_BK = int(known_B.max()), known_B[:, None] + count_BK.cumsum(axis=1)
        self.longest: list[int] = [first, first, *length_BK.max(axis=0).tolist()]
        # The tokens of the last step are never encoded.
        ends = [self.longest[k] + self.widths[k] for k in range(self.num_steps)]
        self.num_slots = max(first, *ends, 0)
        self._next = 0

    def next_step(self) -> StepPlan | None:
        """Return the next step: encode what was sampled last, predict the next positions. None after the last."""
        k = self._next
        if k == self.num_steps:
            return None
        self._next += 1
        encode = None
        if self.widths[k]:
            count_B = None if self.count_BK is None else self.count_BK[:, k - 1]
            encode = EncodeArgs(self._groups[k], count_B, self.longest[k + 1], static=True)
        scale_B1 = None if self.scale_BK is None else self.scale_BK[:, k : k + 1]
        return StepPlan(encode, PredictArgs(self._groups[k + 1], scale_B1, static=True))

    @cached_property
    def _groups(self) -> tuple[Tensor, ...]:
        """`[B, S]` of each group. Made when first used: where graphs are replayed, only `tensors` are."""
        return torch.split(self.position_BT, self.widths, dim=1)

    def predicted(self) -> tuple[Tensor, ...]:
        """`[B, S]`: the positions that each step predicts, padded with N."""
        return self._groups[1 : self.num_steps + 1]

    def tensors(self) -> list[Tensor]:
        """The tensors that differ between batches of the same shape."""
        return [x for x in (self.position_BT, self.scale_BK, self.count_BK) if x is not None]


class PlannedSteps:
    """The strategy of the plan: each step fills as many positions as planned, all at once."""

    def __init__(self, cursor: PlanCursor) -> None:
        self.cursor = cursor
        self.ragged, self.num_slots = cursor.ragged, cursor.num_slots
        self.num_steps: int | None = cursor.num_steps

    def next_step(self, state: DecodeState) -> StepPlan | None:
        """Return the next planned step."""
        return self.cursor.next_step()

    def accept(self, state: DecodeState, logits_BSV: Tensor, sampled_BS: Tensor) -> tuple[Tensor, Tensor | None]:
        """Accept every sampled token."""
        return sampled_BS, None
