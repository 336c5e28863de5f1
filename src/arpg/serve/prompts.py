"""Prompts on a server: kept in memory alone, and timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from arpg.pipeline import Pipeline
from arpg.serve.metrics import Metrics
from arpg.text_encoder import PromptCache, TextEncoder


class TimedEncoder:
    """Stands in for a `TextEncoder`, and says how long it took."""

    def __init__(self, encoder: TextEncoder, metrics: Metrics) -> None:
        self._encoder, self._metrics = encoder, metrics

    def states(self, prompts: Sequence[str], *, batch_size: int = 1) -> list[Tensor]:
        with self._metrics.prompt.time():
            return self._encoder.states(prompts, batch_size=batch_size)


def shared_prompts(pipeline: Pipeline, metrics: Metrics) -> PromptCache | None:
    """The states of a pipeline's prompts, for all requests; None: it takes classes.

    Nothing is written to the disk, which anybody could fill with prompts. The encoder is loaded now, so that a server
    that is ready does not need it first, and one that lacks it does not start.
    """
    own = pipeline.prompts
    if own is None:
        return None
    encoder = own.encoder
    return PromptCache(own.config, load=lambda: cast(TextEncoder, TimedEncoder(encoder, metrics)))
