"""Tokens in and out of a decoding step: embed tokens at positions with their rotation, and scatter sampled tokens.

Forward only; each is one kernel where tensor operations are three or more.

Shapes: B batch, R rows (B, or 2B when guided), N grid tokens, S tokens of a call, D width, K head channels, V codes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels.dispatch import prefetch_weights


def rope_at(
    pos_BN2: Tensor, position_BS: Tensor, *, copies: int, head_dim: int, base: float, static: bool = False
) -> tuple[Tensor, Tensor]:
    """The cosines and sines `[R, S, K]` of `ops.rope_table` at the positions, `copies` times; `static` as in `ops`."""
    shape = copies * len(position_BS), position_BS.shape[1], head_dim
    cos, sin = (torch.empty(shape, device=pos_BN2.device) for _ in range(2))
    _launch(pos_BN2, position_BS, pos_BN2, cos, cos, cos, sin, width=0, base=base, static=static)
    return cos, sin


def embed_at(
    weight_VD: Tensor,
    ids_BN: Tensor,
    pos_BN2: Tensor,
    position_BS: Tensor,
    *,
    copies: int,
    head_dim: int,
    base: float,
    static: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The embeddings `[R, S, D]` of the tokens at the positions, then cosines and sines as from `rope_at`."""
    rows, width = copies * len(position_BS), weight_VD.shape[1]
    x = torch.empty((rows, position_BS.shape[1], width), dtype=weight_VD.dtype, device=weight_VD.device)
    cos, sin = (torch.empty((*x.shape[:2], head_dim), device=x.device) for _ in range(2))
    _launch(pos_BN2, position_BS, ids_BN, weight_VD, x, cos, sin, width=width, base=base, static=static)
    return x, cos, sin


def _launch(
    pos_BN2: Tensor,
    position_BS: Tensor,
    ids_BN: Tensor,
    weight_VD: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    width: int,
    base: float,
    static: bool,
) -> None:
    """A width of 0: no ids are read and nothing is embedded."""
    rows, slots, channels = cos.shape
    assert ids_BN.stride(-1) == 1
    assert pos_BN2.stride()[1:] == (2, 1)
    pdl = prefetch_weights(cos)
    _embed_at[(slots, rows)](
        pos_BN2, position_BS, ids_BN, weight_VD, x, cos, sin, pos_BN2.stride(0), *position_BS.stride(),
        ids_BN.stride(0), len(position_BS), math.log2(base), width, triton.next_power_of_2(width), channels,
        triton.next_power_of_2(channels), pdl, static, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch"])
def _embed_at(  # type: ignore[no-untyped-def]
    pos, position, ids, weight, x, cos, sin, pos_row, position_row, position_slot, ids_row, batch, log_base,
    D: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
    STATIC: tl.constexpr,
):  # fmt: skip
    """One slot of one row. Static positions are read, and the angles computed, before the dependency barrier."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not STATIC:
            tl.extra.cuda.gdc_wait()
    slot, row, sample = tl.program_id(0), tl.program_id(1), (tl.program_id(1) % batch).to(tl.int64)
    to = (row * tl.num_programs(0) + slot).to(tl.int64)
    at = tl.load(position + sample * position_row + slot * position_slot)
    down, across = tl.load(pos + sample * pos_row + 2 * at), tl.load(pos + sample * pos_row + 2 * at + 1)
    channel = tl.arange(0, CHANNELS)
    exponent = ((channel % (K // 2)) // 2).to(tl.float32) / (K // 4)
    angle = tl.where(channel < K // 2, down, across) * tl.exp2(-log_base * exponent)
    exists = (down >= 0).to(tl.float32)
    c, n = tl.cos(angle) * exists, tl.sin(angle) * exists
    if PDL and STATIC:  # not pure, so that the compiler does not move them behind the wait
        c = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [c], tl.float32, is_pure=False, pack=1)
        n = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], tl.float32, is_pure=False, pack=1)
        tl.extra.cuda.gdc_wait()
    if D > 0:
        token = tl.load(ids + sample * ids_row + at)
        wide = tl.arange(0, WIDTH)
        tl.store(x + to * D + wide, tl.load(weight + token * D + wide, wide < D), wide < D)
    tl.store(cos + to * K + channel, c, channel < K)
    tl.store(sin + to * K + channel, n, channel < K)


def scatter_tokens(ids_BN: Tensor, known_BN: Tensor, position_BS: Tensor, sampled_BS: Tensor) -> tuple[Tensor, Tensor]:
    """New ids and known with the sampled tokens at the positions; the given tensors stay as they are."""
    batch, tokens = ids_BN.shape
    slots = position_BS.shape[1]
    ids_out, known_out = ids_BN.new_empty(ids_BN.shape), known_BN.new_empty(known_BN.shape)
    if slots:
        position_BS, sampled_BS = (x if x.stride(-1) == 1 else x.contiguous() for x in (position_BS, sampled_BS))
        assert ids_BN.stride(-1) == known_BN.stride(-1) == 1
        _scatter_tokens[(batch,)](
            ids_BN, known_BN.view(torch.uint8), position_BS, sampled_BS, ids_out, known_out.view(torch.uint8), tokens,
            slots, ids_BN.stride(0), known_BN.stride(0), position_BS.stride(0), sampled_BS.stride(0),
            triton.next_power_of_2(tokens), triton.next_power_of_2(slots), num_warps=4,
        )  # fmt: skip
        return ids_out, known_out
    return ids_BN.clone(), known_BN.clone()


@triton.jit(do_not_specialize=["S"])
def _scatter_tokens(  # type: ignore[no-untyped-def]
    ids, known, position, sampled, ids_out, known_out, N, S, ids_row, known_row, position_row, sampled_row,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One sample. The only kernel of a step that is launched without PDL: it starts when all before it have ended."""
    row = tl.program_id(0).to(tl.int64)
    token, slot = tl.arange(0, TOKENS), tl.arange(0, SLOTS)
    at = tl.load(position + row * position_row + slot, slot < S, other=0)
    new = tl.load(sampled + row * sampled_row + slot, slot < S, other=0)
    tl.store(ids_out + row * N + token, tl.load(ids + row * ids_row + token, token < N), token < N)
    tl.store(known_out + row * N + token, tl.load(known + row * known_row + token, token < N), token < N)
    tl.debug_barrier()  # sampled tokens are stored after the copy
    tl.store(ids_out + row * N + at, new, slot < S)
    tl.store(known_out + row * N + at, tl.full((SLOTS,), 1, tl.uint8), slot < S)
