"""Where a token stands: 2-D rotation (and the ablation's 2-D sinusoids) from places on the grid.

A place is (row, column), in float, so it may lie between two grid points. `NOWHERE` is the place of
a slot that has none (the class): its cosine and sine are both zero, so its query and key vanish and
only its value acts. That is what the published weights were trained with; an identity rotation
there breaks them. A slot of text has no place either, but takes part in attention: it is turned by nothing at all,
which is what the place (0, 0) does.

Shapes: B batch, S slots, H heads, K channels of a head, D width, N grid tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from arpg.kernels import fusible

BASE = 10000.0
NOWHERE = -1.0


class Rotation(NamedTuple):
    cos_BSK: Tensor  # each angle twice, since channels 2i and 2i+1 turn together
    sin_BSK: Tensor


def grid_places(height: int, width: int, *, device: torch.device | str = "cpu") -> Tensor:
    """`[N, 2]`: (row, column) of each token of the grid, in raster order."""
    rows = torch.arange(height, dtype=torch.float32, device=device)
    columns = torch.arange(width, dtype=torch.float32, device=device)
    return torch.cartesian_prod(rows, columns).reshape(height * width, 2)


def nowhere(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    """`[*shape, 2]`: places of slots that have none."""
    return torch.full((*shape, 2), NOWHERE, dtype=torch.float32, device=device)


def unturned(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    """`[*shape, 2]`: places whose rotation is the identity."""
    return torch.zeros(*shape, 2, dtype=torch.float32, device=device)


def rotation(place_BS2: Tensor, head_dim: int) -> Rotation:
    """The first half of a head's channels turns by the row, the second by the column (float32)."""
    if fusible(place_BS2) and not torch.is_grad_enabled():
        from arpg.kernels.rotary import angles as fused

        return Rotation(*fused(place_BS2, head_dim, BASE))
    angles, somewhere = _angles(place_BS2, head_dim // 4)
    angles = angles.flatten(-2).repeat_interleave(2, dim=-1)
    return Rotation(angles.cos() * somewhere, angles.sin() * somewhere)


def rotate(x_BSHK: Tensor, by: Rotation) -> Tensor:
    """Turn each pair of adjacent channels. Computed at least in float32, returned in the type of `x`."""
    x = x_BSHK.to(torch.promote_types(x_BSHK.dtype, torch.float32))
    even, odd = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    return (x * by.cos_BSK.unsqueeze(2) + turned * by.sin_BSK.unsqueeze(2)).type_as(x_BSHK)


def sinusoids(place_BS2: Tensor, width: int) -> Tensor:
    """`[B, S, D]`: the ablation's additive encoding; half the channels for the row, half for the column."""
    angles, somewhere = _angles(place_BS2, width // 4)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(-2) * somewhere


def _angles(place_BS2: Tensor, num_frequencies: int) -> tuple[Tensor, Tensor]:
    """`[B, S, 2, F]` angles per axis, and `[B, S, 1]`: 1 where the slot has a place, else 0."""
    exponents = torch.arange(num_frequencies, dtype=torch.float32, device=place_BS2.device) / num_frequencies
    angles = place_BS2.float().unsqueeze(-1) * BASE**-exponents
    somewhere = (place_BS2[..., :1] >= 0).float()
    return angles, somewhere
