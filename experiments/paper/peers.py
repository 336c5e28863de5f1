"""Peers of ARPG on the same layers: next-token models, with and without positions of what comes next, and a masked
one.

| peer | sequence | attention | cache | the paper's name |
|---|---|---|---|---|
| `NextToken`, raster order | class, tokens | causal | yes | standard AR (LlamaGen), 24+0 |
| `NextToken`, random orders | class, tokens; the next position is not told | causal | yes | 24+0 without guidance |
| `InterleavedPositions` | class, then [MASK] at a position before its token | causal | yes, twice as long | RandAR |
| `Masked` | class, all tokens or [MASK] | bidirectional | no | MaskGIT |

A peer has as many layers as both passes of its configuration together, all of them self-attention. It takes the place
of an ARPG in the training objective (`hidden` and `head`) and in the decode loop (`encode` and `predict`), whose step
is one call of the network: `encode` keeps the new slots until `predict` runs them with its queries.

Shapes: B batch, N grid tokens, S slots of this call, V vocabulary, D width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import ModelConfig
from arpg.data.dataset import Batch
from arpg.errors import require
from arpg.kernels.ops import Limit, Rope, Stream
from arpg.model.cache import Cache, CacheWriter
from arpg.model.condition import Condition, class_condition
from arpg.model.decoder import TokenDecoder
from arpg.model.layers import ResidualNorm
from arpg.model.rope import grid_positions
from arpg.train.objective import Objective

IGNORED = -100  # a target that does not count


class PeerCache(Cache):
    """A key-value cache, and the slots that the next call of the network adds to it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pending: list[tuple[Tensor, Rope]] = []


class Peer(TokenDecoder):
    """A stack of self-attention blocks over one sequence; subclasses say what the sequence is."""

    raster = False  # trained in raster order, whatever order the batch has
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

    def run(self, x_BSD: Tensor, pos_BS2: Tensor, limit: Limit, dropout_key_B: Tensor | None = None) -> Tensor:
        """Return the normed output of every slot, `[B, S, D]`, without a cache."""
        keys = self._dropout_keys(dropout_key_B, len(self.pass1) + 1)
        stream, _ = self._self_attention(x_BSD, pos_BS2, limit, None, keys)
        normed: Tensor = self.norm(stream, keys.layers[-1])[1]
        return normed

    def encode(self, x_BSD: Tensor, pos_BS2: Tensor | Rope, cache: Cache, **_: Any) -> None:
        """Keep known tokens for the next `predict`."""
        rope = self._rope(pos_BS2)
        assert isinstance(cache, PeerCache)
        assert rope is not None
        cache.pending.append((x_BSD, rope))

    def _joined(self, cache: Cache, *more: tuple[Tensor, Rope]) -> tuple[Tensor, Rope]:
        """Return the pending slots and `more` as one."""
        assert isinstance(cache, PeerCache)
        x, rope = zip(*cache.pending, *more, strict=True)
        cos, sin = zip(*rope, strict=True)
        return torch.cat(x, dim=1), Rope(torch.cat(cos, dim=1), torch.cat(sin, dim=1))

    def _masks(self, pos_BS2: Tensor | Rope) -> tuple[Tensor, Rope]:
        """Return [MASK] slots at the positions."""
        rope = self._rope(pos_BS2)
        assert rope is not None
        mask_D = self.embedding.weight[self.config.mask_id]
        return mask_D.expand(*rope.cos_BSK.shape[:2], -1), rope

    def _last_logits(
        self,
        x_BSD: Tensor,
        rope: Rope,
        limit: Limit,
        writer: CacheWriter | None,
        *,
        num_last: int,
        scale_BS: Tensor | None,
    ) -> Tensor:
        """Run the slots; return the (guided) logits of the last ones, `[B, num_last, V]`."""
        keys = self._dropout_keys(None, len(self.pass1) + 1)
        stream, _ = self._self_attention(x_BSD, rope, limit, writer, keys)
        if num_last < x_BSD.shape[1]:
            delta = stream.delta_BSD
            stream = Stream(
                stream.x_BSD[:, -num_last:].contiguous(),
                None if delta is None else delta[:, -num_last:].contiguous(),
            )
        return self._logits(stream, scale_BS)

    def _appended_logits(
        self, cache: Cache, x_BSD: Tensor, rope: Rope, *, num_last: int, scale_BS: Tensor | None
    ) -> Tensor:
        """Append slots to the cache, causally; return the logits of the last ones."""
        assert isinstance(cache, PeerCache)
        writer = cache.reserve(x_BSD.shape[1])
        limit = writer.limit(causal=True, count_B=None)
        logits_BSV = self._last_logits(x_BSD, rope, limit, writer, num_last=num_last, scale_BS=scale_BS)
        cache.commit(writer.num_new)
        cache.pending.clear()
        return logits_BSV

    def _positions(self, order_BN: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """`[B, N, 2]`: the grid positions of an order."""
        return grid_positions(*(grid or self.config.grid), device=order_BN.device)[order_BN]


class NextToken(Peer):
    """Each token predicts the next one; the order is not an input, so in random orders the position is not known."""

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
        """Return the output of each token's predecessor in the order, `[B, N, D]`."""
        x_BND = self.embedding(ids_BN.gather(1, order_BN)[:, :-1])
        pos_BN2 = self._positions(order_BN, grid)[:, :-1]
        x = torch.cat((condition.prefix_BPD, x_BND), dim=1)
        return self.run(x, torch.cat((condition.pos_BP2, pos_BN2), dim=1), "causal", dropout_key_B)

    def predict(
        self,
        pos_BS2: Tensor | Rope,
        query_BSD: Tensor | None,
        cache: Cache,
        visible_BS: Tensor | None = None,
        *,
        scale_BS: Tensor | None = None,
    ) -> Tensor:
        """Append the token sampled last; it predicts the next."""
        asked = (pos_BS2.cos_BSK if isinstance(pos_BS2, Rope) else pos_BS2).shape[1]
        require(asked == 1, f"a step has {asked} tokens; a next-token model predicts one: ask for a step per token")
        return self._appended_logits(cache, *self._joined(cache), num_last=1, scale_BS=scale_BS)


class RasterNextToken(NextToken):
    """The standard autoregressive model: trained and decoded in raster order."""

    raster = True


class InterleavedPositions(Peer):
    """A [MASK] at the position of the next token stands before each token, in the same causal sequence."""

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
        """Return the outputs of the [MASK] slots, `[B, N, D]`."""
        pos_BN2 = self._positions(order_BN, grid)
        x_BND = self.embedding(ids_BN.gather(1, order_BN))
        mask_BND = self.embedding.weight[self.config.mask_id].expand_as(x_BND)
        pairs = torch.stack((mask_BND, x_BND), dim=2).flatten(1, 2)[:, :-1]  # nothing follows the last token
        pos = torch.stack((pos_BN2, pos_BN2), dim=2).flatten(1, 2)[:, :-1]
        x, pos = torch.cat((condition.prefix_BPD, pairs), dim=1), torch.cat((condition.pos_BP2, pos), dim=1)
        return self.run(x, pos, "causal", dropout_key_B)[:, condition.prefix_BPD.shape[1] :: 2]

    def allocate_cache(self, rows: int, slots: int, *, ragged: bool = False) -> Cache:
        """Allocate slots for the [MASK]s as well."""
        return super().allocate_cache(rows, slots + math.prod(self.config.grid), ragged=ragged)

    def predict(
        self,
        pos_BS2: Tensor | Rope,
        query_BSD: Tensor | None,
        cache: Cache,
        visible_BS: Tensor | None = None,
        *,
        scale_BS: Tensor | None = None,
    ) -> Tensor:
        """Append the tokens of the last step and the [MASK]s of this one; all of them stay in the cache."""
        masks = self._masks(pos_BS2)
        joined = self._joined(cache, masks)
        return self._appended_logits(cache, *joined, num_last=masks[0].shape[1], scale_BS=scale_BS)


class Masked(Peer):
    """All tokens attend to all; those that are not known yet are [MASK]. Nothing can be cached."""

    def run_masked(
        self,
        ids_BN: Tensor,
        known_BN: Tensor,
        condition: Condition,
        *,
        grid: tuple[int, int] | None = None,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of all grid positions, `[B, N, D]`, where only the known tokens are seen."""
        seen_BN = torch.where(known_BN, ids_BN, self.config.mask_id)
        raster_N = torch.arange(ids_BN.shape[1], device=ids_BN.device)
        pos_BN2 = self._positions(raster_N.expand_as(ids_BN), grid)
        x = torch.cat((condition.prefix_BPD, self.embedding(seen_BN)), dim=1)
        pos = torch.cat((condition.pos_BP2, pos_BN2), dim=1)
        return self.run(x, pos, None, dropout_key_B)[:, condition.prefix_BPD.shape[1] :]

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
        """Return outputs in the order of `order_BN`, given the tokens that `known_tokens` lets each sample see."""
        assert dropout_key_B is not None, "how many tokens are known depends on the key of the sample"
        known_BN = known_tokens(order_BN, dropout_key_B)
        out = self.run_masked(ids_BN, known_BN, condition, grid=grid, dropout_key_B=dropout_key_B)
        return out.gather(1, order_BN[..., None].expand_as(out))

    def allocate_cache(self, rows: int, slots: int, *, ragged: bool = False) -> Cache:
        """Allocate no slots: the known tokens stay pending."""
        return super().allocate_cache(rows, 0, ragged=ragged)

    def predict(
        self,
        pos_BS2: Tensor | Rope,
        query_BSD: Tensor | None,
        cache: Cache,
        visible_BS: Tensor | None = None,
        *,
        scale_BS: Tensor | None = None,
    ) -> Tensor:
        """Run all known tokens with [MASK]s at the positions, which must be all that are left."""
        masks = self._masks(pos_BS2)
        return self._last_logits(*self._joined(cache, masks), None, None, num_last=masks[0].shape[1], scale_BS=scale_BS)


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
    """The training loss of a peer: that of ARPG, in raster order where the peer has one, on masked tokens only."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of `batch`."""
        peer: Peer = self.model  # type: ignore[assignment]
        if peer.raster:
            raster_BN = torch.arange(batch.order_BN.shape[1], device=batch.order_BN.device).expand_as(batch.order_BN)
            batch = dataclasses.replace(batch, order_BN=raster_BN)
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
    "masked": Masked,
}
