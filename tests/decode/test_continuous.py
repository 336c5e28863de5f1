"""A running batch: samples that join and leave get the tokens that they get alone."""

import pytest
import torch

from arpg import tasks
from arpg.decode import Request, decode, make_plan
from arpg.decode.continuous import ContinuousBatch, start_batch
from arpg.decode.plan import Plan
from arpg.kernels import ops
from arpg.kernels.ops import Packing
from arpg.model import class_condition
from arpg.settings import SamplingSettings


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
            found[names[i]] = running.tokens([i])[0]
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
    assert torch.equal(running.tokens([0, 1])[0], whole[[3, 1]])


def test_a_uniform_batch_is_the_loop_bit_for_bit(model):
    settings = SETTINGS[0]
    request = tasks.generate(model, [0, 1], [5, 6])
    running = ContinuousBatch(model, request, plan_of(request, settings), settings)
    for step in decode(model, request, plan_of(request, settings), settings):
        running.step()
        assert all(torch.equal(a, b) for a, b in zip(running.tokens([0, 1]), (step.ids_BN, step.known_BN), strict=True))
    assert all(row.finished for row in running.rows)


def test_different_plans_and_places_share_a_batch(model):
    """Own orders, numbers of steps and guidance; and places that are not those of the grid."""
    own = [SamplingSettings(steps=3, guidance=3.0), SamplingSettings(steps=7, order="raster", guidance=2.0)]
    plain = tasks.generate(model, [1, 2], [3, 4])
    plans = [plan_of(plain, settings).samples[i] for i, settings in enumerate(own)]
    running = ContinuousBatch(model, plain, Plan(tuple(plans)), own[0])
    moved = Request(
        class_condition(model, torch.tensor([3])),
        (4, 4),
        torch.zeros(1, 16, dtype=torch.long),
        torch.zeros(1, 16, dtype=torch.bool),
        (9,),
        pos_N2=torch.rand(16, 2, generator=torch.Generator().manual_seed(1)) * 4,
    )
    running.step()
    running.add(moved, plan_of(moved, own[1]))
    while not all(row.finished for row in running.rows):
        running.step()
    ids = running.tokens([0, 1, 2])[0]
    assert torch.equal(ids[:1], alone(model, tasks.generate(model, [1], [3]), own[0]))
    assert torch.equal(ids[1:2], alone(model, tasks.generate(model, [2], [4]), own[1]))
    assert torch.equal(ids[2:], alone(model, moved, own[1]))


def test_a_sample_keeps_its_slot_of_the_cache(model):
    """Joining and leaving copy the samples concerned alone; the tensors stay, until there are too few slots."""
    settings = SETTINGS[0]
    names = list(range(4))
    made = requests(model)
    running = ContinuousBatch(model, made[0], plan_of(made[0], settings), settings)
    for request in made[1:]:
        running.add(request, plan_of(request, settings))
    key = running._pool.cache.key_LBTHK
    assert key.shape[1] == 2 * 4
    running.step()
    before = key.clone()
    running.keep([3, 1, 0])  # the last slot moves into the third
    names = [3, 1, 0]
    moved = [i for i in range(8) if not torch.equal(key[:, i], before[:, i])]
    assert moved == [4, 5]
    assert torch.equal(key[:, 4:6], before[:, 6:8])
    running.add(made[2], plan_of(made[2], settings))
    names.append(2)
    assert running._pool.cache.key_LBTHK.data_ptr() == key.data_ptr()
    while not all(row.finished for row in running.rows):
        running.step()
    ids = running.tokens(range(4))[0]
    for i, name in enumerate(names):
        assert torch.equal(ids[i : i + 1], alone(model, made[name], settings)), name


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
    assert torch.equal(running.tokens([0])[0], alone(model, first, settings))


def test_packed_tokens_are_those_of_their_rows():
    """Three samples of 2, 0 and 3 tokens, conditional and unconditional."""
    x_CT1 = torch.arange(10.0).reshape(2, 5, 1)
    packing = Packing(
        torch.tensor([[0, 1, 0], [5, 6, 5], [0, 0, 0], [5, 5, 5], [2, 3, 4], [7, 8, 9]]),
        torch.tensor([[0, 1, 12, 13, 14], [3, 4, 15, 16, 17]]),
    )
    rows = ops.unpack(x_CT1, packing)
    assert rows.shape == (6, 3, 1)
    assert rows[[0, 1], :2].flatten().tolist() == [0, 1, 5, 6]
    assert rows[[4, 5]].flatten().tolist() == [2, 3, 4, 7, 8, 9]
    assert torch.equal(ops.pack(rows, packing), x_CT1)
    narrow = x_CT1.to(torch.float8_e4m3fn)
    assert torch.equal(ops.pack(ops.unpack(narrow, packing), packing).float(), narrow.float())
    assert ops.unpack(x_CT1, None) is ops.pack(x_CT1, None) is x_CT1


@pytest.mark.parametrize("decode_", ["exact", "speculative"])
def test_rows_leave_batches_that_guess(model, decode_):
    settings = SamplingSettings(steps=16, guidance=2.0, decode=decode_, attention="causal", draft=3)
    request = Request.gather([(r, 0) for r in requests(model)])
    running = start_batch(model, request, plan_of(request, settings), settings)
    names, found = [0, 1, 2, 3], {}
    for turn in range(100):
        running.step()
        done = [i for i, row in enumerate(running.rows) if row.finished]
        found |= {names[i]: running.tokens([i])[0] for i in done}
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
    assert not any(x.requires_grad for x in (pool.cache.key_LBTHK, pool.cache.value_LBTHK, pool.pos_BN2))
