"""The kernel of `attention.py`: queries of one head over the slots of their row, softmax on the fly. Forward only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["S", "first", "settled"])
def attend_kernel(  # type: ignore[no-untyped-def]
    q, k, v, key, value, limit, cos, sin, lengths, out,
    qb, qs, qh, nb, ns, nh, ub, us, uh, kb, kt: tl.constexpr, kh, vb, vt: tl.constexpr, vh, lb, ls,
    S, first, settled, H, scale: tl.constexpr, K: tl.constexpr,
    LIMITED: tl.constexpr, TURN: tl.constexpr, NEW: tl.constexpr, RAGGED: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some queries of one head of one row; softmax on the fly, in base 2.

    New slots enter the softmax first, then the cache's last ones, of which there may be fewer than SLOTS, then whole
    blocks, which need no mask. All that comes before the blocks is read before anything is computed. EARLY: at most
    SLOTS settled slots, read before the wait, and at most ROWS others, new or not, enter the softmax together.
    """
    if AHEAD:  # the next kernel may fetch its weights
        tl.extra.cuda.gdc_launch_dependents()
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)[None, :]
    whole = None if K == CHANNELS else channel < K
    key += batch * kb + head * kh
    value += batch * vb + head * vh
    if EARLY:
        slot = tl.arange(0, SLOTS)
        stored = (slot[:, None] < settled) & (channel < K)
        keys = tl.load(key + slot[:, None] * kt + channel, stored, other=0.0)
        values = tl.load(value + slot[:, None] * vt + channel, stored, other=0.0)
    if AHEAD:
        tl.extra.cuda.gdc_wait()
    end = first
    if RAGGED:
        end = tl.load(lengths + batch).to(tl.int32)
    row = tl.minimum(query, S - 1)[:, None]  # behind the last query: the last one again
    x = _load(q + batch * qb + head * qh + row * qs + channel, whole)
    if NEW:  # as many as there are queries
        new_keys = _load(k + batch * nb + head * nh + row * ns + channel, whole)
        new_values = _load(v + batch * ub + head * uh + row * us + channel, whole)
    if TURN:
        angle = row * K + channel
        c, n = _load(cos + batch * S * K + angle, whole), _load(sin + batch * S * K + angle, whole)
    if EARLY and not NEW:  # keys last: they change hands at once, which holds up whatever is read after them
        slot = settled + tl.arange(0, ROWS)
        stored = (slot[:, None] < end) & (channel < K)
        new_values = tl.load(value + slot[:, None] * vt + channel, stored, other=0.0)
        new_keys = tl.load(key + slot[:, None] * kt + channel, stored, other=0.0)
    if TURN:
        x = _turned(x, c, n)
        if NEW:
            new_keys = _turned(new_keys, c, n)
    held, fresh = end, S
    if EARLY:
        slot, held = tl.arange(0, SLOTS), settled
        if not NEW:
            fresh = end - settled
    else:
        blocks = tl.maximum(end - 1, 0) // SLOTS  # whole ones, before the last
        slot = blocks * SLOTS + tl.arange(0, SLOTS)
        stored = (slot[:, None] < end) & (channel < K)
        values = tl.load(value + slot[:, None] * vt + channel, stored, other=0.0)
        keys = tl.load(key + slot[:, None] * kt + channel, stored, other=0.0)
    there = (query[:, None] < S) & (channel < K)
    visible, new_visible = (slot < held)[None, :], (query < fresh)[None, :]
    if LIMITED:
        sees = tl.load(limit + batch * lb + query * ls, query < S, other=1).to(tl.int32)[:, None]
        visible, new_visible = visible & (slot[None, :] < sees), new_visible & ((held + query)[None, :] < sees)
    if NEW:
        to = (end + query)[:, None]
        tl.store(key + to * kt + channel, new_keys, there)
        tl.store(value + to * vt + channel, new_values, there)
    if EARLY:
        total, mean = _look_at_both(x, keys, values, visible, new_keys, new_values, new_visible, scale)
        result = mean / total
    else:
        if NEW:
            most, total, mean = _first_look(x, new_keys, new_values, new_visible, scale, LIMITED)
            most, total, mean = _look(x, keys, values, visible, scale, most, total, mean, LIMITED)
        else:
            most, total, mean = _first_look(x, keys, values, visible, scale, LIMITED)
        slot = tl.arange(0, SLOTS)
        for start in range(0, blocks * SLOTS, SLOTS):
            keys = _load(key + start * kt + (slot[:, None] * kt + channel), whole)
            values = _load(value + start * vt + (slot[:, None] * vt + channel), whole)
            within = start + slot[None, :] < sees if LIMITED else None
            most, total, mean = _look(x, keys, values, within, scale, most, total, mean, LIMITED)
        result = mean * (1 / total)[:, None]
    at = out + (batch * S * H + head) * K + (query[:, None] * H * K + channel)
    tl.store(at, result.to(out.dtype.element_ty), there)


@triton.jit
def _load(at, mask):  # type: ignore[no-untyped-def]
    """Zero where the mask is off, if there is one."""
    if mask is None:
        return tl.load(at)
    else:
        return tl.load(at, mask, other=0.0)


@triton.jit
def _scores(x, keys, visible):  # type: ignore[no-untyped-def]
    score = tl.dot(x, tl.trans(keys), input_precision="ieee")
    return score if visible is None else tl.where(visible, score, float("-inf"))


@triton.jit
def _first_look(x, keys, values, visible, scale, LIMITED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The softmax begins. Where there are limits, a query may see none of the slots."""
    score = _scores(x, keys, visible)
    most = tl.max(score, 1) * scale
    safe = tl.where(most == float("-inf"), 0.0, most) if LIMITED else most
    weight = tl.exp2(score * scale - safe[:, None])
    return most, tl.sum(weight, 1), tl.dot(weight.to(values.dtype), values, input_precision="ieee")


@triton.jit
def _look_at_both(x, keys, values, visible, new_keys, new_values, new_visible, scale):  # type: ignore[no-untyped-def]
    """The softmax begins with two sets of slots, of which every query sees one slot or more.

    Weights are summed by a product with ones, which gives every channel of the mean its own sum: no thread waits.
    """
    score, new_score = _scores(x, keys, visible), _scores(x, new_keys, new_visible)
    most = tl.maximum(tl.max(score, 1), tl.max(new_score, 1)) * scale
    weight = tl.exp2(score * scale - most[:, None]).to(values.dtype)
    new_weight = tl.exp2(new_score * scale - most[:, None]).to(values.dtype)
    mean = tl.dot(weight, values, input_precision="ieee")
    total = tl.dot(weight, tl.full(values.shape, 1.0, values.dtype), input_precision="ieee")
    mean = tl.dot(new_weight, new_values, mean, input_precision="ieee")
    total = tl.dot(new_weight, tl.full(new_values.shape, 1.0, values.dtype), total, input_precision="ieee")
    return total, mean


@triton.jit
def _look(x, keys, values, visible, scale, most, total, mean, LIMITED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some more slots enter the softmax."""
    score = _scores(x, keys, visible)
    higher = tl.maximum(most, tl.max(score, 1) * scale)
    safe = tl.where(higher == float("-inf"), 0.0, higher) if LIMITED else higher
    weight = tl.exp2(score * scale - safe[:, None])
    fade = tl.exp2(most - safe)
    total = total * fade + tl.sum(weight, 1)
    mean = tl.dot(weight.to(values.dtype), values, mean * fade[:, None], input_precision="ieee")
    return higher, total, mean


@triton.jit
def _turned(x, cos, sin):  # type: ignore[no-untyped-def]
    """Rows of one head, turned. Partners change places by exclusive or, which moves nothing between threads."""
    bits = x.to(tl.int32 if x.dtype == tl.float32 else tl.int16, bitcast=True)
    pairs = tl.reshape(bits, (x.shape[0], x.shape[1] // 2, 2))
    swapped = tl.reshape(pairs ^ tl.xor_sum(pairs, 2, keep_dims=True), x.shape)
    partner = swapped.to(x.dtype, bitcast=True).to(tl.float32)
    along, across = x.to(tl.float32) * cos, partner * sin
    return tl.where(tl.arange(0, x.shape[1])[None, :] % 2 == 0, along - across, along + across).to(x.dtype)
