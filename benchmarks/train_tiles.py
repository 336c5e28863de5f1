"""Times kernels of a training step for ways to cut them into tiles; prints a table.

python benchmarks/train_tiles.py --width 1024 --batch-size 256 --slots 256
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial

import torch
from torch import Tensor, nn
from triton.testing import do_bench

from arpg.kernels import adamw, residual_norm
from arpg.train.optim import EMA, clip_gradients, make_adamw
from arpg.train.recipe import OptimRecipe
from arpg.train.update import Update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args()
    shape = (options.batch_size, options.slots, options.width)
    x, y, z = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    _say(f"{torch.cuda.get_device_name()}; one tensor at 4.8 TB/s: {1e6 * x.nbytes / 4.8e12:.1f} us")
    _residual(x, y, z, options.dropout)
    del x, y, z
    _update(options.width)


def _residual(grad_total: Tensor, grad_normed: Tensor, total: Tensor, p: float) -> None:
    weight = torch.randn(total.shape[-1], device="cuda")
    key = torch.arange(len(total), device="cuda", dtype=torch.int32)
    _say(f"residual and norm, backward: {5 if p else 4} tensors")
    first = None
    for rows, stages, programs in itertools.product((1, 2), (1, 2, 3, 4), (512, 768, 1024, 2048, 4096)):
        residual_norm._ROWS, residual_norm._STAGES, residual_norm._PROGRAMS = rows, stages, programs

        def run() -> tuple[Tensor, ...]:
            return residual_norm.residual_norm_backward(grad_total, grad_normed, total, weight, key, p, 1e-5)

        out = run()
        first = out if first is None else first
        torch.testing.assert_close(out[:2], first[:2], atol=0.1, rtol=0.02)
        torch.testing.assert_close(out[2], first[2], atol=1.0, rtol=0.01)
        _say(f"  _ROWS {rows}  _STAGES {stages}  _PROGRAMS {programs:5d}  {_time(run):8.1f} us")


def _update(width: int, count: int = 76) -> None:
    """About as many parameters as ARPG-L has, where the width is 1024."""
    module = nn.ParameterList(nn.Parameter(torch.randn(4 * width, width, device="cuda")) for _ in range(count))
    for parameter in module:
        parameter.grad = torch.randn_like(parameter)
    for decay in (0.0, 0.9999):
        optimizer, ema = make_adamw(module, OptimRecipe(lr=1e-4)), EMA(module, decay)
        clip_gradients(optimizer, 1.0)
        size = 4 * width**2 * 4 * count / 4.8e6
        _say(f"AdamW{' and average' if decay else ''}: {9 if decay else 7} times the parameters, {size:.1f} us each")
        _say(f"  torch                    {_time(partial(Update(optimizer, ema, one_pass=False), 0)):8.1f} us")
        for block, warps in itertools.product((512, 1024, 2048), (2, 4, 8)):
            adamw._BLOCK, adamw._WARPS = block, warps
            took = _time(partial(Update(optimizer, ema, one_pass=True), 0))
            _say(f"  _BLOCK {block:4d}  _WARPS {warps}      {took:8.1f} us")


def _time(run) -> float:  # type: ignore[no-untyped-def]
    return 1000 * float(do_bench(run, warmup=20, rep=60))


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
