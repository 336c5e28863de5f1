"""GEMM for 24 to 64 rows on Hopper: norm, product, then SwiGLU or the residual sum, in one kernel. Forward only.

It computes what `small_gemm.py` computes, and leaves the sums of squares as that does, so that either may follow the
other. For this many rows that kernel reads the rows too often; here

- a program copies all of its weights to shared memory with the bulk tensor copy engine before the dependency barrier,
  so that they arrive while the kernels in front of it run; rows are copied after the barrier, through a ring of stages;
- the weights are the left operand of `wgmma`, 64 lines of a program; the rows are the right one, padded to 32 or 64.
  The copy engine reads no padding;
- the weight of the norm is multiplied into the weights in shared memory, before the barrier; the norm itself is a
  factor of each row, from the sums of squares that the kernel in front has left.

A weight with more inputs than shared memory holds is divided among four programs. Each writes its partial sums, and the
last to arrive adds all of them in a fixed order, so that results are reproducible. The counters of arrivals lie behind
the sums of squares of the residual stream: the product that makes the stream sets them to zero. A buffer of the module
would be shared by graphs that are replayed at once on two streams, and one that each call clears would put a kernel
without early launch in front of it.

Shapes: M rows, D inputs, N outputs, P partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
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

from arpg.kernels import small_gemm
from arpg.kernels.dispatch import MAX_WGMMA_INPUTS, WGMMA_SPLIT, prefetch_weights

SCALES_STREAM = False  # as in `small_gemm`
LINES = 64  # weight lines of a program: `wgmma` multiplies 64 at a time
ATOM = gl.constexpr(64)  # inputs of a bulk copy: 128 bytes, one swizzled line of shared memory
RING_BYTES = 64 * 1024  # of shared memory for rows: how much of them is on its way at once


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
    """`[..., N]`: the product of `small_gemm.linear`, whose arguments these are."""
    if norm_D is not None and squares_PM is None:  # the first layer of a pass: that kernel sums the squares itself
        return small_gemm.linear(x, weight_ND, norm_D=norm_D, eps=eps, swiglu=swiglu)
    inputs, outputs = x.shape[-1], len(weight_ND) // (2 if swiglu else 1)
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    x_MD = x.flatten(0, -2)
    add_MN = out if add is None else add.flatten(0, -2)
    assert x_MD.stride(-1) == add_MN.stride(-1) == 1
    assert weight_ND.is_contiguous()
    split = 1 if inputs <= MAX_WGMMA_INPUTS else WGMMA_SPLIT
    assert split == 1 or norm_D is None
    rows = max(16, triton.next_power_of_2(len(x_MD)))  # Triton has no other tiles
    row_bytes = rows * x.element_size()
    chunk = 128 if 4 * 128 * row_bytes <= RING_BYTES else 64  # inputs of a stage: at least four stages
    blocks = triton.cdiv(triton.cdiv(inputs, chunk), split)
    stages = min(blocks, RING_BYTES // (chunk * row_bytes))
    lines = LINES // 2 if swiglu else LINES
    tiles = triton.cdiv(outputs, lines)
    layout = gl.NVMMASharedLayout(128, 16)
    x_map = TensorDescriptor(x_MD, list(x_MD.shape), list(x_MD.stride()), [rows, chunk], layout)
    weight_map = TensorDescriptor(weight_ND, list(weight_ND.shape), [inputs, 1], [lines, ATOM.value], layout)
    partials = x.new_empty(tiles * split * rows * LINES if split > 1 else 1, dtype=torch.float32)
    counters = _counters(squares_PM, tiles, x.device) if split > 1 else partials
    given = 0 if norm_D is None or squares_PM is None else len(squares_PM)
    pdl = prefetch_weights(x)
    _wgmma_gemm[(tiles, split)](
        x_map, weight_map, x if norm_D is None else norm_D, add_MN, out, x if squares_PM is None else squares_PM,
        x if sums_PM is None else sums_PM, partials, counters, len(x_MD), outputs, add_MN.stride(0), eps, inputs,
        norm_D is not None, add is not None, swiglu, sums_PM is not None, given, triton.next_power_of_2(given), LINES,
        rows, chunk, blocks, stages, split, small_gemm.ROWS, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def empty_sums(x: Tensor, weight_ND: Tensor) -> Tensor:
    """Allocate partial sums of the squares of `x @ weight + add`: `[P, M]`, padded as in `small_gemm.empty_sums`.

    A counter for each tile of outputs lies behind them.
    """
    tiles, padded = triton.cdiv(len(weight_ND), LINES), triton.cdiv(x.numel() // x.shape[-1], small_gemm.ROWS)
    size = padded * small_gemm.ROWS * tiles
    return torch.empty(size + tiles, dtype=torch.float32, device=x.device)[:size].view(-1, tiles).t()


def _counters(squares_PM: Tensor | None, tiles: int, device: torch.device) -> Tensor:
    """Return how many programs of each tile have written their partial sums: zero before and after a product."""
    if squares_PM is None:
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    assert len(squares_PM) == tiles  # made by this kernel, for as many outputs
    return squares_PM.as_strided((tiles,), (1,), squares_PM.numel()).view(torch.int32)


@gluon.jit(do_not_specialize=["M"])
def _wgmma_gemm(  # type: ignore[no-untyped-def]
    x_map, weight_map, norm, add, out, squares, sums, partials, counters, M, N, add_row, eps, D: gl.constexpr,
    NORM: gl.constexpr, ADD: gl.constexpr, SWIGLU: gl.constexpr, SUMS: gl.constexpr, GIVEN: gl.constexpr,
    GIVEN_BLOCK: gl.constexpr, LINES: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, PADDED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`LINES` lines of the weight, `BLOCKS` chunks of the inputs, all rows. With `SWIGLU`, gates, then their ups.

    What lies past the last row, line or input is copied as zeros and not stored. `PADDED`: sums of squares are for a
    multiple of so many rows.
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
            padded = (M + PADDED - 1) // PADDED * PADDED
            gl.store(sums + row * gl.num_programs(0) + tile, gl.sum(rounded * rounded, 1), row < padded)
            gl.store(sums + padded * gl.num_programs(0) + tile, 0.0)  # the counter of the next product that is divided


@gluon.jit
def _sum_parts(part, there, SPLIT: gl.constexpr, STEP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Add the partial sums of all programs of a tile, in the order of their inputs whoever adds them."""
    total = gl.load(part, there, other=0.0, cache_modifier=".cg")
    for other in gl.static_range(1, SPLIT):
        total += gl.load(part + other * STEP, there, other=0.0, cache_modifier=".cg")
    return total
