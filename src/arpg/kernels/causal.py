"""Gradients of causal attention over a short sequence: one program holds all keys of a head, so that nothing is
computed twice, added in memory or kept from the forward pass, which is torch's own.

Shapes: B batch, S slots, H heads, K head channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

MOST_SLOTS, MOST_CHANNELS = 256, 64  # what the registers hold
_QUERIES, _WARPS = 32, 8  # queries at a time


def fits(q_BSHK: Tensor, key_BTHK: Tensor) -> bool:
    _, slots, _, channels = q_BSHK.shape
    return q_BSHK.shape == key_BTHK.shape and slots <= MOST_SLOTS and channels <= MOST_CHANNELS


@torch.library.custom_op("arpg::causal_attention", mutates_args=())
def causal_attention(q_BSHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor) -> Tensor:
    """`[B, S, H, K]`: each slot sees itself and those before it."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, key_BSHK, value_BSHK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


@torch.library.custom_op("arpg::causal_attention_backward", mutates_args=())
def causal_attention_backward(q: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, slots, heads, channels = q.shape
    q, key, value, grad = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, key, value, grad))
    dq, dk, dv = (torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(3))
    most = max(16, triton.next_power_of_2(slots))
    _gradients[(batch * heads,)](
        q, key, value, grad, dq, dk, dv, *q.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3],
        slots, heads, 1.0 / math.sqrt(channels), channels, most, min(_QUERIES, most),
        max(16, triton.next_power_of_2(channels)), num_warps=max(1, _WARPS * most // 256), num_stages=2,
    )  # fmt: skip
    return dq, dk, dv


@causal_attention.register_fake
def _(q: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@causal_attention_backward.register_fake
def _(q: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = causal_attention_backward(*ctx.saved_tensors, grad)
    return gradients


causal_attention.register_autograd(_gradient, setup_context=_setup)


@triton.jit(do_not_specialize=["S"])
def _gradients(  # type: ignore[no-untyped-def]
    q, k, v, g, dq, dk, dv, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, S, H, scale,
    K: tl.constexpr, SLOTS: tl.constexpr, QUERIES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One head. Scores stand with keys in rows and some queries in columns."""
    batch, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    slot, channel = tl.arange(0, SLOTS)[:, None], tl.arange(0, CHANNELS)[None, :]
    real = (slot < S) & (channel < K)
    keys = tl.load(k + batch * kb + slot * ks + head * kh + channel, real, other=0.0)
    values = tl.load(v + batch * vb + slot * vs + head * vh + channel, real, other=0.0)
    grad_keys = tl.zeros((SLOTS, CHANNELS), tl.float32)
    grad_values = tl.zeros((SLOTS, CHANNELS), tl.float32)
    to = batch * S * H * K + head * K  # of all three gradients
    for start in range(0, S, QUERIES):
        query = start + tl.arange(0, QUERIES)[:, None]
        there = (query < S) & (channel < K)
        x = tl.load(q + batch * qb + query * qs + head * qh + channel, there, other=0.0)
        grad = tl.load(g + batch * gb + query * gs + head * gh + channel, there, other=0.0)
        score = tl.dot(keys, tl.trans(x), input_precision="ieee") * (scale * 1.4426950408889634)
        column = start + tl.arange(0, QUERIES)[None, :]
        score = tl.where((slot <= column) & (slot < S), score, float("-inf"))
        weight = tl.exp2(score - tl.max(score, 0)[None, :])
        weight = weight * (1.0 / tl.sum(weight, 0))[None, :]
        grad_values = tl.dot(weight.to(grad.dtype), grad, grad_values, input_precision="ieee")
        grad_weight = tl.dot(values, tl.trans(grad), input_precision="ieee")
        along = tl.sum(weight * grad_weight, 0)[None, :]
        grad_score = (weight * (grad_weight - along) * scale).to(x.dtype)
        grad_keys = tl.dot(grad_score, x, grad_keys, input_precision="ieee")
        grad_x = tl.trans(tl.dot(tl.trans(keys), grad_score, input_precision="ieee"))
        tl.store(dq + to + query * (H * K) + channel, grad_x.to(dq.dtype.element_ty), there)
    tl.store(dk + to + slot * (H * K) + channel, grad_keys.to(dk.dtype.element_ty), real)
    tl.store(dv + to + slot * (H * K) + channel, grad_values.to(dv.dtype.element_ty), real)
