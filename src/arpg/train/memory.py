"""The memory that training takes on one device, by formula, and the batch that fits it.

Measured: ARPG-L on an H200 (batch 256, bf16) takes 53.9 GiB, the formula says 57; `garden` on a CPU in float32 takes 52
MiB for each image, the formula says 51.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from arpg.config import ModelConfig
from arpg.device import available_bytes, training_precision
from arpg.errors import InputError
from arpg.train.cost import ACTIVATION_BYTES, STATE_BYTES, VALUE_BYTES, num_parameters
from arpg.train.objective import CHUNK
from arpg.train.recipe import ModelRecipe

LOGIT_BYTES = 12  # a logit of the chunk in work, its softmax and its gradient
CPU_BUDGET = 4 << 30  # more does not make a step on a CPU faster

log = logging.getLogger(__name__)


def training_bytes(config: ModelConfig, batch_size: int, *, precision: str, trained: int | None = None) -> int:
    """Estimate the bytes of a training step with `batch_size` images at once.

    Counted are the weights; the gradient, both moments and the average of those that are `trained` (None: all);
    activations, and a chunk of logits.
    """
    parameters, tokens = num_parameters(config), config.grid[0] * config.grid[1]
    state = STATE_BYTES - VALUE_BYTES
    weights = VALUE_BYTES * parameters + state * (parameters if trained is None else trained)
    size = ACTIVATION_BYTES * (1 if precision == "bf16" else 2)
    activations = batch_size * tokens * config.width * (config.pass1_layers + config.pass2_layers) * size
    return weights + activations + min(CHUNK, batch_size * tokens) * config.vocab_size * LOGIT_BYTES


def budget_bytes(device: torch.device) -> int | None:
    """Return the memory that a step may take: what is free, less a margin. None: not known."""
    free = available_bytes(device)
    if free is None:
        return None
    return int(0.9 * free) if device.type == "cuda" else min(free // 2, CPU_BUDGET)


def fit_to_device(recipe: ModelRecipe, device: torch.device, *, trained: int | None = None) -> ModelRecipe:
    """Cut the batch into the fewest equal parts that fit the memory of one device, unless the recipe cuts it itself.

    Losses do not depend on the number of parts.
    """
    run, budget = recipe.run, budget_bytes(device)
    if run.accumulate > 1 or run.parallel != "none" or budget is None:
        return recipe
    precision = training_precision(run.precision, device)
    for parts in (n for n in range(1, run.batch_size + 1) if run.batch_size % n == 0):
        needed = training_bytes(recipe.model, run.batch_size // parts, precision=precision, trained=trained)
        if needed <= budget:
            if parts > 1:
                log.info("a batch of %d images is computed in %d parts, which fit the memory", run.batch_size, parts)
            return replace(recipe, run=replace(run, accumulate=parts))
    raise InputError(
        f"training takes about {needed / 2**30:.1f} GiB with one image at a time; {device.type} has "
        f"{budget / 2**30:.1f} GiB to spare; free some memory, or train adapters (arpg finetune --lora 8)"
    )
