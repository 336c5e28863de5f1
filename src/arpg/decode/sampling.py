"""From logits to ids: guidance, temperature, top-k, top-p, and the draw. Pure functions of tensors.

Shapes: B batch, R rows (B, or 2B with the unconditional ones after the conditional), S tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arpg.config import SamplingSettings
from arpg.decode.noise import Stream, gumbel
from arpg.kernels import HAS_TRITON


def guide(logits_RSV: Tensor, scale_B1: Tensor | None) -> Tensor:
    """uncond + scale (cond - uncond) in float32; without a scale the rows are the conditional logits alone."""
    if scale_B1 is None:
        return logits_RSV.float()
    cond, uncond = logits_RSV.float().chunk(2)
    return uncond + scale_B1[..., None] * (cond - uncond)


def keep_top_k(logits_BSV: Tensor, top_k: int) -> Tensor:
    """Only the `top_k` most likely codes (and what ties with the last of them)."""
    if top_k >= logits_BSV.shape[-1]:
        return logits_BSV
    least = logits_BSV.topk(top_k, dim=-1).values[..., -1:]
    return logits_BSV.masked_fill(logits_BSV < least, float("-inf"))


def keep_top_p(logits_BSV: Tensor, top_p: float) -> Tensor:
    """Only the most likely codes that together reach `top_p`; the most likely one always stays."""
    if top_p >= 1.0:
        return logits_BSV
    ranked, index = logits_BSV.sort(dim=-1, descending=True)
    probability = ranked.softmax(-1)
    before = probability.cumsum(-1) - probability
    ranked = ranked.masked_fill(before >= top_p, float("-inf"))
    return torch.empty_like(ranked).scatter_(-1, index, ranked)


def warp(logits_BSV: Tensor, settings: SamplingSettings) -> Tensor:
    """Temperature, then top-k, then top-p. At temperature 0 only the most likely code is left to the draw."""
    if settings.temperature == 0:
        return keep_top_k(logits_BSV, 1)
    logits_BSV = logits_BSV / settings.temperature
    if settings.top_k is not None:
        logits_BSV = keep_top_k(logits_BSV, settings.top_k)
    return keep_top_p(logits_BSV, settings.top_p)


def sample(logits_BSV: Tensor, settings: SamplingSettings, key_B2: Tensor, position_BS: Tensor) -> Tensor:
    """Ids `[B, S]`: the Gumbel-max draw, with noise that only depends on seed, position and code."""
    plain = settings.top_k is None and settings.top_p >= 1 and settings.temperature > 0
    if plain and logits_BSV.is_cuda and HAS_TRITON:
        from arpg.kernels.draw import draw

        return draw(logits_BSV, settings.temperature, key_B2, position_BS, Stream.TOKEN)
    warped = warp(logits_BSV, settings)
    if settings.temperature == 0:
        return warped.argmax(-1)
    return (warped + gumbel(key_B2, Stream.TOKEN, position_BS, warped.shape[-1])).argmax(-1)
