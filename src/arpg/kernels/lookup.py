"""The small steps around the layers of a step: tokens and places are looked up, and what was drawn is put down. Forward
only; each is one kernel where tensor operations are three or more, and is launched ahead like those of the layers.

Shapes: B batch, R rows (B, or 2B when guided), N grid tokens, S tokens of a call, D width, K head channels, V codes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels import ahead


def turned_at(
    place_BN2: Tensor, position_BS: Tensor, *, copies: int, head_dim: int, base: float
) -> tuple[Tensor, Tensor]:
    """The cosines and sines `[R, S, K]` of `model/rope.py::rotation` at the positions' places, `copies` times."""
    shape = copies * len(position_BS), position_BS.shape[1], head_dim
    cos, sin = (torch.empty(shape, device=place_BN2.device) for _ in range(2))
    _launch(place_BN2, position_BS, place_BN2, cos, cos, cos, sin, width=0, base=base)
    return cos, sin


def embedded_at(
    weight_VD: Tensor,
    ids_BN: Tensor,
    place_BN2: Tensor,
    position_BS: Tensor,
    *,
    copies: int,
    head_dim: int,
    base: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Also the embeddings `[R, S, D]` of the tokens at the positions, before the cosines and sines."""
    rows, width = copies * len(position_BS), weight_VD.shape[1]
    x = torch.empty((rows, position_BS.shape[1], width), dtype=weight_VD.dtype, device=weight_VD.device)
    cos, sin = (torch.empty((*x.shape[:2], head_dim), device=x.device) for _ in range(2))
    _launch(place_BN2, position_BS, ids_BN, weight_VD, x, cos, sin, width=width, base=base)
    return x, cos, sin


def _launch(
    place_BN2: Tensor,
    position_BS: Tensor,
    ids_BN: Tensor,
    weight_VD: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    width: int,
    base: float,
) -> None:
    """Without width there are no ids, and nothing is embedded."""
    rows, slots, channels = cos.shape
    assert ids_BN.stride(-1) == 1
    assert place_BN2.stride()[1:] == (2, 1)
    _look_up[(slots, rows)](
        place_BN2, position_BS, ids_BN, weight_VD, x, cos, sin, place_BN2.stride(0), *position_BS.stride(),
        ids_BN.stride(0), len(position_BS), math.log2(base), width, triton.next_power_of_2(width), channels,
        triton.next_power_of_2(channels), ahead(cos), num_warps=4, launch_pdl=ahead(cos),
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch"])
def _look_up(  # type: ignore[no-untyped-def]
    place, position, ids, weight, x, cos, sin, place_row, position_row, position_slot, ids_row, batch, log_base,
    D: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, CHANNELS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One slot of one row. Positions and places are older than any kernel that may still run: they are read at once."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    slot, row, sample = tl.program_id(0), tl.program_id(1), (tl.program_id(1) % batch).to(tl.int64)
    to = (row * tl.num_programs(0) + slot).to(tl.int64)
    at = tl.load(position + sample * position_row + slot * position_slot)
    down, across = tl.load(place + sample * place_row + 2 * at), tl.load(place + sample * place_row + 2 * at + 1)
    channel = tl.arange(0, CHANNELS)
    exponent = ((channel % (K // 2)) // 2).to(tl.float32) / (K // 4)
    angle = tl.where(channel < K // 2, down, across) * tl.exp2(-log_base * exponent)
    somewhere = (down >= 0).to(tl.float32)
    c, n = tl.cos(angle) * somewhere, tl.sin(angle) * somewhere
    if AHEAD:  # not pure, so that the compiler does not move them behind the wait
        c = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [c], tl.float32, is_pure=False, pack=1)
        n = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], tl.float32, is_pure=False, pack=1)
        tl.extra.cuda.gdc_wait()
    if D > 0:
        token = tl.load(ids + sample * ids_row + at)
        wide = tl.arange(0, WIDTH)
        tl.store(x + to * D + wide, tl.load(weight + token * D + wide, wide < D), wide < D)
    tl.store(cos + to * K + channel, c, channel < K)
    tl.store(sin + to * K + channel, n, channel < K)


def put(ids_BN: Tensor, known_BN: Tensor, position_BS: Tensor, drawn_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and known, with what was drawn at the positions; those before stay as they are."""
    batch, tokens = ids_BN.shape
    slots = position_BS.shape[1]
    ids_out, known_out = ids_BN.new_empty(ids_BN.shape), known_BN.new_empty(known_BN.shape)
    if slots:
        position_BS, drawn_BS = (x if x.stride(-1) == 1 else x.contiguous() for x in (position_BS, drawn_BS))
        assert ids_BN.stride(-1) == known_BN.stride(-1) == 1
        _put[(batch,)](
            ids_BN, known_BN.view(torch.uint8), position_BS, drawn_BS, ids_out, known_out.view(torch.uint8), tokens,
            slots, ids_BN.stride(0), known_BN.stride(0), position_BS.stride(0), drawn_BS.stride(0),
            triton.next_power_of_2(tokens), triton.next_power_of_2(slots), num_warps=4,
        )  # fmt: skip
        return ids_out, known_out
    return ids_BN.clone(), known_BN.clone()


@triton.jit(do_not_specialize=["S"])
def _put(  # type: ignore[no-untyped-def]
    ids, known, position, drawn, ids_out, known_out, N, S, ids_row, known_row, position_row, drawn_row,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One sample. The only kernel of a step that starts when all before it have ended: nothing gets further ahead."""
    row = tl.program_id(0).to(tl.int64)
    token, slot = tl.arange(0, TOKENS), tl.arange(0, SLOTS)
    at = tl.load(position + row * position_row + slot, slot < S, other=0)
    new = tl.load(drawn + row * drawn_row + slot, slot < S, other=0)
    tl.store(ids_out + row * N + token, tl.load(ids + row * ids_row + token, token < N), token < N)
    tl.store(known_out + row * N + token, tl.load(known + row * known_row + token, token < N), token < N)
    tl.debug_barrier()  # what is drawn comes after what was there
    tl.store(ids_out + row * N + at, new, slot < S)
    tl.store(known_out + row * N + at, tl.full((SLOTS,), 1, tl.uint8), slot < S)
