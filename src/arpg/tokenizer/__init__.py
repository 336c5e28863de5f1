"""The VQ tokenizer: images to code ids and back."""

from typing import Any, Protocol

import torch
from torch import Tensor

from arpg.config import TokenizerConfig
from arpg.tokenizer.vq import VQTokenizer


class Tokenizer(Protocol):
    """What tasks and the pipeline need of a tokenizer. Shapes: B images, N tokens, H W pixels."""

    @property
    def config(self) -> TokenizerConfig: ...

    @property
    def device(self) -> torch.device: ...

    def encode(self, image_B3HW: Tensor) -> Tensor:
        """Return the code ids `[B, N]` of images in [-1, 1]."""
        ...

    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Tensor:
        """Return the images `[B, 3, H, W]` of code ids; patches outside `known_BN` are of no use."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name."""
        ...


__all__ = ["Tokenizer", "VQTokenizer"]
