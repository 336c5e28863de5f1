"""A running batch: samples that join and leave get the tokens that they get alone."""

import dataclasses
from weakref import WeakSet

import pytest
import torch

from arpg import ARPG, InputError, tasks
from arpg.decode import Request, continuous, decode, make_plan
from arpg.decode.continuous import ContinuousBatch, _token_bucket, start_batch
from arpg.decode.graphs import GraphCache
from arpg.decode.plan import Plan
from arpg.kernels.ops import Packing
from arpg.model import class_condition, text_condition
from arpg.model.condition import ControlMap, control_condition
from arpg.settings import SamplingSettings
from support.small import SMALL, TEXT, controlled_model, small_model, text_states


class PlayedGraphs(GraphCache):
    """Graphs on a CPU: what is captured runs again with each replay."""

    replays = 0


@pytest.fixture
def played_graphs(monkeypatch):
    """A function that makes a `PlayedGraphs`, or None."""
    made = []

    class Pool:
        def __init__(self, device):
            self.used, self.graphs = False, WeakSet()

        def capture(self, runs):
            assert self.graphs or not self.used  # torch frees a pool with the last of its graphs
            made = [(PlayedGraph(run), None) for run in runs]
            self.used = True
            self.graphs.update(graph for graph, _ in made)
            return made

    class PlayedGraph:
        def __init__(self, run):
            self.run = run

        def replay(self):
            made[-1].replays += 1
            self.run()

    def make(captured, **options):
        if captured:
            made.append(PlayedGraphs(torch.device("cpu"), **options))
        return made[-1] if captured else None

    monkeypatch.setattr(continuous, "GraphPool", Pool)
    return make


def run_all(running):
    while not all(row.finished for row in running.rows):
        running.step()


def requests(model, num=4):
    """One with nothing known, one with half, one with all but one, ...; each with its class and seed."""
    made = []
    for i in range(num):
        known = torch.rand(1, 16, generator=torch.Generator().manual_seed(i)) < 0.25 * i
        ids = torch.randint(0, 24, (1, 16), generator=torch.Generator().manual_seed(i + 9))
        made.append(Request(class_condition(model, torch.tensor([i % 5])), (4, 4), ids, known, (100 + i,)))
    return made


def plan_of(request, settings):
    return make_plan(request.grid, request.known_BN, request.seeds, settings)


def alone(model, request, settings):
    *_, last = decode(model, request, plan_of(request, settings), settings)
    return last.ids_BN


SETTINGS = [
    SamplingSettings(steps=5, guidance=2.0),
    SamplingSettings(steps=5, guidance=2.0, attention="causal", temperature=0.7, top_k=9),
    SamplingSettings(steps=4, guidance=1.0, order="spiral-in", schedule="linear"),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("gap", [1, 2, 3])
def test_joined_samples_get_the_tokens_of_their_own(model, settings, gap):
    """A new one joins every `gap` steps, each leaves when it is finished."""
    waiting = dict(enumerate(requests(model)))
    expected = {i: alone(model, request, settings) for i, request in waiting.items()}
    running, names, found, together = None, [], {}, 0
    for turn in range(100):
        if turn % gap == 0 and waiting:
            name = min(waiting)
            request = waiting.pop(name)
            names.append(name)
            if running is None:
                running = ContinuousBatch(model, request, plan_of(request, settings), settings)
            else:
                running.add(request, plan_of(request, settings))
        if running is None:
            break
        running.step()
        together = max(together, len(running.rows))
        done = [i for i, row in enumerate(running.rows) if row.finished]
        for i in done:
            found[names[i]] = running.fetch([i]).wait()[0]
        stay = [i for i in range(len(names)) if i not in done]
        names = [names[i] for i in stay]
        if done:
            running = running if stay else None
            if running:
                running.keep(stay)
    assert not waiting
    assert not names
    assert together > 1
    for name, ids in expected.items():
        assert torch.equal(found[name], ids), name


def test_rows_leave_from_the_middle(model):
    settings = SETTINGS[0]
    request = tasks.generate(model, [0, 1, 2, 3], [5, 6, 7, 8])
    running = ContinuousBatch(model, request, plan_of(request, settings), settings)
    running.step()
    running.step()
    running.keep([3, 1])
    while not all(row.finished for row in running.rows):
        running.step()
    whole = alone(model, request, settings)
    assert torch.equal(running.fetch([0, 1]).wait()[0], whole[[3, 1]])


def test_a_uniform_batch_is_the_loop_bit_for_bit(model):
    settings = SETTINGS[0]
    request = tasks.generate(model, [0, 1], [5, 6])
    running = ContinuousBatch(model, request, plan_of(request, settings), settings)
    for step in decode(model, request, plan_of(request, settings), settings):
        running.step()
        assert all(
            torch.equal(a, b) for a, b in zip(running.fetch([0, 1]).wait(), (step.ids_BN, step.known_BN), strict=True)
        )
    assert all(row.finished for row in running.rows)


def test_different_plans_share_a_batch(model):
    """Own orders, numbers of steps and guidance."""
    own = [SamplingSettings(steps=3, guidance=3.0), SamplingSettings(steps=7, order="raster", guidance=2.0)]
    plain = tasks.generate(model, [1, 2], [3, 4])
    plans = [plan_of(plain, settings).samples[i] for i, settings in enumerate(own)]
    running = ContinuousBatch(model, plain, Plan(tuple(plans)), own[0])
    running.step()
    third = tasks.generate(model, [3], [9])
    running.add(third, plan_of(third, own[1]))
    run_all(running)
    ids = running.fetch([0, 1, 2]).wait()[0]
    assert torch.equal(ids[:1], alone(model, tasks.generate(model, [1], [3]), own[0]))
    assert torch.equal(ids[1:2], alone(model, tasks.generate(model, [2], [4]), own[1]))
    assert torch.equal(ids[2:], alone(model, third, own[1]))


def test_places_that_are_not_those_of_the_grid(model):
    """All samples of a batch have the same; others are refused."""
    settings, pos_N2 = SETTINGS[0], torch.rand(16, 2, generator=torch.Generator().manual_seed(1)) * 4
    moved = [dataclasses.replace(request, pos_N2=pos_N2.clone()) for request in requests(model)]
    running = ContinuousBatch(model, moved[0], plan_of(moved[0], settings), settings)
    running.step()
    running.add(moved[1], plan_of(moved[1], settings))
    plain = requests(model)[2]
    with pytest.raises(InputError, match="same grid and positions"):
        running.add(plain, plan_of(plain, settings))
    run_all(running)
    for i, ids in enumerate(running.fetch([0, 1]).wait()[0]):
        assert torch.equal(ids, alone(model, moved[i], settings)[0])


@pytest.mark.parametrize("captured", [False, True])
def test_a_sample_keeps_its_slot_of_the_cache(model, captured, played_graphs):
    """Joining and leaving copy nothing; the tensors stay, until there are too few slots."""
    settings = SETTINGS[0]
    made = requests(model)
    running = ContinuousBatch(model, made[0], plan_of(made[0], settings), settings, graphs=played_graphs(captured))
    for request in made[1:]:
        running.add(request, plan_of(request, settings))
    key = running._pool.cache.key_LBTHK
    assert key.shape[1] == 2 * 4
    running.step()
    before = key.clone()
    running.keep([3, 1, 0])
    assert torch.equal(key, before)
    assert [row.slot for row in running.rows] == [3, 1, 0]
    running.add(made[2], plan_of(made[2], settings))
    names = [3, 1, 0, 2]
    assert running.rows[-1].slot == 2
    assert running._pool.cache.key_LBTHK.data_ptr() == key.data_ptr()
    run_all(running)
    ids = running.fetch(range(4)).wait()[0]
    for i, name in enumerate(names):
        assert torch.equal(ids[i : i + 1], alone(model, made[name], settings)), name


@pytest.mark.parametrize("captured", [False, True])
def test_a_class_is_encoded_in_the_first_step(model, captured, played_graphs, monkeypatch):
    """Joining runs no network: only prompts and known tokens are prefilled."""
    settings, calls = SETTINGS[0], []
    plain, known = requests(model)[:2]
    encode = ARPG.encode
    monkeypatch.setattr(
        ARPG, "encode", lambda self, x, *args, **kw: calls.append(len(x)) or encode(self, x, *args, **kw)
    )
    running = ContinuousBatch(model, plain, plan_of(plain, settings), settings, graphs=played_graphs(captured))
    assert calls == []
    running.add(known, plan_of(known, settings))
    assert calls == [2, 2]  # its class, then its known tokens
    run_all(running)
    expected = torch.cat([alone(model, request, settings) for request in (plain, known)])
    assert torch.equal(running.fetch([0, 1]).wait()[0], expected)


@pytest.mark.parametrize("settings", [*SETTINGS, SamplingSettings(steps=1, guidance=2.0)])
def test_captured_steps_are_the_eager_ones(model, settings, played_graphs):
    """Every captured step is padded: packed tokens, rows and widths. Samples join, leave and come back to a batch that
    is empty; the pool grows meanwhile. Each gets the tokens that it gets alone, and most steps are replayed.
    """
    graphs, waiting = played_graphs(True), [*requests(model, 4), *requests(model, 4)]
    expected = [alone(model, request, settings) for request in waiting]
    running = ContinuousBatch(model, waiting[0], plan_of(waiting[0], settings), settings, graphs=graphs)
    names, found, name, turn = [0], {}, 0, 0
    while names or name + 1 < len(waiting):
        if name + 1 < len(waiting) and (turn % 3 == 2 or not names):
            name += 1
            running.add(waiting[name], plan_of(waiting[name], settings))
            names.append(name)
        running.step()
        turn += 1
        for i, row in enumerate(running.rows):
            if row.finished:
                found[names[i]] = running.fetch([i]).wait()[0]
        stay = [i for i, row in enumerate(running.rows) if not row.finished]
        running.keep(stay)
        names = [names[i] for i in stay]
    for i, ids in enumerate(expected):
        assert torch.equal(found[i], ids), i
    assert {shape.slots for shape in graphs.captured} <= {1, 2, 4}
    assert all(shape.encoded % 16 == 0 for shape in graphs.captured)
    assert graphs.replays > 0


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", ["text", "control", "guidance"])
def test_other_conditions_join_and_leave(kind, captured, played_graphs):
    """Prompts of different lengths, condition images, and a model that takes the guidance scale as an input."""
    if kind == "text":
        model = small_model(TEXT)
        conditions = [text_condition(model, text_states(1 + 2 * i, seed=i), text_states(3 - i)) for i in range(3)]
    elif kind == "control":
        model = controlled_model()
        images = [torch.randint(0, 256, (8, 8), dtype=torch.uint8) for _ in range(3)]
        plain = [class_condition(model, torch.tensor([i])) for i in range(3)]
        conditions = [control_condition(model, plain[i], [ControlMap(images[i], "canny", 1.0)]) for i in range(3)]
    else:
        model = small_model(dataclasses.replace(SMALL, guidance_input=True))
        conditions = [class_condition(model, torch.tensor([i])) for i in range(3)]
    settings = SETTINGS[0]
    made = [Request.from_nothing(condition, (4, 4), (i,)) for i, condition in enumerate(conditions)]
    running = ContinuousBatch(model, made[0], plan_of(made[0], settings), settings, graphs=played_graphs(captured))
    for request in made[1:]:
        running.step()
        running.add(request, plan_of(request, settings))
    run_all(running)
    expected = torch.cat([alone(model, request, settings) for request in made])
    assert torch.equal(running.fetch(range(3)).wait()[0], expected)
    running.keep([1])
    running.add(made[2], plan_of(made[2], settings))  # in a slot that was used before
    run_all(running)
    assert torch.equal(running.fetch([1]).wait()[0], expected[2:])


@pytest.mark.parametrize("captured", [False, True])
def test_a_long_prompt_and_a_long_step(text_model, captured, played_graphs):
    """Rows are padded to the longest step of another sample: the one with the longest prefix has room for it."""
    many = SamplingSettings(steps=16, guidance=2.0)
    two = SamplingSettings(steps=2, guidance=2.0, schedule="linear")
    made = [Request.from_nothing(text_condition(text_model, text_states(num)), (4, 4), (num,)) for num in (7, 1)]
    running = ContinuousBatch(text_model, made[0], plan_of(made[0], many), many, graphs=played_graphs(captured))
    for _ in range(14):
        running.step()
    running.add(made[1], plan_of(made[1], two))
    run_all(running)
    expected = [alone(text_model, request, settings) for request, settings in zip(made, (many, two), strict=True)]
    assert torch.equal(running.fetch([0, 1]).wait()[0], torch.cat(expected))


def test_a_larger_pool_drops_the_graphs_of_the_smaller(model, played_graphs):
    settings, graphs = SETTINGS[0], played_graphs(True)
    first, *others = [tasks.generate(model, [i], [i]) for i in range(4)]
    running = ContinuousBatch(model, first, plan_of(first, settings), settings, graphs=graphs)
    running.step()
    assert len(graphs.captured) == 1
    for request in others:
        running.add(request, plan_of(request, settings))
    assert len(graphs.captured) == 0
    run_all(running)
    expected = [alone(model, request, settings) for request in (first, *others)]
    assert torch.equal(running.fetch(range(4)).wait()[0], torch.cat(expected))


def test_a_bucket_is_captured_when_it_comes_again(model, played_graphs):
    settings, graphs = SamplingSettings(steps=16, guidance=2.0, schedule="linear"), played_graphs(True, capture_after=1)
    request = tasks.generate(model, [1], [2])
    running = ContinuousBatch(model, request, plan_of(request, settings), settings, graphs=graphs)
    sizes = [(running.step(), len(graphs.captured), graphs.replays)[1:] for _ in range(4)]
    assert sizes == [(0, 0), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("num", [1, 15, 16, 17, 250, 257, 700, 1025, 2048, 5000])
def test_buckets_hold_their_tokens(num):
    bucket = _token_bucket(num)
    assert num <= bucket <= max(16, num + 15, 1.13 * num)
    assert _token_bucket(bucket) == bucket


@pytest.mark.parametrize("done", [True, False])
def test_a_device_is_idle_if_the_step_before_has_ended(monkeypatch, done):
    """Two steps may be in flight; the third waits for the end of the first."""
    model, settings, waits = small_model(), SamplingSettings(steps=6), []

    class Mark:
        def query(self):
            return done

        def synchronize(self):
            waits.append(self)

    request = tasks.generate(model, [1, 2], [1, 2])
    running = ContinuousBatch(model, request, plan_of(request, settings), settings)
    monkeypatch.setattr(type(model), "device", property(lambda model: torch.device("cuda")))
    monkeypatch.setattr(running, "_launch", lambda shape, flat: None)
    monkeypatch.setattr(continuous, "_mark", lambda device: Mark())
    idle = []
    for _ in range(4):
        running.step()
        idle.append(running.device_idle)
    assert idle == [True, done, done, done]  # nothing was launched before the first
    assert len(waits) == 2
    assert running.waited_s > 0


def test_a_compiled_batch_is_traced_whole(monkeypatch):
    """No part of a block of packed rows ends the trace; tokens are those of the same without compilation."""
    settings = SamplingSettings(steps=3, guidance=2.0)

    def run(model):
        request = tasks.generate(model, [1, 2, 3], [1, 2, 3])
        running = ContinuousBatch(model, request, plan_of(request, settings), settings)
        for _ in range(3):
            running.step()
        return running.fetch(range(3)).wait()[0]

    plain, compiled = run(small_model()), small_model()
    compile_block = torch.nn.Module.compile  # the code itself is not made, only traced
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **how: compile_block(block, backend="eager", **how))
    compiled.compile_blocks(dynamic=True)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(run(compiled), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_on_a_gpu(dtype):
    """Samples that join at different steps, in slots that were used before: captured, and eager with the same padding.

    In float32 also the tokens of each sample alone.
    """
    model, settings = small_model().to("cuda", dtype), SamplingSettings(steps=6, guidance=2.0)
    made = [tasks.generate(model, [i % 5], [i]) for i in range(24)]

    def run(graphs):
        running = ContinuousBatch(model, made[0], plan_of(made[0], settings), settings, graphs=graphs)
        names, found, copies = [0], {}, []
        for turn in range(60):
            for name in range(1 + 2 * turn, min(3 + 2 * turn, len(made))):
                running.add(made[name], plan_of(made[name], settings))
                names.append(name)
            running.step()
            done = [i for i, row in enumerate(running.rows) if row.finished]
            if done:
                copies.append(([names[i] for i in done], running.fetch(done)))
            stay = [i for i in range(len(names)) if i not in done]
            running.keep(stay)
            names = [names[i] for i in stay]
        for finished, copy in copies:  # long after their slots were given to others
            found |= dict(zip(finished, copy.wait()[0], strict=True))
        return torch.stack([found[i] for i in range(len(made))])

    graphs = GraphCache(model.device)
    captured = run(graphs)
    assert len(graphs.captured) > 2
    assert torch.equal(run(GraphCache(model.device, capture_after=10**9)), captured)
    assert torch.equal(run(graphs), captured)  # of the first batch, whose tensors are no longer those of this one
    if dtype == torch.float32:
        assert torch.equal(captured.cpu(), torch.cat([alone(model, request, settings).cpu() for request in made]))


def test_a_request_that_does_not_fit_changes_nothing(model, monkeypatch):
    settings = SETTINGS[0]
    first, second = requests(model)[:2]
    running = ContinuousBatch(model, first, plan_of(first, settings), settings)
    running.step()
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "allocate_cache", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            running.add(second, plan_of(second, settings))
    while not running.rows[0].finished:
        running.step()
    assert torch.equal(running.fetch([0]).wait()[0], alone(model, first, settings))


def test_packed_tokens_are_those_of_their_rows():
    """Three samples of 2, 0 and 3 tokens, conditional and unconditional, and one token of padding."""
    start_R, count_R = torch.tensor([0, 6, 2, 8, 2, 8]), torch.tensor([2, 2, 0, 0, 3, 3])
    packing = Packing(start_R, count_R, 3, (2, 6)).with_indices()
    assert packing.token_RS[[0, 1], :2].tolist() == [[0, 1], [6, 7]]
    assert packing.token_RS[[4, 5]].tolist() == [[2, 3, 4], [8, 9, 10]]
    assert packing.place_CT[:, :5].tolist() == [[0, 1, 12, 13, 14], [3, 4, 15, 16, 17]]
    for index, size in ((packing.token_RS, 2 * 6), (packing.place_CT, 6 * 3)):  # padding, too, is somewhere
        assert index.min() >= 0
        assert index.max() < size


@pytest.mark.parametrize("decode_", ["exact", "speculative"])
def test_rows_leave_batches_that_guess(model, decode_):
    settings = SamplingSettings(steps=16, guidance=2.0, decode=decode_, attention="causal", draft=3)
    request = Request.gather([(r, 0) for r in requests(model)])
    running = start_batch(model, request, plan_of(request, settings), settings)
    names, found = [0, 1, 2, 3], {}
    for turn in range(100):
        running.step()
        done = [i for i, row in enumerate(running.rows) if row.finished]
        found |= {names[i]: running.fetch([i]).wait()[0] for i in done}
        gone = {*done, *([0] if turn == 0 else [])}  # the first is cancelled after a step
        stay = [i for i in range(len(names)) if i not in gone]
        names = [names[i] for i in stay]
        if not stay:
            break
        if gone:
            running.keep(stay)
    assert set(found) == {1, 2, 3}
    for name, ids in found.items():
        assert torch.equal(ids, alone(model, requests(model)[name], settings)), name


def test_no_graph_is_built(model):
    """A graph over the cache would keep itself alive for ever."""
    settings = SETTINGS[0]
    first, second = requests(model)[:2]
    running = ContinuousBatch(model, first, plan_of(first, settings), settings)
    running.add(second, plan_of(second, settings))
    running.keep([1])
    running.step()
    pool = running._pool
    assert not any(x.requires_grad for x in (pool.cache.key_LBTHK, pool.cache.value_LBTHK, pool.pos_X2))
