"""Times the backward pass of residual and norm for ways to cut it (rows at once, programs); prints and checks them.

python benchmarks/train_tiles.py --width 1024 --batch-size 256 --slots 256
"""

from __future__ import annotations

import argparse
import itertools

import torch
from triton.testing import do_bench

from arpg.kernels import residual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args()
    shape = (options.batch_size, options.slots, options.width)
    grad_total, grad_normed, total = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(options.width, device="cuda")
    key = torch.arange(options.batch_size, device="cuda", dtype=torch.int32)
    ideal = (5 if options.dropout else 4) * total.nbytes / 4.8e12
    print(f"{torch.cuda.get_device_name()}; at 4.8 TB/s {1e6 * ideal:.0f} us")  # noqa: T201
    first = None
    for rows, programs in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096, 8192)):
        residual._ROWS, residual._PROGRAMS = rows, programs

        def run() -> tuple[torch.Tensor, ...]:
            backward = residual.residual_norm_backward
            return backward(grad_total, grad_normed, total, weight, key, options.dropout, 1e-5)

        out = run()
        first = out if first is None else first
        torch.testing.assert_close(out, first, atol=0.1, rtol=0.02)
        print(f"rows {rows}  programs {programs:5d}  {1000 * do_bench(run, warmup=20, rep=60):7.1f} us")  # noqa: T201


if __name__ == "__main__":
    main()
