"""Times gradients of a training step for ways to cut them into tiles, and checks them; prints a table.

python benchmarks/train_tiles.py --width 1024 --batch-size 256 --slots 256
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from arpg.kernels import causal, residual
from arpg.kernels.rotary import join_turned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args()
    shape = (options.batch_size, options.slots, options.width)
    x, y, z, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    _say(f"{torch.cuda.get_device_name()}; one tensor at 4.8 TB/s: {1e6 * x.nbytes / 4.8e12:.1f} us")
    _residual(x, y, z, options.dropout)
    _attention(*(part.unflatten(-1, (options.heads, -1)) for part in (x, y, z, w)))


def _residual(grad_total: Tensor, grad_normed: Tensor, total: Tensor, p: float) -> None:
    weight = torch.randn(total.shape[-1], device="cuda")
    key = torch.arange(len(total), device="cuda", dtype=torch.int32)
    _say(f"residual and norm, backward: {5 if p else 4} tensors")
    first = None
    for rows, stages, programs in itertools.product((1, 2), (1, 2, 3, 4), (512, 768, 1024, 2048, 4096)):
        residual._ROWS, residual._STAGES, residual._PROGRAMS = rows, stages, programs

        def run() -> tuple[Tensor, ...]:
            return residual.residual_norm_backward(grad_total, grad_normed, total, weight, key, p, 1e-5)

        out = run()
        first = out if first is None else first
        torch.testing.assert_close(out[:2], first[:2], atol=0.1, rtol=0.02)
        torch.testing.assert_close(out[2], first[2], atol=1.0, rtol=0.01)
        _say(f"  _ROWS {rows}  _STAGES {stages}  _PROGRAMS {programs:5d}  {_time(run):8.1f} us")


def _attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    _say("causal attention, backward: 7 tensors")
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    expected = torch.autograd.grad(out, inputs, grad.transpose(1, 2), retain_graph=True)
    plain = _time(lambda: torch.autograd.grad(out, inputs, grad.transpose(1, 2), retain_graph=True))
    _say(f"  torch                    {plain:8.1f} us")
    qkv, angles = torch.stack((q, k, v), 2), torch.rand(2, *q.shape[:2], q.shape[-1], device="cuda").unbind(0)
    joined = _time(lambda: join_turned(q, k, v, *angles))
    _say(f"  rotation of gradients back {joined:8.1f} us")
    for queries, warps in itertools.product((16, 32, 64), (4, 8, 16)):
        causal._QUERIES, causal._WARPS = queries, warps
        try:
            causal.turned_attention_backward(qkv, *angles, grad)
            ours = causal.causal_attention_backward(q, k, v, grad)
        except OutOfResources as error:
            _say(f"  _QUERIES {queries}  _WARPS {warps:2d}  {error}")
            continue
        for a, b in zip(ours, expected, strict=True):
            assert (a - b.transpose(1, 2)).norm() < 0.02 * b.norm()
        taken = _time(lambda: causal.causal_attention_backward(q, k, v, grad))
        back = _time(lambda: causal.turned_attention_backward(qkv, *angles, grad))
        _say(f"  _QUERIES {queries}  _WARPS {warps:2d}  {taken:8.1f} us, with rotation {back:8.1f} us")


def _time(run) -> float:  # type: ignore[no-untyped-def]
    return 1000 * float(do_bench(run, warmup=20, rep=60))


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
