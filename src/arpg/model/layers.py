"""The blocks of both passes: residual and norm, SwiGLU and one attention.

Shapes: B batch, S slots of this call, T visible slots, H heads, K channels of a head, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import ModelConfig
from arpg.kernels import FLOAT8, decoding, few, usable
from arpg.model.cache import KeyValue, Limit, Slots
from arpg.model.dropout import Dropout
from arpg.model.rope import Rotation, rotate

Mask = Tensor | Literal["causal"] | None  # as `sees` makes it


class Squares(NamedTuple):
    """Nothing is to be added to the stream; and sums of its squares are there, which the next norm needs."""

    squares_PM: Tensor  # as `kernels/few_rows.py` makes them


Delta = Tensor | Squares | None  # what a layer leaves to be added to the stream; None: nothing


class ResidualNorm(nn.Module):
    """Adds what the layer before has made to the stream, after dropout, and norms the sum (root mean square).

    The norm is computed at least in float32, cast, then scaled.
    """

    EPS = 1e-5
    in_float8 = False  # whether those who read the norm take float8 (`arpg.quantization.precision` knows)

    def __init__(self, width: int, *, dropout: float, site: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.dropout = Dropout(dropout, site)

    def forward(self, x_BSD: Tensor, delta_BSD: Delta, dropout_key_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream, and the stream normed. No delta: there was no layer before."""
        if not isinstance(delta_BSD, Tensor):
            return x_BSD, once(self._norm, x_BSD)
        if self.in_float8 and decoding(x_BSD):
            from arpg.kernels.residual import residual_norm_float8

            narrow: tuple[Tensor, Tensor] = residual_norm_float8(x_BSD, delta_BSD, self.weight, self.EPS)
            return narrow
        p = self.dropout.p if self.training else 0.0
        keys = None if dropout_key_B is None else self.dropout.key(dropout_key_B)
        if usable(x_BSD) and (p == 0 or keys is not None):
            from arpg.kernels.residual import residual_norm as fused

            key_B = x_BSD.new_empty(0, dtype=torch.int32) if keys is None else keys
            both: tuple[Tensor, Tensor] = fused(x_BSD, delta_BSD, self.weight, key_B, p, self.EPS)
            return both
        x_BSD = x_BSD + self.dropout(delta_BSD, dropout_key_B)
        return x_BSD, self._norm(x_BSD)

    def product(self, layer: nn.Linear, x_BSD: Tensor, delta_BSD: Delta, dropout_key_B: Tensor | None = None) -> Tensor:
        """What a layer makes of the stream normed; of a handful of rows in one kernel."""
        if not self.joins(layer, x_BSD, delta_BSD):
            out: Tensor = layer(self(x_BSD, delta_BSD, dropout_key_B)[1])
            return out
        from arpg.kernels.few_rows import linear

        squares = delta_BSD.squares_PM if isinstance(delta_BSD, Squares) else None
        return linear(x_BSD, layer.weight, norm_D=self.weight, eps=self.EPS, squares_PM=squares)

    def joins(self, layer: nn.Linear, x_BSD: Tensor, delta_BSD: Delta) -> bool:
        """Whether the norm and the layer after it are one kernel."""
        return not isinstance(delta_BSD, Tensor) and not self.training and few(x_BSD, layer)

    def _norm(self, x: Tensor) -> Tensor:
        if decoding(x):
            return F.rms_norm(x, x.shape[-1:], eps=self.EPS) * self.weight
        x32 = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.EPS)
        return normed.type_as(x) * self.weight


class SwiGLU(nn.Module):
    in_float8 = False  # whether `down` takes float8

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(swiglu(self.gate_up(x), in_float8=self.in_float8))
        return out


def swiglu(gate_up: Tensor, *, in_float8: bool = False) -> Tensor:
    """silu(gate) * up."""
    if in_float8 and decoding(gate_up):
        from arpg.kernels.swiglu import swiglu_float8

        narrow: Tensor = swiglu_float8(gate_up)
        return narrow
    if usable(gate_up):
        from arpg.kernels.swiglu import swiglu as fused

        hidden: Tensor = fused(gate_up)
        return hidden
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def turn(x_BSHK: Tensor, by: Rotation) -> Tensor:
    """`rotate`, fused where that can be."""
    if usable(x_BSHK):
        from arpg.kernels.rotary import turn as fused

        turned: Tensor = fused(x_BSHK, *by)
        return turned
    return rotate(x_BSHK, by)


def split_turned(qkv_BS3HK: Tensor, by: Rotation) -> tuple[Tensor, ...]:
    """Queries and keys, rotated, and values."""
    if usable(qkv_BS3HK):
        from arpg.kernels.rotary import split_turned as fused

        parts: tuple[Tensor, ...] = fused(qkv_BS3HK, *by)
        return parts
    q, k, v = qkv_BS3HK.unbind(2)
    return rotate(q, by), rotate(k, by), v


def once(function: Callable[[Any], Tensor], x_BSD: Tensor) -> Tensor:
    """A function of the channels; where all slots of all rows are one and the same (expanded), it is called for one."""
    if not usable(x_BSD) or x_BSD.stride()[:2] != (0, 0):
        return function(x_BSD)
    return function(x_BSD[:1, :1]).expand(*x_BSD.shape[:2], -1)


def sees(limit: Limit, num_slots: int, x: Tensor) -> Mask:
    """The limits themselves where the fused attention takes `x`, otherwise a mask `[B, 1, S, T]` made of them."""
    if limit is None or isinstance(limit, str) or decoding(x):
        return limit
    slot_T = torch.arange(num_slots, device=limit.device)
    return (slot_T < limit[..., None])[:, None]


def attend(q_BSHK: Tensor, kv: KeyValue, mask: Mask, by: Rotation | None = None, *, in_float8: bool = False) -> Tensor:
    """The one attention: `[B, S, D]` from queries (turned first, if there is a rotation), keys and values."""
    if decoding(q_BSHK) and not isinstance(mask, str):
        from arpg.kernels.attention import attend as fused

        rotation = None if by is None else (by.cos_BSK, by.sin_BSK)
        dtype = FLOAT8 if in_float8 else None
        return fused(q_BSHK, kv.key_BTHK, kv.value_BTHK, mask, rotation, settled=kv.settled, dtype=dtype).flatten(2)
    q_BSHK = q_BSHK if by is None else turn(q_BSHK, by)
    out_BHSK = F.scaled_dot_product_attention(
        q_BSHK.transpose(1, 2),
        kv.key_BTHK.transpose(1, 2),
        kv.value_BTHK.transpose(1, 2),
        attn_mask=None if isinstance(mask, str) else mask,
        is_causal=isinstance(mask, str),
    )
    return out_BHSK.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Pass 1: a slot brings its own key and value, which go to the slots before (None: there are none)."""

    in_float8 = False  # whether `out` takes float8

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    @property
    def projection(self) -> nn.Linear:
        return self.qkv

    def forward(self, qkv_BSE: Tensor, by: Rotation | None, mask: Mask, slots: Slots | None) -> Tensor:
        """What the heads see, `[B, S, D]`, given the projection of the slots."""
        qkv_BS3HK = qkv_BSE.view(*qkv_BSE.shape[:2], 3, self.num_heads, -1)
        if slots is not None and by is not None and not isinstance(mask, str) and decoding(qkv_BS3HK):
            from arpg.kernels.attention import attend_and_store

            cache, dtype = (slots.key_BTHK, slots.value_BTHK), FLOAT8 if self.in_float8 else None
            seen = attend_and_store(qkv_BS3HK, cache, mask, by, slots.first, settled=slots.settled, dtype=dtype)
            return seen.flatten(2)
        q, k, v = qkv_BS3HK.unbind(2) if by is None else split_turned(qkv_BS3HK, by)
        return attend(q, KeyValue(k, v) if slots is None else slots.write(k, v), mask, in_float8=self.in_float8)


class CrossAttention(nn.Module):
    """Pass 2: queries only; the keys and values are those that Pass 1 left."""

    in_float8 = False  # whether `out` takes float8

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    @property
    def projection(self) -> nn.Linear:
        return self.q

    def forward(self, q_BSD: Tensor, by: Rotation | None, mask: Mask, memory: KeyValue) -> Tensor:
        """What the heads see, `[B, S, D]`, given the projection of the queries."""
        return attend(q_BSD.view(*q_BSD.shape[:2], self.num_heads, -1), memory, mask, by, in_float8=self.in_float8)


class MemoryProjection(nn.Linear):
    """Between the passes: the keys, turned, and the values that Pass 2 asks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.width, 2 * config.width, bias=False)
        self.num_heads = config.num_heads

    def forward(  # type: ignore[override]
        self,
        x_BSD: Tensor,
        by: Rotation | None,
        slots: Slots | None,
        norm: ResidualNorm | None = None,
        delta: Delta = None,
    ) -> KeyValue:
        """With a norm, `x` is the stream, not normed yet, and both are one kernel."""
        kv_BSE = super().forward(x_BSD) if norm is None else norm.product(self, x_BSD, delta)
        key, value = kv_BSE.unflatten(-1, (2, self.num_heads, -1)).unbind(2)  # type: ignore[no-untyped-call]
        if slots is not None and by is not None and decoding(key):
            from arpg.kernels.rotary import store_turned

            store_turned(key, value, *by, key_BTHK=slots.key_BTHK, value_BTHK=slots.value_BTHK, first=slots.first)
            return slots.all()
        key = key if by is None else turn(key, by)
        return KeyValue(key, value) if slots is None else slots.write(key, value)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU. What SwiGLU makes is handed on, to be added by the norm that comes next."""

    def __init__(self, config: ModelConfig, attention: SelfAttention | CrossAttention) -> None:
        super().__init__()
        self.attn_norm = ResidualNorm(config.width, dropout=config.dropout, site=0)
        self.attn: SelfAttention | CrossAttention = attention
        self.ffn_norm = ResidualNorm(config.width, dropout=config.dropout, site=1)
        self.ffn = SwiGLU(config.width, config.ffn_width)

    def forward(
        self,
        x: Tensor,
        delta: Delta,
        by: Rotation | None,
        mask: Mask,
        source: Slots | KeyValue | None,
        dropout_key_B: Tensor | None = None,
    ) -> tuple[Tensor, Delta]:
        """The stream, and what is to be added to it."""
        if self.attn_norm.joins(self.ffn.down, x, delta):
            return self._few_rows(x, delta, by, mask, source)
        x, normed = self.attn_norm(x, delta, dropout_key_B)
        seen = self.attn(once(self.attn.projection, normed), by, mask, source)
        x, normed = self.ffn_norm(x, self.attn.out(seen), dropout_key_B)
        return x, self.ffn(normed)

    def _few_rows(
        self, x: Tensor, delta: Delta, by: Rotation | None, mask: Mask, source: Slots | KeyValue | None
    ) -> tuple[Tensor, Delta]:
        """The same in five kernels. Sums are complete: only their squares are handed on."""
        from arpg.kernels.few_rows import empty_sums, linear

        seen = self.attn(once(lambda x: self.attn_norm.product(self.attn.projection, x, delta), x), by, mask, source)
        out, down, norm = self.attn.out.weight, self.ffn.down.weight, self.ffn_norm
        squares = empty_sums(x, out)
        x = linear(seen, out, add=x, sums_PM=squares)
        hidden = linear(x, self.ffn.gate_up.weight, norm_D=norm.weight, eps=norm.EPS, swiglu=True, squares_PM=squares)
        squares = empty_sums(x, down)
        return linear(hidden, down, add=x, sums_PM=squares), Squares(squares)
