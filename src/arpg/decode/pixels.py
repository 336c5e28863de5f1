"""Pixels from CUDA graphs: the tokenizer's decoder, captured once for each size of a chunk and each grid.

A batch is split into chunks of the sizes 64, 32, ... 1, so that few captures serve all batches and nothing is padded.
Large images, and GPUs with little memory, have smaller chunks: a graph keeps the memory of its feature maps.
Shapes: B batch, N grid tokens, HW pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from arpg.config import TokenizerConfig
from arpg.decode.graphs import Capture, GraphCache
from arpg.kernels.dispatch import use_pixel_graphs
from arpg.tokenizer import Tokenizer, VQTokenizer

_LARGEST_CHUNK = 64
_MEMORY_SHARE = 0.125  # of the GPU's memory that the graphs of a tokenizer may hold together
_LIVE_MAPS = 5  # feature maps of the size of the image that the decoder holds at once, at most


class GraphedTokenizer:
    """A `Tokenizer` whose images are replayed from CUDA graphs where the policy allows it; any thread may use it.

    Only the fused decoder is captured: it is a copy of the weights, which nobody changes. A graph that another thread
    is replaying is not waited for; images are copied out of its memory.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # As in the engine, a size is captured when it comes for the second time.
        self.graphs: GraphCache[CapturedPixels] = GraphCache(tokenizer.device, share=_MEMORY_SHARE, capture_after=1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the tokenizer, not the captured graphs."""
        return GraphedTokenizer, (self.tokenizer,)

    @property
    def config(self) -> TokenizerConfig:
        """The sizes of the tokenizer."""
        return self.tokenizer.config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.tokenizer.device

    def encode(self, image_B3HW: Tensor) -> Tensor:
        """Return the code ids `[B, N]` of images in [-1, 1]."""
        return self.tokenizer.encode(image_B3HW)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name."""
        return self.tokenizer.state_dict()

    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Tensor:
        """Return the images `[B, 3, H, W]` of code ids, as `VQTokenizer.decode` does."""
        tokenizer = self.tokenizer
        if not use_pixel_graphs() or not isinstance(tokenizer, VQTokenizer) or tokenizer.fused is None:
            return _decode(tokenizer, ids_BN, grid, known_BN)
        largest = largest_chunk(tokenizer.config, grid, self.graphs.memory)
        if min(largest, len(ids_BN)) == 0:
            return _decode(tokenizer, ids_BN, grid, known_BN)
        sizes = list(chunk_sizes(len(ids_BN), largest))
        known = [None] * len(sizes) if known_BN is None else torch.split(known_BN, sizes)
        parts = [
            self._replay(tokenizer, ids, grid, k) for ids, k in zip(torch.split(ids_BN, sizes), known, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _replay(self, tokenizer: VQTokenizer, ids_BN: Tensor, grid: tuple[int, int], known_BN: Tensor | None) -> Tensor:
        key = (len(ids_BN), grid, known_BN is not None, tokenizer.pixel_dtype, id(tokenizer.fused))
        graphs = self.graphs.acquire(key)
        if graphs is None and self.graphs.worth_capturing(key):
            graphs = self.graphs.capture(key, lambda: CapturedPixels(tokenizer, ids_BN, grid, known_BN))
        if graphs is None:
            return _decode(tokenizer, ids_BN, grid, known_BN)
        try:
            return graphs.replay(ids_BN, known_BN)
        finally:
            graphs.busy.release()


class CapturedPixels(Capture[Tensor]):
    """The decoder as a graph, for a number of images and a grid."""

    def __init__(self, tokenizer: VQTokenizer, ids_BN: Tensor, grid: tuple[int, int], known_BN: Tensor | None) -> None:
        self._inputs = [x.clone() for x in _inputs(ids_BN, known_BN)]
        ids, known = self._inputs[0], None if known_BN is None else self._inputs[1]
        self._weights = tokenizer.fused  # must live as long as the graph, and with it its id
        for _ in range(2):  # cuDNN tunes a size when it comes again, and knows what it tuned in this thread alone
            tokenizer.decode(ids, grid, known_BN=known)
        super().__init__([lambda: tokenizer.decode(ids, grid, known_BN=known)], ids.device)

    def replay(self, ids_BN: Tensor, known_BN: Tensor | None) -> Tensor:
        """Return the images of other ids of the same shape."""
        (image,) = (image.clone() for image in self.run(self._inputs, _inputs(ids_BN, known_BN)))
        return image


def largest_chunk(config: TokenizerConfig, grid: tuple[int, int], memory: int) -> int:
    """Return the largest number of images in a graph, a power of two; 0: not even one fits.

    Its feature maps in half precision take at most half of `memory`, so that graphs of all smaller sizes fit beside it.
    """
    channels, pixels = config.channels * max(config.multipliers[:2]), math.prod(grid) * config.stride**2
    fitting = min(_LARGEST_CHUNK, memory // (2 * 2 * _LIVE_MAPS * channels * pixels))
    return 1 << (fitting.bit_length() - 1) if fitting else 0


def chunk_sizes(count: int, largest: int) -> Iterator[int]:
    """Split `count` images into chunks of sizes that are captured: powers of two, the largest first."""
    while count > 0:
        size = min(largest, 1 << (count.bit_length() - 1))
        yield size
        count -= size


def _inputs(ids_BN: Tensor, known_BN: Tensor | None) -> list[Tensor]:
    return [ids_BN] if known_BN is None else [ids_BN, known_BN]


def _decode(tokenizer: Tokenizer, ids_BN: Tensor, grid: tuple[int, int], known_BN: Tensor | None) -> Tensor:
    return tokenizer.decode(ids_BN, grid) if known_BN is None else tokenizer.decode(ids_BN, grid, known_BN=known_BN)
