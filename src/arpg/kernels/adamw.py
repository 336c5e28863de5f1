"""AdamW, the scale of the gradients and the moving average of the weights in one pass over many tensors.

One program takes a block of one tensor. The tensors are found through a table of addresses: one launch for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 1024, 4


class Rates(NamedTuple):
    """The numbers of a step, which all tensors of a call share."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    average: float  # what the new weights are worth in the average


class Tensors:
    """Tensors that are updated together. All are dense, in float32, and begin at a multiple of 16 bytes."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device, self._block = sizes, device, _BLOCK
        blocks = [triton.cdiv(size, self._block) for size in sizes]
        self._first = [sum(blocks[:i]) for i in range(len(blocks))]
        tensor = torch.arange(len(blocks), dtype=torch.int32)
        self._tensor_of = tensor.repeat_interleave(torch.tensor(blocks)).to(device)
        self._addresses: list[list[int]] = []
        self._table = torch.empty(0)

    def update(self, columns: Sequence[Sequence[Tensor]], corrections: Tensor, scale: Tensor, rates: Rates) -> None:
        """Columns: parameters, gradients, both moments and, if there is one, the average.

        `corrections` is what the moments of each tensor are multiplied by, `[2, T]`; gradients are divided by `scale`.
        """
        self._look_up([[tensor.data_ptr() for tensor in column] for column in columns])
        _update[(len(self._tensor_of),)](
            self._table, self._tensor_of, corrections, scale, len(self.sizes), rates.lr, 1 - rates.betas[0],
            1 - rates.betas[1], rates.eps, rates.lr * rates.weight_decay, rates.average, len(columns) == 5,
            self._block, num_warps=_WARPS,
        )  # fmt: skip

    def _look_up(self, addresses: list[list[int]]) -> None:
        """The table is made again if a tensor has moved: gradients may, where no graph writes them."""
        if addresses == self._addresses:
            return
        assert all(address % 16 == 0 for column in addresses for address in column)
        table = torch.tensor([self._first, self.sizes, *addresses])
        if self.device.type == "cuda":
            table = table.pin_memory()
        self._addresses, self._table = addresses, table.to(self.device, non_blocking=True)


@triton.jit(do_not_specialize=["T"])
def _update(  # type: ignore[no-untyped-def]
    table, tensor_of, corrections, scale, T, lr, fresh1, fresh2, eps, decay, average, AVERAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns of the table: first block, size, addresses. A mask makes reads narrow: it is for last blocks only."""
    tensor = tl.load(tensor_of + tl.program_id(0))
    start = (tl.program_id(0) - tl.load(table + tensor)) * BLOCK
    size = tl.load(table + T + tensor)
    first, second = tl.load(corrections + tensor), tl.load(corrections + T + tensor)
    numbers = (lr * first, fresh1, fresh2, second, eps, decay, average, 1.0 / tl.load(scale))
    if start + BLOCK <= size:
        _block(table + 2 * T + tensor, T, start, size, numbers, False, AVERAGE, BLOCK)
    else:
        _block(table + 2 * T + tensor, T, start, size, numbers, True, AVERAGE, BLOCK)


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    row, T, start, size, numbers, MASKED: tl.constexpr, AVERAGE: tl.constexpr, BLOCK: tl.constexpr
):
    lr, fresh1, fresh2, second, eps, decay, average, by = numbers
    at = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    there = at < size if MASKED else None
    parameter, gradient = _address(row) + at, _address(row + T) + at
    moment1, moment2 = _address(row + 2 * T) + at, _address(row + 3 * T) + at
    mean = _address(row + 4 * T if AVERAGE else row) + at
    g, p = tl.load(gradient, there) * by, tl.load(parameter, there)
    m, v = tl.load(moment1, there), tl.load(moment2, there)
    a = tl.load(mean, there) if AVERAGE else p
    m += fresh1 * (g - m)
    v += fresh2 * (g * g - v)
    p -= decay * p
    p -= lr * m / (tl.sqrt(v) * second + eps)
    tl.store(parameter, p, there)
    tl.store(moment1, m, there)
    tl.store(moment2, v, there)
    if AVERAGE:
        tl.store(mean, a + average * (p - a), there)


@triton.jit
def _address(at):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(at).to(tl.pointer_type(tl.float32)), 16)
