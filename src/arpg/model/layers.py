"""Layers of both passes: residual norm, SwiGLU, self-attention and cross-attention, and the block they make.

Shapes: B batch, S slots of this call, T visible slots, H heads, K channels of a head, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from arpg.config import ModelConfig
from arpg.kernels import ops
from arpg.kernels.ops import Mask, Rope, Stream
from arpg.model.cache import CacheSlots, KeyValue


class Dropout(nn.Module):
    """Dropout whose mask depends on (sample key, site, channel): not on the process or the batch.

    Without a key per sample the mask comes from torch's global generator.
    """

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p = p
        self.site = site  # which dropout of its block this is

    def forward(self, x_B: Tensor, key_B: Tensor | None) -> Tensor:
        """Drop in train mode."""
        return ops.keyed_dropout(x_B, *self.arguments(key_B))

    def arguments(self, key_B: Tensor | None) -> tuple[float, Tensor | None]:
        """Return the probability in the present mode, and the keys of this site."""
        return (self.p if self.training else 0.0), None if key_B is None else ops.fold_key(key_B, self.site)


class ResidualNorm(nn.Module):
    """Adds the pending output of the layer before to the residual stream, after dropout, and takes the RMS norm."""

    EPS = 1e-5

    def __init__(self, width: int, *, dropout: float, site: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.dropout = Dropout(dropout, site)

    def forward(self, stream: Stream, dropout_key_B: Tensor | None = None) -> tuple[Stream, Tensor]:
        """Return the stream and its norm `[B, S, D]`."""
        p, key_B = self.dropout.arguments(dropout_key_B)
        return ops.norm(stream, self.weight, eps=self.EPS, dropout=p, key_B=key_B)

    def linear(
        self, stream: Stream, layers: Sequence[nn.Module], dropout_key_B: Tensor | None = None
    ) -> tuple[Stream, list[Tensor]]:
        """Return the stream and what each linear layer makes of its norm."""
        p, key_B = self.dropout.arguments(dropout_key_B)
        return ops.norm_linear(stream, self.weight, layers, eps=self.EPS, dropout=p, key_B=key_B)

    def guided_linear(
        self, stream: Stream, layer: nn.Module, scale_BS: Tensor, dropout_key_B: Tensor | None = None
    ) -> Tensor:
        """Return what a linear layer makes of the guided norm: of conditional rows, then as many unconditional ones."""
        p, key_B = self.dropout.arguments(dropout_key_B)
        return ops.norm_guide_linear(stream, self.weight, layer, scale_BS, eps=self.EPS, dropout=p, key_B=key_B)

    def swiglu(self, stream: Stream, ffn: SwiGLU, dropout_key_B: Tensor | None = None) -> tuple[Stream, Tensor]:
        """Return the stream and the hidden channels of the feed-forward layer, from its norm."""
        p, key_B = self.dropout.arguments(dropout_key_B)
        dtype = ops.input_dtype(ffn.down)
        return ops.norm_swiglu(stream, self.weight, ffn.gate_up, eps=self.EPS, dropout=p, key_B=key_B, dtype=dtype)


class SwiGLU(nn.Module):
    """The two linear layers of the feed-forward: down(silu(gate) * up)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)


class SelfAttention(nn.Module):
    """Pass 1: each slot brings its own query, key and value."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    @property
    def projection(self) -> nn.Module:
        """The linear layer that makes queries, keys and values from the normed stream."""
        return self.qkv

    def forward(self, qkv_BSE: Tensor, rope: Rope | None, mask: Mask, slots: CacheSlots | None) -> Tensor:
        """Attend, `[B, S, D]`, given the projection; keys and values go to the cache where there is one."""
        qkv_BS3HK = qkv_BSE.view(*qkv_BSE.shape[:2], 3, self.num_heads, -1)
        dtype = ops.input_dtype(self.out)
        if slots is None:
            q, k, v = ops.split_qkv_rope(qkv_BS3HK, rope)
            return ops.attention(q, k, v, mask, dtype=dtype)
        return ops.attention_with_cache_write(
            qkv_BS3HK,
            slots.key_BTHK,
            slots.value_BTHK,
            mask,
            rope=rope,
            first=slots.first,
            stop=slots.stop,
            settled=slots.settled,
            dtype=dtype,
            packing=slots.packing,
        )


class CrossAttention(nn.Module):
    """Pass 2: queries only; keys and values are those that Pass 1 left."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    @property
    def projection(self) -> nn.Module:
        """The linear layer that makes queries from the normed stream."""
        return self.q

    def forward(self, q_BSD: Tensor, rope: Rope | None, mask: Mask, memory: KeyValue) -> Tensor:
        """Attend, `[B, S, D]`, given the projected queries."""
        key, value, settled, packing = memory
        q_BSHK = q_BSD.view(*q_BSD.shape[:2], self.num_heads, -1)
        dtype = ops.input_dtype(self.out)
        return ops.attention(q_BSHK, key, value, mask, rope=rope, settled=settled, dtype=dtype, packing=packing)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: ModelConfig, attention: SelfAttention | CrossAttention) -> None:
        super().__init__()
        self.attn_norm = ResidualNorm(config.width, dropout=config.dropout, site=0)
        self.attn: SelfAttention | CrossAttention = attention
        self.ffn_norm = ResidualNorm(config.width, dropout=config.dropout, site=1)
        self.ffn = SwiGLU(config.width, config.ffn_width)

    def forward(
        self,
        stream: Stream,
        rope: Rope | None,
        mask: Mask,
        source: CacheSlots | KeyValue | None,
        dropout_key_B: Tensor | None = None,
        next_norm_D: Tensor | None = None,
    ) -> Stream:
        """Return the stream after attention and feed-forward. `source`: where keys and values go or come from.

        `next_norm_D`: the weight of the norm that follows, if it is known.
        """
        stream, (projected,) = self.attn_norm.linear(stream, [self.attn.projection], dropout_key_B)
        stream = ops.add_linear(stream, self.attn.out, self.attn(projected, rope, mask, source), self.ffn_norm.weight)
        stream, hidden = self.ffn_norm.swiglu(stream, self.ffn, dropout_key_B)
        return ops.add_linear(stream, self.ffn.down, hidden, next_norm_D)


def next_norms(blocks: nn.ModuleList, last: ResidualNorm) -> Sequence[Tensor | None]:
    """Return the weight of the norm that follows each block, for inference; None where it is sharded or trained.

    A sharded weight is whole only while its own block runs, and one that is trained must not be an input of another.
    """
    if torch.is_grad_enabled():
        return [None] * len(blocks)
    norms: list[Any] = [*(block.attn_norm for block in blocks), last]
    return [norm.weight if type(norm.weight) is nn.Parameter else None for norm in norms[1:]]
