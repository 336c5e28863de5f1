"""What a tokenizer loses: PSNR, LPIPS and how evenly its codes are used.

Shapes: B batch, HW pixels, N tokens, V codes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from arpg.errors import require
from arpg.image import Pixels, check_pixels, to_images, to_uint8
from arpg.tokenizer import VQTokenizer
from arpg.tokenizer.losses import LPIPS


@torch.no_grad()
def reconstruction_report(
    tokenizer: VQTokenizer, pixels: Pixels, lpips: LPIPS, *, batch_size: int = 32
) -> dict[str, Any]:
    """`psnr` (of the error over the whole set), `lpips`, `usage` and `perplexity` of the codes, `n`.

    Everything is measured on the rounded pixels, that is on the images that a user would get.
    """
    check_pixels(pixels)
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    num_codes = tokenizer.config.codebook_size
    grid = tokenizer.grid(*pixels.shape[1:3])
    # Sums stay on the device, in whole or double numbers: nothing waits, and no batch size changes the result.
    squares = torch.zeros((), dtype=torch.int64, device=tokenizer.device)
    count_V = torch.zeros(num_codes, dtype=torch.int64, device=tokenizer.device)
    distance = torch.zeros((), dtype=torch.float64, device=lpips.device)
    for start in range(0, len(pixels), batch_size):
        image_B3HW = to_images(pixels[start : start + batch_size], tokenizer.device)
        ids_BN = tokenizer.encode(image_B3HW.to(tokenizer.dtype))
        again_BHW3 = to_uint8(tokenizer.decode(ids_BN, grid))
        again_B3HW = to_images(again_BHW3)
        squares += (again_BHW3.long() - to_uint8(image_B3HW).long()).square().sum()
        # Not bincount: on a GPU it waits to learn the greatest id.
        count_V.scatter_add_(0, ids_BN.flatten(), torch.ones_like(ids_BN.flatten()))
        distance += lpips(image_B3HW.to(lpips.device), again_B3HW.to(lpips.device)).double().sum()
    mse = squares.item() / pixels.size / 255**2
    share_V = count_V.double() / count_V.sum()
    return {
        "psnr": -10 * math.log10(mse) if mse > 0 else math.inf,
        "lpips": distance.item() / len(pixels),
        "usage": (count_V > 0).double().mean().item(),
        "perplexity": math.exp(torch.special.entr(share_V).sum().item()),
        "n": len(pixels),
    }
