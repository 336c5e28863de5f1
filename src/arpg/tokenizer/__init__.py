"""The VQ tokenizer: images to code ids and back."""

from typing import Any, Protocol

import torch
from torch import Tensor

from arpg.config import TokenizerConfig
from arpg.device import receive
from arpg.image import Pixels, to_images, to_uint8
from arpg.tokenizer.vq import VQTokenizer


class Tokenizer(Protocol):
    """What tasks and the pipeline need of a tokenizer. Shapes: B images, N tokens, H W pixels."""

    @property
    def config(self) -> TokenizerConfig:
        """The sizes of the tokenizer."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        ...

    def encode(self, image_B3HW: Tensor) -> Tensor:
        """Return the code ids `[B, N]` of images in [-1, 1]."""
        ...

    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Tensor:
        """Return the images `[B, 3, H, W]` of code ids; patches outside `known_BN` are of no use."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name."""
        ...


class PixelCodec:
    """A tokenizer for callers that know nothing of its device: pixels and ids are on the CPU."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def config(self) -> TokenizerConfig:
        """The sizes of the tokenizer."""
        return self._tokenizer.config

    @torch.no_grad()
    def encode(self, pixels_BHW3: Pixels) -> Tensor:
        """Return the code ids `[B, N]` of uint8 images."""
        return self._tokenizer.encode(to_images(pixels_BHW3, self._tokenizer.device)).cpu()

    @torch.no_grad()
    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Pixels:
        """Return the uint8 images `[B, H, W, 3]` of code ids; patches outside `known_BN` are of no use."""
        device = self._tokenizer.device
        known = {} if known_BN is None else {"known_BN": known_BN.to(device)}
        image_B3HW = self._tokenizer.decode(ids_BN.to(device), grid, **known)
        pixels_BHW3: Pixels = receive(to_uint8(image_B3HW).contiguous()).numpy()
        return pixels_BHW3


__all__ = ["PixelCodec", "Tokenizer", "VQTokenizer"]
