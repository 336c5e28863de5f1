"""Decoding attention: up to 64 queries per program over a short cache, each seeing the first slots of its row.

Forward only. New slots bring their own keys and values, which the same kernel writes into the cache, so that a layer of
Pass 1 is one kernel. Settled slots are complete, whichever kernels still run: earlier steps have written them. Where
few programs run they are read before the dependency barrier; only queries and the newest slots are read after it.

A float8 cache is read as 16-bit words, of one even and one odd channel each, and converted to float16, which holds
every float8 number: a product takes the even channels and the odd ones as two parts. The tensor cores want the values
of two slots in one register; bytes would have to be loaded one by one for that, words need not.
Shapes: B rows, S queries, T slots, H heads, K head channels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpg.kernels.dispatch import FLOAT8, prefetch_weights
from arpg.kernels.fused_rope import packed_row, store_rope

if TYPE_CHECKING:
    from arpg.kernels.ops import Packing

_MAX_QUERIES = 64  # of one program
_FEW_QUERIES = 16  # the smallest tile
_BUSY_PROGRAMS = 512  # programs that keep a GPU busy
_PREFETCH_WARPS = {128: 4, 256: 4, 512: 16}  # settled slots read before the dependency barrier: warps of the program

Rope = tuple[Tensor, Tensor]  # cos_BSK, sin_BSK


class Tiles(NamedTuple):
    """Tile sizes of the kernel. Registers decide how many programs run at once."""

    queries: int
    slots: int
    warps: int
    stages: int
    registers: int | None = None  # of a thread, for heads of up to 64 channels
    prefetch: bool = False  # settled slots are read before the dependency barrier; others are at most `queries`


def tiles(
    queries: int,
    pairs: int,
    *,
    new: bool,
    packed: bool = False,
    settled: int | None = None,
    newest: int = 0,
    float8: bool = False,
) -> Tiles:
    """Choose tiles for `queries` in each of `pairs` of a row and a head; with new slots one program takes all queries.

    `packed`: most rows have much fewer queries than the longest. `newest` slots follow the `settled` ones; None: not
    known. `float8`: the cache is. `benchmarks/attention_tiles.py` measures other tiles.
    """
    rows = _FEW_QUERIES if packed or queries <= _FEW_QUERIES else 32 if queries <= 32 else _MAX_QUERIES
    if pairs * triton.cdiv(queries, rows) < _BUSY_PROGRAMS:  # read as much of the cache at once as there is
        slots = None if settled is None else next((size for size in _PREFETCH_WARPS if size >= settled), None)
        if slots is not None and max(newest, queries) <= rows == _FEW_QUERIES:  # all newest ones in one tile
            return Tiles(rows, slots, _PREFETCH_WARPS[slots], stages=2, prefetch=True)
        slots, warps = (128, 8) if rows == _FEW_QUERIES else (64, 4)
        return Tiles(rows, slots, warps, stages=2)
    if rows > _FEW_QUERIES:
        return Tiles(_MAX_QUERIES, slots=32, warps=4, stages=3)
    # So that a multiprocessor holds 16 programs; 32 slots of float8 take the memory of 16 others.
    return Tiles(rows, slots=32 if float8 else 16, warps=1, stages=3, registers=128)


def attend(
    q_BSHK: Tensor,
    key_BTHK: Tensor,
    value_BTHK: Tensor,
    limit_BS: Tensor | None,
    rope: Rope | None = None,
    *,
    settled: int = 0,
    dtype: torch.dtype | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """`[B, S, H, K]`. `limit_BS`: how many slots each query sees, one or more; None: all.

    With `rope` (`[B, S, K]` each) the queries are rotated when they are read. `settled`: the first so many slots are
    complete, whichever kernels still run. `dtype`: of the output, by default that of the queries. `packing`: queries,
    rotation and output are packed, limits are those of padded rows.
    """
    qkv, cache = (q_BSHK, q_BSHK, q_BSHK), (key_BTHK, value_BTHK)
    return _launch(qkv, cache, limit_BS, rope, key_BTHK.shape[1], settled, new=False, dtype=dtype, packing=packing)


def attend_and_store(
    qkv_BS3HK: Tensor,
    cache: tuple[Tensor, Tensor],
    limit_BS: Tensor | None,
    rope: Rope,
    first: int | Tensor,
    *,
    settled: int = 0,
    dtype: torch.dtype | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache from slot `first` (of each row) on, and attend.

    `limit_BS` counts slots of the cache, the new ones among them. `settled` and `packing` as in `attend`.
    """
    q, k, v = qkv_BS3HK.unbind(2)
    # With one program for all queries of packed rows, every row would take the time of the longest.
    num_new, most = (q.shape[1], _MAX_QUERIES) if packing is None else (packing.width, _FEW_QUERIES)
    if num_new <= most:
        return _launch((q, k, v), cache, limit_BS, rope, first, settled, new=True, dtype=dtype, packing=packing)
    store_rope(k, v, *rope, key_BTHK=cache[0], value_BTHK=cache[1], first=first, packing=packing)
    if isinstance(first, Tensor):  # a row ends where its limits say
        return attend(q, *cache, limit_BS, rope, dtype=dtype, packing=packing)
    key, value = (x[:, : first + num_new] for x in cache)
    return attend(q, key, value, limit_BS, rope, dtype=dtype, packing=packing)


def _launch(
    qkv: tuple[Tensor, Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    limit_BS: Tensor | None,
    rope: Rope | None,
    first: int | Tensor,
    settled: int,
    *,
    new: bool,
    dtype: torch.dtype | None,
    packing: Packing | None,
) -> Tensor:
    """`first`: where the new slots are written; without new ones, where the cache ends."""
    q, k, v = qkv
    batch, queries, heads, channels = q.shape
    out = torch.empty((batch, queries, heads, channels), dtype=dtype or q.dtype, device=q.device)
    start, count = q, q  # not read
    if packing is not None:
        batch, queries, start, count = len(cache[0]), packing.width, packing.start_R, packing.count_R
        q, k, v = (packed_row(x, batch) for x in qkv)
    limit = q if limit_BS is None else limit_BS.expand(batch, queries)  # without limits: not read
    cos, sin = (q, q) if rope is None else (x.contiguous() for x in rope)
    ragged = isinstance(first, Tensor)
    known: dict[str, int] = {}
    if not isinstance(first, Tensor) and not torch.compiler.is_compiling():  # which would compile for each number
        if not new:
            known = {"settled": settled, "newest": first - settled}
        elif settled == first:
            known = {"settled": settled, "newest": queries}
    float8 = cache[0].dtype == FLOAT8
    tile = tiles(queries, batch * heads, new=new, packed=packing is not None, float8=float8, **known)
    assert not new or queries <= tile.queries
    assert not tile.prefetch or (known["settled"] <= tile.slots and 0 <= known["newest"] <= tile.queries)
    pdl = prefetch_weights(q)
    options: dict[str, Any] = {}
    if pdl:
        options["launch_pdl"] = True
    if tile.registers is not None and channels <= 64 and not torch.compiler.is_compiling():  # which cannot pass it on
        options["maxnreg"] = tile.registers
    _attend[(triton.cdiv(queries, tile.queries), batch * heads)](
        q, k, v, *cache, limit, cos, sin, first if ragged else q, start, count, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *cache[0].stride()[:3], *cache[1].stride()[:3],
        *limit.stride()[:2], queries, 0 if ragged else first, settled if tile.prefetch else 0, heads,
        math.log2(math.e) / math.sqrt(channels), channels, limit_BS is not None, rope is not None, new, ragged,
        packing is not None, tile.queries, tile.slots, max(32 if float8 else 16, triton.next_power_of_2(channels)), pdl,
        tile.prefetch, float8, _COMPILED and q.dtype != torch.float32,
        num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["S", "first", "settled"])
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, key, value, limit, cos, sin, lengths, starts, counts, out,
    qb, qs, qh, nb, ns, nh, ub, us, uh, kb, kt: tl.constexpr, kh, vb, vt: tl.constexpr, vh, lb, ls,
    S, first, settled, H, scale: tl.constexpr, K: tl.constexpr,
    LIMITED: tl.constexpr, ROPE: tl.constexpr, NEW: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
    PAIRED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Some queries of one head of one row; online softmax in base 2.

    New slots enter the softmax first, then the cache's last ones, of which there may be fewer than SLOTS, then whole
    blocks, which need no mask. All that comes before the blocks is read before anything is computed. PREFETCH: at most
    SLOTS settled slots, read before the dependency barrier, and at most ROWS others enter the softmax together.
    PAIRED: the cache is float8; a column of it is then a word of two channels. PTX: words are converted by `_unpack`.
    PACKED: all but the cache is one row of packed tokens, of which these are some.
    """
    if PDL:  # the next kernel may prefetch its weights
        tl.extra.cuda.gdc_launch_dependents()
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)[None, :]
    whole = None if K == CHANNELS else channel < K
    key += batch * kb + head * kh
    value += batch * vb + head * vh
    new_key, new_value = key, value  # where new ones are written
    if PAIRED:
        key, value = key.to(tl.pointer_type(tl.int16), bitcast=True), value.to(tl.pointer_type(tl.int16), bitcast=True)
    WIDTH: tl.constexpr = 2 if PAIRED else 1  # channels of a column
    KT: tl.constexpr = kt // WIDTH
    VT: tl.constexpr = vt // WIDTH
    column = tl.arange(0, CHANNELS // WIDTH)[None, :]
    whole_columns = None if K == CHANNELS else column < K // WIDTH
    if PREFETCH:
        slot = tl.arange(0, SLOTS)
        stored = (slot[:, None] < settled) & (column < K // WIDTH)
        keys = tl.load(key + slot[:, None] * KT + column, stored, other=0)
        values = tl.load(value + slot[:, None] * VT + column, stored, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    origin = batch * S  # of the row, among all queries
    if PACKED:
        S = tl.load(counts + batch).to(tl.int32)
        if tl.program_id(0) * ROWS >= S:
            return
        origin = tl.load(starts + batch)
        q += origin * qs
        k += origin * ns
        v += origin * us
    end = first
    if RAGGED:
        end = tl.load(lengths + batch).to(tl.int32)
    if LIMITED:
        sees = tl.load(limit + batch * lb + query * ls, query < S, other=1).to(tl.int32)[:, None]
        if not NEW:  # a row may be shorter than the longest: no more is read than its queries see
            end = tl.minimum(end, tl.max(sees))
    row = tl.minimum(query, S - 1)[:, None]  # behind the last query: the last one again
    x = _load(q + batch * qb + head * qh + row * qs + channel, whole)
    if NEW:  # as many as there are queries
        new_keys = _load(k + batch * nb + head * nh + row * ns + channel, whole)
        new_values = _load(v + batch * ub + head * uh + row * us + channel, whole)
    if ROPE:
        angle = row * K + channel
        c, n = _load(cos + origin * K + angle, whole), _load(sin + origin * K + angle, whole)
    if PREFETCH and not NEW:  # keys last: their layout conversion holds up later loads
        slot = settled + tl.arange(0, ROWS)
        stored = (slot[:, None] < end) & (column < K // WIDTH)
        new_values = tl.load(value + slot[:, None] * VT + column, stored, other=0)
        new_keys = tl.load(key + slot[:, None] * KT + column, stored, other=0)
    if ROPE:
        x = _rotate(x, c, n)
        if NEW:
            new_keys = _rotate(new_keys, c, n)
    held, fresh = end, S
    if PREFETCH:
        slot, held = tl.arange(0, SLOTS), settled
        if not NEW:
            fresh = end - settled
    else:
        blocks = tl.maximum(end - 1, 0) // SLOTS  # whole ones, before the last
        slot = blocks * SLOTS + tl.arange(0, SLOTS)
        stored = (slot[:, None] < end) & (column < K // WIDTH)
        values = tl.load(value + slot[:, None] * VT + column, stored, other=0)
        keys = tl.load(key + slot[:, None] * KT + column, stored, other=0)
    there = (query[:, None] < S) & (channel < K)
    visible, new_visible = (slot < held)[None, :], (query < fresh)[None, :]
    if LIMITED:
        visible, new_visible = visible & (slot[None, :] < sees), new_visible & ((held + query)[None, :] < sees)
    if NEW:
        to = (end + query)[:, None]
        new_keys, new_values = new_keys.to(new_key.dtype.element_ty), new_values.to(new_value.dtype.element_ty)
        tl.store(new_key + to * kt + channel, new_keys, there)
        tl.store(new_value + to * vt + channel, new_values, there)
        new_keys, new_values = _split(new_keys, q, PAIRED), _split(new_values, q, PAIRED)
    elif PREFETCH:
        new_keys, new_values = _convert(new_keys, q, PAIRED, PTX), _convert(new_values, q, PAIRED, PTX)
    x = _split(x, q, PAIRED)
    keys, values = _convert(keys, q, PAIRED, PTX), _convert(values, q, PAIRED, PTX)
    if PREFETCH:
        total, mean = _softmax_pair(x, keys, values, visible, new_keys, new_values, new_visible, scale)
        result = _join(mean) / (_join((total, total)) if PAIRED else total)
    else:
        if NEW:
            most, total, mean = _softmax_start(x, new_keys, new_values, new_visible, scale, LIMITED)
            most, total, mean = _softmax_add(x, keys, values, visible, scale, most, total, mean, LIMITED)
        else:
            most, total, mean = _softmax_start(x, keys, values, visible, scale, LIMITED)
        slot = tl.arange(0, SLOTS)
        for start in range(0, blocks * SLOTS, SLOTS):
            some_keys = _load(key + start * KT + (slot[:, None] * KT + column), whole_columns)
            some_values = _load(value + start * VT + (slot[:, None] * VT + column), whole_columns)
            keys, values = _convert(some_keys, q, PAIRED, PTX), _convert(some_values, q, PAIRED, PTX)
            within = start + slot[None, :] < sees if LIMITED else None
            most, total, mean = _softmax_add(x, keys, values, within, scale, most, total, mean, LIMITED)
        result = _join(mean) * (1 / total)[:, None]
    at = out + (origin * H + head) * K + (query[:, None] * H * K + channel)
    tl.store(at, result.to(out.dtype.element_ty), there)


_COMPILED = isinstance(_attend, triton.JITFunction)  # or interpreted, which has no PTX


@triton.jit
def _load(at, mask):  # type: ignore[no-untyped-def]
    """Zero where the mask is off, if there is one."""
    if mask is None:
        return tl.load(at)
    else:
        return tl.load(at, mask, other=0)


@triton.jit
def _split(x, like, PAIRED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The parts of rows of channels: all, or even and odd ones in the type that `_convert` gives words of the cache."""
    if PAIRED:
        dtype: tl.constexpr = tl.float32 if like.dtype.element_ty == tl.float32 else tl.float16
        return tl.split(tl.reshape(x.to(dtype), (x.shape[0], x.shape[1] // 2, 2)))
    else:
        return (x,)


@triton.jit
def _convert(columns, like, PAIRED: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The parts of columns of the cache: all channels, or even and odd ones."""
    if PTX and PAIRED:
        return _unpack(columns)
    elif PAIRED:
        dtype: tl.constexpr = tl.float32 if like.dtype.element_ty == tl.float32 else tl.float16
        low, high = (columns & 0xFF).to(tl.uint8), ((columns >> 8) & 0xFF).to(tl.uint8)
        even, odd = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        return even.to(dtype), odd.to(dtype)
    else:
        return (columns,)


@triton.jit
def _unpack(words):  # type: ignore[no-untyped-def]
    """Even and odd channels of words of two float8 numbers, in float16: three instructions for two words.

    Two words are in a register: their low bytes go to its lower half, their high bytes to the upper one. From the plain
    code of `_convert`, the compiler makes three times as many instructions.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 bytes;
        .reg .b16 low, high;
        prmt.b32 bytes, $2, 0, 0x3120;
        mov.b32 {low, high}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _join(parts):  # type: ignore[no-untyped-def]
    """Rows of channels from their parts."""
    if len(parts) == 2:
        return tl.reshape(tl.join(parts[0], parts[1]), (parts[0].shape[0], 2 * parts[0].shape[1]))
    else:
        return parts[0]


@triton.jit
def _dot(weight, values, start):  # type: ignore[no-untyped-def]
    """The product with each part of `values`, added to the parts of `start` if there are any."""
    if start is None and len(values) == 2:
        even = tl.dot(weight, values[0], input_precision="ieee")
        return even, tl.dot(weight, values[1], input_precision="ieee")
    elif start is None:
        return (tl.dot(weight, values[0], input_precision="ieee"),)
    elif len(values) == 2:
        even = tl.dot(weight, values[0], start[0], input_precision="ieee")
        return even, tl.dot(weight, values[1], start[1], input_precision="ieee")
    else:
        return (tl.dot(weight, values[0], start[0], input_precision="ieee"),)


@triton.jit
def _scores(x, keys, visible):  # type: ignore[no-untyped-def]
    score = tl.dot(x[0], tl.trans(keys[0]), input_precision="ieee")
    if len(x) == 2:
        score = tl.dot(x[1], tl.trans(keys[1]), score, input_precision="ieee")
    return score if visible is None else tl.where(visible, score, float("-inf"))


@triton.jit
def _softmax_start(x, keys, values, visible, scale, LIMITED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Start the online softmax. Where there are limits, a query may see none of the slots."""
    score = _scores(x, keys, visible)
    most = tl.max(score, 1) * scale
    safe = tl.where(most == float("-inf"), 0.0, most) if LIMITED else most
    weight = tl.exp2(score * scale - safe[:, None])
    return most, tl.sum(weight, 1), _dot(weight.to(values[0].dtype), values, None)


@triton.jit
def _softmax_pair(x, keys, values, visible, new_keys, new_values, new_visible, scale):  # type: ignore[no-untyped-def]
    """Softmax over two sets of slots, of which every query sees one slot or more.

    Weights are summed by a product with ones, so that every channel of the mean has its own sum and no thread waits.
    """
    score, new_score = _scores(x, keys, visible), _scores(x, new_keys, new_visible)
    most = tl.maximum(tl.max(score, 1), tl.max(new_score, 1)) * scale
    weight = tl.exp2(score * scale - most[:, None]).to(values[0].dtype)
    new_weight = tl.exp2(new_score * scale - most[:, None]).to(values[0].dtype)
    mean = _dot(weight, values, None)
    total = tl.dot(weight, tl.full(values[0].shape, 1.0, weight.dtype), input_precision="ieee")
    mean = _dot(new_weight, new_values, mean)
    total = tl.dot(new_weight, tl.full(new_values[0].shape, 1.0, weight.dtype), total, input_precision="ieee")
    return total, mean


@triton.jit
def _softmax_add(x, keys, values, visible, scale, most, total, mean, LIMITED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add slots to the online softmax."""
    score = _scores(x, keys, visible)
    higher = tl.maximum(most, tl.max(score, 1) * scale)
    safe = tl.where(higher == float("-inf"), 0.0, higher) if LIMITED else higher
    weight = tl.exp2(score * scale - safe[:, None])
    fade = tl.exp2(most - safe)
    total = total * fade + tl.sum(weight, 1)
    weight = weight.to(values[0].dtype)
    if len(mean) == 2:
        return higher, total, _dot(weight, values, (mean[0] * fade[:, None], mean[1] * fade[:, None]))
    else:
        return higher, total, _dot(weight, values, (mean[0] * fade[:, None],))


@triton.jit
def _rotate(x, cos, sin):  # type: ignore[no-untyped-def]
    """Rotate rows of one head. Partners are swapped by exclusive or, which moves nothing between threads."""
    bits = x.to(tl.int32 if x.dtype == tl.float32 else tl.int16, bitcast=True)
    pairs = tl.reshape(bits, (x.shape[0], x.shape[1] // 2, 2))
    swapped = tl.reshape(pairs ^ tl.xor_sum(pairs, 2, keep_dims=True), x.shape)
    partner = swapped.to(x.dtype, bitcast=True).to(tl.float32)
    along, across = x.to(tl.float32) * cos, partner * sin
    return tl.where(tl.arange(0, x.shape[1])[None, :] % 2 == 0, along - across, along + across).to(x.dtype)
