"""Reconstruction quality of a tokenizer: PSNR, SSIM, LPIPS, rFID, usage and perplexity of its codes.

Shapes: B batch, C channels, HW pixels, N tokens, V codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.errors import require
from arpg.evaluation.features import Collector, ImageSource, from_array
from arpg.evaluation.inception import Inception
from arpg.evaluation.metrics import frechet_distance
from arpg.image import Pixels, to_images, to_uint8
from arpg.tokenizer import VQTokenizer
from arpg.tokenizer.losses import LPIPS

WINDOW, SIGMA = 11, 1.5  # of SSIM, as in Wang et al. 2004
STABLE = (0.01 * 255) ** 2, (0.03 * 255) ** 2


@torch.no_grad()
def reconstruction_report(
    tokenizer: VQTokenizer,
    images: Pixels | ImageSource,
    lpips: LPIPS | None = None,
    *,
    batch_size: int = 32,
    inception: Inception | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Return `psnr` (of the error over the whole set; `psnr_image` is the mean over images), `ssim`, `usage`,
    `perplexity` and `n`; and `lpips` and `rfid` where their networks are given.

    Everything is measured on the rounded pixels, that is on the images that a user would get.
    """
    source = images if isinstance(images, ImageSource) else from_array(images, where="pixels")
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    device = tokenizer.device
    # Sums stay on the device, as integers or float64: no synchronisation, and no batch size changes the result.
    count_V = torch.zeros(tokenizer.config.codebook_size, dtype=torch.int64, device=device)
    squares, similar, distances = [], [], []
    collectors = None if inception is None else (Collector(inception), Collector(inception))
    values = 0  # per image
    for pixels_BHW3 in source.batches(batch_size):
        image_B3HW = to_images(pixels_BHW3, device)
        real_BHW3 = to_uint8(image_B3HW)
        ids_BN = tokenizer.encode(image_B3HW.to(tokenizer.dtype))
        again_BHW3 = to_uint8(tokenizer.decode(ids_BN, tokenizer.grid(*pixels_BHW3.shape[1:3])))
        values = again_BHW3[0].numel()
        squares.append((again_BHW3.long() - real_BHW3.long()).square().flatten(1).sum(1))
        similar.append(ssim(real_BHW3, again_BHW3))
        # Not bincount: on a GPU it synchronises to learn the largest id.
        count_V.scatter_add_(0, ids_BN.flatten(), torch.ones_like(ids_BN.flatten()))
        if lpips is not None:
            distances.append(lpips(image_B3HW.to(lpips.device), to_images(again_BHW3).to(lpips.device)).double())
        if collectors is not None:
            collectors[0].add(real_BHW3)
            collectors[1].add(again_BHW3)
        if progress is not None:
            progress(sum(map(len, squares)))
    square_M = torch.cat(squares).double().cpu() / values / 255**2
    share_V = count_V.double() / count_V.sum()
    report: dict[str, Any] = {
        "psnr": _decibels(square_M.mean()),
        "psnr_image": -10 * square_M.log10().mean().item(),
        "ssim": torch.cat(similar).mean().item(),
    }
    if lpips is not None:
        report["lpips"] = torch.cat(distances).mean().item()
    if collectors is not None:
        real, again = (collector.features() for collector in collectors)
        report["rfid"] = frechet_distance(again.pool.to(device), real.pool)
    return report | {
        "usage": (count_V > 0).double().mean().item(),
        "perplexity": math.exp(torch.special.entr(share_V).sum().item()),
        "n": len(square_M),
    }


def ssim(a_BHW3: Tensor, b_BHW3: Tensor) -> Tensor:
    """Return the structural similarity of each pair of uint8 images, in float64: Gaussian windows inside the image."""
    height, width = a_BHW3.shape[1:3]
    require(min(height, width) >= WINDOW, f"images are {width}x{height} pixels; SSIM needs {WINDOW} or more per side")
    a, b = (x.permute(0, 3, 1, 2).double() for x in (a_BHW3, b_BHW3))
    mean_a, mean_b = _blur(a), _blur(b)
    var_a, var_b = _blur(a * a) - mean_a**2, _blur(b * b) - mean_b**2
    cov = _blur(a * b) - mean_a * mean_b
    light = (2 * mean_a * mean_b + STABLE[0]) / (mean_a**2 + mean_b**2 + STABLE[0])
    structure = (2 * cov + STABLE[1]) / (var_a + var_b + STABLE[1])
    return (light * structure).mean((1, 2, 3))


def _blur(x_BCHW: Tensor) -> Tensor:
    offset = torch.arange(WINDOW, dtype=x_BCHW.dtype, device=x_BCHW.device) - WINDOW // 2
    line = torch.exp(-(offset**2) / (2 * SIGMA**2))
    line = line / line.sum()
    rows = F.conv2d(x_BCHW.flatten(0, 1)[:, None], line.view(1, 1, -1, 1))
    both = F.conv2d(rows, line.view(1, 1, 1, -1))
    return both.view(*x_BCHW.shape[:2], *both.shape[2:])


def _decibels(error: Tensor) -> float:
    return -10 * math.log10(error.item()) if error > 0 else math.inf
