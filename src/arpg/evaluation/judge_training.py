"""How a judge learns: AdamW with a warm-up and a cosine, in bfloat16 on a GPU. What is learned is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from arpg.errors import require

Progress = Callable[[int, float], None] | None  # steps done, loss; every 50 steps and at the end
Module = TypeVar("Module", bound=nn.Module)

_EVERY = 50


def seeded(make: Callable[[], Module], seed: int) -> Module:
    """A network whose first weights only depend on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def in_half(device: torch.device) -> torch.autocast:
    """For the network alone: pictures are changed, and losses taken, in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def fit(
    judge: Module,
    loss: Callable[[int], Tensor],
    *,
    steps: int,
    lr: float,
    warmup: float,
    weight_decay: float,
    clip: float | None = None,
    progress: Progress = None,
) -> Module:
    """`loss(step)` is that of the step's batch; `warmup` a share of the steps. The judge comes back in eval mode."""
    require(steps >= 1, f"steps is {steps}; expected 1 or more")
    cuda = next(judge.parameters()).is_cuda
    optimizer = torch.optim.AdamW(judge.train().parameters(), lr=lr, weight_decay=weight_decay, fused=cuda)
    warm = max(1, round(warmup * steps))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        value = loss(step)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(value)
        if clip is not None:
            nn.utils.clip_grad_norm_(judge.parameters(), clip)
        optimizer.step()
        if progress is not None and ((step + 1) % _EVERY == 0 or step + 1 == steps):
            progress(step + 1, value.item())
    return judge.eval()
