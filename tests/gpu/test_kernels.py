"""The fused kernels against their plain twins: values and gradients. Without a GPU, Triton's interpreter runs them
(`conftest.py` switches it on)."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")
GPU = torch.cuda.is_available()

from arpg.bench.case import Case  # noqa: E402
from arpg.data.dataset import Batch  # noqa: E402
from arpg.decode import Engine  # noqa: E402
from arpg.kernels import attention, dispatch, ops, residual_norm  # noqa: E402
from arpg.kernels import gumbel as sampler  # noqa: E402
from arpg.kernels.attention import attend, attend_and_store  # noqa: E402
from arpg.kernels.dispatch import FLOAT8  # noqa: E402
from arpg.kernels.fused_rope import apply_rope, rope_table, split_qkv_rope, store_rope  # noqa: E402
from arpg.kernels.ops import Stream  # noqa: E402
from arpg.kernels.swiglu import swiglu  # noqa: E402
from arpg.model import layers  # noqa: E402
from arpg.model.cache import KeyValue  # noqa: E402
from arpg.model.layers import ResidualNorm  # noqa: E402
from arpg.model.rope import BASE, make_rope, no_positions  # noqa: E402
from arpg.noise import Stream as NoiseStream  # noqa: E402
from arpg.noise import gumbel, seed_keys  # noqa: E402
from arpg.quantization.precision import Fp8Linear, to_precision  # noqa: E402
from arpg.settings import SamplingSettings  # noqa: E402
from benchmarks.measures import agreement, on_context, tokens_of  # noqa: E402
from support.fused import fuse_everywhere  # noqa: E402
from support.interpreted import mend  # noqa: E402
from support.small import SMALL, small_model  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"

mend()


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rotation_of(batch, slots, channels):
    place = torch.rand((batch, slots, 2), generator=torch.Generator().manual_seed(1)) * 12
    place[:, 0] = no_positions(batch)  # a class slot: its rotation is zero
    return make_rope(place.to(DEVICE), channels)


@pytest.mark.parametrize("shape", [(512,), (1, 512), (3, 5, 512), (9, 1536), (2, 768)])
def test_swiglu(shape):
    x, weight = draw(*shape).requires_grad_(), draw(*shape[:-1], shape[-1] // 2, seed=1)
    gate, up = x.chunk(2, -1)
    plain = F.silu(gate) * up
    fused = swiglu(x)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, weight)[0] for y in (fused, plain)))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 5, 48), (2, 8, 64)])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_residual_and_norm(shape, rows, p, monkeypatch):
    monkeypatch.setattr(residual_norm, "_PROGRAMS", 3)  # so that a program of the backward pass takes several turns
    monkeypatch.setattr(residual_norm, "_ROWS", rows)
    norm = ResidualNorm(shape[-1], dropout=p, site=1).to(DEVICE).train()
    torch.nn.init.normal_(norm.weight)
    key = torch.arange(shape[0], dtype=torch.int32, device=DEVICE) * 7919 - 5
    x, delta = draw(*shape).requires_grad_(), draw(*shape, seed=1).requires_grad_()
    stream, normed = norm(Stream(x, delta), key)  # float32: never the kernel
    plain = (stream.x_BSD, normed)
    fused = residual_norm.residual_norm(x, delta, norm.weight, ops.fold_key(key, 1), p, norm.EPS)
    torch.testing.assert_close(fused, plain)
    weights = [draw(*shape, seed=2), draw(*shape, seed=3)]
    gradients = [torch.autograd.grad(y, (x, delta, norm.weight), weights) for y in (fused, plain)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("scale", [[[3.0], [0.5]], [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]])
def test_guided_norm(pending, scale):
    """Rows of any width; one scale for each row or for each slot, also as a column of a larger tensor."""
    weight, scale = draw(48, seed=2), torch.tensor(scale, device=DEVICE)
    stream = Stream(draw(4, 3, 48), draw(4, 3, 48, seed=1) if pending else None)
    plain = ops.guide(ops.norm(stream, weight, eps=1e-5)[1], scale)
    strided = torch.stack((scale, scale), -1)[..., 1]
    fused = residual_norm.guided_norm(*stream[:2], weight, strided, 1e-5, dtype=torch.float32)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("slots", "heads", "channels"), [(1, 3, 16), (7, 3, 16), (10, 6, 64), (5, 1, 4)])
def test_rotation_of_a_fused_projection(slots, heads, channels):
    by = rotation_of(2, slots, channels)
    qkv = draw(2, slots, 3, heads, channels).requires_grad_()
    q, k, v = qkv.unbind(2)
    plain, fused = (ops.apply_rope(q, by), ops.apply_rope(k, by), v), split_qkv_rope(qkv, *by)
    torch.testing.assert_close(fused, plain)
    # Attention hands its gradients back with heads and slots swapped in memory.
    weights = [draw(2, heads, slots, channels, seed=i).transpose(1, 2) for i in range(3)]
    torch.testing.assert_close(*(torch.autograd.grad(y, qkv, weights)[0] for y in (fused, plain)))


def test_rotation_of_queries():
    by = rotation_of(3, 6, 32)
    x, weight = draw(3, 6, 2, 32).requires_grad_(), draw(3, 6, 2, 32, seed=1)
    fused, plain = apply_rope(x, *by), ops.apply_rope(x, by)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, weight)[0] for y in (fused, plain)))
    torch.testing.assert_close(apply_rope(fused, *by, True)[:, 1:], x[:, 1:])  # turned back: where it was


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT8])
@pytest.mark.parametrize("ragged", [False, True])
def test_rotation_into_a_cache(ragged, dtype):
    by, parts = rotation_of(3, 4, 16), draw(3, 4, 2, 2, 16).unbind(2)
    first = torch.tensor([0, 5, 2], device=DEVICE) if ragged else 3
    caches = [torch.zeros(2, 3, 9, 2, 16, device=DEVICE).to(dtype) for _ in range(2)]
    store_rope(*parts, *by, key_BTHK=caches[0][0], value_BTHK=caches[0][1], first=first)
    ops.cache_write(*parts, *caches[1], rope=by, first=first)  # float32: never the kernel
    off = 0.13 if dtype == FLOAT8 else 1e-5  # a float8 number may be rounded to the next one
    torch.testing.assert_close(*(cache.float() for cache in caches), rtol=off, atol=1e-5)


@pytest.mark.parametrize("channels", [4, 24, 64])
def test_angles(channels):
    place = torch.rand((2, 5, 2), generator=torch.Generator().manual_seed(1)) * 64
    place[:, 0] = no_positions(2)
    plain = make_rope(place, channels)
    fused = rope_table(place.to(DEVICE), channels, BASE)
    torch.testing.assert_close([x.cpu() for x in fused], list(plain), atol=2e-5, rtol=1e-5)


@pytest.fixture(params=[None, 16])
def at_a_time(request, monkeypatch):
    """As many slots at a time as attention takes itself, or few, so that there are several blocks."""
    if request.param:
        own = attention.tiles
        monkeypatch.setattr(attention, "tiles", lambda *a, **by: own(*a, **by)._replace(slots=request.param))


@pytest.mark.usefixtures("at_a_time")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("queries", "slots", "channels"),
    [(1, 1, 4), (3, 70, 16), pytest.param(20, 130, 24, marks=pytest.mark.slow), (5, 64, 32)],
)
def test_attention_over_a_cache(queries, slots, channels, turned):
    """One query and many, one block of slots and several, odd sizes; limits by query, by row, for all, and none."""
    cache = draw(2, 2, slots + 9, 3, channels)  # longer than what is in use
    key, value = cache[0, :, :slots], cache[1, :, :slots]
    q, by = draw(2, queries, 3, channels, seed=1), rotation_of(2, queries, channels)
    many = torch.randint(1, slots + 1, (2, queries), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for limit in (None, many, many[:, :1], many[:1]):
        mask = None if limit is None else (torch.arange(slots, device=DEVICE) < limit[..., None])[:, None]
        query = ops.apply_rope(q, by) if turned else q
        plain = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)), attn_mask=mask)
        fused = attend(q, key, value, limit, tuple(by) if turned else None)
        torch.testing.assert_close(fused, plain.transpose(1, 2), atol=2e-5, rtol=2e-5)
    small = attend(q, key, value, None, tuple(by) if turned else None, dtype=FLOAT8)
    assert small.dtype == FLOAT8
    full = attend(q, key, value, None, tuple(by) if turned else None)
    assert (small.float() - full).norm() < 0.04 * full.norm()


@pytest.mark.parametrize("slots_at_once", [16, 32, None])
@pytest.mark.parametrize(("queries", "slots", "channels"), [(1, 1, 4), (3, 70, 64), (5, 100, 24)])
def test_attention_over_a_float8_cache(queries, slots, channels, slots_at_once, monkeypatch):
    """Every float8 number among the values, in several blocks and in one, with limits and without."""
    if slots_at_once:
        own = attention.tiles
        monkeypatch.setattr(attention, "tiles", lambda *a, **by: own(*a, **by)._replace(slots=slots_at_once))
    cache = ops.to_float8(3 * draw(2, 2, slots + 9, 3, channels))
    every = torch.tensor([byte for byte in range(256) if byte % 128 != 127], dtype=torch.uint8)  # those are NaN
    cache[1].view(torch.uint8).view(-1)[: len(every)] = every[: cache[1].numel()].to(DEVICE)
    key, value = cache[0, :, :slots], cache[1, :, :slots]
    q, by = draw(2, queries, 3, channels, seed=1), rotation_of(2, queries, channels)
    many = torch.randint(1, slots + 1, (2, queries), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for limit in (None, many):
        mask = None if limit is None else (torch.arange(slots, device=DEVICE) < limit[..., None])[:, None]
        plain = ops.attention(q, key, value, mask, rope=by).unflatten(-1, (3, channels))  # float32: never the kernel
        for settled in (0, 0 if slots_at_once else max(0, slots - 3)):
            fused = attend(q, key, value, limit, tuple(by), settled=settled)
            torch.testing.assert_close(fused, plain, atol=5e-4, rtol=2e-5)  # values reach 448


@pytest.mark.gpu
@pytest.mark.skipif(not GPU or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8")
@pytest.mark.parametrize("rows", [2, 256])
def test_words_of_float8_on_a_gpu(rows):
    """Half precision converts words by PTX: one slot is seen, so the result is its value, for every float8 number."""
    every = torch.tensor([byte for byte in range(256) if byte % 128 != 127], dtype=torch.uint8)
    value = torch.cat((every, every[:2])).view(4, 64).to(DEVICE).view(FLOAT8)  # 4 heads of 64 channels
    cache = value.view(torch.uint8).expand(rows, 1, 4, 64).contiguous().view(FLOAT8)
    q = draw(rows, 5, 4, 64).bfloat16()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad():
            fused = attend(q.to(dtype), ops.to_float8(torch.ones_like(cache.float())), cache, None)
        torch.testing.assert_close(fused, value.to(dtype).expand(rows, 5, 4, 64), atol=0, rtol=0)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("queries", "held"), [(1, 0), (5, 70), (16, 30), pytest.param(70, 5, marks=pytest.mark.slow)])
def test_attention_that_stores_float8(queries, held, ragged):
    """New slots are stored rounded and seen as they are stored; what is too large for float8 is its largest number."""
    caches = [ops.to_float8(draw(2, 2, held + queries + 3, 2, 32)).unbind(0) for _ in range(2)]  # the same twice
    qkv, by = draw(2, queries, 3, 2, 32, seed=1), rotation_of(2, queries, 32)
    qkv[0, 0, 2, 0, :2] = torch.tensor([1e4, -1e4])
    first = torch.tensor([held, held // 2], device=DEVICE) if ragged else held
    limit = (first[:, None] + queries) if ragged else None
    stop = held + queries
    mask = None if limit is None else (torch.arange(stop, device=DEVICE) < limit[..., None])[:, None]
    options = {"rope": by, "first": first, "stop": stop}
    plain = ops.attention_with_cache_write(qkv, *caches[0], mask, **options)  # float32: never the kernel
    for settled in (0, held):
        fused = attend_and_store(qkv, caches[1], limit, tuple(by), first, settled=0 if ragged else settled).flatten(2)
        torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-4)
        for a, b in zip(*caches, strict=True):
            torch.testing.assert_close(a.float(), b.float(), atol=0, rtol=0.13)  # rotated with other roundings
            assert (a.float() != b.float()).float().mean() < 0.01


CUTS = [
    (0, 1),
    (0, 16),
    (1, 1),
    (15, 16),
    (16, 3),
    (17, 9),
    (128, 1),
    (129, 16),
    (255, 2),
    (256, 1),
    (256, 16),
    (300, 7),
]


@pytest.mark.parametrize("queries", [1, 20, 70])
def test_attention_reads_no_further_than_its_row(queries):
    """Rows of 1, 40 and 130 slots in a cache of 300: what lies behind them is not even multiplied by zero."""
    q, key, value = draw(3, queries, 2, 32), draw(3, 300, 2, 32), draw(3, 300, 2, 32)
    limit = torch.tensor([[1], [40], [130]], device=DEVICE)
    expected = attend(q, key, value, limit)
    for row, length in enumerate(limit.flatten().tolist()):
        key[row, length:], value[row, length:] = float("nan"), float("nan")
        alone = attend(q[row : row + 1], key[row : row + 1, :length], value[row : row + 1, :length], None)
        torch.testing.assert_close(expected[row : row + 1], alone, atol=2e-5, rtol=2e-5)
    assert torch.equal(attend(q, key, value, limit), expected)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("width", [3, 20, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_packed_tokens(stored, width, causal):
    """Three samples, one of them without tokens, two copies of each, and padding, which no row has and none sees."""
    counts, held = torch.tensor([width, 0, width // 2 + 1]), torch.tensor([40, 3, 0, 7, 5, 90], device=DEVICE)
    count_R, num = counts.repeat_interleave(2).to(DEVICE), int(counts.sum()) + 2
    start_R = ((counts.cumsum(0) - counts)[:, None] + num * torch.arange(2)).flatten().to(DEVICE)
    packing = ops.Packing(start_R, count_R, width, (2, num)).with_indices()
    qkv, by = draw(2, num, 3, 2, 16, seed=1), rotation_of(2, num, 16)
    caches = [draw(2, 6, 90 + width + 1, 2, 16).unbind(0) for _ in range(2)]  # the same twice
    if stored:
        limit = held[:, None] + (torch.arange(width, device=DEVICE) + 1 if causal else count_R[:, None])
        mask = (torch.arange(90 + width, device=DEVICE) < limit[..., None])[:, None]
        options = {"rope": by, "first": held, "stop": 90 + width, "packing": packing}
        plain = ops.attention_with_cache_write(qkv, *caches[0], mask, **options)  # float32: never the kernel
        fused = attend_and_store(qkv, caches[1], limit, tuple(by), held, packing=packing).flatten(2)
    else:
        limit = held.clamp(min=1)[:, None].expand(-1, width if causal else 1)
        mask = (torch.arange(90 + width + 1, device=DEVICE) < limit[..., None])[:, None]
        plain = ops.attention(qkv[:, :, 0], *caches[0], mask, rope=by, packing=packing)
        fused = attend(qkv[:, :, 0], *caches[1], limit, tuple(by), packing=packing).flatten(2)
    torch.testing.assert_close(fused[:, :-2], plain[:, :-2], atol=2e-5, rtol=2e-5)
    for key_or_value, expected in zip(caches[1], caches[0], strict=True):
        for row, (first, count) in enumerate(zip(held.tolist(), count_R.tolist(), strict=True)):
            stop = first + count
            torch.testing.assert_close(key_or_value[row, :stop], expected[row, :stop], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("held", [0, 5, 40])
@pytest.mark.parametrize(
    "width", [3, 21, pytest.param(16, marks=pytest.mark.slow), pytest.param(70, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_packed_rows_of_one_length(held, width, copies, causal):
    """Samples that begin together: the cache ends at the same slot in all rows, whose earlier slots are settled."""
    rows, num, stop = 2 * copies, 2 * width, held + width
    start_R = (width * torch.arange(2)[:, None] + num * torch.arange(copies)).flatten().to(DEVICE)
    packing = ops.Packing(start_R, torch.full((rows,), width, device=DEVICE), width, (copies, num)).with_indices()
    qkv, by = draw(copies, num, 3, 2, 16, seed=1), rotation_of(copies, num, 16)
    caches = [draw(2, rows, stop + 2, 2, 16).unbind(0) for _ in range(2)]  # the same twice
    slot, limit = torch.arange(stop, device=DEVICE), None
    if causal:
        limit = (held + 1 + torch.arange(width, device=DEVICE)).expand(rows, -1)
    mask = None if limit is None else (slot < limit[..., None])[:, None]
    plain = ops.attention_with_cache_write(qkv, *caches[0], mask, rope=by, first=held, stop=stop, packing=packing)
    stored = attend_and_store(qkv, caches[1], limit, tuple(by), held, settled=held, packing=packing)
    torch.testing.assert_close(stored.flatten(2), plain, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(caches[1], caches[0], atol=2e-5, rtol=2e-5)
    visible = [each[:, :stop] for each in caches[1]]
    plain = ops.attention(qkv[:, :, 0], *visible, mask, rope=by, packing=packing)
    fused = attend(qkv[:, :, 0], *visible, limit, tuple(by), settled=held, packing=packing)
    torch.testing.assert_close(fused.flatten(2), plain, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("settled", "newest"), CUTS)
@pytest.mark.parametrize("limited", [False, True])
def test_attention_over_settled_slots(settled, newest, limited, monkeypatch):
    """Few programs take all settled slots at once, and the others with them."""
    slots, queries, channels = settled + newest, 5, 16
    key, value = draw(2, 2, slots + 3, 2, channels)[:, :, :slots]
    q, by = draw(2, queries, 2, channels, seed=1), rotation_of(2, queries, channels)
    taken, own = [], attention.tiles
    monkeypatch.setattr(attention, "tiles", lambda *a, **by: taken.append(own(*a, **by)) or taken[-1])
    limit = torch.tensor([[1, slots, slots // 2 + 1, settled + 1, max(1, settled)]], device=DEVICE) if limited else None
    mask = None if limit is None else (torch.arange(slots, device=DEVICE) < limit[..., None])[:, None]
    heads = (x.transpose(1, 2) for x in (ops.apply_rope(q, by), key, value))
    plain = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)
    for count in (settled, 0):
        fused = attend(q, key, value, limit, tuple(by), settled=count)
        torch.testing.assert_close(fused, plain, atol=2e-5, rtol=2e-5)
    assert [cut.prefetch for cut in taken] == [True, slots <= 16]


@pytest.mark.parametrize(
    ("held", "queries"),
    [
        *((0, 1), (17, 9), (129, 4)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 16), (15, 1), (256, 16), (300, 7))),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_stores_behind_settled_slots(held, queries, causal):
    caches = [draw(2, 2, held + queries + 3, 2, 16).unbind(0) for _ in range(2)]  # the same twice
    qkv, by = draw(2, queries, 3, 2, 16, seed=1), rotation_of(2, queries, 16)
    limit = held + 1 + torch.arange(queries, device=DEVICE)[None] if causal else None
    for settled in (held, held // 2):  # all that are held, or not
        outs = [
            attend_and_store(qkv, c, limit, tuple(by), held, settled=s)
            for c, s in zip(caches, (0, settled), strict=True)
        ]
        torch.testing.assert_close(*outs, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(*caches)


def test_packed_rows_have_short_tiles():
    """One long row among many does not make the programs of all rows large."""
    assert attention.tiles(40, 2048, new=False).queries == 64
    assert attention.tiles(40, 2048, new=False, packed=True).queries == 16


def test_many_programs_do_not_prefetch():
    few, many = (attention.tiles(4, pairs, new=True, settled=100, newest=4) for pairs in (32, 2048))
    assert few.prefetch
    assert not many.prefetch
    assert not attention.tiles(4, 32, new=True).prefetch  # nobody knows what is settled
    assert not attention.tiles(4, 32, new=False, settled=100, newest=17).prefetch
    assert not attention.tiles(4, 32, new=False, settled=600, newest=1).prefetch


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_attention_in_compiled_code():
    """As validation on prompts meets it: torch.compile hands plain numbers over in float64."""
    q, key, value = (draw(2, n, 3, 64, seed=n).bfloat16() for n in (5, 40, 41))
    limit, value = torch.full((2, 5), 30, device=DEVICE), value[:, :40]
    with torch.no_grad():
        compiled = torch.compile(lambda x: attend(x, key, value, limit))(q)
        torch.testing.assert_close(compiled, attend(q, key, value, limit))


@pytest.mark.usefixtures("at_a_time")
@pytest.mark.parametrize(
    ("queries", "held", "channels"),
    [(1, 0, 4), (3, 70, 16), pytest.param(70, 5, 32, marks=pytest.mark.slow), (20, 128, 24)],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_attention_that_stores(queries, held, channels, ragged):
    """New keys and values are seen and stored: what rotation, a write and attention do one after the other."""
    caches = [draw(2, 2, held + queries + 3, 3, channels).unbind(0) for _ in range(2)]  # the same twice
    qkv, by = draw(2, queries, 3, 3, channels, seed=1), rotation_of(2, queries, channels)
    first = torch.tensor([held, held // 2], device=DEVICE) if ragged else held
    slot = torch.arange(queries, device=DEVICE) + (first[:, None] if ragged else held)
    after = held + queries
    block = (slot[:, -1:] + 1) if ragged else None
    for limit in (block, slot.expand(2, -1) + 1):  # all new ones see each other, or only backwards
        q, k, v = qkv.unbind(2)
        ops.cache_write(k, v, *caches[0], rope=by, first=first)
        kv = [x[:, :after] for x in caches[0]]
        mask = None if limit is None else (torch.arange(after, device=DEVICE) < limit[..., None])[:, None]
        plain = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (ops.apply_rope(q, by), *kv)), attn_mask=mask
        )
        fused = attend_and_store(qkv, caches[1], limit, tuple(by), first)
        torch.testing.assert_close(fused, plain.transpose(1, 2), atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(*caches)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler asks for it
def test_the_gradients_of_training_through_the_kernels(monkeypatch):
    """The whole network with dropout, in float32: the losses and gradients that it has without kernels."""
    from arpg.train.objective import Objective

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(24, (2, 4), generator=generator).to(DEVICE)
    order = torch.stack([torch.randperm(4, generator=generator) for _ in range(2)]).to(DEVICE)
    labels, key = torch.tensor([0, 1], device=DEVICE), torch.arange(2, dtype=torch.int32, device=DEVICE)
    config = dataclasses.replace(SMALL, pass1_layers=1, pass2_layers=2, grid=(2, 2))
    results = []
    for fused in (False, True):
        monkeypatch.setattr(ops, "can_fuse_half", lambda x, fused=fused: fused)
        objective = Objective(small_model(config).to(DEVICE).train(), (2, 2))
        if fused:
            for block in (*objective.model.pass1, *objective.model.pass2):
                block.compile(backend="aot_eager")
        loss = objective(Batch(ids, labels, order, key))
        results.append([loss, *torch.autograd.grad(loss, list(objective.parameters()))])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler asks for it
@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_query_is_made_once(compiled, monkeypatch):
    """All slots have the same query at first: one is normed and projected. Its gradients are those of all."""
    if compiled and GPU:
        pytest.skip("counted by a hook, which the compiler of torch 2.11 leaves out")
    monkeypatch.setattr(ops, "can_fuse_half", lambda x: True)
    gradients = []
    for apart in (False, True):
        torch.manual_seed(0)
        block = layers.Block(SMALL, layers.CrossAttention(SMALL)).to(DEVICE)
        mask_D, memory = draw(SMALL.width), draw(2, 3, 7, SMALL.num_heads, SMALL.head_dim)
        mask_D.requires_grad_()
        x = mask_D.expand(3, 7, -1)
        rows = []
        block.attn.q.register_forward_hook(lambda _, inputs, __, rows=rows: rows.append(inputs[0].shape[:2].numel()))
        if compiled:
            torch._dynamo.reset()  # what was compiled for a block without a hook would be taken, and not call it
            block.compile(backend="aot_eager")
        by = rotation_of(3, 7, SMALL.head_dim)
        kv = KeyValue(*memory.unbind(0))
        stream = block(Stream(x.contiguous() if apart else x), by, "causal", kv)
        out = torch.cat((stream.x_BSD, stream.delta_BSD), -1)
        assert rows == [21 if apart else 1]
        weight = draw(*out.shape, seed=2)
        gradients.append([out, *torch.autograd.grad(out, [mask_D, *block.parameters()], weight)])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"attention": "causal"}, marks=pytest.mark.slow),
        pytest.param({"attention": "causal", "decode": "exact", "draft": 2}, marks=pytest.mark.slow),
    ],
)
def test_decoding_through_the_kernels(settings, monkeypatch):
    """The whole loop, ragged and guided, gives the tokens that it gives without them."""
    from arpg import decode, make_plan, tasks

    model = small_model().to(DEVICE)
    known = torch.zeros(2, 16, dtype=torch.bool)
    known[0, :5] = True
    request = tasks.fill(model, 2, [5, 6], ids_N=torch.arange(16) % 24, known_N=known)
    resolved = SamplingSettings(steps=4, guidance=3.0, **settings)
    plan = make_plan((4, 4), known, request.seeds, resolved)
    *_, plain = decode(model, request, plan, resolved)
    calls = []
    fuse_everywhere(monkeypatch, on_inference=calls.append)
    with dispatch.kernel_policy(dispatch.KernelPolicy(small_gemm=False)):  # that one takes half precision only
        *_, fused = decode(model, request, plan, resolved)
    assert fused.ids_BN.tolist() == plain.ids_BN.tolist()
    assert calls
    assert dispatch.TRITON_AVAILABLE


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("attention", ["block", "causal"])
def test_a_continuous_batch_through_the_kernels(monkeypatch, together, guidance, attention):
    """Packed tokens of samples at different steps, or all at the same: the tokens of the same without the kernels."""
    from arpg import make_plan, tasks
    from arpg.decode.continuous import ContinuousBatch

    model = small_model(dataclasses.replace(SMALL, grid=(6, 6))).to(DEVICE)
    settings = SamplingSettings(steps=2, guidance=guidance, schedule="linear", attention=attention)  # of 18 tokens

    def run():
        requests = [tasks.generate(model, [seed], [seed]) for seed in (1, 2, 3)]
        plans = [make_plan((6, 6), request.known_BN, request.seeds, settings) for request in requests]
        running = ContinuousBatch(model, requests[0], plans[0], settings)
        for request, plan in zip(requests[1:], plans[1:], strict=True):
            if not together:
                running.step()
            running.add(request, plan)
        while not all(row.finished for row in running.rows):
            running.step()
        return running.fetch(range(3)).wait()[0]

    plain = run()
    fuse_everywhere(monkeypatch)
    with dispatch.kernel_policy(dispatch.KernelPolicy(small_gemm=False)):  # that one takes half precision only
        assert torch.equal(run(), plain)


@pytest.mark.parametrize("stream", [NoiseStream.TOKEN, NoiseStream.ORDER])
@pytest.mark.parametrize("num_codes", [8, 100, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 64, 200))])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("small", [True, False])
def test_sampling(num_codes, stream, small, static, monkeypatch):
    """The very numbers of the plain sampler, in one block of codes and in several."""
    monkeypatch.setattr(sampler, "_CODES", 64)
    monkeypatch.setattr(sampler, "_SMALL_BATCH_CODES", 64)
    monkeypatch.setattr(sampler, "_SMALL_BATCH", 6 if small else 5)
    key, position = seed_keys([5, 2**63 + 12345]), torch.tensor([[0, 3, 143], [70000, 6, 7]])
    logits = draw(2, 3, num_codes)
    noise = gumbel(key, stream, position, num_codes).to(DEVICE)
    there = (key.to(DEVICE), stream, position.to(DEVICE))
    assert sampler.sample(logits, 1.0, *there, static=static).tolist() == (logits + noise).argmax(-1).tolist()
    assert sampler.sample(logits, 0.7, *there, static=static).tolist() == (logits / 0.7 + noise).argmax(-1).tolist()
    logits[..., 1] = float("-inf")  # never sampled
    assert (sampler.sample(logits, 1.0, *there, static=static) != 1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_the_network_with_and_without_kernels(monkeypatch):
    """In bfloat16 on the GPU, the fused network is as close to float32 as the plain one."""
    from arpg.config import ModelConfig
    from arpg.model import ARPG, class_condition

    config = ModelConfig(width=256, num_heads=4, pass1_layers=2, pass2_layers=2, vocab_size=64, num_classes=5)
    model = ARPG(config).init_weights(seed=0).to(DEVICE).eval()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    ids = torch.randint(64, (4, 256), device=DEVICE)
    order = torch.stack([torch.randperm(256, device=DEVICE) for _ in range(4)])
    condition = class_condition(model, torch.tensor([0, 1, 2, 5]))
    exact = model(ids, order, condition)
    with torch.autocast("cuda", torch.bfloat16):
        fused = model(ids, order, condition)
        monkeypatch.setattr(dispatch, "TRITON_AVAILABLE", False)
        plain = model(ids, order, condition)
    errors = [float((x.float() - exact).detach().norm() / exact.detach().norm()) for x in (fused, plain)]
    assert errors[0] < 1.2 * errors[1] < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_training_with_and_without_kernels(monkeypatch):
    """With dropout, in bfloat16: the gradients of the fused step are as close to float32's as the plain step's."""
    from arpg.config import ModelConfig
    from arpg.model import ARPG
    from arpg.train.objective import Objective

    config = ModelConfig(width=256, num_heads=4, pass1_layers=2, pass2_layers=2, vocab_size=64, num_classes=5)
    objective = Objective(ARPG(config).init_weights(seed=0).to(DEVICE).train(), config.grid)
    torch.nn.init.normal_(objective.model.head.weight, std=0.1)
    ids = torch.randint(64, (4, 256), device=DEVICE)
    order = torch.stack([torch.randperm(256, device=DEVICE) for _ in range(4)])
    labels, key = torch.tensor([0, 1, 2, 5], device=DEVICE), torch.arange(4, dtype=torch.int32, device=DEVICE)

    def gradient(half):
        objective.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            objective(Batch(ids, labels, order, key)).backward()
        return torch.cat([p.grad.flatten() for p in objective.parameters()])

    exact, fused = gradient(half=False), gradient(half=True)
    monkeypatch.setattr(dispatch, "TRITON_AVAILABLE", False)
    plain = gradient(half=True)
    errors = [float((x - exact).norm() / exact.norm()) for x in (fused, plain)]
    assert errors[0] < 1.2 * errors[1] < 0.05


@pytest.mark.skipif(GPU, reason="for Triton's interpreter")
def test_float8_goes_through_the_network(monkeypatch):
    """Norms, attention and SwiGLU hand float8 to every layer that takes it."""
    monkeypatch.setattr("arpg.quantization.precision.check_fp8", lambda device: None)
    config, cpu = dataclasses.replace(SMALL, vocab_size=32), torch.device("cpu")  # a multiple of 16
    plain, made = small_model(config), to_precision(small_model(config), "fp8", cpu)
    case = Case("small", 2, SamplingSettings(steps=3, guidance=1.0), config.grid)
    ids = tokens_of(Engine(plain, "eager"), case)
    exact, alone = on_context(plain, case, ids), on_context(made, case, ids)
    taken = set()
    for name, layer in made.named_modules():
        if isinstance(layer, Fp8Linear):
            layer.register_forward_pre_hook(lambda _, args, name=name: taken.add((name, args[0].dtype)))
    monkeypatch.setattr(ops, "can_fuse_half", lambda x: x.dtype != FLOAT8)
    monkeypatch.setattr(ops, "can_fuse_inference", lambda x: x.dtype != FLOAT8)
    handed = on_context(made, case, ids)
    first = {"pass1.0.attn.qkv", "pass2.0.attn.q"}  # nothing was added before them
    assert len(taken) == 2 * 4 + 1 + 2 * 4 + 1
    assert {name for name, dtype in taken if dtype != FLOAT8} == first
    assert agreement(alone, exact)["logit error"] < 0.3
    assert agreement(handed, exact)["logit error"] < 0.4  # the interpreter rounds badly (`test_precision.py`)
