"""ARPG: the two-pass decoder. No loop, no sampling, no state here; the cache is an argument.

Shapes: B batch, N grid tokens, P prefix slots, S slots of this call, V vocabulary, D width, H heads, K head channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import ModelConfig
from arpg.model.cache import Cache, KeyValue, Limit, Writer
from arpg.model.condition import Condition
from arpg.model.control import ControlQueries, PatchEncoder
from arpg.model.copies import copies_of
from arpg.model.dropout import Dropout, fold_each
from arpg.model.layers import Block, CrossAttention, Delta, MemoryProjection, ResidualNorm, SelfAttention, sees
from arpg.model.rope import Rotation, grid_places, rotation, sinusoids
from arpg.model.text import TextPrefix

VERSIONS = 64  # of one function that the compiler makes, at most


class Keys(NamedTuple):
    """What fixes the dropout masks of each sample; None: nothing does."""

    tokens: Tensor | None
    layers: Sequence[Tensor | None]  # blocks of Pass 1, memory_norm, blocks of Pass 2, norm


class ARPG(nn.Module):
    """Pass 1 turns known tokens into keys and values; Pass 2 predicts any positions from them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.embedding = nn.Embedding(config.num_embeddings, width)
        self.token_dropout = Dropout(config.dropout, 0)
        self.pass1 = nn.ModuleList(Block(config, SelfAttention(config)) for _ in range(config.pass1_layers))
        self.memory_norm = ResidualNorm(width, dropout=config.dropout)
        num_memories = 1 if config.shared_kv else config.pass2_layers
        self.memory_kv = nn.ModuleList(MemoryProjection(config) for _ in range(num_memories))
        self.pass2 = nn.ModuleList(Block(config, CrossAttention(config)) for _ in range(config.pass2_layers))
        self.norm = ResidualNorm(width, dropout=config.dropout)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.text = None if config.text is None else TextPrefix(config.text, width)
        self.control = None if config.control is None else ControlQueries(config.control, width)

    def init_weights(self, *, seed: int, std: float = 0.02) -> ARPG:
        """The published initialisation: normal weights, a head of zeros. The same for a seed on every device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() >= 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
                else:
                    parameter.fill_(1.0)
            self.head.weight.zero_()
        if self.text is not None:
            self.text.init_null(generator)
        if self.control is not None:
            self.control.init_weights()
        return self

    def compile_parts(self, *, dynamic: bool | None = None) -> None:
        """Compile the parts that repeat, each on its own: seconds, where the whole network takes a minute.

        `dynamic`: whether for sizes that differ from call to call; None: as they come. The blocks of both passes and of
        the encoder, of two widths, learning and judged, are versions of one function to the compiler, and beyond 8 of
        them it would go on uncompiled: its limit is raised, for the process.
        """
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, VERSIONS)
        parts = [self.token_dropout, self.memory_norm, self.norm, *self.pass1, *self.memory_kv, *self.pass2]
        if self.control is not None and isinstance(self.control.encoder, PatchEncoder):
            parts += self.control.encoder.blocks
        for part in parts:
            part.compile(dynamic=dynamic)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def embed(self, ids_BS: Tensor) -> Tensor:
        out: Tensor = self.embedding(ids_BS)
        return out

    def allocate_cache(self, rows: int, slots: int, *, ragged: bool = False) -> Cache:
        config = self.config
        return Cache(
            config.pass1_layers + len(self.memory_kv),
            rows,
            slots,
            config.num_heads,
            config.head_dim,
            ragged=ragged,
            device=self.device,
            dtype=self.dtype,
        )

    def encode(
        self,
        x_BSD: Tensor,
        place_BS2: Tensor | Rotation,
        cache: Cache,
        *,
        causal: bool,
        count_B: Tensor | None = None,
        end: int | None = None,
    ) -> None:
        """Pass 1: add known tokens to the cache, as a block that sees itself or strictly causally.

        Where they are is said by places, or already by the rotation that these make. In a ragged cache only the first
        `count_B` slots of each row count; `end` as in `Cache.commit`.
        """
        writer = cache.reserve(x_BSD.shape[1])
        self._pass1(x_BSD, place_BS2, writer.limit(causal=causal, count_B=count_B), writer)
        cache.commit(writer.num_new, count_B=count_B, end=end)

    def predict(
        self, place_BS2: Tensor | Rotation, query_BSD: Tensor | None, cache: Cache, visible_BS: Tensor | None = None
    ) -> Tensor:
        """Pass 2: logits `[B, S, V]` for the tokens at the places, asked with `[MASK]` or the given queries.

        `visible_BS`: how many slots of the cache each query sees; None: all that its row has.
        """
        if visible_BS is None and cache.length_B is not None:
            visible_BS = cache.length_B[:, None]
        first = self.config.pass1_layers
        memories = [cache.read(first + i) for i in range(len(self.memory_kv))]
        return self._pass2(query_BSD, place_BS2, visible_BS, memories, head=self.head)

    def forward(
        self,
        ids_BN: Tensor,
        order_BN: Tensor,
        condition: Condition,
        *,
        grid: tuple[int, int] | None = None,
        place_N2: Tensor | None = None,
    ) -> Tensor:
        """Teacher forcing: logits `[B, N, V]` of the tokens in `order_BN`, each from those before it.

        Causal in both passes, in train and eval mode alike. Tokens stand on the grid, unless places are given.
        """
        logits: Tensor = self.head(self.hidden(ids_BN, order_BN, condition, grid=grid, place_N2=place_N2))
        return logits

    def hidden(
        self,
        ids_BN: Tensor,
        order_BN: Tensor,
        condition: Condition,
        *,
        grid: tuple[int, int] | None = None,
        place_N2: Tensor | None = None,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """`forward` up to the head: `[B, N, D]`. A key per sample fixes its dropout masks."""
        if place_N2 is None:
            place_N2 = grid_places(*(grid or self.config.grid), device=ids_BN.device)
        place_BN2 = place_N2.to(ids_BN.device)[order_BN]
        shuffled_BN = ids_BN.gather(1, order_BN)
        x, place = self._content(shuffled_BN[:, :-1], place_BN2[:, :-1], condition)
        keys = self._dropout_keys(dropout_key_B)
        memories = self._pass1(x, place, "causal", None, keys)
        if len(memories) == 1 and torch.is_grad_enabled():  # all layers read it: their gradients are summed at once
            copies = [copies_of(part, len(self.pass2)) for part in (memories[0].key_BTHK, memories[0].value_BTHK)]
            memories = [KeyValue(*pair) for pair in zip(*copies, strict=True)]
        query_BND = condition.query_BND
        if query_BND is not None:
            query_BND = query_BND.gather(1, order_BN[..., None].expand(-1, -1, query_BND.shape[-1]))
        num_prefix, length_B = condition.prefix_BPD.shape[1], condition.length_B
        limit: Limit = "causal"  # query r sees the prefix and the r tokens before it
        if length_B is not None or num_prefix > 1:
            first = num_prefix if length_B is None else length_B.to(ids_BN.device)[:, None]
            limit = first + torch.arange(ids_BN.shape[1], device=ids_BN.device)[None]
        return self._pass2(query_BND, place_BN2, limit, memories, keys)

    def _content(self, ids_BS: Tensor, place_BS2: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Prefix and tokens in one row each. A short prefix is followed by its tokens at once; what fills up comes
        last, where causality hides it.
        """
        prefix, at, length_B = condition.prefix_BPD, condition.place_BP2, condition.length_B
        if length_B is None:
            return torch.cat((prefix, self.embed(ids_BS)), dim=1), torch.cat((at, place_BS2), dim=1)
        num_tokens = ids_BS.shape[1]
        slot_BT = torch.arange(prefix.shape[1] + num_tokens, device=ids_BS.device) - length_B.to(ids_BS.device)[:, None]
        index_BT = slot_BT.clamp(0, num_tokens - 1)
        text_BT1 = (slot_BT < 0)[..., None]
        x = torch.where(text_BT1, F.pad(prefix, (0, 0, 0, num_tokens)), self.embed(ids_BS.gather(1, index_BT)))
        tokens_at = place_BS2.take_along_dim(index_BT[..., None], dim=1)
        return x, torch.where(text_BT1, F.pad(at, (0, 0, 0, num_tokens)), tokens_at)

    def _pass1(
        self,
        x_BSD: Tensor,
        place_BS2: Tensor | Rotation,
        limit: Limit,
        writer: Writer | None,
        keys: Keys | None = None,
    ) -> list[KeyValue]:
        """The keys and values for Pass 2: all that the cache has then, or without one these alone."""
        by = self._rotation(place_BS2)
        keys = self._dropout_keys(None) if keys is None else keys
        x = self.token_dropout(_stream(self._at(x_BSD, place_BS2)), keys.tokens)
        num_slots = x.shape[1] if writer is None else writer.stop
        mask = sees(limit, num_slots, x)
        delta: Delta = None
        slots = [None if writer is None else writer.slots(i) for i in range(len(self.pass1) + len(self.memory_kv))]
        for i, block in enumerate(self.pass1):
            x, delta = block(x, delta, by, mask, slots[i], keys.layers[i])
        norm = None
        if self.memory_norm.joins(self.memory_kv[0], x, delta):  # type: ignore[arg-type]
            norm = self.memory_norm
        else:
            _, x = self.memory_norm(x, delta, keys.layers[len(self.pass1)])
        return [project(x, by, slots[len(self.pass1) + i], norm, delta) for i, project in enumerate(self.memory_kv)]

    def _pass2(
        self,
        query_BSD: Tensor | None,
        place_BS2: Tensor | Rotation,
        limit: Limit,
        memories: Sequence[KeyValue],
        keys: Keys | None = None,
        head: nn.Linear | None = None,
    ) -> Tensor:
        """The normed output of the last layer, or what the head makes of it: logits."""
        if query_BSD is None:  # one and the same for all: the first layer turns it into one query, too
            shape = (place_BS2.cos_BSK if isinstance(place_BS2, Rotation) else place_BS2).shape
            query_BSD = _stream(self.embedding.weight[self.config.mask_id]).expand(*shape[:-1], -1)
        by = self._rotation(place_BS2)
        x = _stream(self._at(query_BSD, place_BS2))
        delta: Delta = None
        mask = sees(limit, memories[0].key_BTHK.shape[1], x)
        *layers, last = (self._dropout_keys(None) if keys is None else keys).layers[len(self.pass1) + 1 :]
        for i, (block, key) in enumerate(zip(self.pass2, layers, strict=True)):
            x, delta = block(x, delta, by, mask, memories[i % len(memories)], key)
        if head is not None:
            return self.norm.product(head, x, delta, last)
        out: Tensor = self.norm(x, delta, last)[1]
        return out

    def _dropout_keys(self, dropout_key_B: Tensor | None) -> Keys:
        count = len(self.pass1) + 1 + len(self.pass2) + 1
        return Keys(dropout_key_B, (None,) * count if dropout_key_B is None else fold_each(dropout_key_B, count))

    def _rotation(self, place_BS2: Tensor | Rotation) -> Rotation | None:
        if isinstance(place_BS2, Rotation):
            return place_BS2
        return rotation(place_BS2, self.config.head_dim) if self.config.positions == "rope" else None

    def _at(self, x_BSD: Tensor, place_BS2: Tensor | Rotation) -> Tensor:
        """The ablation without rotation: places are added to tokens and queries instead."""
        if isinstance(place_BS2, Rotation) or self.config.positions == "rope":
            return x_BSD
        return x_BSD + sinusoids(place_BS2, self.config.width).type_as(x_BSD)


def _stream(x: Tensor) -> Tensor:
    """The residual stream runs in autocast's type, where there is one: half the traffic of float32."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
