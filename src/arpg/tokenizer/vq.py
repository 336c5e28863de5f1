"""VQTokenizer: a convolutional autoencoder with an L2-normalised codebook (VQ-16, VQ-8 and smaller).

Shapes: B batch, C channels, HW pixels, hw latent grid, N = h * w tokens, E codebook channels.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import TokenizerConfig
from arpg.errors import require
from arpg.kernels.dispatch import can_fuse


class ResBlock(nn.Module):
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
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return out


class Upsample(nn.Module):
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


class Quantizer(nn.Module):
    """Nearest code on the unit sphere."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)

    def codes(self) -> Tensor:
        """The codebook as it is used: L2-normalised."""
        return F.normalize(self.embedding.weight, dim=-1)

    def nearest(self, z_BEhw: Tensor) -> Tensor:
        z_BNE = F.normalize(z_BEhw.flatten(2).transpose(1, 2), dim=-1)
        return (z_BNE @ self.codes().T).argmax(-1)  # on the sphere, nearest is most similar

    def look_up(self, ids_BN: Tensor) -> Tensor:
        return F.embedding(ids_BN, self.codes())


class VQTokenizer(nn.Module):
    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.quantize = Quantizer(config)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)
        self.decoder = Decoder(config)
        self.pixel_dtype: torch.dtype | None = None  # what images are decoded in, where that is not the weights' type
        self._fused: tuple[nn.Module, ...] = ()  # the decoder again, as kernels run it; no part of the state

    @property
    def device(self) -> torch.device:
        return self.quantize.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.quantize.embedding.weight.dtype

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """The token grid of an image; its sides must be multiples of the stride."""
        stride = self.config.stride
        require(
            height > 0 and width > 0 and height % stride == 0 and width % stride == 0,
            f"image is {width}x{height} pixels; expected sides that are multiples of {stride}; resize or crop it",
        )
        return height // stride, width // stride

    def encode(self, image_B3HW: Tensor) -> Tensor:
        """Ids `[B, N]` in raster order, from images in [-1, 1]."""
        self.grid(*image_B3HW.shape[2:])
        return self.quantize.nearest(self.quant_conv(self.encoder(image_B3HW)))

    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Tensor:
        """Images `[B, 3, H, W]`, about [-1, 1]. Tokens that are not known yet count as the zero vector."""
        codes_BNE = self.quantize.look_up(ids_BN if known_BN is None else ids_BN * known_BN)
        if known_BN is not None:
            codes_BNE = codes_BNE * known_BN[..., None]
        return self.decode_codes(codes_BNE.transpose(1, 2).reshape(*codes_BNE.shape[::2], *grid))

    def decode_codes(self, codes_BEhw: Tensor) -> Tensor:
        if self.pixel_dtype is None:
            image: Tensor = self.decoder(self.post_quant_conv(codes_BEhw))
            return image
        if can_fuse(codes_BEhw) and not torch.is_grad_enabled():
            fused = self.fused or self._fuse(self.pixel_dtype)
            image = fused(self.post_quant_conv(codes_BEhw))
            return image.type_as(codes_BEhw)
        with torch.autocast(codes_BEhw.device.type, dtype=self.pixel_dtype):
            image = self.decoder(self.post_quant_conv(codes_BEhw))
        return image.type_as(codes_BEhw)

    def decode_in(self, dtype: torch.dtype) -> VQTokenizer:
        """From now on make images in this type. The weights stay, and so do the tokens of images.

        On a GPU with Triton, half precision takes the fused decoder, a copy of the weights as they are then.
        """
        self.pixel_dtype = None if dtype == self.dtype else dtype
        self._fused = ()
        self.decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self

    @property
    def fused(self) -> nn.Module | None:
        return self._fused[0] if self._fused else None

    def _fuse(self, dtype: torch.dtype) -> nn.Module:
        from arpg.tokenizer.fused import FusedDecoder

        self._fused = (FusedDecoder(self.decoder, dtype),)
        return self._fused[0]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._fused = ()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


def _middle(channels: int) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(channels, channels), SpatialAttention(channels), ResBlock(channels, channels)])
