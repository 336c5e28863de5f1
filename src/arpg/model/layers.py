"""The blocks of both passes: RMSNorm, SwiGLU and one attention.

Shapes: B batch, S slots of this call, T visible slots, H heads, K channels of a head, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import ModelConfig
from arpg.model.dropout import Dropout
from arpg.model.rope import Rotation, rotate

KeyValue = tuple[Tensor, Tensor]  # key_BTHK, value_BTHK
Remember = Callable[[Tensor, Tensor], KeyValue]  # takes the new keys and values, returns all visible ones
Mask = Tensor | Literal["causal"] | None  # bool, broadcast to B1ST: True where a query sees a slot


class RMSNorm(nn.Module):
    """Root-mean-square norm: computed in float32, cast, then scaled."""

    EPS = 1e-5

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.EPS)
        return normed.type_as(x) * self.weight


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


def attend(q_BSHK: Tensor, kv: KeyValue, mask: Mask) -> Tensor:
    """The one attention: `[B, S, D]` from queries and the visible keys and values."""
    causal = isinstance(mask, str)
    out_BHSK = F.scaled_dot_product_attention(
        q_BSHK.transpose(1, 2),
        kv[0].transpose(1, 2),
        kv[1].transpose(1, 2),
        attn_mask=None if isinstance(mask, str) else mask,
        is_causal=causal,
    )
    return out_BHSK.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Pass 1: a slot brings its own key and value; `remember` adds those of the slots before."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BSD: Tensor, by: Rotation | None, mask: Mask, remember: Remember) -> Tensor:
        q, k, v = self.qkv(x_BSD).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        if by is not None:
            q, k = rotate(q, by), rotate(k, by)
        out: Tensor = self.out(attend(q, remember(k, v), mask))
        return out


class CrossAttention(nn.Module):
    """Pass 2: queries only; the keys and values are those that Pass 1 left."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BSD: Tensor, by: Rotation | None, mask: Mask, memory: KeyValue) -> Tensor:
        q = self.q(x_BSD).unflatten(-1, (self.num_heads, -1))
        if by is not None:
            q = rotate(q, by)
        out: Tensor = self.out(attend(q, memory, mask))
        return out


class Block(nn.Module):
    """Pre-norm attention and SwiGLU; both residuals start from the block's input."""

    def __init__(self, config: ModelConfig, attention: nn.Module) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.width)
        self.attn = attention
        self.ffn_norm = RMSNorm(config.width)
        self.ffn = SwiGLU(config.width, config.ffn_width)
        self.attn_dropout = Dropout(config.dropout, 0)
        self.ffn_dropout = Dropout(config.dropout, 1)

    def forward(
        self,
        x: Tensor,
        by: Rotation | None,
        mask: Mask,
        source: Remember | KeyValue,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        x = x + self.attn_dropout(self.attn(self.attn_norm(x), by, mask, source), dropout_key_B)
        x = x + self.ffn_dropout(self.ffn(self.ffn_norm(x)), dropout_key_B)
        return x
