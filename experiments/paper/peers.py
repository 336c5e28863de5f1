"""Peers of ARPG on the same layers: next-token models, with and without positions of what comes next, and a masked
one.

| peer | sequence | attention | cache | the paper's name |
|---|---|---|---|---|
| `NextToken`, raster order | class, tokens | causal | yes | standard AR (LlamaGen), 24+0 |
| `NextToken`, random orders | class, tokens; the next position is not told | causal | yes | 24+0 without guidance |
| `InterleavedPositions` | class, then [MASK] at a position before its token | causal | yes, twice as long | RandAR |
| `Masked` | class, all tokens or [MASK] | bidirectional | no | MaskGIT |

A peer has as many layers as both passes of its configuration together. It takes the place of an ARPG in the training
objective (`hidden` and `head`), and decodes with the same plans, noise and guidance (`decode`).

Shapes: B batch, R rows (2B when guided), N grid tokens, S slots of this call, T slots in all, V vocabulary, D width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import ModelConfig
from arpg.data.dataset import Batch
from arpg.decode import Plan, make_plan
from arpg.decode.sampling import guide, sample, warp
from arpg.errors import require
from arpg.kernels import ops
from arpg.kernels.ops import Limit, Stream
from arpg.model.cache import Cache, CacheWriter
from arpg.model.condition import Condition, class_condition
from arpg.model.layers import Block, Dropout, ResidualNorm, SelfAttention
from arpg.model.rope import grid_positions, make_rope
from arpg.noise import Stream as NoiseStream
from arpg.noise import gumbel, seed_keys
from arpg.settings import SamplingSettings
from arpg.train.objective import Objective

IGNORED = -100  # a target that does not count


class Peer(nn.Module):
    """A stack of self-attention blocks over one sequence; subclasses say what the sequence is."""

    raster = False  # trained in raster order, whatever order the batch has

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        require(config.positions == "rope", f"positions are {config.positions!r}; peers rotate queries and keys (rope)")
        self.config = config
        num_layers = config.pass1_layers + config.pass2_layers
        self.embedding = nn.Embedding(config.num_embeddings, config.width)
        self.token_dropout = Dropout(config.dropout, 0)
        self.pass1 = nn.ModuleList(Block(config, SelfAttention(config)) for _ in range(num_layers))
        self.pass2 = nn.ModuleList()  # where the training loop looks for blocks
        self.norm = ResidualNorm(config.width, dropout=config.dropout)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.embedding.weight.dtype

    def init_weights(self, *, seed: int, std: float = 0.02) -> Peer:
        """Initialise as ARPG is: normal weights, a head of zeros."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() >= 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
                else:
                    parameter.fill_(1.0)
            self.head.weight.zero_()
        return self

    def embed(self, ids_BS: Tensor) -> Tensor:
        """`[B, S, D]`: the embeddings of codes, classes or `[MASK]`."""
        out: Tensor = self.embedding(ids_BS)
        return out

    def compile_blocks(self, *, dynamic: bool | None = None) -> None:
        """Compile the parts that repeat, as ARPG does."""
        ops.compile_each([self.token_dropout, self.norm, *self.pass1], dynamic=dynamic)

    def allocate_cache(self, rows: int, slots: int) -> Cache:
        """Allocate a key-value cache."""
        c = self.config
        return Cache(
            len(self.pass1), rows, slots, c.num_heads, c.head_dim, ragged=False, device=self.device, dtype=self.dtype
        )

    def run(
        self,
        x_BSD: Tensor,
        pos_BS2: Tensor,
        limit: Limit,
        writer: CacheWriter | None = None,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """Return the normed output of every slot, `[B, S, D]`; keys and values go to the cache where there is one."""
        rope = make_rope(pos_BS2, self.config.head_dim)
        count = len(self.pass1) + 1
        keys: Sequence[Tensor | None] = (None,) * count
        if dropout_key_B is not None:
            keys = ops.fold_keys(dropout_key_B, count)
        x = self.token_dropout(ops.to_autocast(x_BSD), dropout_key_B)
        mask = ops.attention_mask(limit, x.shape[1] if writer is None else writer.stop, x)
        stream = Stream(x)
        for i, block in enumerate(self.pass1):
            stream = block(stream, rope, mask, None if writer is None else writer.slots(i), keys[i])
        normed: Tensor = self.norm(stream, keys[-1])[1]
        return normed

    def append(self, x_BSD: Tensor, pos_BS2: Tensor, cache: Cache) -> Tensor:
        """Run new slots after those of the cache, causally, and keep them there: `[B, S, D]`."""
        writer = cache.reserve(x_BSD.shape[1])
        out = self.run(x_BSD, pos_BS2, writer.limit(causal=True, count_B=None), writer)
        cache.commit(writer.num_new)
        return out

    def forward(self, ids_BN: Tensor, order_BN: Tensor, condition: Condition, **options: object) -> Tensor:
        """Teacher forcing: logits `[B, N, V]` of the tokens in `order_BN`."""
        logits: Tensor = self.head(self.hidden(ids_BN, order_BN, condition, **options))  # type: ignore[arg-type]
        return logits

    def hidden(
        self,
        ids_BN: Tensor,
        order_BN: Tensor,
        condition: Condition,
        *,
        grid: tuple[int, int] | None = None,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs that predict the tokens in `order_BN`, `[B, N, D]`."""
        raise NotImplementedError

    def fill(self, rows: Rows, plan: Plan, settings: SamplingSettings) -> Tensor:
        """Return sampled ids `[B, N]`, following the plan."""
        raise NotImplementedError

    @torch.no_grad()
    def decode(self, labels: Sequence[int], seeds: Sequence[int], settings: SamplingSettings) -> Tensor:
        """Sample ids `[B, N]`; image i has label i and seed i, with the orders and step sizes of `settings`."""
        plan = make_plan(self.config.grid, torch.zeros(len(seeds), self._num_tokens, dtype=torch.bool), seeds, settings)
        return self.fill(Rows.start(self, labels, seeds, guided=plan.guided), plan, settings)

    @property
    def _num_tokens(self) -> int:
        return self.config.grid[0] * self.config.grid[1]

    def _positions(self, order_BN: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """`[B, N, 2]`: the grid positions of an order."""
        return grid_positions(*(grid or self.config.grid), device=order_BN.device)[order_BN]


@dataclasses.dataclass
class Rows:
    """The rows of a decode: the class slot of each, twice when guided, and the keys of the noise."""

    prefix_R1D: Tensor
    pos_R12: Tensor
    key_B2: Tensor
    copies: int

    @classmethod
    def start(cls, peer: Peer, labels: Sequence[int], seeds: Sequence[int], *, guided: bool) -> Rows:
        """Return the rows of labels and seeds."""
        condition = class_condition(peer, torch.tensor(list(labels)))  # type: ignore[arg-type]
        prefix, pos = condition.prefix_BPD, condition.pos_BP2
        if guided:
            prefix, pos = torch.cat((prefix, condition.null_prefix_BPD)), torch.cat((pos, pos))
        return cls(prefix, pos, seed_keys(seeds, device=peer.device), 2 if guided else 1)

    def repeat(self, x_B: Tensor) -> Tensor:
        """Give the unconditional rows what the conditional ones have."""
        return ops.repeat_rows(x_B, self.copies)

    def sample(self, logits_RSV: Tensor, settings: SamplingSettings, position_BS: Tensor, scale: float) -> Tensor:
        """Sample ids `[B, S]`."""
        scale_BS = torch.full(position_BS.shape, scale, device=logits_RSV.device) if self.copies == 2 else None
        return sample(logits_RSV, settings, self.key_B2, position_BS, scale_BS=scale_BS)


def planned_steps(plan: Plan, device: torch.device) -> list[tuple[Tensor, float]]:
    """Return the positions `[B, S]` and the guidance of each step; all samples of a plan have the same sizes."""
    order_BN = torch.tensor([sample.order for sample in plan.samples], device=device)
    sizes, scales = plan.samples[0].sizes, plan.samples[0].scales
    return list(zip(torch.split(order_BN, list(sizes), dim=1), scales, strict=True))


class NextToken(Peer):
    """Each token predicts the next one; the order is not an input, so in random orders the position is not known."""

    def hidden(
        self,
        ids_BN: Tensor,
        order_BN: Tensor,
        condition: Condition,
        *,
        grid: tuple[int, int] | None = None,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """Return the output of each token's predecessor in the order, `[B, N, D]`."""
        x_BND = self.embedding(ids_BN.gather(1, order_BN)[:, :-1])
        pos_BN2 = self._positions(order_BN, grid)[:, :-1]
        x = torch.cat((condition.prefix_BPD, x_BND), dim=1)
        return self.run(x, torch.cat((condition.pos_BP2, pos_BN2), dim=1), "causal", dropout_key_B=dropout_key_B)

    def fill(self, rows: Rows, plan: Plan, settings: SamplingSettings) -> Tensor:
        """Sample one token after the other; each is appended to the cache and predicts the next."""
        steps = planned_steps(plan, self.device)
        require(
            all(position_BS.shape[1] == 1 for position_BS, _ in steps),
            f"{len(steps)} steps are asked for; a next-token model takes one per token, {self._num_tokens}",
        )
        cache = self.allocate_cache(len(rows.prefix_R1D), self._num_tokens)
        ids_BN = torch.zeros(len(rows.key_B2), self._num_tokens, dtype=torch.long, device=self.device)
        x, pos = rows.prefix_R1D, rows.pos_R12
        for position_B1, scale in steps:
            logits_R1V = self.head(self.append(x, pos, cache))
            ids_B1 = rows.sample(logits_R1V, settings, position_B1, scale)
            ids_BN.scatter_(1, position_B1, ids_B1)
            x, pos = self.embedding(rows.repeat(ids_B1)), rows.repeat(self._positions(position_B1))
        return ids_BN


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
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of the [MASK] slots, `[B, N, D]`."""
        pos_BN2 = self._positions(order_BN, grid)
        x_BND = self.embedding(ids_BN.gather(1, order_BN))
        mask_BND = self.embedding.weight[self.config.mask_id].expand_as(x_BND)
        pairs = torch.stack((mask_BND, x_BND), dim=2).flatten(1, 2)[:, :-1]  # nothing follows the last token
        pos = torch.stack((pos_BN2, pos_BN2), dim=2).flatten(1, 2)[:, :-1]
        x, pos = torch.cat((condition.prefix_BPD, pairs), dim=1), torch.cat((condition.pos_BP2, pos), dim=1)
        return self.run(x, pos, "causal", dropout_key_B=dropout_key_B)[:, condition.prefix_BPD.shape[1] :: 2]

    def fill(self, rows: Rows, plan: Plan, settings: SamplingSettings) -> Tensor:
        """Append the tokens of the last step and the [MASK]s of this one; all of them stay in the cache."""
        cache = self.allocate_cache(len(rows.prefix_R1D), 2 * self._num_tokens)
        ids_BN = torch.zeros(len(rows.key_B2), self._num_tokens, dtype=torch.long, device=self.device)
        x, pos = rows.prefix_R1D, rows.pos_R12
        for position_BS, scale in planned_steps(plan, self.device):
            pos_RS2 = rows.repeat(self._positions(position_BS))
            mask_RSD = self.embedding.weight[self.config.mask_id].expand(*pos_RS2.shape[:2], -1)
            out = self.append(torch.cat((x, mask_RSD), dim=1), torch.cat((pos, pos_RS2), dim=1), cache)
            logits_RSV = self.head(out[:, -position_BS.shape[1] :])
            ids_BS = rows.sample(logits_RSV, settings, position_BS, scale)
            ids_BN.scatter_(1, position_BS, ids_BS)
            x, pos = self.embedding(rows.repeat(ids_BS)), pos_RS2
        return ids_BN


class Masked(Peer):
    """All tokens attend to all; those that are not known yet are [MASK]. Nothing can be cached.

    `confidence`: the order of decoding. None follows the plan (random, Halton, ...); a number keeps, at each step, the
    tokens whose log-probability plus that much annealed Gumbel noise is greatest, as MaskGIT does.
    """

    confidence: float | None = None

    def run_masked(
        self,
        ids_BN: Tensor,
        known_BN: Tensor,
        prefix_BPD: Tensor,
        pos_BP2: Tensor,
        *,
        grid: tuple[int, int] | None = None,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of all grid positions, `[B, N, D]`, where only the known tokens are seen."""
        seen_BN = torch.where(known_BN, ids_BN, self.config.mask_id)
        raster_N = torch.arange(ids_BN.shape[1], device=ids_BN.device)
        pos_BN2 = self._positions(raster_N.expand_as(ids_BN), grid)
        x, pos = torch.cat((prefix_BPD, self.embedding(seen_BN)), dim=1), torch.cat((pos_BP2, pos_BN2), dim=1)
        return self.run(x, pos, None, dropout_key_B=dropout_key_B)[:, prefix_BPD.shape[1] :]

    def hidden(
        self,
        ids_BN: Tensor,
        order_BN: Tensor,
        condition: Condition,
        *,
        grid: tuple[int, int] | None = None,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """Return outputs in the order of `order_BN`, given the tokens that `known_tokens` lets each sample see."""
        assert dropout_key_B is not None, "how many tokens are known depends on the key of the sample"
        known_BN = known_tokens(order_BN, dropout_key_B)
        out = self.run_masked(
            ids_BN, known_BN, condition.prefix_BPD, condition.pos_BP2, grid=grid, dropout_key_B=dropout_key_B
        )
        return out.gather(1, order_BN[..., None].expand_as(out))

    def fill(self, rows: Rows, plan: Plan, settings: SamplingSettings) -> Tensor:
        """Predict all tokens at every step and keep those of the plan, or the most confident ones."""
        num = self._num_tokens
        ids_BN = torch.zeros(len(rows.key_B2), num, dtype=torch.long, device=self.device)
        known_BN = torch.zeros_like(ids_BN, dtype=torch.bool)
        every_BN = torch.arange(num, device=self.device).expand_as(ids_BN)
        steps = planned_steps(plan, self.device)
        for k, (position_BS, scale) in enumerate(steps):
            out = self.run_masked(rows.repeat(ids_BN), rows.repeat(known_BN), rows.prefix_R1D, rows.pos_R12)
            logits_RNV = self.head(out)
            sampled_BN = rows.sample(logits_RNV, settings, every_BN, scale)
            if self.confidence is not None:
                left = 1 - (k + 1) / len(steps)
                sure_BN = self._confidence(rows, logits_RNV, sampled_BN, settings, scale, noise=self.confidence * left)
                position_BS = sure_BN.masked_fill(known_BN, -math.inf).topk(position_BS.shape[1]).indices
            ids_BN = ids_BN.scatter(1, position_BS, sampled_BN.gather(1, position_BS))
            known_BN = known_BN.scatter(1, position_BS, True)
        return ids_BN

    def _confidence(
        self,
        rows: Rows,
        logits_RNV: Tensor,
        sampled_BN: Tensor,
        settings: SamplingSettings,
        scale: float,
        *,
        noise: float,
    ) -> Tensor:
        """Return the log-probability of the sampled tokens plus `noise` times Gumbel noise, `[B, N]`."""
        scale_B1 = torch.full((len(sampled_BN), 1), scale, device=logits_RNV.device) if rows.copies == 2 else None
        log_BNV = warp(guide(logits_RNV, scale_B1), settings).float().log_softmax(-1)
        sure_BN = log_BNV.gather(-1, sampled_BN[..., None])[..., 0]
        every_BN = torch.arange(sampled_BN.shape[1], device=sampled_BN.device).expand_as(sampled_BN)
        return sure_BN + noise * gumbel(rows.key_B2, NoiseStream.TRAIN_ORDER, every_BN, 1)[..., 0]


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
        condition = class_condition(peer, batch.labels_B)  # type: ignore[arg-type]
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
