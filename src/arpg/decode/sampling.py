"""From logits to ids: temperature, top-k, top-p and the Gumbel-max sample. Pure functions of tensors.

Shapes: B batch, S tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.kernels.ops import gumbel_argmax
from arpg.noise import Stream
from arpg.settings import SamplingSettings


def keep_top_k(logits_BSV: Tensor, top_k: int) -> Tensor:
    """Keep only the `top_k` most likely codes (and what ties with the last of them)."""
    if top_k >= logits_BSV.shape[-1]:
        return logits_BSV
    least = logits_BSV.topk(top_k, dim=-1).values[..., -1:]
    return logits_BSV.masked_fill(logits_BSV < least, float("-inf"))


def keep_top_p(logits_BSV: Tensor, top_p: float) -> Tensor:
    """Keep only the most likely codes that together reach `top_p`; the most likely one always stays."""
    if top_p >= 1.0:
        return logits_BSV
    ranked, index = logits_BSV.sort(dim=-1, descending=True)
    probability = ranked.softmax(-1)
    before = probability.cumsum(-1) - probability
    ranked = ranked.masked_fill(before >= top_p, float("-inf"))
    return torch.empty_like(ranked).scatter_(-1, index, ranked)


def warp(logits_BSV: Tensor, settings: SamplingSettings) -> Tensor:
    """Apply temperature, then top-k, then top-p, at least in float32. At temperature 0 the most likely code is left."""
    logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    if settings.temperature == 0:
        return keep_top_k(logits_BSV, 1)
    logits_BSV = logits_BSV / settings.temperature
    if settings.top_k is not None:
        logits_BSV = keep_top_k(logits_BSV, settings.top_k)
    return keep_top_p(logits_BSV, settings.top_p)


def sample(
    logits_BSV: Tensor, settings: SamplingSettings, key_B2: Tensor, position_BS: Tensor, *, static: bool = False
) -> Tensor:
    """Sample ids `[B, S]` with noise that only depends on seed, position and code. `static` as in `ops.embed_at`."""
    if settings.temperature > 0 and settings.top_k is None and settings.top_p >= 1:
        return gumbel_argmax(
            logits_BSV, key_B2, Stream.TOKEN, position_BS, temperature=settings.temperature, static=static
        )
    warped = warp(logits_BSV, settings)
    if settings.temperature == 0:
        return warped.argmax(-1)
    return gumbel_argmax(warped, key_B2, Stream.TOKEN, position_BS, static=static)


def probs(logits_BSV: Tensor, settings: SamplingSettings) -> Tensor:
    """Return the probabilities with which `sample` samples each code."""
    if settings.temperature == 0:
        return F.one_hot(logits_BSV.argmax(-1), logits_BSV.shape[-1]).to(
            torch.promote_types(logits_BSV.dtype, torch.float32)
        )
    return warp(logits_BSV, settings).softmax(-1)
