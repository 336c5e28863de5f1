"""Optimisation: AdamW groups, the learning rate of a step, and the exponential moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arpg.train.recipe import OptimRecipe


def make_adamw(module: nn.Module, recipe: OptimRecipe) -> torch.optim.AdamW:
    """Weight decay on every tensor of two or more dimensions (embeddings too), on nothing else."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=recipe.lr, betas=recipe.betas, fused=True)


def learning_rate(recipe: OptimRecipe, step: int, num_steps: int) -> float:
    """Linear warm-up to `lr`, then cosine or linear to `min_lr`, or constant."""
    warmup = round(recipe.warmup * num_steps)
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    if recipe.schedule == "constant" or num_steps <= warmup + 1:
        return recipe.lr
    done = (step - warmup) / (num_steps - 1 - warmup)
    share = 0.5 * (1 + math.cos(math.pi * done)) if recipe.schedule == "cosine" else 1.0 - done
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * share


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(optimizer: torch.optim.AdamW, most: float) -> None:
    """`clip_grad_norm_` over all parameters; the fused AdamW scales whole tensors itself, on its way."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(isinstance(p, DTensor) for p in parameters):
        nn.utils.clip_grad_norm_(parameters, most)
        return
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    optimizer.grad_scale = ((norm + 1e-6) / most).clamp(min=1.0)  # type: ignore[attr-defined]


class EMA:
    """A moving average of a module's parameters; works on sharded parameters as on whole ones.

    Decay 0: there is none. Nothing is kept, and what is swapped in are the weights themselves.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        followed = dict(module.named_parameters()) if decay > 0 else {}
        self.names, self.live = list(followed), list(followed.values())
        self.average = [p.detach().clone() for p in self.live]

    def weight(self, step: int) -> float:
        """Of new weights. Young averages forget faster, so that the start does not linger."""
        return 1.0 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        if self.live:
            torch._foreach_lerp_(self.average, [p.detach() for p in self.live], self.weight(step))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The module computes with the averaged weights inside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, live in zip(self.average, self.live, strict=True):
            kept = live.detach().clone()
            live.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by name; the very tensors, so that loading in place works."""
        return dict(zip(self.names, self.average, strict=True))
