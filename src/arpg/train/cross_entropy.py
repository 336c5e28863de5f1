"""Cross-entropy straight from hidden states: the logits of all tokens never exist at once.

Shapes: M tokens, D width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

CHUNK = 16384
P = ParamSpec("P")
T = TypeVar("T")


def linear_cross_entropy(x_MD: Tensor, weight_VD: Tensor, target_M: Tensor, *, chunk: int = CHUNK) -> Tensor:
    """mean(cross_entropy(x @ weight.T, target)), computed and differentiated chunk by chunk.

    The gradient of the logits is softmax - onehot, so each chunk's share of both gradients can be taken while
    its logits are there; backward only scales them.
    """
    if torch.is_autocast_enabled(x_MD.device.type):
        dtype = torch.get_autocast_dtype(x_MD.device.type)
        x_MD, weight_VD = x_MD.to(dtype), weight_VD.to(dtype)
    loss: Tensor = _LinearCrossEntropy.apply(x_MD, weight_VD, target_M, chunk)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_VD: Tensor, target_M: Tensor, chunk: int) -> Tensor:
        needs_grad = any(ctx.needs_input_grad)
        grad_x = torch.empty_like(x_MD) if needs_grad else None
        grad_weight = torch.zeros(weight_VD.shape, dtype=torch.float32, device=weight_VD.device) if needs_grad else None
        total = torch.zeros((), dtype=torch.float32, device=x_MD.device)
        for start in range(0, len(x_MD), chunk):
            part = slice(start, start + chunk)
            loss, grad_logits = _softmax_grad(x_MD[part] @ weight_VD.T, target_M[part], len(x_MD))
            total += loss
            if grad_x is not None and grad_weight is not None:
                grad_x[part] = grad_logits @ weight_VD
                grad_weight += grad_logits.T @ x_MD[part]
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scaled = _compiled(_scaled) if grad_x.is_cuda else _scaled
        return scaled(grad_x, grads[0], grad_x.dtype), scaled(grad_weight, grads[0], ctx.weight_dtype), None, None


def _softmax_grad(logits_MV: Tensor, target_M: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The chunk's share of the mean loss, and the gradient of its logits in their own type."""
    compute = _compiled(_plain_softmax_grad) if logits_MV.is_cuda else _plain_softmax_grad
    return compute(logits_MV, target_M, total)


def _plain_softmax_grad(logits_MV: Tensor, target_M: Tensor, total: int) -> tuple[Tensor, Tensor]:
    logits = logits_MV.float()
    log_sum = torch.logsumexp(logits, -1, keepdim=True)
    at_target = logits.gather(-1, target_M[:, None])
    loss = (log_sum - at_target).sum() / total
    codes = torch.arange(logits.shape[-1], device=logits.device)
    grad = torch.exp(logits - log_sum) - (codes == target_M[:, None]).float()
    return loss, (grad / total).to(logits_MV.dtype)


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale).to(dtype)


@functools.cache
def _compiled(function: Callable[P, T]) -> Callable[P, T]:
    return torch.compile(function, dynamic=False)
