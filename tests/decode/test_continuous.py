"""A running batch: samples that join and leave get the tokens that they get alone."""

import pytest
import torch

from arpg import tasks
from arpg.decode import Request, decode, make_plan
from arpg.decode.continuous import ContinuousBatch, should_merge
from arpg.decode.plan import Plan
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
            new = ContinuousBatch(model, request, plan_of(request, settings), settings)
            names.append(name)
            if running is None:
                running = new
            else:
                running.join(new)
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
        assert running.state.cache.length_B is None  # no mask
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
    running.join(ContinuousBatch(model, moved, plan_of(moved, own[1]), own[1]))
    while not all(row.finished for row in running.rows):
        running.step()
    ids = running.tokens([0, 1, 2])[0]
    assert torch.equal(ids[:1], alone(model, tasks.generate(model, [1], [3]), own[0]))
    assert torch.equal(ids[1:2], alone(model, tasks.generate(model, [2], [4]), own[1]))
    assert torch.equal(ids[2:], alone(model, moved, own[1]))


def test_joining_pays_when_rows_are_at_like_steps(model):
    settings = SamplingSettings(steps=8, schedule="arccos", guidance=2.0)
    request = tasks.generate(model, [0], [0])

    def at(step):
        running = ContinuousBatch(model, request, plan_of(request, settings), settings)
        for _ in range(step):
            running.step()
        return running

    assert should_merge(at(0), at(0), call_overhead_tokens=0.5)
    assert should_merge(at(0), at(7), call_overhead_tokens=1000)
    assert not should_merge(at(0), at(7), call_overhead_tokens=0.5)


@pytest.mark.parametrize("decode_", ["exact", "speculative"])
def test_rows_leave_batches_that_guess(model, decode_):
    settings = SamplingSettings(steps=16, guidance=2.0, decode=decode_, attention="causal", draft=3)
    request = Request.gather([(r, 0) for r in requests(model)])
    running = ContinuousBatch(model, request, plan_of(request, settings), settings)
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
    runnings = [ContinuousBatch(model, r, plan_of(r, settings), settings) for r in requests(model)[:2]]
    runnings[0].join(runnings[1])
    runnings[0].keep([1])
    runnings[0].step()
    state = runnings[0].state
    assert not any(x.requires_grad for x in (state.cache.key_LBTHK, state.cache.value_LBTHK, state.pos_BN2))
