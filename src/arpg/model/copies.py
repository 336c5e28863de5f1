"""One tensor for several readers, whose gradients are summed in one pass over memory instead of two by two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def copies_of(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """`x` for each of so many readers (its memory is shared; do not write)."""
    copies: tuple[Tensor, ...] = _Copies.apply(x, count)  # type: ignore[no-untyped-call]
    return copies


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        given = [grad for grad in grads if grad is not None]
        if len(given) < 2:
            return (given[0] if given else None), None
        return (_compiled() if given[0].is_cuda else _sum)(given), None


def _sum(parts: list[Tensor]) -> Tensor:
    """At least in float32, rounded once."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total.to(parts[0].dtype)


@functools.cache
def _compiled() -> Callable[[list[Tensor]], Tensor]:
    return torch.compile(_sum, dynamic=False)
