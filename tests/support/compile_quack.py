"""Compiles the GEMMs of `large_gemm` for Hopper on a machine without a GPU; prints "compiled" for each product.

Run by `test_large_gemm.py` as a program of its own, with the environment by which QuACK takes it for one with a GPU.
"""

import functools
from unittest import mock

import torch
from quack.epilogue.frontend import EpiMod
from quack.gemm_runtime import host

from arpg.kernels import large_gemm
from arpg.kernels.large_gemm import TILES

WIDTH, HIDDEN = 1024, 2816


def main():
    """Every tile in every epilogue would be 21 kernels; each tile is compiled in two of the three, by turns."""
    weights = {"qkv": (3 * WIDTH, WIDTH), "gate_up": (2 * HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    qkv, gate_up, down = (torch.zeros(shape, dtype=torch.bfloat16) for shape in weights.values())
    x, norm_D = torch.zeros(2, 40, WIDTH, dtype=torch.bfloat16), torch.zeros(WIDTH, dtype=torch.bfloat16)
    for i, tile in enumerate(TILES):
        with mock.patch.object(large_gemm, "best_tile", lambda *_, tile=tile: tile):
            total, scaled, sums = large_gemm.add_linear(x.new_zeros(2, 40, HIDDEN), down, x, norm_D)
            print("compiled")  # noqa: T201
            large_gemm.linear(scaled, gate_up if i % 2 else qkv, eps=1e-5, squares_PM=sums, swiglu=bool(i % 2))
            print("compiled")  # noqa: T201
            assert total.shape == x.shape


if __name__ == "__main__":
    with (
        mock.patch.object(host, "get_max_active_clusters", lambda size: 132 // size),
        mock.patch.object(EpiMod, "gemm", functools.partialmethod(EpiMod.gemm, _launch=False)),
    ):
        main()
