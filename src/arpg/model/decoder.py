"""TokenDecoder: what every network that the decode loop can run has, ARPG and the peers it is compared with.

An embedding of codes, classes and [MASK], self-attention blocks that write a key-value cache, a norm and a head.
Shapes: B batch, N grid tokens, S slots of this call, V vocabulary, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arpg.config import ModelConfig
from arpg.kernels import ops
from arpg.kernels.ops import Limit, Rope, Stream
from arpg.model.cache import Cache, CacheWriter
from arpg.model.condition import Condition, TextPrefix
from arpg.model.layers import Block, Dropout, ResidualNorm, SelfAttention, next_norms
from arpg.model.queries import ControlQueries
from arpg.model.rope import BASE, make_rope, sinusoids


class DropoutKeys(NamedTuple):
    """Keys that fix the dropout masks of each sample; None: torch's global generator does."""

    tokens: Tensor | None
    layers: Sequence[Tensor | None]  # one for each block and norm, in the order in which they run


class TokenDecoder(nn.Module, ABC):
    """Encodes known tokens into a cache and predicts others from it; subclasses say how."""

    cache_type: type[Cache] = Cache
    pass2: nn.ModuleList
    norm: ResidualNorm
    head: nn.Linear
    text: TextPrefix | None
    control: ControlQueries | None

    def __init__(self, config: ModelConfig, num_layers: int) -> None:
        """`num_layers`: self-attention blocks. Subclasses add the other parts, in the order above."""
        super().__init__()
        self.config = config
        self.kv_cache_dtype: torch.dtype | None = None  # None: that of the weights
        self.embedding = nn.Embedding(config.num_embeddings, config.width)
        self.token_dropout = Dropout(config.dropout, 0)
        self.pass1 = nn.ModuleList(Block(config, SelfAttention(config)) for _ in range(num_layers))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights that are not quantized."""
        return self.embedding.weight.dtype

    @property
    def num_cached_layers(self) -> int:
        """Layers whose keys and values are cached."""
        return len(self.pass1)

    def embed_at(
        self, ids_BN: Tensor, pos_BN2: Tensor, position_BS: Tensor, *, copies: int, static: bool = False
    ) -> tuple[Tensor, Tensor | Rope]:
        """Return what `encode` takes for the tokens at `position_BS`, see `ops.embed_at`."""
        return ops.embed_at(
            self.embedding.weight,
            ids_BN,
            pos_BN2,
            position_BS,
            copies=copies,
            head_dim=self._rotated_channels,
            base=BASE,
            static=static,
        )

    def rope_at(self, pos_BN2: Tensor, position_BS: Tensor, *, copies: int, static: bool = False) -> Tensor | Rope:
        """Return what `predict` takes as the positions at `position_BS`, see `ops.rope_at`."""
        weight_VD, head_dim = self.embedding.weight, self._rotated_channels
        return ops.rope_at(pos_BN2, position_BS, weight_VD, copies=copies, head_dim=head_dim, base=BASE, static=static)

    @property
    def _rotated_channels(self) -> int | None:
        """The channels of a head; None where queries and keys are not rotated."""
        return self.config.head_dim if self.config.positions == "rope" else None

    def compile_blocks(self, *, dynamic: bool | None = None) -> None:
        """Compile the parts that repeat, each on its own; `dynamic` as in `ops.compile_each`."""
        ops.compile_each([self.token_dropout, self.norm, *self.pass1, *self.pass2], dynamic=dynamic)

    def allocate_cache(self, rows: int, slots: int, *, ragged: bool = False) -> Cache:
        """Allocate a key-value cache for `rows` of at most `slots`; `ragged`: rows may differ in length."""
        config = self.config
        return self.cache_type(
            self.num_cached_layers,
            rows,
            slots,
            config.num_heads,
            config.head_dim,
            ragged=ragged,
            device=self.device,
            dtype=self.kv_cache_dtype or self.dtype,
        )

    @abstractmethod
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
        """Add known tokens to the cache; they see each other, or strictly causally.

        `pos_BS2`: grid positions, or already their rotation. In a ragged cache only the first `count_B` slots of each
        row count; `end` as in `Cache.commit`.
        """

    @abstractmethod
    def predict(
        self,
        pos_BS2: Tensor | Rope,
        query_BSD: Tensor | None,
        cache: Cache,
        visible_BS: Tensor | None = None,
        *,
        scale_BS: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[B, S, V]` of the tokens at the positions, queried with `[MASK]` or the given queries.

        `visible_BS`: how many slots of the cache each query sees; None: all that its row has. `scale_BS`: guidance; the
        rows are then conditional ones and as many unconditional ones after them, and the logits are guided: half as
        many. A model that `takes_guidance` has no unconditional rows.
        """

    @property
    def takes_guidance(self) -> bool:
        """Whether the guidance scale is an input, so that there are no unconditional rows."""
        return False

    def same_logits(self, cache: Cache) -> bool:
        """Whether `predict` gives the same logits at all positions, for [MASK] queries that see the whole cache."""
        return False

    @abstractmethod
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
        """`forward` up to the head: `[B, N, D]`. A key per sample fixes its dropout masks."""

    def forward(
        self,
        ids_BN: Tensor,
        order_BN: Tensor,
        condition: Condition,
        *,
        grid: tuple[int, int] | None = None,
        pos_N2: Tensor | None = None,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """Teacher forcing: logits `[B, N, V]` of the tokens in `order_BN`, each from those before it.

        Causal, in train and eval mode alike. Tokens are on the grid, unless positions are given.
        """
        x_BND = self.hidden(ids_BN, order_BN, condition, grid=grid, pos_N2=pos_N2, dropout_key_B=dropout_key_B)
        logits: Tensor = self.head(x_BND)
        return logits

    def _init_parameters(self, seed: int, std: float) -> torch.Generator:
        """Initialise as published: normal weights, a head of zeros. Return the generator where it then is."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() >= 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
                else:
                    parameter.fill_(1.0)
            self.head.weight.zero_()
        return generator

    def _self_attention(
        self,
        x_BSD: Tensor,
        pos_BS2: Tensor | Rope,
        limit: Limit,
        writer: CacheWriter | None,
        keys: DropoutKeys,
        next_norm: ResidualNorm,
    ) -> tuple[Stream, Rope | None]:
        """Run the blocks of Pass 1; return their stream, for `next_norm`, and the rotation of the slots."""
        rope = self._rope(pos_BS2)
        x = self.token_dropout(ops.to_autocast(self._add_positions(x_BSD, pos_BS2)), keys.tokens)
        mask = ops.attention_mask(limit, x.shape[1] if writer is None else writer.stop, x)
        stream = Stream(x)
        for i, (block, norm_D) in enumerate(zip(self.pass1, next_norms(self.pass1, next_norm), strict=True)):
            slots = None if writer is None else writer.slots(i)
            stream = block(stream, rope, mask, slots, keys.layers[i], norm_D)
        return stream, rope

    def _logits(self, stream: Stream, scale_BS: Tensor | None, dropout_key_B: Tensor | None = None) -> Tensor:
        """Return what the head makes of the normed stream. It is linear without bias, so guidance comes before it."""
        if scale_BS is None:
            return self.norm.linear(stream, [self.head], dropout_key_B)[1][0]
        return self.norm.guided_linear(stream, self.head, scale_BS, dropout_key_B)

    def _dropout_keys(self, dropout_key_B: Tensor | None, count: int) -> DropoutKeys:
        """Return the keys of `count` blocks and norms."""
        return DropoutKeys(
            dropout_key_B, (None,) * count if dropout_key_B is None else ops.fold_keys(dropout_key_B, count)
        )

    def _rope(self, pos_BS2: Tensor | Rope) -> Rope | None:
        if isinstance(pos_BS2, Rope):
            return pos_BS2
        return make_rope(pos_BS2, self.config.head_dim) if self.config.positions == "rope" else None

    def _add_positions(self, x_BSD: Tensor, pos_BS2: Tensor | Rope) -> Tensor:
        """The ablation without rotation adds sinusoids of the positions to tokens and queries instead."""
        if isinstance(pos_BS2, Rope) or self.config.positions == "rope":
            return x_BSD
        return x_BSD + sinusoids(pos_BS2, self.config.width).type_as(x_BSD)
