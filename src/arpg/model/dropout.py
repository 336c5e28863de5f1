"""Dropout whose mask is a function of (sample key, layer, site, channel): not of the process or the batch.

Shapes: B batch; anything after it, the last dimension even.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_GOLDEN = -1640531527  # 2^32 / golden ratio, as int32


class Dropout(nn.Module):
    """Acts in train mode. With a key per sample the mask depends on it alone; without, on torch's global generator."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p = p
        self.site = site  # which dropout of its block this is

    def forward(self, x_B: Tensor, key_B: Tensor | None) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_B
        if key_B is None:
            return F.dropout(x_B, self.p)
        return drop(x_B, self.key(key_B), self.p)

    def key(self, key_B: Tensor) -> Tensor:
        """The site's own keys."""
        return fold(key_B, self.site)


def drop(x_B: Tensor, key_B: Tensor, p: float) -> Tensor:
    """Two channels, one of each half of the last dimension, share the two halves of a random word."""
    half = x_B.shape[-1] // 2
    shape = (*x_B.shape[1:-1], half)
    index = torch.arange(math.prod(shape), device=x_B.device, dtype=torch.int32).reshape(shape)
    word = _mix(key_B.reshape(-1, *[1] * len(shape)) + index)
    keep = torch.cat((word & 0xFFFF, (word >> 16) & 0xFFFF), -1) >= round(p * 2**16)
    return x_B * keep * (1.0 / (1.0 - p))


def fold(key_B: Tensor, number: int) -> Tensor:
    """New keys out of old ones: for each layer, and in it for each site, so that no two share a mask."""
    step = ((number + 1) * _GOLDEN + 2**31) % 2**32 - 2**31  # wrapped here: a compiler might widen it instead
    return _mix(key_B + step)


def fold_each(key_B: Tensor, count: int) -> tuple[Tensor, ...]:
    """`fold` for the numbers 0 to `count` - 1, all at once."""
    step_L = torch.arange(1, count + 1, dtype=torch.int32, device=key_B.device) * _GOLDEN  # wraps
    return _mix(key_B + step_L[:, None]).unbind(0)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit avalanche (two multiplications, three shifts) in wrapping int32; `& mask` makes the shifts logical."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
