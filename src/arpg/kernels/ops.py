"""Operations of the network: one function each, a fused kernel where one takes the tensors, else plain PyTorch.

The plain code is the definition; a kernel computes the same and is held to it by tests. Nothing else in the package
chooses between the two, but for the tokenizer, whose decoder is fused as a whole (`tokenizer/fused.py`).

Shapes: B batch, R rows (B, or 2B when guided: conditional, then unconditional), S slots of this call, T slots of the
cache, N grid tokens, H heads, K head channels, D width, V vocabulary, O outputs, P partial sums, M rows of a GEMM.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.kernels.dispatch import (
    FLOAT8,
    FLOAT8_MAX,
    can_compile,
    can_fuse,
    can_fuse_half,
    can_fuse_inference,
    fused_gemm,
    has_kernels,
)
from arpg.noise import Stream as NoiseStream
from arpg.noise import gumbel

P = ParamSpec("P")
T = TypeVar("T")

# How many slots each query sees, the first ones: `[B, S]` (either may be 1), "causal", or None for all of them.
Limit = Tensor | Literal["causal"] | None
Mask = Tensor | Literal["causal"] | None  # as `attention_mask` makes it: limits for the fused attention, else booleans


class Rope(NamedTuple):
    """Cosines and sines of a rotation, each angle twice: channels 2i and 2i + 1 turn together."""

    cos_BSK: Tensor
    sin_BSK: Tensor


class Packing(NamedTuple):
    """Rows of different lengths whose tokens are packed one after the other as `[C, T]`.

    C: conditional and unconditional copies; row C i + c is that of sample i. Behind the last row there may be padding,
    of which kernels leave results undefined. Only attention and the cache take rows; plain code pads them by the two
    indices, kernels read them where they are.
    """

    start_R: Tensor  # the first token of each row, counted over all copies
    count_R: Tensor  # the tokens of each row
    width: int  # of a padded row: no row has more tokens
    shape: tuple[int, int]  # C, T
    token_RS: Tensor | None = None  # the packed token at each place of padded rows; any where the row is shorter
    place_CT: Tensor | None = None  # the place of each packed token in padded rows, row * S + slot; any for padding

    @classmethod
    def of(cls, start_R: Tensor, count_R: Tensor, width: int, shape: tuple[int, int], *, like: Tensor) -> Packing:
        """Make a packing for tensors as `like`, with the indices where no kernel takes these."""
        packing = cls(start_R, count_R, width, shape)
        return packing if can_fuse_inference(like) else packing.with_indices()

    def with_indices(self) -> Packing:
        """Return the packing with the indices of plain code."""
        (copies, tokens), device = self.shape, self.start_R.device
        token_RS = (self.start_R[:, None] + torch.arange(self.width, device=device)).clamp(max=copies * tokens - 1)
        token_CT = torch.arange(copies * tokens, device=device).view(copies, tokens)
        start_CB = self.start_R.view(-1, copies).t().contiguous()
        sample_CT = torch.searchsorted(start_CB, token_CT, right=True) - 1
        row_CT = copies * sample_CT + torch.arange(copies, device=device)[:, None]
        slot_CT = (token_CT - start_CB.gather(1, sample_CT)).clamp(max=self.width - 1)
        return self._replace(token_RS=token_RS, place_CT=row_CT * self.width + slot_CT)


class Stream(NamedTuple):
    """The residual stream and what is still to be added to it.

    Where a kernel has made them: partial sums of its squares, and the stream times the weight of the norm that follows.
    """

    x_BSD: Tensor
    delta_BSD: Tensor | None = None
    squares_PM: Tensor | None = None
    scaled_BSD: Tensor | None = None


def to_float8(x: Tensor) -> Tensor:
    """Cast to float8 without a scale; what is out of its range becomes its largest number."""
    return x if x.dtype == FLOAT8 else x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)


def as_bytes(x: Tensor) -> Tensor:
    """View float8 as bytes, which can be indexed everywhere; others as they are."""
    return x.view(torch.uint8) if x.dtype == FLOAT8 else x


def input_dtype(layer: nn.Module) -> torch.dtype | None:
    """Return the type that `layer` reads without a cast where that is not the type of the stream: float8, or None."""
    dtype: torch.dtype | None = getattr(layer, "input_dtype", None)
    return dtype


# Residual stream, norm, linear layers


def norm(
    stream: Stream,
    weight_D: Tensor,
    *,
    eps: float,
    dropout: float = 0.0,
    key_B: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Stream, Tensor]:
    """Add what is pending to the stream (after dropout) and return it with its RMS norm.

    The norm is computed at least in float32, cast, then scaled. `key_B` fixes the dropout masks; `dtype` is the type of
    the normed tensor where a kernel can write it directly.
    """
    x, delta = stream.x_BSD, stream.delta_BSD
    if delta is None:
        return stream, _expanded_once(lambda part: _rms_norm(part, weight_D, eps), x)
    if dtype == FLOAT8 and can_fuse_inference(x):
        from arpg.kernels.residual_norm import residual_norm_float8

        x, normed = residual_norm_float8(x, delta, weight_D, eps)
    elif can_fuse_half(x) and (dropout == 0 or key_B is not None):
        from arpg.kernels.residual_norm import residual_norm

        key = x.new_empty(0, dtype=torch.int32) if key_B is None else key_B
        x, normed = residual_norm(x, delta, weight_D, key, dropout, eps)
    else:
        x = x + keyed_dropout(delta, dropout, key_B)
        normed = _rms_norm(x, weight_D, eps)
    return Stream(x), normed


def norm_linear(
    stream: Stream,
    weight_D: Tensor,
    layers: Sequence[nn.Module],
    *,
    eps: float,
    dropout: float = 0.0,
    key_B: Tensor | None = None,
) -> tuple[Stream, list[Tensor]]:
    """Return the stream and what each of `layers` makes of its norm, `[B, S, O]`."""
    if (fused := _fused_norm(stream, weight_D, layers[0], eps, dropout)) is not None:
        x, linear = fused
        return stream, [_expanded_once(functools.partial(linear, weight_ND=layer.weight), x) for layer in layers]
    stream, normed = norm(stream, weight_D, eps=eps, dropout=dropout, key_B=key_B, dtype=input_dtype(layers[0]))
    return stream, [_expanded_once(layer, normed) for layer in layers]


def norm_guide_linear(
    stream: Stream,
    weight_D: Tensor,
    layer: nn.Module,
    scale_BS: Tensor,
    *,
    eps: float,
    dropout: float = 0.0,
    key_B: Tensor | None = None,
) -> Tensor:
    """Return what `layer`, which is linear without bias, makes of the guided norm of the stream, `[B, S, O]`.

    The same as `guide` of its outputs, from half the rows.
    """
    x = stream.x_BSD
    if dropout == 0 and can_fuse_inference(x):
        from arpg.kernels.residual_norm import guided_norm

        guided = guided_norm(x, stream.delta_BSD, weight_D, scale_BS, eps, dtype=input_dtype(layer) or x.dtype)
    else:
        _, normed = norm(stream, weight_D, eps=eps, dropout=dropout, key_B=key_B)
        guided = guide(normed, scale_BS).type_as(normed)
    if (gemm := fused_gemm(guided, layer)) is not None and not gemm.SCALES_STREAM:
        return gemm.linear(guided, layer.weight)  # type: ignore[arg-type]
    logits: Tensor = layer(guided)
    return logits


def norm_swiglu(
    stream: Stream,
    weight_D: Tensor,
    gate_up: nn.Module,
    *,
    eps: float,
    dropout: float = 0.0,
    key_B: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Stream, Tensor]:
    """Return the stream and silu(gate) * up of its norm; `dtype` as in `norm`."""
    if (fused := _fused_norm(stream, weight_D, gate_up, eps, dropout)) is not None:
        x, linear = fused
        return stream, linear(x, gate_up.weight, swiglu=True)
    stream, (hidden,) = norm_linear(stream, weight_D, [gate_up], eps=eps, dropout=dropout, key_B=key_B)
    return stream, swiglu(hidden, dtype=dtype)


def add_linear(stream: Stream, layer: nn.Module, x_BSO: Tensor, next_norm_D: Tensor | None = None) -> Stream:
    """Add layer(x) to the stream: pending until the next norm, or at once where one kernel does both.

    `next_norm_D`: the weight of that norm; None: the kernel that needs it is not used.
    """
    x_BSD = stream.x_BSD
    assert stream.delta_BSD is None
    gemm = fused_gemm(x_BSD, layer)
    if gemm is None or (gemm.SCALES_STREAM and next_norm_D is None):
        return Stream(x_BSD, layer(x_BSO))
    weight: Any = layer.weight
    if gemm.SCALES_STREAM:
        assert next_norm_D is not None
        total, scaled, sums = gemm.add_linear(x_BSO, weight, x_BSD, next_norm_D)
        return Stream(total, None, sums, scaled)
    sums = gemm.empty_sums(x_BSD, weight)
    return Stream(gemm.linear(x_BSO, weight, add=x_BSD, squares_PM=stream.squares_PM, sums_PM=sums), None, sums)


def _fused_norm(
    stream: Stream, weight_D: Tensor, layer: nn.Module, eps: float, dropout: float
) -> tuple[Tensor, Callable[..., Tensor]] | None:
    """Return the GEMM that includes the norm before a layer, and what it takes, if there is one."""
    if stream.delta_BSD is not None or dropout != 0 or (gemm := fused_gemm(stream.x_BSD, layer)) is None:
        return None
    linear = functools.partial(gemm.linear, eps=eps, squares_PM=stream.squares_PM)
    if not gemm.SCALES_STREAM:
        return stream.x_BSD, functools.partial(linear, norm_D=weight_D)
    return None if stream.scaled_BSD is None else (stream.scaled_BSD, linear)


def swiglu(gate_up: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """silu(gate) * up from the fused projection `[..., 2 F]`."""
    if dtype == FLOAT8 and can_fuse_inference(gate_up):
        from arpg.kernels.swiglu import swiglu_float8

        narrow: Tensor = swiglu_float8(gate_up)
        return narrow
    if can_fuse_half(gate_up):
        from arpg.kernels.swiglu import swiglu as fused

        hidden: Tensor = fused(gate_up)
        return hidden
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if can_fuse_inference(x):
        return F.rms_norm(x, x.shape[-1:], eps=eps) * weight_D
    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.type_as(x) * weight_D


def _expanded_once(function: Callable[[Any], Tensor], x_BSD: Tensor) -> Tensor:
    """Apply a function of the channels; where all slots of all rows are one (expanded) vector, apply it once."""
    if not can_fuse_half(x_BSD) or x_BSD.stride()[:2] != (0, 0):
        return function(x_BSD)
    return function(x_BSD[:1, :1]).expand(*x_BSD.shape[:2], -1)


def int8_linear(x: Tensor, values_OI: Tensor, scale_O: Tensor) -> Tensor:
    """Multiply by an int8 weight with a scale for each output; activations stay as they are."""
    if can_fuse_half(x):
        from arpg.kernels.int8_gemm import MAX_ROWS, int8_gemm

        if x.numel() <= MAX_ROWS * x.shape[-1]:
            product: Tensor = int8_gemm(x, values_OI, scale_O)
            return product
    if x.dtype == torch.float16:  # sums of numbers up to 127 would leave its range
        return F.linear(x, (values_OI.float() * scale_O[:, None]).to(x.dtype))
    return F.linear(x, values_OI.to(x.dtype)).mul_(scale_O)


# Rotary position embedding


def rope_table(pos_BS2: Tensor, head_dim: int, base: float) -> Rope:
    """Return the rotation of each grid position (row, column), in float32; a negative position gives zeros.

    The first half of a head's channels turns by the row, the second by the column.
    """
    if can_fuse(pos_BS2) and not torch.is_grad_enabled():
        from arpg.kernels.fused_rope import rope_table as fused

        return Rope(*fused(pos_BS2, head_dim, base))
    angles, exists = position_angles(pos_BS2, head_dim // 4, base)
    angles = angles.flatten(-2).repeat_interleave(2, dim=-1)
    return Rope(angles.cos() * exists, angles.sin() * exists)


def position_angles(pos_BS2: Tensor, num_frequencies: int, base: float) -> tuple[Tensor, Tensor]:
    """`[B, S, 2, F]` angles per axis, and `[B, S, 1]`: 1 where the slot has a position, else 0."""
    exponents = torch.arange(num_frequencies, dtype=torch.float32, device=pos_BS2.device) / num_frequencies
    angles = pos_BS2.float().unsqueeze(-1) * base**-exponents
    return angles, (pos_BS2[..., :1] >= 0).float()


def apply_rope(x_BSHK: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair of adjacent channels, at least in float32; the result has the type of `x`."""
    if can_fuse_half(x_BSHK):
        from arpg.kernels.fused_rope import apply_rope as fused

        rotated: Tensor = fused(x_BSHK, *rope)
        return rotated
    x = x_BSHK.to(torch.promote_types(x_BSHK.dtype, torch.float32))
    even, odd = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    partner = torch.stack((-odd, even), dim=-1).flatten(-2)
    return (x * rope.cos_BSK.unsqueeze(2) + partner * rope.sin_BSK.unsqueeze(2)).type_as(x_BSHK)


def split_qkv_rope(qkv_BS3HK: Tensor, rope: Rope | None) -> tuple[Tensor, ...]:
    """Return queries and keys, rotated, and values: `[B, S, H, K]` each."""
    if rope is None:
        return qkv_BS3HK.unbind(2)
    if can_fuse_half(qkv_BS3HK):
        from arpg.kernels.fused_rope import split_qkv_rope as fused

        parts: tuple[Tensor, ...] = fused(qkv_BS3HK, *rope)
        return parts
    q, k, v = qkv_BS3HK.unbind(2)
    return apply_rope(q, rope), apply_rope(k, rope), v


# Attention and the key-value cache


def attention_mask(limit: Limit, num_slots: int, x: Tensor) -> Mask:
    """Return the limits themselves where the fused attention takes `x`, else booleans `[B, 1, S, T]`."""
    if limit is None or isinstance(limit, str) or can_fuse_inference(x):
        return limit
    slot_T = torch.arange(num_slots, device=limit.device)
    return (slot_T < limit[..., None])[:, None]


def attention(
    q_BSHK: Tensor,
    key_BTHK: Tensor,
    value_BTHK: Tensor,
    mask: Mask,
    *,
    rope: Rope | None = None,
    settled: int = 0,
    dtype: torch.dtype | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """The one attention: `[B, S, D]` from queries (rotated first by `rope`), keys and values.

    Keys and values may be float8. `settled`: the first so many slots are complete, whichever kernels still run. `dtype`
    as in `norm`. With a `packing` queries and results are packed, keys and values are those of its rows.
    """
    if can_fuse_inference(q_BSHK) and not isinstance(mask, str):
        from arpg.kernels.attention import attend

        fused = attend(q_BSHK, key_BTHK, value_BTHK, mask, rope, settled=settled, dtype=dtype, packing=packing)
        return fused.flatten(2)
    q_BSHK = _unpack(q_BSHK if rope is None else apply_rope(q_BSHK, rope), packing)
    if key_BTHK.dtype == FLOAT8:
        key_BTHK, value_BTHK = key_BTHK.type_as(q_BSHK), value_BTHK.type_as(q_BSHK)
    out_BHSK = F.scaled_dot_product_attention(
        q_BSHK.transpose(1, 2),
        key_BTHK.transpose(1, 2),
        value_BTHK.transpose(1, 2),
        attn_mask=None if isinstance(mask, str) else mask,
        is_causal=isinstance(mask, str),
    )
    return _pack(out_BHSK.transpose(1, 2).flatten(2), packing)


def attention_with_cache_write(
    qkv_BS3HK: Tensor,
    key_BTHK: Tensor,
    value_BTHK: Tensor,
    mask: Mask,
    *,
    rope: Rope | None,
    first: int | Tensor,
    stop: int,
    settled: int = 0,
    dtype: torch.dtype | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Write the rotated keys and the values into a layer's cache from slot `first` (of each row) on, and attend.

    New slots are seen as the cache holds them, rounded where it is float8. `stop` is where the longest row ends then.
    One kernel does both where the fused attention takes the tensors. `packing`: of the projection and the result.
    """
    options: dict[str, Any] = {"settled": settled, "dtype": dtype, "packing": packing}
    if rope is not None and not isinstance(mask, str) and can_fuse_inference(qkv_BS3HK):
        from arpg.kernels.attention import attend_and_store

        return attend_and_store(qkv_BS3HK, (key_BTHK, value_BTHK), mask, rope, first, **options).flatten(2)
    q, k, v = split_qkv_rope(qkv_BS3HK, rope)
    _store(_unpack(k, packing), _unpack(v, packing), key_BTHK, value_BTHK, first)
    return attention(q, key_BTHK[:, :stop], value_BTHK[:, :stop], mask, **options)


def cache_write(
    key_BSHK: Tensor,
    value_BSHK: Tensor,
    key_BTHK: Tensor,
    value_BTHK: Tensor,
    *,
    rope: Rope | None,
    first: int | Tensor,
    packing: Packing | None = None,
) -> None:
    """Write the rotated keys and the values into a layer's cache, from slot `first` (of each row) on."""
    if rope is not None and can_fuse_inference(key_BSHK):
        from arpg.kernels.fused_rope import store_rope

        cache: dict[str, Any] = {"key_BTHK": key_BTHK, "value_BTHK": value_BTHK, "first": first}
        store_rope(key_BSHK, value_BSHK, *rope, **cache, packing=packing)
        return
    key_BSHK = key_BSHK if rope is None else apply_rope(key_BSHK, rope)
    _store(_unpack(key_BSHK, packing), _unpack(value_BSHK, packing), key_BTHK, value_BTHK, first)


def _store(key_BSHK: Tensor, value_BSHK: Tensor, key_BTHK: Tensor, value_BTHK: Tensor, first: int | Tensor) -> None:
    if key_BTHK.dtype == FLOAT8:
        key_BSHK, value_BSHK = as_bytes(to_float8(key_BSHK)), as_bytes(to_float8(value_BSHK))
        key_BTHK, value_BTHK = as_bytes(key_BTHK), as_bytes(value_BTHK)
    num_new = key_BSHK.shape[1]
    if isinstance(first, int):
        part = slice(first, first + num_new)
        key_BTHK[:, part], value_BTHK[:, part] = key_BSHK, value_BSHK
    else:
        row_B1 = torch.arange(len(first), device=first.device)[:, None]
        slot_BS = first[:, None] + torch.arange(num_new, device=first.device)
        key_BTHK[row_B1, slot_BS], value_BTHK[row_B1, slot_BS] = key_BSHK, value_BSHK


def _unpack(x_CTHK: Tensor, packing: Packing | None) -> Tensor:
    """Return packed tokens as padded rows, `[R, S, H, K]`."""
    if packing is None:
        return x_CTHK
    assert packing.token_RS is not None
    return x_CTHK.flatten(0, 1)[packing.token_RS]


def _pack(x_RSD: Tensor, packing: Packing | None) -> Tensor:
    """Return padded rows as packed tokens, `[C, T, D]`."""
    if packing is None:
        return x_RSD
    assert packing.place_CT is not None
    return x_RSD.flatten(0, 1)[packing.place_CT]


# Tokens of a decoding step


def embed_at(
    weight_VD: Tensor,
    ids_BN: Tensor,
    pos_BN2: Tensor,
    position_BS: Tensor,
    *,
    copies: int,
    head_dim: int | None,
    base: float,
    static: bool = False,
) -> tuple[Tensor, Tensor | Rope]:
    """Return the embeddings `[R, S, D]` of the tokens at `position_BS`, and their grid positions or rotation.

    Each row stands `copies` times (conditional and unconditional). `head_dim`: None where the model does not rotate.
    `static`: the positions were written before the decode started, so a kernel may read them before the one in front
    of it ends.
    """
    if head_dim is not None and can_fuse_inference(weight_VD):
        from arpg.kernels.token_io import embed_at as fused

        x_RSD, *rope = fused(
            weight_VD, ids_BN, pos_BN2, position_BS, copies=copies, head_dim=head_dim, base=base, static=static
        )
        return x_RSD, Rope(*rope)
    x_BSD = F.embedding(ids_BN.gather(1, position_BS), weight_VD)
    return repeat_rows(x_BSD, copies), _gather_pos(pos_BN2, position_BS, copies)


def rope_at(
    pos_BN2: Tensor,
    position_BS: Tensor,
    like: Tensor,
    *,
    copies: int,
    head_dim: int | None,
    base: float,
    static: bool = False,
) -> Tensor | Rope:
    """Return the grid positions at `position_BS`, `[R, S, 2]`, or their rotation where one kernel makes it.

    `like`: a tensor of the device and type that the rotated tensors have; other arguments as in `embed_at`.
    """
    if head_dim is not None and can_fuse_inference(like):
        from arpg.kernels.token_io import rope_at as fused

        return Rope(*fused(pos_BN2, position_BS, copies=copies, head_dim=head_dim, base=base, static=static))
    return _gather_pos(pos_BN2, position_BS, copies)


def scatter_tokens(
    ids_BN: Tensor, known_BN: Tensor, position_BS: Tensor, sampled_BS: Tensor, kept_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return new ids and known with `sampled_BS` at `position_BS`; known where they are kept (None: all)."""
    if kept_BS is None and has_kernels(ids_BN):
        from arpg.kernels.token_io import scatter_tokens as fused

        return fused(ids_BN, known_BN, position_BS, sampled_BS)
    known: Tensor | bool = True if kept_BS is None else kept_BS | known_BN.gather(1, position_BS)
    return ids_BN.scatter(1, position_BS, sampled_BS), known_BN.scatter(1, position_BS, known)


def guide(x_RSD: Tensor, scale_BS: Tensor) -> Tensor:
    """Return uncond + scale (cond - uncond), at least in float32; a scale per position, or `[B, 1]` per row.

    Written so that at scale 1 it is cond, whatever is rounded.
    """
    cond, uncond = x_RSD.to(torch.promote_types(x_RSD.dtype, torch.float32)).chunk(2)
    return cond + (scale_BS[..., None] - 1) * (cond - uncond)


def gumbel_argmax(
    logits_BSV: Tensor,
    key_B2: Tensor,
    stream: NoiseStream,
    position_BS: Tensor,
    *,
    temperature: float = 1.0,
    static: bool = False,
) -> Tensor:
    """Sample ids `[B, S]` by the Gumbel-max trick, at least in float32: argmax(logits / temperature + noise).

    The noise is a function of seed, stream, position and code alone. `static` as in `embed_at`.
    """
    if can_fuse(logits_BSV):
        from arpg.kernels.gumbel import sample as fused

        return fused(logits_BSV, temperature, key_B2, stream, position_BS, static=static)
    logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    logits_BSV = logits_BSV if temperature == 1.0 else logits_BSV / temperature
    return (logits_BSV + gumbel(key_B2, stream, position_BS, logits_BSV.shape[-1])).argmax(-1)


def repeat_rows(x_B: Tensor, copies: int) -> Tensor:
    """Repeat a batch for its conditional and unconditional rows."""
    return x_B if copies == 1 else torch.cat((x_B,) * copies)


def _gather_pos(pos_BN2: Tensor, position_BS: Tensor, copies: int) -> Tensor:
    return repeat_rows(pos_BN2.gather(1, position_BS[..., None].expand(-1, -1, 2)), copies)


# Training


def keyed_dropout(x_B: Tensor, p: float, key_B: Tensor | None) -> Tensor:
    """Drop channels with probability `p`, by a mask that is a function of each sample's key and the channel alone.

    Without keys the mask comes from torch's global generator. Two channels, one of each half of the last dimension,
    share the two halves of a random word.
    """
    if p == 0:
        return x_B
    if key_B is None:
        return F.dropout(x_B, p)
    half = x_B.shape[-1] // 2
    shape = (*x_B.shape[1:-1], half)
    index = torch.arange(math.prod(shape), device=x_B.device, dtype=torch.int32).reshape(shape)
    word = _mix(key_B.reshape(-1, *[1] * len(shape)) + index)
    keep = torch.cat((word & 0xFFFF, (word >> 16) & 0xFFFF), -1) >= round(p * 2**16)
    return x_B * keep * (1.0 / (1.0 - p))


def fold_key(key_B: Tensor, number: int) -> Tensor:
    """Return new dropout keys for a site of a layer, so that no two sites share a mask."""
    step = ((number + 1) * _GOLDEN + 2**31) % 2**32 - 2**31  # wrapped here: a compiler might widen it instead
    return _mix(key_B + step)


def fold_keys(key_B: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return `fold_key` for the numbers 0 to `count` - 1, all at once."""
    step_L = torch.arange(1, count + 1, dtype=torch.int32, device=key_B.device) * _GOLDEN  # wraps
    return _mix(key_B + step_L[:, None]).unbind(0)


_GOLDEN = -1640531527  # 2^32 / golden ratio, as int32


def _mix(x: Tensor) -> Tensor:
    """A 32-bit avalanche (two multiplications, three shifts) in wrapping int32; `& mask` makes the shifts logical."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def to_autocast(x: Tensor) -> Tensor:
    """Return `x` in autocast's type where autocast is on: the residual stream then has half the traffic of float32."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def grad_fanout(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return `x` for each of `count` readers; their gradients are summed in one pass over memory (do not write)."""
    copies: tuple[Tensor, ...] = _GradFanout.apply(x, count)
    return copies


class _GradFanout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        given = [grad for grad in grads if grad is not None]
        if len(given) < 2:
            return (given[0] if given else None), None
        return compiled(_sum, given[0])(given), None


def _sum(parts: list[Tensor]) -> Tensor:
    """Sum at least in float32, rounded once."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total.to(parts[0].dtype)


def compiled(function: Callable[P, T], given: Tensor) -> Callable[P, T]:
    """Return a small function, compiled where that is worth it on the device of `given`."""
    return _compile(function) if can_compile(given) else function


@functools.cache
def _compile(function: Callable[P, T]) -> Callable[P, T]:
    return torch.compile(function, dynamic=False)


def compile_each(modules: Sequence[nn.Module], *, dynamic: bool | None = None) -> None:
    """Compile modules one by one, in place: seconds, where a whole network takes a minute.

    `dynamic`: whether for sizes that differ from call to call; None: as they come. Blocks of several widths and modes
    are versions of one function to the compiler, which would go on uncompiled beyond 8 of them: its limit is raised,
    for the process.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, 64)
    for module in modules:
        module.compile(dynamic=dynamic)
