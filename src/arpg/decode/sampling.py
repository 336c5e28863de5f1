"""From logits to ids: guidance, temperature, top-k, top-p, and the draw. Pure functions of tensors.

Shapes: B batch, R rows (B, or 2B with the unconditional ones after the conditional), S tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.decode.noise import Stream, gumbel
from arpg.kernels import fusible
from arpg.settings import SamplingSettings


def guide(logits_RSV: Tensor, scale_BS: Tensor | None) -> Tensor:
    """uncond + scale (cond - uncond), at least in float32; a scale for each position, or `[B, 1]` for each row.

    Without a scale the rows are the conditional logits alone.
    """
    logits_RSV = logits_RSV.to(torch.promote_types(logits_RSV.dtype, torch.float32))
    if scale_BS is None:
        return logits_RSV
    cond, uncond = logits_RSV.chunk(2)
    return uncond + scale_BS[..., None] * (cond - uncond)


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


def sample(
    logits_RSV: Tensor,
    settings: SamplingSettings,
    key_B2: Tensor,
    position_BS: Tensor,
    *,
    scale_BS: Tensor | None = None,
) -> Tensor:
    """Ids `[B, S]`: the Gumbel-max draw, with noise that only depends on seed, position and code."""
    if settings.temperature > 0 and settings.top_k is None and settings.top_p >= 1 and fusible(logits_RSV):
        from arpg.kernels.draw import draw as fused

        return fused(logits_RSV, scale_BS, settings.temperature, key_B2, Stream.TOKEN, position_BS)
    warped = warp(guide(logits_RSV, scale_BS), settings)
    if settings.temperature == 0:
        return warped.argmax(-1)
    return draw(warped, key_B2, Stream.TOKEN, position_BS)


def draw(logits_BSV: Tensor, key_B2: Tensor, stream: Stream, position_BS: Tensor) -> Tensor:
    """Ids `[B, S]` from softmax(logits)."""
    if fusible(logits_BSV):
        from arpg.kernels.draw import draw as fused

        return fused(logits_BSV, None, 1.0, key_B2, stream, position_BS)
    return (logits_BSV + gumbel(key_B2, stream, position_BS, logits_BSV.shape[-1])).argmax(-1)


def law(logits_BSV: Tensor, settings: SamplingSettings) -> Tensor:
    """The probabilities with which `sample` draws each code."""
    if settings.temperature == 0:
        return F.one_hot(logits_BSV.argmax(-1), logits_BSV.shape[-1]).type_as(logits_BSV)
    return warp(logits_BSV, settings).softmax(-1)
