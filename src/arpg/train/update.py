"""AdamW and the moving average of the weights in one kernel, where it takes all tensors.

The optimizer state is torch's own, so snapshots and distributed training do not depend on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from arpg.kernels.dispatch import can_fuse
from arpg.train.optim import EMA

ALIGNMENT = 16  # bytes that the kernel reads at once


class Update:
    """One step of AdamW and of the moving average, from the parameters' gradients and the scale of `clip_gradients`."""

    def __init__(self, optimizer: torch.optim.AdamW, ema: EMA, *, one_pass: bool) -> None:
        """`one_pass`: run both in one kernel, if it takes all tensors."""
        self.optimizer, self.ema, self.one_pass = optimizer, ema, one_pass
        self._tensors: list[Any] = []  # of each group, once the kernel has taken it
        self._average: dict[Tensor, Tensor] = dict(zip(ema.live, ema.average, strict=True))

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        """Take one step. The first is torch's, which creates the optimizer state."""
        columns = [self._columns(group["params"]) for group in self.optimizer.param_groups if self.one_pass]
        if not columns or not all(map(_takes, columns)):
            self.optimizer.step()
            self.ema.update(step)
            return
        from arpg.kernels.adamw import Rates, Tensors

        if not self._tensors:
            self._tensors = [Tensors([p.numel() for p in of[0]], of[0][0].device) for of in columns]
        scale = getattr(self.optimizer, "grad_scale", None)
        scale = columns[0][0][0].new_ones(()) if scale is None else scale
        for group, tensors, of in zip(self.optimizer.param_groups, self._tensors, columns, strict=True):
            corrections = self._corrections(group)
            rates = Rates(group["lr"], group["betas"], group["eps"], group["weight_decay"], self.ema.weight(step))
            tensors.update(of, corrections, scale, rates)

    def _columns(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Return parameters, gradients, both moments and the average; a column is shorter where some are missing."""
        state = [self.optimizer.state[p] for p in parameters if p in self.optimizer.state]
        columns = [parameters, [p.grad for p in parameters if p.grad is not None]]
        columns += [[of[name] for of in state] for name in ("exp_avg", "exp_avg_sq")]
        if self._average:
            columns.append([self._average[p] for p in parameters])
        return columns

    def _corrections(self, group: dict[str, Any]) -> Tensor:
        """Count the step, and return the bias corrections `[2, T]` of the moments."""
        steps = [self.optimizer.state[p]["step"] for p in group["params"]]
        torch._foreach_add_(steps, 1)
        step_T = torch.stack(steps).double()
        first, second = (1 - beta**step_T for beta in group["betas"])
        return torch.stack((1 / first, second.rsqrt())).float()


def _takes(columns: list[list[Tensor]]) -> bool:
    """Return whether the kernel takes these tensors: all present, unsharded, dense and in float32 on a GPU."""
    return all(len(column) == len(columns[0]) for column in columns) and all(
        can_fuse(x)
        and x.dtype == torch.float32
        and x.is_contiguous()
        and not isinstance(x, DTensor)
        and x.data_ptr() % ALIGNMENT == 0
        for column in columns
        for x in column
    )
