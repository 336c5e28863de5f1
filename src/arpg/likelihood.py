"""How likely a picture is, token by token, as each of several labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from arpg.decode.score import make_orders, token_bits
from arpg.errors import one_of, require
from arpg.image import adm_crop, to_images, to_rgb
from arpg.model import ARPG
from arpg.settings import ORDERS
from arpg.tasks import Label, label_condition
from arpg.tokenizer import Tokenizer


@torch.no_grad()
def picture_bits(
    model: ARPG,
    tokenizer: Tokenizer,
    image: Image.Image,
    labels: Sequence[Label],
    *,
    orders: int,
    order: str,
    seed: int,
    batch_size: int = 32,
) -> NDArray[np.float32]:
    """`[labels, orders, h, w]`: the bits of each token of the picture's middle."""
    require(orders >= 1, f"the number of orders is {orders}; expected 1 or more")
    one_of("order", order, ORDERS)
    grid, stride = model.config.grid, tokenizer.config.stride
    require(grid[0] == grid[1], f"the model's grid is {grid[0]}x{grid[1]}; only square ones can be scored")
    pixels = np.asarray(adm_crop(to_rgb(image), grid[0] * stride))
    ids_N = tokenizer.encode(to_images(pixels[None], tokenizer.device))[0]
    order_KN = make_orders(order, grid, range(seed, seed + orders))
    pairs = [(label, k) for label in labels for k in range(orders)]
    parts = []
    for i in range(0, len(pairs), batch_size):
        chosen, ks = (list(part) for part in zip(*pairs[i : i + batch_size], strict=True))
        parts.append(token_bits(model, ids_N.expand(len(ks), -1), label_condition(model, chosen), order_KN[ks]).cpu())
    bits: NDArray[np.float32] = torch.cat(parts).numpy().reshape(len(labels), orders, *grid)
    return bits
