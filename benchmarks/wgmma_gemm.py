"""Time a GEMM for 1 to 128 rows that holds its weights in shared memory, beside the library and the present kernel.

    python -m benchmarks.wgmma_gemm --out wgmma-gemm-h200.json   # layers and products
    python -m benchmarks.wgmma_gemm --rows 64 --variants whole

A prototype: the package does not use it. It computes what `arpg.kernels.small_gemm.linear` computes (norm, product,
then SwiGLU or the residual sum) on Hopper (compute capability 9.0), in another way:

- A program copies all of its weights to shared memory with the bulk tensor copy engine before the dependency barrier,
  so they arrive while the kernels in front of it run. Rows are copied after the barrier, through a ring of stages.
- The weights are the left operand of `wgmma`, 64 lines per program; the rows are the right one, padded to 16, 32, 64 or
  128. The copy engine reads no padding.
- Each program reads all rows, so few programs with many outputs read less than many with few: 64 rows of 1,024 inputs
  are 128 KiB per program, 17 MB for 132 programs (the weights of `qkv` are 6 MB). The programs of the present kernel
  that share a multiprocessor take their rows from its L1 cache; bulk copies bypass it, and need none.
- The weight of the norm is multiplied into the weights in shared memory, before the barrier; the norm itself is a
  factor of each row, from the sums of squares that the kernel in front has left.
- Where the inputs are divided among programs (`Tile.split`), each writes its partial sums, and the last to arrive adds
  all of them in a fixed order, so results are reproducible. A cluster cannot do it: Triton 3.6 does not compile a
  layout conversion between the programs of a cluster, and its bulk copies have no multicast.

The network of `benchmarks/small_gemm.py` (24 layers and the head, both passes, one CUDA graph, more weights than L2
holds) runs with the library's products, with the present kernel and with each variant: logits against float32, and
whether a second run gives the same. The head, and a norm whose squares are not known, are the library's. Before, every
product of a variant is checked against float32 and timed alone, each call with other weights.

Shapes: M rows, D inputs, N outputs, P partial sums.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from arpg.bench.record import environment
from arpg.files import write_json
from arpg.kernels import dispatch, small_gemm
from arpg.kernels.dispatch import KernelPolicy, kernel_policy, prefetch_weights
from benchmarks.measures import graph_microseconds, relative_error
from benchmarks.small_gemm import HALF, LAYERS, SHAPES, attempt, exact_product, make_model, one_step

LINES = 64  # weight lines of a program: `wgmma` multiplies 64 at a time
ATOM = gl.constexpr(64)  # inputs of a bulk copy: 128 bytes, one swizzled line of shared memory
WARPS = 4  # one warpgroup


class Tile(NamedTuple):
    """How one product is divided."""

    split: int = 1  # programs that share the inputs of the same outputs
    ring_kib: int = 64  # shared memory for rows: how much of them is on its way at once


ROWS = (8, 12, 16, 24, 32, 48, 64, 96, 128)
VARIANTS: dict[str, dict[str, Tile]] = {  # by kind of product; `sum` by whether inputs and outputs are as many
    "whole": {"plain": Tile(), "swiglu": Tile(), "out": Tile(), "down": Tile(4)},
    "split": {"plain": Tile(2), "swiglu": Tile(), "out": Tile(4), "down": Tile(8)},
    "short ring": {"plain": Tile(1, 32), "swiglu": Tile(1, 32), "out": Tile(1, 32), "down": Tile(4, 32)},
}


def linear(
    x: Tensor,
    weight_ND: Tensor,
    *,
    norm_D: Tensor | None = None,
    eps: float = 0.0,
    add: Tensor | None = None,
    swiglu: bool = False,
    squares_PM: Tensor | None = None,
    sums_PM: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`[M, N]`: the product of `arpg.kernels.small_gemm.linear`, of `x` `[M, D]`; a norm needs its `squares_PM`."""
    tile = tile or Tile()
    assert not swiglu or (norm_D is not None and tile.split == 1)
    inputs, outputs = x.shape[-1], len(weight_ND) // (2 if swiglu else 1)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    add_MN = out if add is None else add
    assert x.stride(-1) == add_MN.stride(-1) == 1
    assert (norm_D is None) == (squares_PM is None)
    assert len(x) <= max(ROWS)
    rows = max(16, triton.next_power_of_2(len(x)))  # Triton has no other tiles
    row_bytes = rows * x.element_size()
    chunk = 128 if 4 * 128 * row_bytes <= tile.ring_kib * 1024 else 64  # inputs of a stage: at least four stages
    blocks = triton.cdiv(triton.cdiv(inputs, chunk), tile.split)
    stages = min(blocks, max(2, tile.ring_kib * 1024 // (chunk * row_bytes)))
    parts = LINES // 2 if swiglu else LINES
    layout = gl.NVMMASharedLayout(128, 16)
    x_map = TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, chunk], layout)
    weight_map = TensorDescriptor(weight_ND, list(weight_ND.shape), [inputs, 1], [parts, ATOM.value], layout)
    tiles = triton.cdiv(outputs, parts)
    partials = x.new_empty(tiles * tile.split * rows * LINES if tile.split > 1 else 1, dtype=torch.float32)
    given = 0 if squares_PM is None else len(squares_PM)
    pdl = prefetch_weights(x)
    _wgmma_gemm[(tiles, tile.split)](
        x_map, weight_map, x if norm_D is None else norm_D, add_MN, out, x if squares_PM is None else squares_PM,
        x if sums_PM is None else sums_PM, partials, _counters(x.device), len(x), outputs, add_MN.stride(0), eps,
        inputs, norm_D is not None, add is not None, swiglu, sums_PM is not None, given, triton.next_power_of_2(given),
        LINES, rows, chunk, blocks, stages, tile.split, pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return out


def empty_sums(x: Tensor, weight_ND: Tensor) -> Tensor:
    """Allocate partial sums of the squares of `x @ weight + add`: `[P, M]`, those of a row beside each other."""
    makers, rows = triton.cdiv(len(weight_ND), LINES), x.numel() // x.shape[-1]
    return torch.empty((rows, makers), dtype=torch.float32, device=x.device).t()


@cache
def _counters(device: torch.device) -> Tensor:
    """How many programs of each tile have written their partial sums: zero between kernels, for one stream."""
    return torch.zeros(1024, dtype=torch.int32, device=device)


@gluon.jit(do_not_specialize=["M"])
def _wgmma_gemm(  # type: ignore[no-untyped-def]
    x_map, weight_map, norm, add, out, squares, sums, partials, counters, M, N, add_row, eps, D: gl.constexpr,
    NORM: gl.constexpr, ADD: gl.constexpr, SWIGLU: gl.constexpr, SUMS: gl.constexpr, GIVEN: gl.constexpr,
    GIVEN_BLOCK: gl.constexpr, LINES: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`LINES` lines of the weight, `BLOCKS` chunks of the inputs, all rows. With `SWIGLU`, gates, then their ups.

    What lies past the last row, line or input is copied as zeros and not stored.
    """
    PARTS: gl.constexpr = 2 if SWIGLU else 1
    OUTPUTS: gl.constexpr = LINES // PARTS
    ATOMS: gl.constexpr = CHUNK // ATOM
    TYPE: gl.constexpr = weight_map.dtype
    BYTES: gl.constexpr = TYPE.primitive_bitwidth // 8
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SCALED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // CHUNK, CHUNK // 8], [4, 1], [1, 0])
    END: gl.constexpr = gl.BlockedLayout([1, 4], [128 // OUTPUTS, OUTPUTS // 4], [4, 1], [1, 0])
    MADE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile, split = gl.program_id(0), gl.program_id(1)
    first_input = split * (BLOCKS * CHUNK)
    copied = gl.allocate_shared_memory(TYPE, [BLOCKS * ATOMS * PARTS, OUTPUTS, ATOM], weight_map.layout)
    weights = copied._reinterpret(TYPE, [BLOCKS, LINES, CHUNK], x_map.layout)  # the parts of a line of atoms meet
    rows = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, CHUNK], x_map.layout)
    weights_ready = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    rows_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for block in gl.static_range(BLOCKS):
        mbarrier.init(weights_ready.index(block), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(rows_ready.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.expect(rows_ready.index(stage), ROWS * CHUNK * BYTES)
    for block in range(BLOCKS):
        ready = weights_ready.index(block)
        mbarrier.expect(ready, LINES * CHUNK * BYTES)
        for atom in gl.static_range(ATOMS):
            for part in gl.static_range(PARTS):
                to = copied.index((block * ATOMS + atom) * PARTS + part)
                place = [tile * OUTPUTS + part * N, first_input + block * CHUNK + atom * ATOM]
                tma.async_copy_global_to_shared(weight_map, place, ready, to)
    if NORM:
        channel = first_input + gl.arange(0, CHUNK, gl.SliceLayout(0, SCALED))
        scale = gl.load(norm + channel, channel < D, other=0.0)
        for block in range(BLOCKS):
            channel += CHUNK
            scale_after = gl.load(norm + channel, channel < D, other=0.0)
            mbarrier.wait(weights_ready.index(block), 0)
            lines = weights.index(block)
            lines.store(lines.load(SCALED) * scale[None, :])
            scale = scale_after
        fence_async_shared()
        gl.thread_barrier()  # of all threads: the tensor cores may read what they have stored
    if PDL:
        tl.extra.cuda.gdc_wait()

    for block in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x_map, [0, first_input + block * CHUNK], rows_ready.index(block), rows.index(block)
        )
    row = gl.arange(0, ROWS, gl.SliceLayout(1, END))
    column = gl.arange(0, OUTPUTS, gl.SliceLayout(0, END))
    output = tile * OUTPUTS + column
    there = (row[:, None] < M) & (output[None, :] < N)
    if NORM:
        maker = gl.arange(0, GIVEN_BLOCK, gl.SliceLayout(0, MADE))
        maker_row = gl.arange(0, ROWS, gl.SliceLayout(1, MADE))
        made = (maker_row[:, None] < M) & (maker[None, :] < GIVEN)
        given = gl.load(squares + maker_row[:, None] * GIVEN + maker[None, :], made, other=0.0)
        factor = gl.convert_layout(gl.rsqrt(gl.sum(given, 1) / D + eps), gl.SliceLayout(1, END))
    if ADD and SPLIT == 1:
        before = gl.load(add + row[:, None] * add_row + output[None, :], there, other=0.0)
    acc = gl.zeros((LINES, ROWS), gl.float32, ACC)
    for block in range(BLOCKS):
        now = block % STAGES
        if not NORM:
            mbarrier.wait(weights_ready.index(block), 0)
        mbarrier.wait(rows_ready.index(now), block // STAGES % 2)
        acc = warpgroup_mma(weights.index(block), rows.index(now).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if STAGES < BLOCKS:  # the product before has read its stage
            again = (block > 0) & (block - 1 + STAGES < BLOCKS)
            free = (block + STAGES - 1) % STAGES
            gl.thread_barrier()
            mbarrier.expect(rows_ready.index(free), ROWS * CHUNK * BYTES, pred=again)
            after = [0, first_input + (block - 1 + STAGES) * CHUNK]
            tma.async_copy_global_to_shared(x_map, after, rows_ready.index(free), rows.index(free), pred=again)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    gl.thread_barrier()  # of all warps: the sums take the place of what they have read
    copied._keep_alive()
    rows._keep_alive()
    turned = gl.allocate_shared_memory(gl.float32, [ROWS, LINES], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
    turned.store(acc.permute((1, 0)))
    total = turned.slice(0, OUTPUTS, 1).load(END)
    up = total
    if SWIGLU:
        up = turned.slice(OUTPUTS, OUTPUTS, 1).load(END)
    last = SPLIT == 1
    if SPLIT > 1:
        part = partials + tile * (SPLIT * ROWS * OUTPUTS) + row[:, None] * OUTPUTS + column[None, :]
        gl.store(part + split * (ROWS * OUTPUTS), total, there)
        gl.thread_barrier()  # of all threads: the counter is one thread's
        last = gl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            gl.store(counters + tile, 0)
            total = _sum_parts(part, there, SPLIT, ROWS * OUTPUTS)
        if NORM:
            total *= factor[:, None]
        if SWIGLU:
            total = up * factor[:, None] * total / (1.0 + gl.exp(-total))
        if ADD:
            if SPLIT > 1:
                before = gl.load(add + row[:, None] * add_row + output[None, :], there, other=0.0)
            total += before.to(gl.float32)
        result = total.to(out.dtype.element_ty)
        gl.store(out + row[:, None] * N + output[None, :], result, there)
        if SUMS:  # of the rounded outputs, which the next kernel reads
            rounded = gl.where(output[None, :] < N, result.to(gl.float32), 0.0)
            gl.store(sums + row * gl.num_programs(0) + tile, gl.sum(rounded * rounded, 1), row < M)


@gluon.jit
def _sum_parts(part, there, SPLIT: gl.constexpr, STEP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Add the partial sums of all programs of a tile, in the order of their inputs whoever adds them."""
    total = gl.load(part, there, other=0.0, cache_modifier=".cg")
    for other in gl.static_range(1, SPLIT):
        total += gl.load(part + other * STEP, there, other=0.0, cache_modifier=".cg")
    return total


def tile_of(tiles: dict[str, Tile], x: Tensor, weight_ND: Tensor, *, swiglu: bool = False, add: Any = None) -> Tile:
    """Return the tile of a product by its kind."""
    kind = "swiglu" if swiglu else "plain" if add is None else "out" if len(weight_ND) == x.shape[-1] else "down"
    return tiles[kind]


@contextmanager
def in_network(tiles: dict[str, Tile]) -> Iterator[None]:
    """Let the network of small batches multiply with this kernel; what it does not take is the library's."""

    def product(x: Tensor, weight_ND: Tensor, **options: Any) -> Tensor:
        norm_D = options.get("norm_D")
        if (norm_D is not None and options.get("squares_PM") is None) or (norm_D is None and "add" not in options):
            if norm_D is not None:
                x = F.rms_norm(x, x.shape[-1:], norm_D, options["eps"])
            made = F.linear(x, weight_ND)
            gate, up = made.chunk(2, -1)
            return F.silu(gate) * up if options.get("swiglu") else made
        add = options.pop("add", None)
        options |= {} if add is None else {"add": add.flatten(0, -2)}
        tile = tile_of(tiles, x, weight_ND, swiglu=options.get("swiglu", False), add=add)
        return linear(x.flatten(0, -2), weight_ND, tile=tile, **options).unflatten(0, x.shape[:-1])

    with mock.patch.multiple(small_gemm, linear=product, empty_sums=empty_sums):
        yield


def product_options(kind: str, x: Tensor, weight_ND: Tensor) -> dict[str, Any]:
    """Return the arguments with which a layer calls a product of this kind."""
    if kind == "sum":
        add = torch.randn(len(x), len(weight_ND), device="cuda").to(HALF)
        return {"add": add, "sums_PM": empty_sums(x, weight_ND)}
    squares = empty_sums(x, weight_ND.new_empty(x.shape[1], 0)).zero_()
    squares[0] = x.float().square().sum(-1)
    norm = torch.randn(x.shape[1], device="cuda").to(HALF)
    return {"norm_D": norm, "eps": 1e-5, "swiglu": kind == "swiglu", "squares_PM": squares}


def time_products(rows: int, variants: list[str], record: list[dict[str, Any]]) -> None:
    """Record the microseconds and the error of each product of a layer, by variant."""
    for name, (kind, inputs, outputs) in SHAPES.items():
        if name == "head":
            continue
        weights = _weights(outputs, inputs)
        x = torch.randn(rows, inputs, device="cuda").to(HALF)
        options = product_options(kind, x, weights[0])
        for variant in variants:
            swiglu, add = options.get("swiglu", False), options.get("add")
            tile = tile_of(VARIANTS[variant], x, weights[0], swiglu=swiglu, add=add)
            call, exact = partial(linear, x, tile=tile, **options), exact_product(kind, x, weights[0], options)
            result = attempt(f"{name}, {variant}", partial(_time_product, call, weights, exact))
            if result is not None:
                took, error = result
                verdict = "" if error < 0.01 else "  WRONG"
                print(f"{rows:3d} rows  {name:9s} {variant:12s} {took:6.2f} us, error {error:.4f}{verdict}", flush=True)
                record.append({"rows": rows, "product": name, "variant": variant, "us": took, "error": error})


def _time_product(call: Callable[[Tensor], Tensor], weights: list[Tensor], exact: Tensor) -> tuple[float, float]:
    error = relative_error(call(weights[0]), exact)
    return graph_microseconds(lambda: [call(weight) for weight in weights])[0] / len(weights), error


@cache
def _weights(outputs: int, inputs: int) -> list[Tensor]:
    return [(torch.randn(outputs, inputs, device="cuda") / inputs**0.5).to(HALF) for _ in range(LAYERS)]


def time_layers(
    call: Callable[[], Tensor], name: str, rows: int, expected: Tensor, record: list[dict[str, Any]]
) -> None:
    """Record the microseconds of a layer and the error of the logits of `call`, one step of the network."""

    def run() -> tuple[float, float, bool]:
        took, logits = graph_microseconds(call, repeats=20)
        return took / LAYERS, relative_error(logits, expected), torch.equal(call(), logits)

    result = attempt(name, run)
    if result is not None:
        took, error, same = result
        verdict = "" if same else "  NOT REPRODUCIBLE"
        print(f"{rows:3d} rows  {name:12s} {took:6.2f} us a layer, error {error:.4f}{verdict}", flush=True)
        record.append({"rows": rows, "variant": name, "us": took, "error": error, "reproducible": same})


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, help="JSON, written after each number of rows")
    options = parser.parse_args()
    about = environment(torch.device("cuda"))
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}", flush=True)
    products: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    model, exact = make_model().to(HALF), make_model()
    expected = {rows: one_step(exact, rows, torch.float32)() for rows in options.rows}

    def write() -> None:
        if options.out is not None:
            write_json(options.out, {"about": about, "layers": layers, "products": products})

    with mock.patch.object(dispatch, "SMALL_BATCH_ROWS", max(ROWS)):
        for rows in options.rows:  # first, and recorded whatever the prototype does
            with kernel_policy(KernelPolicy(small_gemm=False, pdl=False)):
                time_layers(one_step(model, rows, HALF), "library", rows, expected[rows], layers)
            time_layers(one_step(model, rows, HALF), "present", rows, expected[rows], layers)
        write()
        for rows in options.rows:
            time_products(rows, options.variants, products)
            for variant in options.variants:
                with in_network(VARIANTS[variant]):
                    time_layers(one_step(model, rows, HALF), variant, rows, expected[rows], layers)
            write()


if __name__ == "__main__":
    main()
