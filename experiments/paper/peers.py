"""Peers of ARPG on the same layers: next-token models, with and without positions of what comes next, one that
predicts fixed groups, one that predicts scales, and a masked one.

| peer | sequence | attention | cache | the paper's name |
|---|---|---|---|---|
| `NextToken`, raster order | class, tokens | causal | yes | standard AR (LlamaGen), 24+0 |
| `NextToken`, random orders | class, tokens; the next position is not told | causal | yes | 24+0 without guidance |
| `InterleavedPositions` | class, then [MASK] at a position before its token | causal | yes, twice as long | RandAR |
| `Regions` | class, a token of each region, [MASK]s, then groups of one token of each region | group-wise | yes | PAR |
| `NextScale` | class, then grids of 2 x 2, 3 x 3, ... tokens, each from the one before | scale-wise | yes | VAR |
| `Masked` | class, all tokens or [MASK] | bidirectional | no | MaskGIT |

A peer has as many layers as both passes of its configuration together, all of them self-attention. It takes the place
of an ARPG in the training objective (`hidden` and `head`) and in the decode loop (`encode` and `predict`), whose step
is one call of the network: `encode` keeps the new slots until `predict` runs them with its queries.

Shapes: B batch, N grid tokens, S slots of this call, V vocabulary, D width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg import tasks
from arpg.config import ModelConfig
from arpg.data.dataset import Batch
from arpg.decode import Request
from arpg.errors import require
from arpg.kernels.ops import Limit, Rope, Stream
from arpg.model.cache import Cache
from arpg.model.condition import Condition, class_condition
from arpg.model.decoder import TokenDecoder
from arpg.model.layers import ResidualNorm
from arpg.model.rope import grid_positions
from arpg.train.objective import Objective

IGNORED = -100  # a target that does not count
SIDE = 2  # regions of `Regions` in each direction
GROUP = SIDE * SIDE
SCALES = tuple(side / 16 for side in (1, 2, 3, 4, 5, 6, 8, 10, 13, 16))  # VAR's, as shares of the largest side


class PeerCache(Cache):
    """A key-value cache, and the slots that the next call of the network adds to it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pending: list[tuple[Tensor, Rope]] = []


class Peer(TokenDecoder):
    """A stack of self-attention blocks over one sequence; subclasses say what the sequence is."""

    causal = True  # else bidirectional, without a cache
    grouped = False  # new slots of a call see each other
    queries = True  # a [MASK] stands at each position that is predicted; else the tokens before predict
    step_tokens: tuple[int, ...] | None = None  # of a step; None: any number
    cache_type = PeerCache

    def __init__(self, config: ModelConfig) -> None:
        require(config.positions == "rope", f"positions are {config.positions!r}; peers rotate queries and keys (rope)")
        super().__init__(config, config.pass1_layers + config.pass2_layers)
        self.pass2 = nn.ModuleList()
        self.norm = ResidualNorm(config.width, dropout=config.dropout)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.text = self.control = None

    def init_weights(self, *, seed: int, std: float = 0.02) -> Peer:
        """Initialise as ARPG is."""
        self._init_parameters(seed, std)
        return self

    def fixed_order(self, device: torch.device) -> Tensor | None:
        """Return the order `[N]` in which it is trained, whatever order the batch has; None: that of the batch."""
        return None

    def fixed_sizes(self) -> tuple[int, ...] | None:
        """Return the tokens of each step where they are fixed, in the fixed order."""
        return None

    def request(self, labels: Sequence[int], seeds: Sequence[int]) -> Request:
        """Return the request for whole images; the last tokens of its grid are those of the image."""
        return tasks.generate(self, labels, seeds)

    def slots(self, ids_BN: Tensor, order_BN: Tensor, pos_BN2: Tensor, key_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sequence of training after the class: embeddings `[B, S, D]` and positions.

        `pos_BN2`: grid positions in raster order; `key_B`: what decides how many tokens are known.
        """
        raise NotImplementedError

    def predictions(self, out_BTD: Tensor, order_BN: Tensor) -> Tensor:
        """Return the outputs that predict the tokens in `order_BN`, `[B, N, D]`, of a sequence with its class."""
        raise NotImplementedError

    def limit(self, num: int, device: torch.device) -> Limit:
        """Return how many slots each of the `num` slots of training sees."""
        return "causal" if self.causal else None

    def hidden(
        self,
        ids_BN: Tensor,
        order_BN: Tensor,
        condition: Condition,
        *,
        grid: tuple[int, int] | None = None,
        pos_N2: Tensor | None = None,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs that predict the tokens in `order_BN`, `[B, N, D]`."""
        if pos_N2 is None:
            pos_N2 = grid_positions(*(grid or self.config.grid), device=ids_BN.device)
        x, pos = self.slots(ids_BN, order_BN, pos_N2.expand(len(ids_BN), -1, -1), dropout_key_B)
        x, pos = torch.cat((condition.prefix_BPD, x), dim=1), torch.cat((condition.pos_BP2, pos), dim=1)
        return self.predictions(self.run(x, pos, self.limit(x.shape[1], x.device), dropout_key_B), order_BN)

    def run(self, x_BSD: Tensor, pos_BS2: Tensor, limit: Limit, dropout_key_B: Tensor | None = None) -> Tensor:
        """Return the normed output of every slot, `[B, S, D]`, without a cache."""
        keys = self._dropout_keys(dropout_key_B, len(self.pass1) + 1)
        stream, _ = self._self_attention(x_BSD, pos_BS2, limit, None, keys, self.norm)
        normed: Tensor = self.norm(stream, keys.layers[-1])[1]
        return normed

    def encode(self, x_BSD: Tensor, pos_BS2: Tensor | Rope, cache: Cache, **_: Any) -> None:
        """Keep known tokens for the next `predict`."""
        rope = self._rope(pos_BS2)
        assert isinstance(cache, PeerCache)
        assert rope is not None
        cache.pending.append((x_BSD, rope))

    def inputs(self, pending: list[tuple[Tensor, Rope]], rope: Rope) -> list[tuple[Tensor, Rope]]:
        """Return what a call of the network begins with, of the pending slots and the positions to predict."""
        return list(pending)

    def predict(
        self,
        pos_BS2: Tensor | Rope,
        query_BSD: Tensor | None,
        cache: Cache,
        visible_BS: Tensor | None = None,
        *,
        scale_BS: Tensor | None = None,
    ) -> Tensor:
        """Run the pending slots and the queries; causal ones stay in the cache, others pending."""
        rope = self._rope(pos_BS2)
        assert isinstance(cache, PeerCache)
        assert rope is not None
        num_last, parts = rope.cos_BSK.shape[1], self.inputs(cache.pending, rope)
        expected = " or ".join(map(str, self.step_tokens or ()))
        require(
            self.step_tokens is None or num_last in self.step_tokens,
            f"a step has {num_last} tokens; this model predicts {expected} at once",
        )
        num_known = 0 if self.queries else parts[-1][0].shape[1]  # slots whose outputs predict
        if num_known < num_last:
            mask_D = self.embedding.weight[self.config.mask_id]
            asked = Rope(*(angles[:, num_known:] for angles in rope))
            parts.append((mask_D.expand(*asked.cos_BSK.shape[:2], -1), asked))
        x_BTD = torch.cat([x for x, _ in parts], dim=1)
        rope = Rope(*(torch.cat(angles, dim=1) for angles in zip(*(each for _, each in parts), strict=True)))
        writer = cache.reserve(x_BTD.shape[1]) if self.causal else None
        limit = None if writer is None else writer.limit(causal=not self.grouped, count_B=None)
        stream, _ = self._self_attention(
            x_BTD, rope, limit, writer, self._dropout_keys(None, len(self.pass1) + 1), self.norm
        )
        if writer is not None:
            cache.commit(writer.num_new)
            cache.pending.clear()
        if num_last < x_BTD.shape[1]:
            x, delta = stream.x_BSD, stream.delta_BSD
            last = slice(-num_last, None)
            stream = Stream(x[:, last].contiguous(), None if delta is None else delta[:, last].contiguous())
        return self._logits(stream, scale_BS)


class NextToken(Peer):
    """Each token predicts the next one; the order is not an input, so in random orders the position is not known."""

    queries = False
    step_tokens = (1,)

    def slots(self, ids_BN: Tensor, order_BN: Tensor, pos_BN2: Tensor, key_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return all tokens but the last."""
        before = order_BN[:, :-1]
        return self.embedding(ids_BN.gather(1, before)), pos_BN2.take_along_dim(before[..., None], dim=1)

    def predictions(self, out_BTD: Tensor, order_BN: Tensor) -> Tensor:
        """Return the output of each token's predecessor in the order; the first has the class."""
        return out_BTD


class RasterNextToken(NextToken):
    """The standard autoregressive model: trained and decoded in raster order."""

    def fixed_order(self, device: torch.device) -> Tensor:
        """Return raster order."""
        return torch.arange(math.prod(self.config.grid), device=device)


class Regions(Peer):
    """The grid is parted into 2 x 2 regions, whose tokens at the same place are sampled together.

    The first token of each region comes alone. Then each group predicts the next: a token that of its region. Between
    the two, [MASK]s at the positions of the first group stand beside the last single token.
    """

    queries = False
    grouped = True
    step_tokens = (1, GROUP)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        height, width = config.grid
        require(
            height % SIDE == width % SIDE == 0 and height * width > GROUP,
            f"grid is {height}x{width}; {SIDE} x {SIDE} regions need multiples of {SIDE}, and two tokens each",
        )

    def fixed_order(self, device: torch.device) -> Tensor:
        """Return the first tokens of all regions, the second ones, ..., in raster order each."""
        height, width = self.config.grid
        cells = torch.arange(height * width, device=device).view(SIDE, height // SIDE, SIDE, width // SIDE)
        return cells.permute(1, 3, 0, 2).flatten()

    def fixed_sizes(self) -> tuple[int, ...]:
        """Return single tokens, then groups."""
        return (*[1] * GROUP, *[GROUP] * (math.prod(self.config.grid) // GROUP - 1))

    def slots(self, ids_BN: Tensor, order_BN: Tensor, pos_BN2: Tensor, key_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return single tokens, [MASK]s, then all groups but the last."""
        slots = (slice(GROUP), slice(GROUP + 1, 2 * GROUP), slice(GROUP, -GROUP))
        order_BS = torch.cat([order_BN[:, part] for part in slots], dim=1)
        ids_BS = ids_BN.gather(1, order_BS)
        ids_BS[:, GROUP : 2 * GROUP - 1] = self.config.mask_id
        return self.embedding(ids_BS), pos_BN2.take_along_dim(order_BS[..., None], dim=1)

    def predictions(self, out_BTD: Tensor, order_BN: Tensor) -> Tensor:
        """Return all outputs: there are as many [MASK]s as a group has tokens besides the one that predicts."""
        return out_BTD

    def limit(self, num: int, device: torch.device) -> Limit:
        """Return where the group of each slot ends; the class and all single tokens but the last are alone."""
        slot_S = torch.arange(num, device=device)
        return torch.where(slot_S < GROUP, slot_S + 1, (slot_S // GROUP + 1) * GROUP)[None]

    def allocate_cache(self, rows: int, slots: int, *, ragged: bool = False) -> Cache:
        """Allocate slots for the [MASK]s as well."""
        return super().allocate_cache(rows, slots + GROUP - 1, ragged=ragged)


class InterleavedPositions(Peer):
    """A [MASK] at the position of the next token stands before each token, in the same causal sequence."""

    def slots(self, ids_BN: Tensor, order_BN: Tensor, pos_BN2: Tensor, key_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return pairs of a [MASK] and the token at its position; nothing follows the last [MASK]."""
        x_BND = self.embedding(ids_BN.gather(1, order_BN))
        mask_BND = self.embedding.weight[self.config.mask_id].expand_as(x_BND)
        pos = pos_BN2.take_along_dim(order_BN[..., None], dim=1).repeat_interleave(2, dim=1)
        return torch.stack((mask_BND, x_BND), dim=2).flatten(1, 2)[:, :-1], pos[:, :-1]

    def predictions(self, out_BTD: Tensor, order_BN: Tensor) -> Tensor:
        """Return the outputs of the [MASK]s."""
        return out_BTD[:, 1::2]

    def allocate_cache(self, rows: int, slots: int, *, ragged: bool = False) -> Cache:
        """Allocate slots for the [MASK]s as well."""
        return super().allocate_cache(rows, slots + math.prod(self.config.grid), ragged=ragged)


class NextScale(Peer):
    """Square grids of growing side, each sampled at once from the grid before, resized to as many tokens.

    Tokens see their own grid and all smaller ones. The tokens of all scales are one row of the request, the image's at
    the end. It is not trained here, which would need a tokenizer of all scales; speed and memory do not depend on that.
    """

    queries = False
    grouped = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        height, width = config.grid
        require(height == width, f"grid is {height}x{width}; scales need as many rows as columns")
        self.sides = sorted({max(1, round(share * height)) for share in SCALES})
        self.step_tokens = tuple(side**2 for side in self.sides)

    def fixed_order(self, device: torch.device) -> Tensor:
        """Return the tokens of all scales, one after the other."""
        return torch.arange(sum(self.fixed_sizes()), device=device)

    def fixed_sizes(self) -> tuple[int, ...]:
        """Return the tokens of each scale."""
        return tuple(side**2 for side in self.sides)

    def request(self, labels: Sequence[int], seeds: Sequence[int]) -> Request:
        """Return a request for the tokens of all scales, at their places in the largest grid."""
        whole, largest = super().request(labels, seeds), self.sides[-1]
        cells = [(torch.arange(side) + 0.5) * (largest / side) - 0.5 for side in self.sides]
        pos_N2 = torch.cat([torch.cartesian_prod(cell, cell) for cell in cells])
        made = Request.from_nothing(whole.condition, (1, len(pos_N2)), whole.seeds)
        return dataclasses.replace(made, pos_N2=pos_N2)

    def inputs(self, pending: list[tuple[Tensor, Rope]], rope: Rope) -> list[tuple[Tensor, Rope]]:
        """Resize the pending grid to that of the positions to predict, where it stands as well."""
        ((x_BSD, _),) = pending
        side, new = math.isqrt(x_BSD.shape[1]), math.isqrt(rope.cos_BSK.shape[1])
        nearest = torch.arange(new, device=x_BSD.device) * side // new
        return [(x_BSD[:, (nearest[:, None] * side + nearest).flatten()], rope)]

    def allocate_cache(self, rows: int, slots: int, *, ragged: bool = False) -> Cache:
        """Allocate slots for all scales; the class has that of the first token."""
        return super().allocate_cache(rows, sum(self.fixed_sizes()), ragged=ragged)


class Masked(Peer):
    """All tokens attend to all; those that are not known yet are [MASK]. Nothing can be cached.

    The positions that are predicted must be all that are left.
    """

    causal = False

    def slots(self, ids_BN: Tensor, order_BN: Tensor, pos_BN2: Tensor, key_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return all tokens in raster order; those that `known_tokens` hides are [MASK]."""
        assert key_B is not None, "how many tokens are known depends on the key of the sample"
        return self.embedding(torch.where(known_tokens(order_BN, key_B), ids_BN, self.config.mask_id)), pos_BN2

    def predictions(self, out_BTD: Tensor, order_BN: Tensor) -> Tensor:
        """Return the outputs of all positions, in the order."""
        return out_BTD[:, 1:].take_along_dim(order_BN[..., None], dim=1)

    def allocate_cache(self, rows: int, slots: int, *, ragged: bool = False) -> Cache:
        """Allocate no slots: the known tokens stay pending."""
        return super().allocate_cache(rows, 0, ragged=ragged)


def num_known(num: int, key_B: Tensor) -> Tensor:
    """Return how many of `num` tokens a masked model sees of each sample in training, `[B]`, fewer than `num`.

    num (1 - cos(pi / 2 u)), where u is uniform in [0, 1), a function of the sample's key.
    """
    u_B = (key_B.long() & 0xFFFFFF).double() / 2**24
    return (num * (1 - torch.cos(u_B * (math.pi / 2)))).long().clamp(max=num - 1)


def known_tokens(order_BN: Tensor, key_B: Tensor) -> Tensor:
    """Return which tokens a masked model sees in training, `[B, N]`: the last ones of the order."""
    num = order_BN.shape[1]
    rank_N = torch.arange(num, device=order_BN.device)
    seen_BN = rank_N >= num - num_known(num, key_B)[:, None]
    return torch.zeros_like(seen_BN).scatter(1, order_BN, seen_BN)


class PeerObjective(Objective):
    """The training loss of a peer: that of ARPG, in the peer's order where it has one, on masked tokens only."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of `batch`."""
        peer: Peer = self.model  # type: ignore[assignment]
        if (order_N := peer.fixed_order(batch.order_BN.device)) is not None:
            batch = dataclasses.replace(batch, order_BN=order_N.expand_as(batch.order_BN))
        if not isinstance(peer, Masked):
            return super().forward(batch)
        condition = class_condition(peer, batch.labels_B)
        x_BND = peer.hidden(batch.ids_BN, batch.order_BN, condition, grid=self.grid, dropout_key_B=batch.dropout_key_B)
        known_BN = known_tokens(batch.order_BN, batch.dropout_key_B).gather(1, batch.order_BN)
        target_BN = batch.ids_BN.gather(1, batch.order_BN).masked_fill(known_BN, IGNORED)
        return F.cross_entropy(peer.head(x_BND).flatten(0, 1).float(), target_BN.flatten(), ignore_index=IGNORED)


PEERS: dict[str, type[Peer]] = {
    "raster": RasterNextToken,
    "random": NextToken,
    "interleaved": InterleavedPositions,
    "regions": Regions,
    "scales": NextScale,
    "masked": Masked,
}
