"""Gradients of causal attention over a short sequence: one program holds all keys of a head, so that nothing is
computed twice, added in memory or kept from the forward pass, which is torch's own.

Shapes: B batch, S slots, H heads, K head channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from arpg.kernels.rotary import _turned, turn

MOST_SLOTS, MOST_CHANNELS = 256, 64  # what the registers hold
_QUERIES, _WARPS = 32, 8  # queries at a time


@torch.library.custom_op("arpg::causal_attention", mutates_args=())
def causal_attention(q_BSHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor) -> Tensor:
    """`[B, S, H, K]`: each slot sees itself and those before it."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, key_BSHK, value_BSHK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


@torch.library.custom_op("arpg::turned_attention", mutates_args=())
def turned_attention(qkv_BS3HK: Tensor, cos_BSK: Tensor, sin_BSK: Tensor) -> Tensor:
    """`causal_attention` of a fused projection whose queries and keys are turned first; so are its gradients, back."""
    q, k, v = qkv_BS3HK.unbind(2)
    return causal_attention(turn(q, cos_BSK, sin_BSK), turn(k, cos_BSK, sin_BSK), v)


@torch.library.custom_op("arpg::turned_attention_backward", mutates_args=())
def turned_attention_backward(qkv_BS3HK: Tensor, cos_BSK: Tensor, sin_BSK: Tensor, grad: Tensor) -> Tensor:
    out = torch.empty_like(qkv_BS3HK, memory_format=torch.contiguous_format)
    _launch(qkv_BS3HK.unbind(2), grad, out.unbind(2), (cos_BSK.contiguous(), sin_BSK.contiguous()))
    return out


@torch.library.custom_op("arpg::causal_attention_backward", mutates_args=())
def causal_attention_backward(q: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(3))
    _launch((q, key, value), grad, (dq, dk, dv), None)
    return dq, dk, dv


def _launch(
    inputs: Sequence[Tensor], grad: Tensor, outputs: Sequence[Tensor], rotation: tuple[Tensor, Tensor] | None
) -> None:
    batch, slots, heads, channels = inputs[0].shape
    q, k, v, grad = (x if x.stride(-1) == 1 else x.contiguous() for x in (*inputs, grad))
    most = max(16, triton.next_power_of_2(slots))
    cos, sin = (q, q) if rotation is None else rotation  # without: not read
    _gradients[(batch * heads,)](
        q, k, v, grad, *outputs, cos, sin, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3],
        *outputs[0].stride()[:3], slots, heads, 1.0 / math.sqrt(channels), rotation is not None, channels, most,
        min(_QUERIES, most), max(16, triton.next_power_of_2(channels)), num_warps=max(1, _WARPS * most // 256),
        num_stages=2,
    )  # fmt: skip


@causal_attention.register_fake
def _(q: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@turned_attention.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return qkv.new_empty(qkv[:, :, 0].shape)


@turned_attention_backward.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, grad: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


@causal_attention_backward.register_fake
def _(q: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = causal_attention_backward(*ctx.saved_tensors, grad)
    return gradients


causal_attention.register_autograd(_gradient, setup_context=_setup)
turned_attention.register_autograd(
    lambda ctx, grad: (turned_attention_backward(*ctx.saved_tensors, grad), None, None), setup_context=_setup
)


@triton.jit(do_not_specialize=["S"])
def _gradients(  # type: ignore[no-untyped-def]
    q, k, v, g, dq, dk, dv, cos, sin, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, ob, os, oh, S, H, scale,
    TURN: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, QUERIES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One head. Scores stand with keys in rows and some queries in columns."""
    batch, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    slot, channel = tl.arange(0, SLOTS)[:, None], tl.arange(0, CHANNELS)[None, :]
    real = (slot < S) & (channel < K)
    keys = tl.load(k + batch * kb + slot * ks + head * kh + channel, real, other=0.0)
    values = tl.load(v + batch * vb + slot * vs + head * vh + channel, real, other=0.0)
    if TURN:
        key_cos, key_sin = _angles(cos, sin, batch, slot, S, K, CHANNELS)
        keys = _turned(keys, key_cos, key_sin, SLOTS, CHANNELS).to(k.dtype.element_ty)
    grad_keys = tl.zeros((SLOTS, CHANNELS), tl.float32)
    grad_values = tl.zeros((SLOTS, CHANNELS), tl.float32)
    to = batch * ob + head * oh  # of all three gradients
    for start in range(0, S, QUERIES):
        query = start + tl.arange(0, QUERIES)[:, None]
        there = (query < S) & (channel < K)
        x = tl.load(q + batch * qb + query * qs + head * qh + channel, there, other=0.0)
        grad = tl.load(g + batch * gb + query * gs + head * gh + channel, there, other=0.0)
        if TURN:
            c, n = _angles(cos, sin, batch, query, S, K, CHANNELS)
            x = _turned(x, c, n, QUERIES, CHANNELS).to(q.dtype.element_ty)
        score = tl.dot(keys, tl.trans(x), input_precision="ieee")
        grad_weight = tl.dot(values, tl.trans(grad), input_precision="ieee")
        score = score * (scale * 1.4426950408889634)  # in base 2
        column = start + tl.arange(0, QUERIES)[None, :]
        score = tl.where((slot <= column) & (slot < S), score, float("-inf"))
        weight = tl.exp2(score - tl.max(score, 0)[None, :])
        weight = weight * (1.0 / tl.sum(weight, 0))[None, :]
        grad_values = tl.dot(weight.to(grad.dtype), grad, grad_values, input_precision="ieee")
        along = tl.sum(weight * grad_weight, 0)[None, :]
        grad_score = (weight * (grad_weight - along) * scale).to(x.dtype)
        grad_keys = tl.dot(grad_score, x, grad_keys, input_precision="ieee")
        grad_x = tl.trans(tl.dot(tl.trans(keys), grad_score, input_precision="ieee"))
        if TURN:
            grad_x = _turned(grad_x, c, -n, QUERIES, CHANNELS)
        tl.store(dq + to + query * os + channel, grad_x.to(dq.dtype.element_ty), there)
    tl.store(dv + to + slot * os + channel, grad_values.to(dv.dtype.element_ty), real)
    if TURN:
        key_cos, key_sin = _angles(cos, sin, batch, slot, S, K, CHANNELS)  # again: meanwhile registers were scarce
        grad_keys = _turned(grad_keys, key_cos, -key_sin, SLOTS, CHANNELS)
    tl.store(dk + to + slot * os + channel, grad_keys.to(dk.dtype.element_ty), real)


@triton.jit
def _angles(cos, sin, batch, slot, S, K: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosines and sines of some slots (a column), one for each pair of channels."""
    even = 2 * tl.arange(0, CHANNELS // 2)[None, :]
    at, real = (batch * S + slot) * K + even, (slot < S) & (even < K)
    return tl.load(cos + at, real, other=0.0), tl.load(sin + at, real, other=0.0)
