"""Operations of the tokenizer's fused decoder, in half precision on GPUs that have the kernels.

Each is one fused convolution where that is measured to be faster, else the library's between those of `group_norm.py`.

Shapes: B batch, C channels, I inputs, O outputs, HW pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.kernels import group_norm
from arpg.kernels.conv import conv
from arpg.kernels.dispatch import conv_tile
from arpg.kernels.group_norm import Moments


class Features(NamedTuple):
    """A feature map `[B, C, H, W]`, channels last, with its moments, and the bias that is still to be added to it."""

    x_BCHW: Tensor
    moments: Moments
    bias_C: Tensor | None = None


def norm_conv(
    features: Features, norm: nn.GroupNorm, weight_OI33: Tensor, bias_O: Tensor, *, residual_BOHW: Tensor | None = None
) -> Features:
    """Convolve the norm (with SiLU) of `features`, and add the bias and the residual."""
    x, moments, pending = features
    tile = conv_tile(x, weight_OI33)
    if tile is not None and tile.norm:
        line = group_norm.line(moments, pending, norm, scale=0.5)
        return Features(*conv(x, weight_OI33, bias_O, tile, line_B2I=line, residual_BOHW=residual_BOHW))
    x = group_norm.norm(x, moments, pending, norm)
    if tile is not None:
        return Features(*conv(x, weight_OI33, bias_O, tile, residual_BOHW=residual_BOHW))
    x = F.conv2d(x, weight_OI33, padding=1)
    if residual_BOHW is None:
        return Features(x, group_norm.moments(x), bias_O)
    return Features(*group_norm.add(residual_BOHW, x, bias_O))


def norm_conv_to_image(features: Features, norm: nn.GroupNorm, weight_OI33: Tensor, bias_O: Tensor) -> Tensor:
    """Convolve the norm (with SiLU) of `features` to the three channels of images, in float32.

    Of more than three outputs (tensor cores take multiples of 8), the first ones count.
    """
    x, moments, pending = features
    tile = conv_tile(x, weight_OI33)
    if tile is not None and tile.norm:
        line = group_norm.line(moments, pending, norm, scale=0.5)
        return conv(x, weight_OI33, bias_O, tile, line_B2I=line, moments=False, dtype=torch.float32, outputs=3)[0]
    x = group_norm.norm(x, moments, pending, norm)
    return F.conv2d(x, weight_OI33, padding=1)[:, :3].float() + bias_O[:3, None, None]


def upsample_conv(x_BCHW: Tensor, weight_4OI22: Tensor, bias_O: Tensor) -> Features:
    """Convolve `x_BCHW` enlarged twice, by the four convolutions on the small grid (`tokenizer/fused.py`)."""
    tile = conv_tile(x_BCHW, weight_4OI22)
    if tile is not None:
        return Features(*conv(x_BCHW, weight_4OI22, bias_O, tile))
    return Features(*group_norm.spread(F.conv2d(x_BCHW, weight_4OI22, padding=1), bias_O))
