"""Positions of tokens: 2-D rotary embedding (and the ablation's 2-D sinusoids) of grid positions.

A position is (row, column) in float, so it may lie between two grid points. `NO_POSITION` marks a slot that has none
(the class): its cosine and sine are both zero, so its query and key vanish and only its value acts. The published
weights were trained with that; an identity rotation there breaks them. A slot of text has no position either, but takes
part in attention: it is not rotated, which is what the position (0, 0) does.

Shapes: B batch, S slots, K channels of a head, D width, N grid tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arpg.kernels import ops
from arpg.kernels.ops import Rope

BASE = 10000.0
NO_POSITION = -1.0


def grid_positions(height: int, width: int, *, device: torch.device | str = "cpu") -> Tensor:
    """`[N, 2]`: (row, column) of each token of the grid, in raster order."""
    rows = torch.arange(height, dtype=torch.float32, device=device)
    columns = torch.arange(width, dtype=torch.float32, device=device)
    return torch.cartesian_prod(rows, columns).reshape(height * width, 2)


def no_positions(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    """`[*shape, 2]`: positions of slots that have none."""
    return torch.full((*shape, 2), NO_POSITION, dtype=torch.float32, device=device)


def identity_positions(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    """`[*shape, 2]`: positions whose rotation is the identity."""
    return torch.zeros(*shape, 2, dtype=torch.float32, device=device)


def make_rope(pos_BS2: Tensor, head_dim: int) -> Rope:
    """Return the rotation of each position: half of a head's channels by the row, half by the column (float32)."""
    return ops.rope_table(pos_BS2, head_dim, BASE)


def sinusoids(pos_BS2: Tensor, width: int) -> Tensor:
    """`[B, S, D]`: the ablation's additive encoding; half the channels for the row, half for the column."""
    angles, exists = ops.position_angles(pos_BS2, width // 4, BASE)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(-2) * exists
