"""The loop: previews, seeds, batches, masks."""

import dataclasses

import pytest
import torch

from arpg import InputError, Request, SamplingSettings, decode, make_plan, tasks
from arpg.decode import engine
from arpg.decode.continuous import ContinuousBatch
from arpg.decode.state import DecodeState, PredictArgs, prefill, to_device
from arpg.kernels.ops import guide
from arpg.model import Cache, class_condition
from arpg.quantization.packed import PackedLinear
from arpg.quantization.precision import Fp8Linear, Int8Linear
from support.small import SMALL, small_model

SETTINGS = SamplingSettings(steps=5, guidance=3.0, top_k=20, top_p=0.95)


def run(model, request, settings=SETTINGS):
    return list(decode(model, request, make_plan(request.grid, request.known_BN, request.seeds, settings), settings))


@pytest.mark.parametrize(
    "settings", [SETTINGS, SamplingSettings(steps=7), SamplingSettings(steps=5, attention="causal")]
)
def test_an_image_depends_on_its_seed_and_not_on_its_batch(model, settings):
    labels, seeds = [0, 1, 2, 3, 4, 0, 1, 2], list(range(10, 18))
    whole = run(model, tasks.generate(model, labels, seeds), settings)[-1].ids_BN
    for size in (1, 3):
        for i in range(0, 8, size):
            part = run(model, tasks.generate(model, labels[i : i + size], seeds[i : i + size]), settings)[-1]
            assert torch.equal(part.ids_BN, whole[i : i + size])
    assert whole.unique(dim=0).shape[0] == 8


def test_a_ragged_batch_gives_what_its_samples_give_alone(model):
    """Different masks, numbers of tokens, steps and guidance in one decode."""
    generator = torch.Generator().manual_seed(0)
    known = torch.rand(4, 16, generator=generator) < torch.tensor([0.0, 0.3, 0.6, 1.0])[:, None]
    ids = torch.randint(24, (4, 16), generator=generator)
    labels = torch.tensor([0, 1, 2, 3])
    options = [dataclasses.replace(SETTINGS, steps=s, guidance=g) for s, g in ((3, 1.0), (5, 4.0), (16, 2.0), (2, 3.0))]

    def request(rows):
        condition = class_condition(model, labels[rows])
        return Request(condition, (4, 4), ids[rows], known[rows], tuple(rows))

    def plan(rows):
        return engine.Plan(tuple(make_plan((4, 4), known[[r]], (r,), options[r]).samples[0] for r in rows))

    together = list(decode(model, request([0, 1, 2, 3]), plan([0, 1, 2, 3]), SETTINGS))[-1].ids_BN
    for r in range(4):
        alone = list(decode(model, request([r]), plan([r]), SETTINGS))[-1].ids_BN
        assert torch.equal(alone[0], together[r]), r
    assert torch.equal(together[known], ids[known])


def test_steps_unfold_and_never_take_back(model):
    request = tasks.generate(model, [1, 2], [0, 1])
    plan = make_plan(request.grid, request.known_BN, request.seeds, SETTINGS)
    before = None
    steps = list(decode(model, request, plan, SETTINGS))
    for i, step in enumerate(steps):
        assert (step.index, step.num_steps) == (i, 5)
        for b, sample in enumerate(plan.samples):
            assert sorted(sample.order[: sum(sample.sizes[: i + 1])]) == step.known_BN[b].nonzero().flatten().tolist()
        if before is not None:
            assert torch.equal(step.ids_BN[before.known_BN], before.ids_BN[before.known_BN])
        before = step
    assert steps[-1].known_BN.all()
    assert steps[-1].ids_BN.max() < SMALL.vocab_size


def test_known_tokens_stay_and_matter(model):
    known = torch.zeros(1, 16, dtype=torch.bool)
    known[0, :6] = True
    results = []
    for value in (3, 17):
        ids = torch.full((1, 16), value)
        request = Request(class_condition(model, torch.tensor([1])), (4, 4), ids, known, (0,))
        final = run(model, request)[-1].ids_BN
        assert (final[0, :6] == value).all()
        results.append(final[0, 6:])
    assert not torch.equal(*results)


def test_everything_known_returns_it(model):
    ids = torch.arange(16)[None]
    request = Request(class_condition(model, torch.tensor([1])), (4, 4), ids, torch.ones(1, 16, dtype=torch.bool), (0,))
    steps = run(model, request)
    assert len(steps) == 1
    assert torch.equal(steps[0].ids_BN, ids)


def test_guidance_one_is_conditional_and_zero_is_unconditional(model):
    one = dataclasses.replace(SETTINGS, guidance=1.0)
    off = dataclasses.replace(SETTINGS, guidance=7.0, guidance_schedule="none")
    request = tasks.generate(model, [1, 2], [0, 1])
    conditional = run(model, request, off)[-1].ids_BN
    assert torch.equal(run(model, request, one)[-1].ids_BN, conditional)
    # The doubled batch with a scale of 1 comes to the same: force it with one guided sample beside.
    zero = dataclasses.replace(SETTINGS, guidance=0.0, guidance_schedule="constant")
    for labels in ([1, 2], [3, 4]):
        unconditional = run(model, tasks.generate(model, labels, [0, 1]), zero)[-1].ids_BN
        null = dataclasses.replace(request, condition=class_condition(model, torch.tensor([5, 5])))
        assert torch.equal(unconditional, run(model, null, off)[-1].ids_BN)


def test_more_steps_than_tokens_is_one_token_each(model):
    request = tasks.generate(model, [1], [0])
    assert len(run(model, request, SamplingSettings(steps=1000))) == 16


def test_fractional_places_are_used(model):
    request = tasks.generate(model, [1, 2, 3], [0, 1, 2])
    settings = SamplingSettings(steps=16)
    same = dataclasses.replace(request, pos_N2=request.positions())
    squeezed = dataclasses.replace(request, pos_N2=request.positions() * 0.37)
    expected = run(model, request, settings)[-1].ids_BN
    assert torch.equal(run(model, same, settings)[-1].ids_BN, expected)
    assert not torch.equal(run(model, squeezed, settings)[-1].ids_BN, expected)


def test_an_abandoned_or_broken_decode_leaves_nothing_behind(model, monkeypatch):
    request = tasks.generate(model, [1], [0])
    expected = run(model, request)[-1].ids_BN
    plan = make_plan(request.grid, request.known_BN, request.seeds, SETTINGS)
    next(decode(model, request, plan, SETTINGS))

    def broken(*_, **__):
        raise RuntimeError("boom")

    monkeypatch.setattr(engine, "sample", broken)
    with pytest.raises(RuntimeError, match="boom"):
        run(model, request)
    monkeypatch.undo()
    assert torch.equal(run(model, request)[-1].ids_BN, expected)
    assert set(model.state_dict()) == set(small_model().state_dict())


def test_bad_requests(model):
    request = tasks.generate(model, [1], [0])
    plan = make_plan(request.grid, request.known_BN, request.seeds, SETTINGS)
    known = torch.zeros(1, 16, dtype=torch.bool)
    known[0, 3] = True
    with pytest.raises(InputError, match="not the 15 positions"):
        decode(model, dataclasses.replace(request, known_BN=known), plan, SETTINGS)
    with pytest.raises(InputError, match="known tokens run from 24 to 24"):
        run(model, dataclasses.replace(request, known_BN=known, ids_BN=torch.full((1, 16), 24)))
    with pytest.raises(InputError, match="seed is -1"):
        tasks.generate(model, [1], [-1])
    with pytest.raises(InputError, match="class 7 does not exist"):
        tasks.generate(model, [7], [0])
    with pytest.raises(InputError, match=r"needs? \(1, 15\)"):
        dataclasses.replace(request, grid=(3, 5))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_same_tokens_on_the_gpu_and_no_waiting():
    cpu, gpu = small_model(), small_model().cuda()
    labels, seeds = [0, 1, 2, 3], [5, 6, 7, 8]
    expected = run(cpu, tasks.generate(cpu, labels, seeds))[-1].ids_BN
    request = tasks.generate(gpu, labels, seeds)
    plan = make_plan(request.grid, request.known_BN, request.seeds, SETTINGS)
    steps = decode(gpu, request, plan, SETTINGS)
    first = next(steps)  # the set-up copies the plan; from here on nothing may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        *_, last = [first, *steps]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(last.ids_BN.cpu(), expected)


def predicted(model, request, *, guided=True):
    """How many positions of the first step the network predicts, the logits of all, and those without the shortcut."""
    state = to_device(model, request, guided=guided, ragged=False)
    state = prefill(model, state, causal=False, num_slots=16, ragged=False)
    calls = []
    plain = model.predict

    def predict(pos, *rest, **options):
        calls.append(pos.shape[1])
        return plain(pos, *rest, **options)

    model.predict = predict
    try:
        logits = state.predict(model, PredictArgs(torch.arange(16).expand(len(request.seeds), -1), None))
    finally:
        del model.predict
    every = state.pos_BN2[:, :16].repeat(2 if guided else 1, 1, 1)
    return calls, logits, plain(every, None, state.cache)


@torch.no_grad()
def test_the_first_step_predicts_once_where_all_positions_are_alike():
    """With nothing known but one class slot; not with known tokens, another encoding of positions or own queries."""
    model = small_model()
    request = tasks.generate(model, [1, 4], [0, 1])
    calls, logits, every = predicted(model, request)
    assert calls == [1]
    assert logits.shape == (4, 16, 24)
    torch.testing.assert_close(logits, every)

    known = torch.arange(16) == 3
    assert predicted(model, tasks.fill(model, 1, [0, 1], ids_N=torch.arange(16), known_N=known))[0] == [16]
    condition = dataclasses.replace(request.condition, query_BND=torch.randn(2, 16, 32))
    assert predicted(model, dataclasses.replace(request, condition=condition))[0] == [16]
    cosine = small_model(dataclasses.replace(SMALL, positions="cosine"))
    calls, logits, every = predicted(cosine, tasks.generate(cosine, [1, 4], [0, 1]))
    assert calls == [16]
    assert not torch.allclose(logits[:, :1].expand_as(logits), every, atol=1e-3)


@pytest.fixture
def seen_settled(monkeypatch):
    """What readers of a cache are told to be settled, checked: nothing that was written since the last `scatter`."""
    seen, lowest, kept = [], {}, []
    reserve, read, scatter, view = Cache.reserve, Cache.read, DecodeState.scatter, Cache.view

    def reserves(cache, num_new):
        first = cache.end if cache.length_B is None else int(cache.length_B.min())
        lowest[id(cache)] = min(lowest.get(id(cache), 0), first)  # a new cache: nothing is settled
        writer = reserve(cache, num_new)
        seen.append((writer.slots(0).settled, lowest[id(cache)]))
        return writer

    def reads(cache, layer):
        seen.append((read(cache, layer).settled, lowest.get(id(cache), 0)))
        return read(cache, layer)

    def scatters(state, *args):
        lowest[id(state.cache)] = state.cache.end
        scatter(state, *args)

    def views(cache, rows, end, length_B):
        """At the start of a step: the step before has ended with operations that wait for all before them."""
        made = view(cache, rows, end, length_B)
        lowest[id(made)] = end
        kept.append(made)  # so that no other gets its id
        return made

    monkeypatch.setattr(Cache, "reserve", reserves)
    monkeypatch.setattr(Cache, "read", reads)
    monkeypatch.setattr(DecodeState, "scatter", scatters)
    monkeypatch.setattr(Cache, "view", views)
    return seen


@pytest.mark.parametrize("known", [0, 3])
@pytest.mark.parametrize("ways", [{}, {"attention": "causal"}, {"decode": "exact"}, {"decode": "speculative"}])
def test_what_is_settled_was_written_before_the_last_scatter(model, seen_settled, ways, known):
    settings = SamplingSettings(
        steps=5, guidance=3.0, **({"attention": "causal", "draft": 2} | ways if "decode" in ways else ways)
    )
    mask = (torch.arange(16) < known)[None]
    request = tasks.fill(model, 1, [5], ids_N=torch.arange(16) % 24, known_N=mask[0])
    run(model, request, settings)
    assert all(told <= true for told, true in seen_settled)
    exact = "decode" in ways  # rows may differ in length: nothing is settled
    assert [told > 0 for told, _ in seen_settled].count(True) == (
        0 if exact else 8
    )  # from the second step on, twice each


def test_what_is_settled_when_samples_join(model, seen_settled):
    def planned(seed):
        request = tasks.generate(model, [1], [seed])
        return request, make_plan(request.grid, request.known_BN, request.seeds, settings)

    settings = SamplingSettings(steps=4)
    running = ContinuousBatch(model, *planned(0), settings)
    running.add(*planned(1))
    running.step()
    running.step()
    assert all(told <= true for told, true in seen_settled)
    assert seen_settled[-1][0] > 0  # of the same length
    running.add(*planned(2))
    running.step()
    assert all(told <= true for told, true in seen_settled)
    assert seen_settled[-1][0] == 0  # of different lengths


@torch.no_grad()
def logits_and_guided(model, scale_BS):
    """The logits of two guided samples with some tokens in the cache: guided after the head, and before it."""
    cache, generator = model.allocate_cache(4, 20), torch.Generator().manual_seed(0)
    pos = (torch.rand(4, 8, 2, generator=generator) * 4).to(model.device)
    x = torch.randn(4, 8, model.config.width, generator=generator).to(model.device, model.dtype)
    model.encode(x, pos, cache, causal=False)
    query = pos[:, :3]
    return guide(model.predict(query, None, cache), scale_BS), model.predict(query, None, cache, scale_BS=scale_BS)


SCALES = [[[4.0], [1.0]], [[0.0, 1.0, 2.5], [7.0, 1.0, 3.0]]]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("packed", [False, True])
def test_guidance_before_the_head_is_guidance_of_the_logits(scale, dtype, packed):
    """A product of 32 inputs is rounded about sqrt(32) times: 1e-6 of the largest logit times the scale in float32."""
    model = small_model().to(dtype)
    if packed:
        model.head = PackedLinear.from_linear(model.head)
    after, before = logits_and_guided(model, torch.tensor(scale, dtype=dtype))
    assert before.shape == (2, 3, 24)
    tolerance = 8 * float(after.abs().max()) * torch.finfo(dtype).eps * 32**0.5
    torch.testing.assert_close(before, after, rtol=0, atol=tolerance)
    conditional = logits_and_guided(model, torch.ones(2, 1, dtype=dtype))[0]
    torch.testing.assert_close(before[1, 1], conditional[1, 1], rtol=0, atol=tolerance)  # scale 1 is no guidance


@pytest.mark.parametrize("kind", [Int8Linear, Fp8Linear, torch.bfloat16])
def test_guidance_before_the_head_rounds_no_more(kind):
    """Of a head that rounds its inputs: the guided ones are rounded once, not two that are then scaled.

    A third more at most: here conditional and unconditional rows have nothing in common, so neither way is better.
    """
    scale, config = torch.tensor(SCALES[0]), dataclasses.replace(SMALL, vocab_size=32)
    exact, model = small_model(config), small_model(config)
    if isinstance(kind, torch.dtype):
        model.to(kind)
    else:
        model.head = kind.from_linear(model.head)
        exact.head.weight.data.copy_(model.head.weight)
    true, _ = logits_and_guided(exact, scale)
    after, before = (float((x.float() - true).norm()) for x in logits_and_guided(model, scale))
    assert before < 1.33 * after + 1e-5 * float(true.norm())
    assert before < 0.05 * float(true.norm())
