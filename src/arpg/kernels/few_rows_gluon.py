"""The kernel of `few_rows.py`, in Gluon, the part of Triton in which one says where every number lies. Forward only.

Rows and weights are loaded as the tensor cores take them, 16 bytes a thread, and pass through no shared memory: which
input comes first does not matter to a product, as long as rows and weights agree. Each warp multiplies inputs of its
own; their sums meet in shared memory. All weights of a program are asked for before it waits for the kernel in front.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime.jit import constexpr_function

INPUTS = gl.constexpr(64)  # of a warp at a time: two loads of 16 bytes for each of the four threads of a row


@constexpr_function
def _loaded(warps, size, axis):  # type: ignore[no-untyped-def]
    """Who loads what of `[warp, size, 64 inputs]` (1) or `[warp, 64 inputs, size]` (2): eight inputs each, twice."""

    def at(warp, other, channel):  # type: ignore[no-untyped-def]
        return [warp, other, channel] if axis == 1 else [warp, channel, other]

    registers = [at(0, 0, 1), at(0, 0, 2), at(0, 0, 4), at(0, 0, 32)]
    registers += [at(0, 8 << bit, 0) for bit in range((size // 8).bit_length() - 1)]
    lanes = [at(0, 0, 8), at(0, 0, 16), at(0, 1, 0), at(0, 2, 0), at(0, 4, 0)]
    of_warps = [at(1 << bit, 0, 0) for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], at(warps, size, 64))


@constexpr_function
def _plain(rank):  # type: ignore[no-untyped-def]
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank - 1, -1, -1)))


@constexpr_function
def _shared(warps, outputs):  # type: ignore[no-untyped-def]
    """Lines of 64 inputs; every other line with its halves changed, so that no two threads want the same bank."""
    bits = [[0, 1 << bit, 0] for bit in range(6)] + [[0, 32, 1]]
    bits += [[0, 0, 2 << bit] for bit in range(outputs.bit_length() - 2)]
    return gl.SharedLinearLayout(bits + [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)])


@gluon.jit(do_not_specialize=["M"])
def few_rows_product(  # type: ignore[no-untyped-def]
    x, norm, weight, add, out, squares, sums, M, N, x_row, add_row, eps, D: gl.constexpr, NORM: gl.constexpr,
    ADD: gl.constexpr, SWIGLU: gl.constexpr, SUMS: gl.constexpr, GIVEN: gl.constexpr, GIVEN_BLOCK: gl.constexpr,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr, STAGED: gl.constexpr,
    LEAD: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Some groups of outputs of some rows. Rows are `[warp, row, input]`, weights `[warp, input, output]`.

    Rows and outputs that are not there are those of the last one, and not stored. `STAGED`: weights wait in shared
    memory, not in registers. `LEAD`: parts of the rows that are asked for before one is multiplied.
    """
    EACH: gl.constexpr = 2 * OUTPUTS if SWIGLU else OUTPUTS
    CHAINS: gl.constexpr = 2 if GROUPS * EACH == 8 else 1  # sums that do not wait for each other
    STEP: gl.constexpr = WARPS * INPUTS
    PARTS: gl.constexpr = (D + STEP - 1) // STEP
    SUM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = _loaded(WARPS, ROWS, 1)
    RIGHT: gl.constexpr = _loaded(WARPS, EACH, 2)
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 8, 4], [WARPS, 1, 1], [1, 2, 0]) if STAGED else RIGHT
    DOWN: gl.constexpr = ROWS // WARPS  # rows of a warp once the sums have met
    WIDE: gl.constexpr = 1 if OUTPUTS * DOWN < 32 else OUTPUTS * DOWN // 32
    MET: gl.constexpr = gl.BlockedLayout([WARPS, 1, WIDE], [1, DOWN, 32 // DOWN], [1, WARPS, 1], [2, 1, 0])
    END: gl.constexpr = gl.SliceLayout(0, MET)
    MADE: gl.constexpr = gl.BlockedLayout([4, 1], [32 // DOWN, DOWN], [1, WARPS], [0, 1])
    if AHEAD:
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
                tile = _copied(lines, channel, part * STEP, STEP, D, WARPS, EACH)
            else:
                tile = _some(lines, channel, part * STEP, STEP, D)
            weights += (tile,)  # type: ignore[assignment]
    if STAGED:
        async_copy.commit_group()
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    channel = warp * INPUTS + gl.arange(0, INPUTS, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    if NORM:
        for part in gl.static_range(PARTS):
            scales += (_some(norm, channel, part * STEP, STEP, D),)  # type: ignore[assignment]
    if AHEAD:
        tl.extra.cuda.gdc_wait()

    row = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LEFT))), M - 1)
    begin = x + (row * x_row)[None, :, None]
    for part in gl.static_range(LEAD if LEAD < PARTS else PARTS):
        rows += (_some(begin, channel, part * STEP, STEP, D),)  # type: ignore[assignment]
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
        gl.thread_barrier()  # so that the compiler asks for the rows before it waits for the weights
        async_copy.wait_group(0)
    square_w = gl.zeros((WARPS, ROWS), gl.float32, gl.SliceLayout(2, LEFT))
    for _ in gl.static_range(GROUPS * CHAINS):
        totals += (gl.zeros((WARPS, ROWS, EACH), gl.float32, SUM),)  # type: ignore[assignment]
    for part in gl.static_range(PARTS):
        if part + LEAD < PARTS:
            rows += (_some(begin, channel, (part + LEAD) * STEP, STEP, D),)  # type: ignore[assignment]
        some = rows[part]  # type: ignore[var-annotated]
        if NORM and not GIVEN:
            exact = some.to(gl.float32)  # type: ignore[var-annotated]
            square_w += gl.sum(exact * exact, 2)
        if NORM:
            some = _times(some, scales[part])
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
            of_warps = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], _plain(2), square_w)
            square = gl.sum(of_warps.load(gl.SliceLayout(2, MET)), 0)
        factor = gl.rsqrt(gl.convert_layout(square, gl.SliceLayout(1, END)) / D + eps)[:, None]
    for group in gl.static_range(GROUPS):
        total = totals[group] + totals[GROUPS + group] if CHAINS == 2 else totals[group]  # type: ignore[var-annotated]
        shared += (gl.allocate_shared_memory(gl.float32, [WARPS, ROWS, EACH], _plain(3), total),)  # type: ignore[assignment]
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
        if SUMS:  # of what will be read, rounded
            rounded = gl.where(output[None, :] < N, result.to(gl.float32), 0.0)
            place = row * (gl.num_programs(0) * GROUPS) + first_group + group
            gl.store(sums + place, gl.sum(rounded * rounded, 1))


@gluon.jit
def _some(begin, channel, first: gl.constexpr, size: gl.constexpr, D: gl.constexpr):  # type: ignore[no-untyped-def]
    """Some channels from the first on; zeros behind the last."""
    if first + size <= D:
        return gl.load(begin + channel + first)
    else:
        return gl.load(begin + channel + first, channel + first < D, other=0.0)


@gluon.jit
def _copied(  # type: ignore[no-untyped-def]
    lines, channel, first: gl.constexpr, size: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, EACH: gl.constexpr
):
    """The same on the way to shared memory."""
    to = gl.allocate_shared_memory(lines.dtype.element_ty, [WARPS, INPUTS, EACH], _shared(WARPS, EACH))
    if first + size <= D:
        async_copy.async_copy_global_to_shared(to, lines + channel + first)
    else:
        async_copy.async_copy_global_to_shared(to, lines + channel + first, channel + first < D)
    return to


@gluon.jit
def _times(some, scale):  # type: ignore[no-untyped-def]
    """Two products an instruction."""
    TYPE: gl.constexpr = "bf16x2" if some.dtype == gl.bfloat16 else "f16x2"
    some, scale = gl.broadcast(some, scale)
    return gl.inline_asm_elementwise(
        "mul.rn." + TYPE + " $0, $1, $2;", "=r,r,r", [some, scale], dtype=some.dtype, is_pure=True, pack=2
    )
