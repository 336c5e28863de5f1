"""Inception v3 of 2015 as FID uses it, with batch norms folded into the convolutions; names as in the original graph.

It is not the Inception of torchvision: average pools do not count their padding, the last block pools by maximum,
images are enlarged with TensorFlow 1's corners, and there are 1008 logits.

Shapes: B batch, HW pixels, C channels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE = 299
POOL, LOGITS = 2048, 1008
SPATIAL_CHANNELS = 7  # of mixed_6/conv: what sFID looks at

Kernel = int | tuple[int, int]


class Activations(NamedTuple):
    """What one batch gives: pooled features, spatial features (rows, columns, channels), logits without bias."""

    pool: Tensor
    spatial: Tensor
    logits: Tensor | None


class Conv(nn.Module):
    """Convolution, folded batch norm, ReLU. Padded to keep the size unless it has a stride or is `valid`."""

    def __init__(
        self, in_channels: int, channels: int, kernel: Kernel = 1, *, stride: int = 1, valid: bool = False
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        self.weight = nn.Parameter(torch.zeros(channels, in_channels, height, width))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.stride = stride
        self.padding = (0, 0) if valid or stride > 1 else (height // 2, width // 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(F.conv2d(x, self.weight, self.bias, self.stride, self.padding))


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def _maximum(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 1, 1)


def _halve(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2)


def _tower(in_channels: int, *convs: tuple[int, Kernel], stride: int = 1) -> nn.Sequential:
    """Convolutions named conv, conv_1, conv_2, ...; the last one has the stride."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (channels, kernel) in enumerate(convs):
        last = i + 1 == len(convs)
        layers[f"conv_{i}" if i else "conv"] = Conv(in_channels, channels, kernel, stride=stride if last else 1)
        in_channels = channels
    return nn.Sequential(layers)


class Mixed(nn.Module):
    """A 1x1 convolution, two towers and a pooled 1x1 convolution, side by side."""

    def __init__(self, in_channels: int, conv: int, tower: nn.Module, tower_1: nn.Module, pooled: int) -> None:
        super().__init__()
        self.conv = Conv(in_channels, conv)
        self.tower = tower
        self.tower_1 = tower_1
        self.tower_2 = _tower(in_channels, (pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x), self.tower(x), self.tower_1(x), self.tower_2(_average(x))], 1)


class Reduction(nn.Module):
    """Halves the sides: branches with a stride, and a maximum pool."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*(branch(x) for branch in self.children()), _halve(x)], 1)


class Split(nn.Module):
    """The last two blocks: towers that end in a 1x3 and a 3x1 convolution side by side."""

    def __init__(self, in_channels: int, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pool = pool
        self.conv = Conv(in_channels, 320)
        self.tower_conv = Conv(in_channels, 384)
        self.tower_mixed_conv = Conv(384, 384, (1, 3))
        self.tower_mixed_conv_1 = Conv(384, 384, (3, 1))
        self.tower_1_conv = Conv(in_channels, 448)
        self.tower_1_conv_1 = Conv(448, 384, 3)
        self.tower_1_mixed_conv = Conv(384, 384, (1, 3))
        self.tower_1_mixed_conv_1 = Conv(384, 384, (3, 1))
        self.tower_2_conv = Conv(in_channels, 192)

    def forward(self, x: Tensor) -> Tensor:
        a = self.tower_conv(x)
        b = self.tower_1_conv_1(self.tower_1_conv(x))
        return torch.cat(
            [
                self.conv(x),
                self.tower_mixed_conv(a),
                self.tower_mixed_conv_1(a),
                self.tower_1_mixed_conv(b),
                self.tower_1_mixed_conv_1(b),
                self.tower_2_conv(self.pool(x)),
            ],
            1,
        )


def _mixed_35(in_channels: int, pooled: int) -> Mixed:
    tower = _tower(in_channels, (48, 1), (64, 5))
    return Mixed(in_channels, 64, tower, _tower(in_channels, (64, 1), (96, 3), (96, 3)), pooled)


def _mixed_17(channels: int) -> Mixed:
    row, column = (1, 7), (7, 1)
    tower = _tower(768, (channels, 1), (channels, row), (192, column))
    tower_1 = _tower(768, (channels, 1), (channels, column), (channels, row), (channels, column), (192, row))
    return Mixed(768, 192, tower, tower_1, 192)


class InceptionNetwork(nn.Module):
    """The network from pixels (0 to 255) to features; `output`, the weights of the logits, may be absent."""

    def __init__(self, *, logits: bool) -> None:
        super().__init__()
        self.conv = Conv(3, 32, 3, stride=2)
        self.conv_1 = Conv(32, 32, 3, valid=True)
        self.conv_2 = Conv(32, 64, 3)
        self.conv_3 = Conv(64, 80)
        self.conv_4 = Conv(80, 192, 3, valid=True)
        self.mixed = _mixed_35(192, 32)
        self.mixed_1 = _mixed_35(256, 64)
        self.mixed_2 = _mixed_35(288, 64)
        tower = _tower(288, (64, 1), (96, 3), (96, 3), stride=2)
        self.mixed_3 = Reduction(conv=Conv(288, 384, 3, stride=2), tower=tower)
        self.mixed_4 = _mixed_17(128)
        self.mixed_5 = _mixed_17(160)
        self.mixed_6 = _mixed_17(160)
        self.mixed_7 = _mixed_17(192)
        tower_1 = _tower(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), stride=2)
        self.mixed_8 = Reduction(tower=_tower(768, (192, 1), (320, 3), stride=2), tower_1=tower_1)
        self.mixed_9 = Split(1280, _average)
        self.mixed_10 = Split(2048, _maximum)
        self.output = nn.Linear(POOL, LOGITS, bias=False) if logits else None
        self.requires_grad_(False).eval()

    def forward(self, pixels_B3HW: Tensor) -> Activations:
        x = (enlarge(pixels_B3HW) - 128) / 128
        x = _halve(self.conv_2(self.conv_1(self.conv(x))))
        x = _halve(self.conv_4(self.conv_3(x)))
        x = self.mixed_3(self.mixed_2(self.mixed_1(self.mixed(x))))
        x = self.mixed_5(self.mixed_4(x))
        first = self.mixed_6.conv
        spatial = F.relu(F.conv2d(x, first.weight[:SPATIAL_CHANNELS], first.bias[:SPATIAL_CHANNELS]))
        x = self.mixed_10(self.mixed_9(self.mixed_8(self.mixed_7(self.mixed_6(x)))))
        pool = x.mean((2, 3))
        logits = None if self.output is None else self.output(pool)
        return Activations(pool, spatial.permute(0, 2, 3, 1).flatten(1), logits)


def enlarge(x_BCHW: Tensor, side: int = SIDE) -> Tensor:
    """Bilinear as in TensorFlow 1: output pixel i is at i * size / side, so the last ones repeat the edge."""
    for dim in (2, 3):
        size = x_BCHW.shape[dim]
        place = torch.arange(side, device=x_BCHW.device, dtype=torch.float64) * (size / side)
        low = place.floor().long()
        high = (low + 1).clamp_max(size - 1)
        share = (place - low).to(x_BCHW.dtype).view(-1, *[1] * (3 - dim))
        below, above = x_BCHW.index_select(dim, low), x_BCHW.index_select(dim, high)
        x_BCHW = below + (above - below) * share
    return x_BCHW
