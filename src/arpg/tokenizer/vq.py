"""VQTokenizer: a convolutional autoencoder with an L2-normalised codebook (VQ-16, VQ-8 and smaller).

Shapes: B batch, C channels, HW pixels, hw latent grid, N = h * w tokens, E codebook channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import TokenizerConfig
from arpg.device import tuned_convolutions
from arpg.errors import require
from arpg.kernels.dispatch import can_fuse
from arpg.tokenizer.autoencoder import Decoder, Encoder


class Quantizer(nn.Module):
    """Nearest code on the unit sphere."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)

    def codes(self) -> Tensor:
        """The codebook as it is used: L2-normalised."""
        return F.normalize(self.embedding.weight, dim=-1)

    def nearest(self, z_BEhw: Tensor) -> Tensor:
        """Return the ids `[B, N]` of the nearest codes."""
        z_BNE = F.normalize(z_BEhw.flatten(2).transpose(1, 2), dim=-1)
        return (z_BNE @ self.codes().T).argmax(-1)  # on the sphere, nearest is most similar

    def look_up(self, ids_BN: Tensor) -> Tensor:
        """Return the codes `[B, N, E]` of ids."""
        return F.embedding(ids_BN, self.codes())


class VQTokenizer(nn.Module):
    """Images to code ids and back."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.quantize = Quantizer(config)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)
        self.decoder = Decoder(config)
        self.pixel_dtype: torch.dtype | None = None  # what images are decoded in, where that is not the weights' type
        self._decoded: set[tuple[int, ...]] = set()  # sizes of codes that a GPU has decoded
        self._fused: tuple[nn.Module, ...] = ()  # the decoder again, as kernels run it; no part of the state

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.quantize.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
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
        """Decode codes to images `[B, 3, H, W]`, in `pixel_dtype` where it is set."""
        if not codes_BEhw.is_cuda or torch.is_grad_enabled():
            return self._decode_codes(codes_BEhw)
        size = tuple(codes_BEhw.shape)
        again = size in self._decoded
        self._decoded.add(size)
        with tuned_convolutions(again):  # tuning takes longer than decoding: a size pays for it when it comes again
            return self._decode_codes(codes_BEhw)

    def _decode_codes(self, codes_BEhw: Tensor) -> Tensor:
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
        """The fused decoder, where it has been built."""
        return self._fused[0] if self._fused else None

    def _fuse(self, dtype: torch.dtype) -> nn.Module:
        from arpg.tokenizer.fused import FusedDecoder

        self._fused = (FusedDecoder(self.decoder, dtype),)
        return self._fused[0]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._fused = ()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
