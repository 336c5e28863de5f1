"""The guidance scale as an input: what it adds to the [MASK] query of a position.

A model that was trained to match guided logits (`arpg.train.objective.GuidanceDistillation`) needs no unconditional
rows: Pass 1 does not depend on the scale, and Pass 2 has it in its queries, so every step and token may have its own.
Shapes: B batch, S positions, F features, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FREQUENCIES = 16


class GuidanceQueries(nn.Module):
    """Sines and cosines of the logarithm of the scale, then an MLP whose last layer starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(2 * FREQUENCIES, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Zero the last layer, after the common initialisation: training starts at the model without this input."""
        self.down.weight.zero_()

    def forward(self, scale_BS: Tensor) -> Tensor:
        """Return `[B, S, D]`."""
        octaves = torch.arange(FREQUENCIES, device=scale_BS.device) * (6 / (FREQUENCIES - 1)) - 1
        angle_BSF = torch.log1p(scale_BS.float())[..., None] * (math.pi / 2 * 2**octaves)
        features = torch.cat((angle_BSF.sin(), angle_BSF.cos()), dim=-1).to(self.up.weight.dtype)
        added: Tensor = self.down(F.gelu(self.up(features), approximate="tanh"))
        return added
