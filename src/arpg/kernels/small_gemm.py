"""GEMM for small batches (up to 48 rows): norm, product, then SwiGLU or the residual sum, in one kernel. Forward only.

With so few rows a product takes as long as reading its weights. So a program prefetches all of its weights before the
dependency barrier (programmatic dependent launch); only the rows are read after it. An RMS norm needs the squares of
all inputs of a row: the kernel that writes the rows can sum the squares of its outputs for the next one. On Hopper,
`wgmma_gemm.py` is faster from 24 rows on.

The kernel is written in Gluon, the part of Triton with explicit layouts. Rows and weights are loaded as the tensor
cores take them, 16 bytes per thread, without shared memory: the order of inputs does not matter to a product, as long
as rows and weights agree. Each warp multiplies inputs of its own; their sums are combined in shared memory.
Shapes: M rows, D inputs, N outputs, P partial sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime.jit import constexpr_function

from arpg.kernels.dispatch import num_processors, prefetch_weights

SCALES_STREAM = False  # the norm's weight is multiplied into the weights of the layer
ROWS = 16  # of a program: one tile of the tensor cores
INPUTS = gl.constexpr(64)  # of a warp per iteration: two loads of 16 bytes for each of the four threads of a row


class Tile(NamedTuple):
    """Tile of one program."""

    outputs: int  # of a group
    groups: int  # at most; no more than it takes to give each processor one program
    warps: int
    staged: bool  # weights are prefetched to shared memory, not to registers
    lead: int  # parts of the rows that are loaded before the first is multiplied
    registers: int  # of a thread, at most: the programs of a processor share 65,536


# By kind of product, the fastest of those that `benchmarks/fused_gemm.py --tiles` tries.
TILES: dict[str, Tile] = {
    "plain": Tile(8, 3, 4, True, 4, 168),
    "swiglu": Tile(8, 1, 4, False, 4, 168),
    "sum": Tile(8, 1, 8, False, 6, 112),
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
) -> Tensor:
    """`[..., N]`: x times the weight, after an RMS norm of `x` (`[..., D]`) where `norm_D` is given; plus `add`.

    With `swiglu`, the weight holds gates and ups `[2 N, D]`: silu(gate) * up. `sums_PM`, made by `empty_sums`, gets
    partial sums of the squares of the outputs, which the next norm takes as `squares_PM`. With `add`, `squares_PM` are
    those of `add`; only `wgmma_gemm.py` needs them there.
    """
    inputs, outputs = x.shape[-1], len(weight_ND) // (2 if swiglu else 1)
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    x_MD = x.flatten(0, -2)
    add_MN = out if add is None else add.flatten(0, -2)
    assert x_MD.stride(-1) == add_MN.stride(-1) == 1
    assert weight_ND.is_contiguous()
    tile = TILES["swiglu" if swiglu else "plain" if add is None else "sum"]
    groups, blocks = _groups(tile, outputs, x), triton.cdiv(len(x_MD), ROWS)
    parts, padded = (0, 0) if norm_D is None or squares_PM is None else squares_PM.shape
    assert parts == 0 or padded == blocks * ROWS
    _small_gemm[(triton.cdiv(outputs, tile.outputs * groups), blocks)](
        x_MD, x if norm_D is None else norm_D, weight_ND, add_MN, out, x if squares_PM is None else squares_PM,
        x if sums_PM is None else sums_PM, len(x_MD), outputs, x_MD.stride(0), add_MN.stride(0), eps, inputs,
        norm_D is not None, add is not None, swiglu, sums_PM is not None, parts, triton.next_power_of_2(parts), ROWS,
        tile.outputs, groups, tile.warps, tile.staged, tile.lead, prefetch_weights(x), num_warps=tile.warps,
        maxnreg=tile.registers, launch_pdl=prefetch_weights(x),
    )  # fmt: skip
    return out


def empty_sums(x: Tensor, weight_ND: Tensor) -> Tensor:
    """Allocate partial sums of the squares of `x @ weight + add`: `[P, M]`, those of a row beside each other.

    Rows are padded to a whole number of programs, so that they can be read without a mask.
    """
    tile = TILES["sum"]
    groups = _groups(tile, len(weight_ND), x)
    makers = triton.cdiv(len(weight_ND), tile.outputs * groups) * groups
    padded = triton.cdiv(x.numel() // x.shape[-1], ROWS) * ROWS
    return torch.empty((padded, makers), dtype=torch.float32, device=x.device).t()


def _groups(tile: Tile, outputs: int, x: Tensor) -> int:
    return min(tile.groups, triton.cdiv(triton.cdiv(outputs, tile.outputs), num_processors(x.device)))


@constexpr_function
def _load_layout(warps, size, axis):  # type: ignore[no-untyped-def]
    """The layout of loads of `[warp, size, 64 inputs]` (1) or `[warp, 64 inputs, size]` (2)."""

    def at(warp, other, channel):  # type: ignore[no-untyped-def]
        return [warp, other, channel] if axis == 1 else [warp, channel, other]

    registers = [at(0, 0, 1), at(0, 0, 2), at(0, 0, 4), at(0, 0, 32)]
    registers += [at(0, 8 << bit, 0) for bit in range((size // 8).bit_length() - 1)]
    lanes = [at(0, 0, 8), at(0, 0, 16), at(0, 1, 0), at(0, 2, 0), at(0, 4, 0)]
    of_warps = [at(1 << bit, 0, 0) for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], at(warps, size, 64))


@constexpr_function
def _plain_layout(rank):  # type: ignore[no-untyped-def]
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank - 1, -1, -1)))


@constexpr_function
def _shared_layout(warps, outputs):  # type: ignore[no-untyped-def]
    """Lines of 64 inputs; every other line with its halves swapped, to avoid bank conflicts."""
    bits = [[0, 1 << bit, 0] for bit in range(6)] + [[0, 32, 1]]
    bits += [[0, 0, 2 << bit] for bit in range(outputs.bit_length() - 2)]
    return gl.SharedLinearLayout(bits + [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)])


@gluon.jit(do_not_specialize=["M"])
def _small_gemm(  # type: ignore[no-untyped-def]
    x, norm, weight, add, out, squares, sums, M, N, x_row, add_row, eps, D: gl.constexpr, NORM: gl.constexpr,
    ADD: gl.constexpr, SWIGLU: gl.constexpr, SUMS: gl.constexpr, GIVEN: gl.constexpr, GIVEN_BLOCK: gl.constexpr,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr, STAGED: gl.constexpr,
    LEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Some groups of outputs of some rows. Rows are `[warp, row, input]`, weights `[warp, input, output]`.

    Rows and outputs past the end repeat the last one and are not stored. `STAGED`: weights are prefetched to shared
    memory, not to registers. `LEAD`: parts of the rows that are loaded before the first is multiplied.
    """
    EACH: gl.constexpr = 2 * OUTPUTS if SWIGLU else OUTPUTS
    CHAINS: gl.constexpr = 2 if GROUPS * EACH == 8 else 1  # independent accumulators
    STEP: gl.constexpr = WARPS * INPUTS
    PARTS: gl.constexpr = (D + STEP - 1) // STEP
    SUM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = _load_layout(WARPS, ROWS, 1)
    RIGHT: gl.constexpr = _load_layout(WARPS, EACH, 2)
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 8, 4], [WARPS, 1, 1], [1, 2, 0]) if STAGED else RIGHT
    DOWN: gl.constexpr = ROWS // WARPS  # rows of a warp once the sums are combined
    WIDE: gl.constexpr = 1 if OUTPUTS * DOWN < 32 else OUTPUTS * DOWN // 32
    MET: gl.constexpr = gl.BlockedLayout([WARPS, 1, WIDE], [1, DOWN, 32 // DOWN], [1, WARPS, 1], [2, 1, 0])
    END: gl.constexpr = gl.SliceLayout(0, MET)
    MADE: gl.constexpr = gl.BlockedLayout([4, 1], [32 // DOWN, DOWN], [1, WARPS], [0, 1])
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_group, first_row = gl.program_id(0) * GROUPS, gl.program_id(1) * ROWS
    both = gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(1, COPIED)))  # gates of some outputs, then their ups
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, COPIED)))[:, None, None]
    channel = warp * INPUTS + gl.arange(0, INPUTS, gl.SliceLayout(0, gl.SliceLayout(2, COPIED)))[None, :, None]
    weights, scales, rows, totals, befores, shared = (), (), (), (), (), ()
    for part in gl.static_range(PARTS):
        for group in gl.static_range(GROUPS):
            line = gl.minimum((first_group + group) * OUTPUTS + both % OUTPUTS, N - 1) + both // OUTPUTS * N
            lines = weight + (line * D)[None, None, :]
            if STAGED:
                tile = _copy(lines, channel, part * STEP, STEP, D, WARPS, EACH)
            else:
                tile = _load(lines, channel, part * STEP, STEP, D)
            weights += (tile,)  # type: ignore[assignment]
    if STAGED:
        async_copy.commit_group()
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    channel = warp * INPUTS + gl.arange(0, INPUTS, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    if NORM:
        for part in gl.static_range(PARTS):
            scales += (_load(norm, channel, part * STEP, STEP, D),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()

    row = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LEFT))), M - 1)
    begin = x + (row * x_row)[None, :, None]
    for part in gl.static_range(LEAD if LEAD < PARTS else PARTS):
        rows += (_load(begin, channel, part * STEP, STEP, D),)  # type: ignore[assignment]
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, END))
    if ADD:
        for group in gl.static_range(GROUPS):
            output = (first_group + group) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, END))
            there = (row[:, None] < M) & (output[None, :] < N)
            befores += (gl.load(add + row[:, None] * add_row + output[None, :], there, other=0.0),)  # type: ignore[assignment]
    if NORM and GIVEN:
        maker = gl.arange(0, GIVEN_BLOCK, gl.SliceLayout(1, MADE))[:, None]
        maker_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, MADE))[None, :]
        given = gl.load(squares + maker_row * GIVEN + maker, maker < GIVEN, other=0.0)
    if STAGED:
        gl.thread_barrier()  # so that the compiler loads the rows before it waits for the weights
        async_copy.wait_group(0)
    square_w = gl.zeros((WARPS, ROWS), gl.float32, gl.SliceLayout(2, LEFT))
    for _ in gl.static_range(GROUPS * CHAINS):
        totals += (gl.zeros((WARPS, ROWS, EACH), gl.float32, SUM),)  # type: ignore[assignment]
    for part in gl.static_range(PARTS):
        if part + LEAD < PARTS:
            rows += (_load(begin, channel, (part + LEAD) * STEP, STEP, D),)  # type: ignore[assignment]
        some = rows[part]  # type: ignore[var-annotated]
        if NORM and not GIVEN:
            exact = some.to(gl.float32)  # type: ignore[var-annotated]
            square_w += gl.sum(exact * exact, 2)
        if NORM:
            some = _multiply(some, scales[part])
        some = some.reshape((WARPS, ROWS, 2, 4, 2, 2, 2)).permute(0, 1, 2, 4, 5, 3, 6)
        some = some.reshape((WARPS, ROWS, INPUTS))
        some = gl.convert_layout(some, gl.DotOperandLayout(0, SUM, 2), assert_trivial=True)
        of_chain, of_others, totals = totals[:GROUPS], totals[GROUPS:], ()
        for group in gl.static_range(GROUPS):
            tile = weights[part * GROUPS + group]
            if STAGED:
                tile = tile.load(RIGHT)
            tile = tile.reshape((WARPS, 2, 4, 2, 2, 2, EACH)).permute(0, 1, 3, 4, 2, 5, 6)
            tile = tile.reshape((WARPS, INPUTS, EACH))
            tile = gl.convert_layout(tile, gl.DotOperandLayout(1, SUM, 2), assert_trivial=True)
            totals += (mma_v2(some, tile, of_chain[group]),)
        totals = of_others + totals

    if NORM:
        if GIVEN:
            square = gl.sum(given, 0)
        else:
            of_warps = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], _plain_layout(2), square_w)
            square = gl.sum(of_warps.load(gl.SliceLayout(2, MET)), 0)
        factor = gl.rsqrt(gl.convert_layout(square, gl.SliceLayout(1, END)) / D + eps)[:, None]
    for group in gl.static_range(GROUPS):
        total = totals[group] + totals[GROUPS + group] if CHAINS == 2 else totals[group]  # type: ignore[var-annotated]
        shared += (gl.allocate_shared_memory(gl.float32, [WARPS, ROWS, EACH], _plain_layout(3), total),)  # type: ignore[assignment]
    for group in gl.static_range(GROUPS):
        output = (first_group + group) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, END))
        there = (row[:, None] < M) & (output[None, :] < N)
        total = gl.sum(shared[group].slice(0, OUTPUTS, 2).load(MET), 0)
        if NORM:
            total *= factor
        if SWIGLU:
            up = gl.sum(shared[group].slice(OUTPUTS, OUTPUTS, 2).load(MET), 0)
            total = (up * factor if NORM else up) * total / (1.0 + gl.exp(-total))
        if ADD:
            total += befores[group].to(gl.float32)
        result = total.to(out.dtype.element_ty)
        gl.store(out + row[:, None] * N + output[None, :], result, there)
        if SUMS:  # of the rounded outputs, which the next kernel reads
            rounded = gl.where(output[None, :] < N, result.to(gl.float32), 0.0)
            place = row * (gl.num_programs(0) * GROUPS) + first_group + group
            gl.store(sums + place, gl.sum(rounded * rounded, 1))


@gluon.jit
def _load(begin, channel, first: gl.constexpr, size: gl.constexpr, D: gl.constexpr):  # type: ignore[no-untyped-def]
    """Load some channels from the first on; zeros past the last."""
    if first + size <= D:
        return gl.load(begin + channel + first)
    else:
        return gl.load(begin + channel + first, channel + first < D, other=0.0)


@gluon.jit
def _copy(  # type: ignore[no-untyped-def]
    lines, channel, first: gl.constexpr, size: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, EACH: gl.constexpr
):
    """Copy some channels to shared memory."""
    to = gl.allocate_shared_memory(lines.dtype.element_ty, [WARPS, INPUTS, EACH], _shared_layout(WARPS, EACH))
    if first + size <= D:
        async_copy.async_copy_global_to_shared(to, lines + channel + first)
    else:
        async_copy.async_copy_global_to_shared(to, lines + channel + first, channel + first < D)
    return to


@gluon.jit
def _multiply(some, scale):  # type: ignore[no-untyped-def]
    """Multiply two values per instruction."""
    TYPE: gl.constexpr = "bf16x2" if some.dtype == gl.bfloat16 else "f16x2"
    some, scale = gl.broadcast(some, scale)
    return gl.inline_asm_elementwise(
        "mul.rn." + TYPE + " $0, $1, $2;", "=r,r,r", [some, scale], dtype=some.dtype, is_pure=True, pack=2
    )
