"""Likelihoods: the exact log-likelihood of an image's tokens under an order, in bits.

An any-order model gives a likelihood for every order; their mean varies less than any one of them.
Shapes: B batch, N grid tokens, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from arpg.decode.order import fill_orders, resolve_order
from arpg.decode.request import Request
from arpg.errors import require
from arpg.image import ImageInput, adm_crop, to_image, to_images, to_rgb
from arpg.model import Condition, TokenDecoder
from arpg.settings import Order
from arpg.tokenizer import Tokenizer

_BATCH = 32  # orders of an image that are scored together
_CHUNK_TOKENS = 4608  # tokens whose logits are in memory together


def make_orders(order: Order, grid: tuple[int, int], seeds: range) -> Tensor:
    """`[len(seeds), N]`: whole-image orders. (`local` is taken one token at a time.)"""
    open_BN = np.ones((len(seeds), grid[0] * grid[1]), dtype=bool)
    sizes = [(1,) * open_BN.shape[1]] * len(seeds)
    order_T = fill_orders(resolve_order(order, grid), grid, open_BN, seeds, sizes=sizes)
    return torch.from_numpy(order_T.reshape(open_BN.shape))


@torch.no_grad()
def token_bits(
    model: TokenDecoder,
    ids_BN: Tensor,
    condition: Condition,
    order_BN: Tensor,
    *,
    grid: tuple[int, int] | None = None,
    pos_N2: Tensor | None = None,
) -> Tensor:
    """`[B, N]`: -log2 p of each token given the condition and the tokens before it in the order; raster positions."""
    ids_BN, order_BN = ids_BN.to(model.device), order_BN.to(model.device)
    logits_BNV = model(ids_BN, order_BN, condition, grid=grid, pos_N2=pos_N2).float()
    bits = F.cross_entropy(logits_BNV.transpose(1, 2), ids_BN.gather(1, order_BN), reduction="none") / math.log(2)
    return torch.zeros_like(bits).scatter_(1, order_BN, bits)


def fill_bits(model: TokenDecoder, request: Request, ids_BN: Tensor) -> Tensor:
    """`[B]`: the bits of what fills a request, given its condition and known tokens, under one fixed order."""
    order_N = make_orders("random", request.grid, range(1))[0]
    open_BN = ~request.known_BN
    # The known tokens first, then the others, each in the same order.
    order_BN = order_N[open_BN[:, order_N].int().argsort(stable=True)]
    condition, size = request.condition, max(1, _CHUNK_TOKENS // len(order_N))
    parts = []
    for i in range(0, len(ids_BN), size):
        rows = slice(i, i + size)
        some = condition.rows(rows)
        bits_BN = token_bits(model, ids_BN[rows], some, order_BN[rows], grid=request.grid, pos_N2=request.pos_N2)
        parts.append((bits_BN.cpu() * open_BN[rows]).sum(1))
    return torch.cat(parts)


@torch.no_grad()
def image_bits(
    model: TokenDecoder,
    tokenizer: Tokenizer,
    image: ImageInput,
    condition: Condition,
    *,
    orders: int,
    order: Order,
    seed: int,
) -> NDArray[np.float32]:
    """`[C, orders, h, w]`: the bits of each token of the image's centre under each of the C samples of `condition`."""
    require(orders >= 1, f"the number of orders is {orders}; expected 1 or more")
    grid, stride = model.config.grid, tokenizer.config.stride
    require(grid[0] == grid[1], f"the model's grid is {grid[0]}x{grid[1]}; only square ones can be scored")
    pixels = np.asarray(adm_crop(to_rgb(to_image(image)), grid[0] * stride))
    ids_N = tokenizer.encode(to_images(pixels[None], tokenizer.device))[0]
    order_KN = make_orders(order, grid, range(seed, seed + orders))
    sample_R = torch.arange(len(condition)).repeat_interleave(orders)
    order_R = torch.arange(orders).repeat(len(condition))
    parts = []
    for some_B, ks_B in zip(torch.split(sample_R, _BATCH), torch.split(order_R, _BATCH), strict=True):
        ids_BN = ids_N.expand(len(some_B), -1)
        parts.append(token_bits(model, ids_BN, condition.rows(some_B), order_KN[ks_B]).cpu())
    bits: NDArray[np.float32] = torch.cat(parts).numpy().reshape(len(condition), orders, *grid)
    return bits
