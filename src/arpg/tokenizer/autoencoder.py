"""The convolutional encoder and decoder of the tokenizer. Shapes: B batch, C channels, HW pixels, hw latent grid."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import TokenizerConfig


class ResBlock(nn.Module):
    """Two convolutions with norms, added to the input."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = _norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = _norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        out: Tensor = self.nin_shortcut(x) + h
        return out


class SpatialAttention(nn.Module):
    """Single-head attention over all pixels of a feature map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x_BChw: Tensor) -> Tensor:
        normed = self.norm(x_BChw)
        q, k, v = (conv(normed).flatten(2).transpose(1, 2) for conv in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x_BChw.shape)
        out: Tensor = x_BChw + self.proj_out(mixed)
        return out


class Downsample(nn.Module):
    """Halve height and width by a strided convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return out


class Upsample(nn.Module):
    """Double height and width, then convolve."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class Level(nn.Module):
    """One resolution: residual blocks (each followed by attention at the lowest one), then a change of size."""

    def __init__(self, widths: list[int], *, attention: bool, resize: tuple[str, nn.Module] | None) -> None:
        super().__init__()
        self.res = nn.ModuleList(ResBlock(a, b) for a, b in itertools.pairwise(widths))
        self.attn = nn.ModuleList(SpatialAttention(b) for b in widths[1:] if attention)
        self.resize = resize[0] if resize else None
        if resize:
            self.add_module(*resize)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        return self.get_submodule(self.resize)(x) if self.resize else x


class Encoder(nn.Module):
    """Map images `[B, 3, H, W]` to features `[B, z, h, w]`."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in config.multipliers]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        previous = config.channels
        for i, width in enumerate(widths):
            resize = ("downsample", Downsample(width)) if i < last else None
            chain = [previous] + [width] * config.res_blocks
            self.conv_blocks.append(Level(chain, attention=i == last, resize=resize))
            previous = width
        self.mid = _middle(previous)
        self.norm_out = _norm(previous)
        self.conv_out = nn.Conv2d(previous, config.z_channels, 3, padding=1)

    def forward(self, image_B3HW: Tensor) -> Tensor:
        x = self.conv_in(image_B3HW)
        for level in self.conv_blocks:
            x = level(x)
        for layer in self.mid:
            x = layer(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class Decoder(nn.Module):
    """Map features `[B, z, h, w]` to images `[B, 3, H, W]`."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in reversed(config.multipliers)]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = _middle(widths[0])
        self.conv_blocks = nn.ModuleList()
        previous = widths[0]
        for i, width in enumerate(widths):
            resize = ("upsample", Upsample(width)) if i < last else None
            chain = [previous] + [width] * (config.res_blocks + 1)
            self.conv_blocks.append(Level(chain, attention=i == 0, resize=resize))
            previous = width
        self.norm_out = _norm(previous)
        self.conv_out = nn.Conv2d(previous, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for layer in self.mid:
            x = layer(x)
        for level in self.conv_blocks:
            x = level(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


def _middle(channels: int) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(channels, channels), SpatialAttention(channels), ResBlock(channels, channels)])
