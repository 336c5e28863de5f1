"""A small LPIPS network, images of noise, and the distance of two images."""

import numpy as np
import torch

from arpg.image import to_images
from arpg.tokenizer.losses import LPIPS

CHANNELS = (4, 4, 8, 8, 12, 12, 12, 16, 16, 16, 20, 20, 20)


def small_lpips():
    """LPIPS with random weights."""
    torch.manual_seed(2)
    module = LPIPS(CHANNELS)
    with torch.no_grad():
        for weight in module.lin.parameters():
            weight.abs_()
    return module


def labelled_textures():
    """Twenty images in three classes; the last class has one."""
    rng = np.random.default_rng(4)
    return rng.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8), np.array([0] * 7 + [5] * 12 + [9])


def distance(lpips, a, b):
    """The LPIPS of two images."""
    with torch.no_grad():
        return lpips(to_images(a[None]), to_images(b[None])).item()
