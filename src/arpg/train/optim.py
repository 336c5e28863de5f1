"""Optimisation: AdamW, the learning-rate schedule, gradient clipping, the exponential moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arpg.train.recipe import OptimRecipe


def make_adamw(module: nn.Module, recipe: OptimRecipe) -> torch.optim.AdamW:
    """Make an AdamW with weight decay on tensors of two or more dimensions (embeddings too) only."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=recipe.lr, betas=recipe.betas, fused=True)


def learning_rate(recipe: OptimRecipe, step: int, num_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up to `lr`, then cosine or linear to `min_lr`, or constant."""
    warmup = round(recipe.warmup * num_steps)
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    if recipe.schedule == "constant" or num_steps <= warmup + 1:
        return recipe.lr
    done = (step - warmup) / (num_steps - 1 - warmup)
    share = 0.5 * (1 + math.cos(math.pi * done)) if recipe.schedule == "cosine" else 1.0 - done
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * share


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(optimizer: torch.optim.AdamW, max_norm: float) -> None:
    """Clip the norm of all gradients; where no parameter is sharded, the fused AdamW scales them in its own pass."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(isinstance(p, DTensor) for p in parameters):
        nn.utils.clip_grad_norm_(parameters, max_norm)
        return
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # type: ignore[attr-defined]


class EMA:
    """An exponential moving average of a module's trained parameters, sharded or not.

    With decay 0 there is no average: nothing is kept, and `swapped_in` leaves the weights as they are.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        followed = {name: p for name, p in module.named_parameters() if p.requires_grad and decay > 0}
        self.names, self.live = list(followed), list(followed.values())
        self.average = [p.detach().clone() for p in self.live]

    def weight(self, step: int) -> float:
        """Return the weight of new parameters in the average: larger at first, so that the initial weights fade."""
        return 1.0 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the module's parameters."""
        if self.live:
            torch._foreach_lerp_(self.average, [p.detach() for p in self.live], self.weight(step))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the averaged weights into the module, inside a `with`."""
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
        """Return the averages by name, without copies, so that they can be loaded in place."""
        return dict(zip(self.names, self.average, strict=True))
