"""GEMM for more rows than a small batch has, on Hopper: SwiGLU or the residual sum in the product's kernel, by QuACK.

QuACK (`pip install 'arpg[hopper]'`) makes GEMMs of NVIDIA's CuTe DSL; what follows the product is a function of its
accumulator. With it a layer is five kernels instead of eight, as for small batches (`small_gemm.py`). Forward only.

An RMS norm is a weight for each input and a factor for each row. The product that makes the residual stream also writes
it times the weight of the next norm, and partial sums of its squares; the next product multiplies its outputs by the
factor that it computes from the sums. A kernel is compiled when it is first needed, which takes about 2 s, and kept in
`$QUACK_CACHE_DIR`, or else in the folder `kernels` of `$ARPG_HOME`.

Shapes: M rows, D inputs, N outputs, P partial sums.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
from contextlib import suppress
from typing import Any, NamedTuple

import cutlass
import quack.cache
import torch
from cutlass import Float32, cute
from quack.activation import swiglu as gated_silu
from quack.epilogue.frontend import EpiMod, gemm_epilogue
from quack.epilogue.math import unpack
from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecLoad
from torch import Tensor

from arpg.kernels.dispatch import num_processors, prefetch_weights
from arpg.storage import home

SCALES_STREAM = True  # `linear` takes the stream times the norm's weight, which `add_linear` makes


class Tile(NamedTuple):
    """What a program computes, and how: `benchmarks/fused_gemm.py --large-tiles` measures others."""

    rows: int
    outputs: int
    pingpong: bool = True  # one half of its warps multiplies while the other is at the epilogue of its tile
    cluster: int = 1  # programs that share what they read of the weight
    split: int = 1  # programs that share the inputs of a tile


# The time of each tile per output, relative to the others, with full waves.
TILES = {
    Tile(64, 64, pingpong=False): 1.5,
    Tile(64, 128): 1.25,
    Tile(128, 96): 1.05,
    Tile(192, 96): 1.15,
    Tile(128, 128): 1.0,
    Tile(128, 160): 1.0,
    Tile(128, 192): 1.0,
}


def linear(
    x: Tensor,
    weight_ND: Tensor,
    *,
    eps: float,
    squares_PM: Tensor,
    swiglu: bool = False,
) -> Tensor:
    """`[..., N]`: the product of the normed `x`, which is given times the norm's weight.

    `squares_PM`: partial sums of the squares of each row before. `swiglu`: weights of gates, then of their ups.
    """
    x_MD = x.flatten(0, -2)
    rows, inputs = x_MD.shape
    outputs = len(weight_ND) // (2 if swiglu else 1)
    out = x.new_empty((*x.shape[:-1], outputs))
    sums_MP = squares_PM.t()
    tile = best_tile(rows, len(weight_ND), num_processors(x.device))
    if swiglu:
        given = {"factor": sums_MP, "hidden": out.view(1, rows, outputs)}
        _launch(_gated(inputs, eps), tile, x_MD, weight_ND, None, None, given, concat_layout=("B",))
    else:
        _launch(_normed(inputs, eps), tile, x_MD, weight_ND, out, None, {"factor": sums_MP})
    return out


def add_linear(x: Tensor, weight_ND: Tensor, add: Tensor, norm_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the stream `x @ weight + add`, `[..., N]`, the same times `norm_D`, and sums of its squares, `[P, M]`."""
    x_MD, add_MN = x.flatten(0, -2), add.contiguous().flatten(0, -2)
    rows, outputs = add_MN.shape
    tile = best_tile(rows, outputs, num_processors(x.device))
    total, scaled = torch.empty_like(add_MN), torch.empty_like(add_MN)
    sums_MP = torch.empty((rows, math.ceil(outputs / tile.outputs)), dtype=torch.float32, device=x.device)
    given = {"norm": norm_D[None], "stream": total[None], "sums": sums_MP[None]}
    _launch(_added, tile, x_MD, weight_ND, scaled, add_MN, given)
    return total.view(add.shape), scaled.view(add.shape), sums_MP.t()


def empty_sums(x: Tensor, weight_ND: Tensor) -> Tensor:
    """Allocate partial sums of the squares of `x @ weight + add`, `[P, M]`."""
    rows, outputs = x.numel() // x.shape[-1], len(weight_ND)
    parts = math.ceil(outputs / best_tile(rows, outputs, num_processors(x.device)).outputs)
    return torch.empty((rows, parts), dtype=torch.float32, device=x.device).t()


@functools.cache
def best_tile(rows: int, outputs: int, processors: int) -> Tile:
    """Return the tile of least cost."""
    return cheapest_tile(TILES, rows, outputs, processors)


def cheapest_tile(tiles: dict[Tile, float], rows: int, outputs: int, processors: int) -> Tile:
    """Return the tile of least cost of tiles with their times per output."""
    return min(tiles, key=lambda tile: tiles[tile] * wave_outputs(tile, rows, outputs, processors))


def wave_outputs(tile: Tile, rows: int, outputs: int, processors: int) -> int:
    """Return the outputs of a program, in all waves: a GPU computes as many tiles at once as it has processors."""
    down = math.ceil(rows / (tile.rows * tile.cluster)) * tile.cluster
    programs = down * math.ceil(outputs / tile.outputs) * tile.split
    return math.ceil(programs / processors) * tile.rows * tile.outputs


def _launch(
    epilogue: EpiMod,
    tile: Tile,
    x_MD: Tensor,
    weight_ND: Tensor,
    out: Tensor | None,
    add: Tensor | None,
    given: dict[str, Tensor],
    **options: Any,
) -> None:
    """Multiply, by one kernel; QuACK's operands have a batch dimension in front."""
    out_MN = None if out is None else out.view(1, len(x_MD), -1)
    epilogue.gemm(
        x_MD[None],
        weight_ND[None],
        out_MN,
        None if add is None else add[None],
        epi_args=given,
        tile_M=tile.rows,
        tile_N=tile.outputs,
        cluster_M=tile.cluster,
        pingpong=tile.pingpong,
        split_k=tile.split,
        post_init_attrs=() if prefetch_weights(x_MD) else (("use_pdl", False),),
        **options,
    )


class RowFactor(ColVecLoad):  # type: ignore[misc]
    """An operand of an epilogue: one over the root mean square of each row, from partial sums of squares `[M, P]`."""

    def __init__(self, name: str, width: int, eps: float) -> None:
        super().__init__(name)
        self.width, self.eps = width, eps

    def config_key(self) -> tuple[int, float]:
        """What the compiled code depends on."""
        return self.width, self.eps

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        """Return a stand-in for the sums, for compilation."""
        shape, stride = (fctx.m, cute.sym_int()), (cute.sym_int64(), 1)
        return cute.runtime.make_fake_tensor(key[0], shape, stride=stride, assumed_align=4)

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        """Pass the sums on as they are."""
        return {self.name: getattr(args, self.name)}

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):  # type: ignore[no-untyped-def]
        """Compute the factors of a tile's rows, a row in each thread, and share them."""
        for part in cutlass.range_constexpr((ctx.tile_M + ctx.num_epi_threads - 1) // ctx.num_epi_threads):
            row = ctx.tidx + part * ctx.num_epi_threads
            if row < ctx.tile_M:
                total = Float32(0.0)
                at = ctx.tile_coord_mnkl[0] * ctx.tile_M + row
                if at < cute.size(param, mode=[0]):
                    for maker in cutlass.range(cute.size(param, mode=[1])):
                        total += param[at, maker]
                smem_tensor[row] = cute.math.rsqrt(total * (1.0 / self.width) + self.eps, fastmath=True)
        broadcast = cute.make_layout((ctx.tile_M, ctx.tile_N), stride=(1, 0))
        factors = ctx.partition_for_epilogue_fn(cute.make_tensor(smem_tensor.iterator, broadcast))
        one = cute.group_modes(factors, 3, cute.rank(factors))[None, None, None, 0]
        return [factors, cute.make_rmem_tensor(one.layout, gemm.acc_dtype)]


@functools.cache
def _normed(width: int, eps: float) -> EpiMod:
    @gemm_epilogue(ops={"factor": RowFactor("factor", width, eps)})
    def normed(acc, factor):  # type: ignore[no-untyped-def]
        return {"D": acc * factor}

    return normed


@functools.cache
def _gated(width: int, eps: float) -> EpiMod:
    """Pairs of outputs are a gate and its up: the two halves of the weight are read by turns."""

    @gemm_epilogue(ops={"factor": RowFactor("factor", width, eps)}, outputs=("hidden",), mode="acc_pair")
    def gated(acc, factor):  # type: ignore[no-untyped-def]
        gate, up = unpack(acc * factor)
        return {"hidden": gated_silu(gate, up)}

    return gated


@gemm_epilogue(
    ops={"norm": RowVecLoad("norm")},
    outputs=("stream",),
    reduces={"sums": ColVecReduce("sums", scaled=True)},
)
def _added(acc, c, norm):  # type: ignore[no-untyped-def]
    total = acc + c
    return {"D": total * norm, "stream": total, "sums": (total, total)}


def kernel_folder() -> str:
    """Return a folder of this user for compiled code; QuACK's own, in /tmp, could be filled by others."""
    folder = home() / "kernels"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return str(folder) if os.access(folder, os.W_OK) else tempfile.mkdtemp(prefix="arpg-kernels-")


if quack.cache.CACHE_DIR is None:
    quack.cache.CACHE_DIR = kernel_folder()
