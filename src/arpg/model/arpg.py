"""ARPG: the two-pass decoder. Pass 1 encodes known tokens as keys and values, Pass 2 predicts any positions from them.

No loop, no sampling and no state here; the cache is an argument.

Shapes: B batch, N grid tokens, P prefix slots, S slots of this call, T slots in all, V vocabulary, D width, H heads,
K head channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import ModelConfig
from arpg.kernels import ops
from arpg.kernels.ops import Limit, Rope, Stream
from arpg.model.cache import Cache, CacheSlots, CacheWriter, KeyValue
from arpg.model.condition import Condition, TextPrefix
from arpg.model.decoder import DropoutKeys, TokenDecoder
from arpg.model.layers import Block, CrossAttention, ResidualNorm, next_norms
from arpg.model.queries import ControlQueries, GuidanceQueries, PatchEncoder
from arpg.model.rope import grid_positions


class ARPG(TokenDecoder):
    """The two-pass decoder of the paper."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.pass1_layers)
        width = config.width
        self.memory_norm = ResidualNorm(width, dropout=config.dropout)
        num_memories = 1 if config.shared_kv else config.pass2_layers
        self.memory_kv = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(num_memories))
        self.pass2 = nn.ModuleList(Block(config, CrossAttention(config)) for _ in range(config.pass2_layers))
        self.norm = ResidualNorm(width, dropout=config.dropout)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.text = None if config.text is None else TextPrefix(config.text, width)
        self.control = None if config.control is None else ControlQueries(config.control, width)
        self.guidance = GuidanceQueries(width) if config.guidance_input else None

    @property
    def num_cached_layers(self) -> int:
        """Layers of Pass 1, and the memories that Pass 2 reads."""
        return len(self.pass1) + len(self.memory_kv)

    def init_weights(self, *, seed: int, std: float = 0.02) -> ARPG:
        """Initialise as published: normal weights, a head of zeros. The same for a seed on every device."""
        generator = self._init_parameters(seed, std)
        if self.text is not None:
            self.text.init_null(generator)
        for part in (self.control, self.guidance):
            if part is not None:
                part.init_weights()
        return self

    def compile_blocks(self, *, dynamic: bool | None = None) -> None:
        """Compile the parts that repeat, each on its own; `dynamic` as in `ops.compile_each`."""
        super().compile_blocks(dynamic=dynamic)
        if self.control is not None and isinstance(self.control.encoder, PatchEncoder):
            ops.compile_each(list(self.control.encoder.blocks), dynamic=dynamic)

    def encode(
        self,
        x_BSD: Tensor,
        pos_BS2: Tensor | Rope,
        cache: Cache,
        *,
        causal: bool,
        count_B: Tensor | None = None,
        end: int | None = None,
    ) -> None:
        """Pass 1: write the keys and values of known tokens to the cache; they see each other, or strictly causally."""
        writer = cache.reserve(x_BSD.shape[1])
        self._pass1(x_BSD, pos_BS2, writer.limit(causal=causal, count_B=count_B), writer)
        cache.commit(writer.num_new, count_B=count_B, end=end)

    @property
    def takes_guidance(self) -> bool:
        """Whether the guidance scale is an input, so that there are no unconditional rows."""
        return self.guidance is not None

    def predict(
        self,
        pos_BS2: Tensor | Rope,
        query_BSD: Tensor | None,
        cache: Cache,
        visible_BS: Tensor | None = None,
        *,
        scale_BS: Tensor | None = None,
    ) -> Tensor:
        """Pass 2: logits `[B, S, V]` of the tokens at the positions, queried with `[MASK]` or the given queries."""
        if visible_BS is None and cache.length_B is not None:
            visible_BS = cache.length_B[:, None]
        first = self.config.pass1_layers
        memories = [cache.read(first + i) for i in range(len(self.memory_kv))]
        stream, key_B = self._pass2(query_BSD, pos_BS2, visible_BS, memories, scale_BS)
        return self._logits(stream, None if self.takes_guidance else scale_BS, key_B)

    def same_logits(self, cache: Cache) -> bool:
        """Whether the cache has one slot only: a query that sees one slot gets its value, wherever it is."""
        return cache.end == 1 and cache.length_B is None and self.config.positions == "rope"

    def hidden(
        self,
        ids_BN: Tensor,
        order_BN: Tensor,
        condition: Condition,
        *,
        grid: tuple[int, int] | None = None,
        pos_N2: Tensor | None = None,
        dropout_key_B: Tensor | None = None,
        scale_BN: Tensor | None = None,
    ) -> Tensor:
        """`forward` up to the head: `[B, N, D]`. A key per sample fixes its dropout masks.

        `scale_BN`: the guidance for each token of the order, where it is an input; None: 1.
        """
        if pos_N2 is None:
            pos_N2 = grid_positions(*(grid or self.config.grid), device=ids_BN.device)
        pos_BN2 = pos_N2.to(ids_BN.device)[order_BN]
        shuffled_BN = ids_BN.gather(1, order_BN)
        x_BTD, pos_BT2 = self._prefix_and_tokens(shuffled_BN[:, :-1], pos_BN2[:, :-1], condition)
        keys = self._keys(dropout_key_B)
        memories = self._pass1(x_BTD, pos_BT2, "causal", None, keys)
        if len(memories) == 1 and torch.is_grad_enabled():  # all layers read it: their gradients are summed at once
            copies = [ops.grad_fanout(part, len(self.pass2)) for part in (memories[0].key_BTHK, memories[0].value_BTHK)]
            memories = [KeyValue(*pair) for pair in zip(*copies, strict=True)]
        query_BND = condition.query_BND
        if query_BND is not None:
            query_BND = query_BND.gather(1, order_BN[..., None].expand(-1, -1, query_BND.shape[-1]))
        num_prefix, length_B = condition.prefix_BPD.shape[1], condition.length_B
        limit: Limit = "causal"  # query r sees the prefix and the r tokens before it
        if length_B is not None or num_prefix > 1:
            first = num_prefix if length_B is None else length_B.to(ids_BN.device)[:, None]
            limit = first + torch.arange(ids_BN.shape[1], device=ids_BN.device)[None]
        stream, key_B = self._pass2(query_BND, pos_BN2, limit, memories, scale_BN, keys)
        normed: Tensor = self.norm(stream, key_B)[1]
        return normed

    def _prefix_and_tokens(self, ids_BS: Tensor, pos_BS2: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Prefix and tokens in one row each. A short prefix is followed by its tokens at once; padding comes last,
        where causality hides it.
        """
        prefix, prefix_pos, length_B = condition.prefix_BPD, condition.pos_BP2, condition.length_B
        if length_B is None:
            return torch.cat((prefix, self.embedding(ids_BS)), dim=1), torch.cat((prefix_pos, pos_BS2), dim=1)
        num_tokens = ids_BS.shape[1]
        slot_BT = torch.arange(prefix.shape[1] + num_tokens, device=ids_BS.device) - length_B.to(ids_BS.device)[:, None]
        index_BT = slot_BT.clamp(0, num_tokens - 1)
        is_prefix_BT1 = (slot_BT < 0)[..., None]
        tokens = self.embedding(ids_BS.gather(1, index_BT))
        tokens_pos = pos_BS2.take_along_dim(index_BT[..., None], dim=1)
        padding = (0, 0, 0, num_tokens)
        x_BTD = torch.where(is_prefix_BT1, F.pad(prefix, padding), tokens)
        return x_BTD, torch.where(is_prefix_BT1, F.pad(prefix_pos, padding), tokens_pos)

    def _pass1(
        self,
        x_BSD: Tensor,
        pos_BS2: Tensor | Rope,
        limit: Limit,
        writer: CacheWriter | None,
        keys: DropoutKeys | None = None,
    ) -> list[KeyValue]:
        """Return the keys and values for Pass 2: all that the cache has then, or without one those of these slots."""
        keys = self._keys(None) if keys is None else keys
        stream, rope = self._self_attention(x_BSD, pos_BS2, limit, writer, keys, self.memory_norm)
        num_layers = len(self.pass1)
        _, projected = self.memory_norm.linear(stream, list(self.memory_kv), keys.layers[num_layers])
        slots = [None if writer is None else writer.slots(num_layers + i) for i in range(len(self.memory_kv))]
        return [self._memory(kv, rope, part) for kv, part in zip(projected, slots, strict=True)]

    def _memory(self, kv_BSE: Tensor, rope: Rope | None, slots: CacheSlots | None) -> KeyValue:
        """The keys (rotated) and values that Pass 2 attends to; they go to the cache where there is one."""
        key, value = kv_BSE.unflatten(-1, (2, self.config.num_heads, -1)).unbind(2)  # type: ignore[no-untyped-call]
        if slots is None:
            return KeyValue(key if rope is None else ops.apply_rope(key, rope), value)
        part = (slots.key_BTHK, slots.value_BTHK)
        ops.cache_write(key, value, *part, rope=rope, first=slots.first, packing=slots.packing)
        return slots.visible()

    def _pass2(
        self,
        query_BSD: Tensor | None,
        pos_BS2: Tensor | Rope,
        limit: Limit,
        memories: Sequence[KeyValue],
        scale_BS: Tensor | None = None,
        keys: DropoutKeys | None = None,
    ) -> tuple[Stream, Tensor | None]:
        """Return the stream after the last layer, and the dropout keys of the norm that follows."""
        if query_BSD is None:  # [MASK] for all, expanded: the first layer computes its query once
            shape = (pos_BS2.cos_BSK if isinstance(pos_BS2, Rope) else pos_BS2).shape
            mask_D = ops.to_autocast(self.embedding.weight[self.config.mask_id])
            query_BSD = mask_D.expand(*shape[:-1], -1)
        if self.guidance is not None:
            scale_BS = query_BSD.new_ones(1, 1) if scale_BS is None else scale_BS
            query_BSD = query_BSD + self.guidance(scale_BS)
        rope = self._rope(pos_BS2)
        x = ops.to_autocast(self._add_positions(query_BSD, pos_BS2))
        mask = ops.attention_mask(limit, memories[0].key_BTHK.shape[1], x)
        *layers, last = (self._keys(None) if keys is None else keys).layers[len(self.pass1) + 1 :]
        stream = Stream(x)
        norms = next_norms(self.pass2, self.norm)
        for i, (block, key_B, norm_D) in enumerate(zip(self.pass2, layers, norms, strict=True)):
            stream = block(stream, rope, mask, memories[i % len(memories)], key_B, norm_D)
        return stream, last

    def _keys(self, dropout_key_B: Tensor | None) -> DropoutKeys:
        """Keys of the blocks of Pass 1, `memory_norm`, the blocks of Pass 2 and `norm`."""
        return self._dropout_keys(dropout_key_B, len(self.pass1) + 1 + len(self.pass2) + 1)
