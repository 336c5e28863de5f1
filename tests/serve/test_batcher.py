"""The batcher: rows of many requests in one batch, each with the tokens it gets alone; fairness, faults, cancelling."""

import dataclasses
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from arpg import tasks
from arpg.decode import Request
from arpg.decode.continuous import ContinuousBatch, Slots, TokenCopy
from arpg.decode.graphs import GraphCache
from arpg.model import class_condition
from arpg.serve.batcher import Batcher, choose_max_batch, choose_max_wait, choose_pause, warm_up
from arpg.settings import SamplingSettings
from support.rows import SETTINGS, SteppedBatcher, SubmittedRows
from support.small import SMALL


@pytest.fixture
def batcher(model):
    made = Batcher(model, max_batch=8)
    yield made
    made.close()


@pytest.fixture
def slow(model):
    made = []

    def make(**options):
        made.append(SteppedBatcher(model, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def masked(model, seed):
    known = torch.rand(1, 16, generator=torch.Generator().manual_seed(seed)) < 0.5
    ids = torch.randint(0, 24, (1, 16), generator=torch.Generator().manual_seed(seed))
    return Request(class_condition(model, torch.tensor([seed % 5])), (4, 4), ids, known, (seed,))


def test_every_request_gets_its_own_tokens(model, batcher):
    """Different numbers, seeds, masks, plans, guidance and decoding strategies, all at once."""
    kinds = [
        SETTINGS,
        SamplingSettings(steps=3, guidance=2.0, order="raster"),
        SamplingSettings(steps=8, guidance=1.0),
        SamplingSettings(steps=4, guidance=2.0, temperature=0.5, top_k=5, attention="causal"),
        SamplingSettings(guidance=2.0, decode="exact", attention="causal", draft=3),
    ]
    submitted = [SubmittedRows(model, i, num=1 + i % 3, settings=kinds[i % 5], seed=7 * i) for i in range(15)]
    submitted += [SubmittedRows(model, 100 + i, settings=kinds[i % 5], request=masked(model, i)) for i in range(10)]
    for rows in submitted:
        batcher.submit(rows.pending)
    assert all(rows.is_right() for rows in submitted)
    assert (batcher.num_waiting, batcher.num_running) == (0, 0)


def test_a_new_request_joins_the_running_batch_and_leaves_when_it_is_finished(model, slow):
    batcher = slow(max_batch=8)
    first, second = SubmittedRows(model, "a", seed=1), SubmittedRows(model, "b", seed=2)
    batcher.submit(first.pending)
    batcher.step(2)
    assert batcher.stepped.acquire(timeout=30)  # it waits before its third step
    batcher.submit(second.pending)
    batcher.allowed.release()
    batcher.step(5)
    assert first.is_right()
    assert second.is_right()
    assert batcher.seen == 3 * [[("a", 0)]] + 2 * [[("a", 0), ("b", 0)]] + 3 * [[("b", 0)]]


def test_the_queue_time_is_that_of_the_oldest_row_without_a_batch(model, slow):
    batcher = slow(max_batch=1)
    first, second = SubmittedRows(model, "a", seed=1), SubmittedRows(model, "b", seed=2)
    assert batcher.queue_seconds == 0
    second.pending.since -= 100
    batcher.submit(first.pending)
    batcher.step(1)
    batcher.submit(second.pending)
    assert 100 <= batcher.queue_seconds < 200
    batcher.step(2 * SETTINGS.steps - 1)
    assert first.is_right()
    assert second.is_right()
    assert batcher.queue_seconds == 0


def test_rows_that_do_not_fit_together_take_turns(model, slow):
    """Rows of other sampling settings have a batch of their own; batches take steps in turn."""
    batcher = slow(max_batch=8)
    first = SubmittedRows(model, "a")
    batcher.submit(first.pending)
    batcher.step(1)
    assert batcher.stepped.acquire(timeout=30)
    second = SubmittedRows(model, "b", settings=dataclasses.replace(SETTINGS, temperature=0.5))
    batcher.submit(second.pending)
    batcher.allowed.release()
    batcher.step(8)
    assert first.is_right()
    assert second.is_right()
    assert [who[0][0] for who in batcher.seen] == list("aababababb")


def test_a_large_job_does_not_block_a_small_one(model, slow):
    batcher = slow(max_batch=8)
    large, small = SubmittedRows(model, "large", num=16), SubmittedRows(model, "small")
    batcher.submit(large.pending)
    batcher.step(1)
    assert batcher.stepped.acquire(timeout=30)
    batcher.submit(small.pending)
    batcher.allowed.release()
    batcher.step(1)
    assert len(batcher.seen[0]) == 6  # a quarter is reserved for other owners
    assert ("small", 0) in batcher.seen[2]
    batcher.allowed.release(1000)
    assert small.is_right()
    assert large.is_right()


def test_owners_are_served_in_turn(model, slow):
    batcher = slow(max_batch=4)
    with batcher._wake:  # they all arrive before it admits any
        submitted = [SubmittedRows(model, name, num=3, seed=i) for i, name in enumerate("abc")]
        batcher._arrived += [rows.pending for rows in submitted]
        batcher._wake.notify()
    batcher.step(1)
    assert sorted(batcher.seen[0]) == [("a", 0), ("b", 0), ("c", 0)]  # the last row is reserved for other owners
    batcher.allowed.release(1000)
    assert all(rows.is_right() for rows in submitted)


def test_a_cancelled_row_leaves_before_the_next_step(model, slow):
    batcher = slow(max_batch=8)
    stays, goes = SubmittedRows(model, "stays", seed=1), SubmittedRows(model, "goes", num=2)
    with batcher._wake:
        batcher._arrived += [stays.pending, goes.pending]
        batcher._wake.notify()
    batcher.step(1)
    assert batcher.stepped.acquire(timeout=30)
    goes.stopped.set()
    batcher.allowed.release()
    batcher.step(1)
    assert goes.wait().error is None
    assert goes.pending.num_open == 2
    assert [len(who) for who in batcher.seen] == [3, 3, 1]
    batcher.allowed.release(1000)
    assert stays.is_right()


@pytest.mark.parametrize("error", [RuntimeError("broken"), torch.OutOfMemoryError("no memory")])
def test_a_failing_step_fails_its_batch_alone(model, slow, monkeypatch, error, caplog):
    caplog.set_level("CRITICAL")
    batcher = slow(max_batch=8)
    bad, good = (
        SubmittedRows(model, "bad", num=2),
        SubmittedRows(model, "good", settings=SamplingSettings(steps=4, guidance=1.0)),
    )
    with batcher._wake:
        batcher._arrived += [bad.pending, good.pending]
        batcher._wake.notify()
    batcher.step(1)
    assert batcher.stepped.acquire(timeout=30)

    def fail():
        raise error

    failing = next(batch for batch in batcher._batches if batch.rows[0].pending is bad.pending)
    failing.decode.step = fail
    batcher.allowed.release(1000)
    assert bad.wait().error is error
    assert good.is_right()
    assert batcher.metrics.registry.get_sample_value("arpg_failures_total") == 1
    after = SubmittedRows(model, "after")
    batcher.submit(after.pending)
    assert after.is_right()


def test_rows_that_cannot_join_fail_alone(model, slow, monkeypatch, caplog):
    """The batch they should have joined goes on without them, whatever of them it had taken in."""
    caplog.set_level("CRITICAL")
    batcher, error = slow(max_batch=8), torch.OutOfMemoryError("no memory")
    first, second = SubmittedRows(model, "a"), SubmittedRows(model, "b")
    bad = SubmittedRows(model, "bad", request=masked(model, 1))

    def fail(*_):
        raise error

    batcher.submit(first.pending)
    batcher.step(1)
    assert batcher.stepped.acquire(timeout=30)
    monkeypatch.setattr(Slots, "put", fail)
    batcher.submit(bad.pending)
    batcher.allowed.release()
    assert bad.wait().error is error
    batcher.submit(second.pending)
    batcher.allowed.release(1000)
    assert first.is_right()
    assert second.is_right()


@pytest.fixture
def late_copies(monkeypatch):
    """Copies that are never ready before somebody waits for them, as on a GPU; returns those waited for."""
    waited, wait = [], TokenCopy.wait

    def recorded(copy):
        waited.append(copy)
        return wait(copy)

    monkeypatch.setattr(TokenCopy, "ready", False)
    monkeypatch.setattr(TokenCopy, "wait", recorded)
    return waited


def test_tokens_are_delivered_after_the_next_step(model, slow, late_copies):
    """Nobody waits for the device before it has more to do; what the last step has made is delivered at once."""
    batcher, shown = slow(max_batch=8), []
    first, second = SubmittedRows(model, "a", seed=1), SubmittedRows(model, "b", seed=2)
    first.pending.on_step = lambda pending: shown.append((pending.steps_B[0], int(pending.known_BN.sum())))
    batcher.submit(first.pending)
    batcher.step(1)
    assert batcher.stepped.acquire(timeout=30)  # it waits before its second step
    assert not late_copies
    batcher.submit(second.pending)
    batcher.allowed.release()
    batcher.step(3)
    assert batcher.stepped.acquire(timeout=30)
    assert [steps for steps, _ in shown] == [1, 2, 3, 4]
    assert not first.ended.is_set()  # its last step was launched, but none after it
    batcher.allowed.release(1000)
    assert first.is_right()
    assert second.is_right()
    assert [steps for steps, _ in shown] == [1, 2, 3, 4, 5]
    assert shown[-1][1] == 16
    assert [known for _, known in shown] == sorted(known for _, known in shown)


def test_a_copy_that_fails_fails_its_rows_alone(model, slow, late_copies, monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    batcher, error = slow(max_batch=8), RuntimeError("broken")
    bad = SubmittedRows(model, "bad")
    good = SubmittedRows(model, "good", settings=dataclasses.replace(SETTINGS, steps=9))
    with batcher._wake:
        batcher._arrived += [bad.pending, good.pending]
        batcher._wake.notify()
    batcher.step(SETTINGS.steps)
    assert batcher.stepped.acquire(timeout=30)
    with monkeypatch.context() as patch:
        patch.setattr(TokenCopy, "wait", lambda copy: (_ for _ in ()).throw(error))
        batcher.allowed.release()
        assert bad.wait().error is error
    batcher.allowed.release(1000)
    assert good.is_right()


def test_a_batch_with_captured_steps_is_kept(model, slow, monkeypatch):
    """Rows that come later find its graphs; an eager batch is dropped."""
    never = partial(GraphCache, capture_after=10**9)  # padded as captured steps are, but never captured
    monkeypatch.setattr("arpg.serve.batcher.GraphCache", never)
    assert not slow(max_batch=8).captures
    monkeypatch.setattr("arpg.serve.batcher.choose_mode", lambda mode, device: {"auto": "graph"}[mode])  # as on a GPU
    batcher = slow(max_batch=8)
    assert batcher.captures
    batcher.allowed.release(1000)
    for seed in range(2):
        rows = SubmittedRows(model, "a", seed=seed, num=2)
        batcher.submit(rows.pending)
        assert rows.is_right()
    other = SubmittedRows(model, "b", settings=SamplingSettings(steps=4, guidance=1.0))
    batcher.submit(other.pending)
    assert other.is_right()
    assert [len(batch.rows) for batch in batcher._idle.values()] == [0, 0]


@pytest.mark.parametrize("kept", [True, False])
def test_memory_of_batches_without_rows_is_given_to_new_ones(model, slow, monkeypatch, kept):
    """A batch that finds no memory is begun again without them; where there are none, its requests fail."""
    monkeypatch.setattr("arpg.serve.batcher.GraphCache", partial(GraphCache, capture_after=10**9))
    monkeypatch.setattr("arpg.serve.batcher.choose_mode", lambda mode, device: "graph")
    batcher = slow(max_batch=8)
    batcher.allowed.release(1000)
    if kept:
        rows = SubmittedRows(model, "a")
        batcher.submit(rows.pending)
        assert rows.is_right()
    make, error = Slots.__init__, torch.OutOfMemoryError("no memory")

    def scarce(slots, *arguments, **options):
        if batcher._idle or not kept:
            raise error
        make(slots, *arguments, **options)

    monkeypatch.setattr(Slots, "__init__", scarce)
    other = SubmittedRows(model, "b", settings=SamplingSettings(steps=4, guidance=1.0))
    batcher.submit(other.pending)
    if kept:
        assert other.is_right()
    else:
        assert other.wait().error is error


def test_an_idle_gpu_does_not_wait_for_more_rows(model):
    assert choose_max_wait(model) == 0.01
    assert choose_max_wait(SimpleNamespace(device=torch.device("cuda"))) == 0.0
    assert choose_pause(model) == 0.0
    assert choose_pause(SimpleNamespace(device=torch.device("cuda"))) == 0.0002


def test_the_size_of_a_batch_follows_from_the_memory(model, monkeypatch):
    """Of a GPU: a quarter of what is free holds the caches, of conditional and unconditional rows."""
    assert choose_max_batch(model) == 16
    gpu = SimpleNamespace(
        device=torch.device("cuda"), config=SMALL, takes_guidance=False, allocate_cache=model.allocate_cache
    )
    slots, layers = 1 + 16 + 16, 2 + 1
    each = 2 * layers * slots * 2 * SMALL.width * 4
    for images, expected in ((10.5, 10), (0.1, 1), (10**6, 128)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=int(4 * images * each): (free, 2 * free))
        assert choose_max_batch(gpu) == expected


@pytest.mark.parametrize("steps", [2, 4])  # with two steps, two samples join at a time
def test_a_warm_up_decodes_batches_of_all_sizes(model, steps):
    """All samples at one step, and at different ones."""
    batcher = Batcher(model, max_batch=4)
    seen, step = set(), batcher._step

    def look_and_step():
        seen.update(tuple(sorted(row.done for row in batch.decode.rows)) for batch in batcher._batches)
        step()

    batcher._step = look_and_step
    warm_up(batcher, tasks.generate(model, [0], [0]), dataclasses.replace(SETTINGS, steps=steps))
    batcher.close()
    assert {(0,), (0, 0), (0, 0, 0, 0)} <= seen
    assert {len(set(done)) for done in seen if len(done) == 4} == {1, steps}
    assert batcher.num_running == batcher.num_waiting == 0


def test_a_warm_up_ends_where_the_model_fails(model, monkeypatch):
    batcher = Batcher(model, max_batch=2)
    monkeypatch.setattr(ContinuousBatch, "step", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    warm_up(batcher, tasks.generate(model, [0], [0]), SETTINGS)
    batcher.close()


def test_everything_known_needs_no_step(model, batcher):
    ids = torch.arange(16)[None]
    known = torch.ones(1, 16, dtype=torch.bool)
    rows = SubmittedRows(
        model, "a", request=Request(class_condition(model, torch.tensor([1])), (4, 4), ids, known, (0,))
    )
    batcher.submit(rows.pending)
    assert rows.wait().error is None
    assert torch.equal(rows.pending.ids_BN, ids)


def test_no_pause_while_two_batches_take_turns(model, slow, monkeypatch):
    """The device of a batch that waits for its turn is busy with the other."""
    pauses = []
    monkeypatch.setattr("arpg.serve.batcher.time", SimpleNamespace(**{**vars(time), "sleep": pauses.append}))
    batcher = slow(max_batch=4, pause=0.0002, num_jobs=lambda: 1000)
    submitted = [SubmittedRows(model, i, settings=SamplingSettings(steps=5, guidance=1.0 + i)) for i in range(2)]
    with batcher._wake:
        for rows in submitted:
            batcher.submit(rows.pending)
    batcher.step(10)
    assert all(rows.is_right() for rows in submitted)
    batcher.close()
    assert len(pauses) <= 1  # after the end of the first


def test_closing_ends_what_is_left(model):
    batcher = SteppedBatcher(model, max_batch=2)
    submitted = [SubmittedRows(model, i) for i in range(4)]
    for rows in submitted:
        batcher.submit(rows.pending)
    batcher.close()
    assert all(rows.ended.is_set() for rows in submitted)
    assert all(rows.error is not None for rows in submitted[2:])


def test_a_large_grid_counts_as_many_rows_and_is_not_starved(model, batcher):
    big = SubmittedRows(model, "big", request=tasks.generate(model, [1], [0], grid=(12, 12)))
    small = [SubmittedRows(model, i, seed=i) for i in range(12)]
    for rows in [*small[:6], big, *small[6:]]:
        batcher.submit(rows.pending)
    assert big.is_right()
    assert all(rows.is_right() for rows in small)
    assert batcher._weight(big.pending) == 8  # nine grids, but at most max_batch


@pytest.mark.parametrize(
    ("jobs", "idle", "expected"), [(2, True, None), (7, True, 0.001), (1000, True, 0.003), (1000, False, None)]
)
def test_jobs_in_no_batch_get_time_between_two_steps(model, slow, monkeypatch, jobs, idle, expected):
    """In proportion to their number, up to a limit; none where all are in the batch or the device is busy, and none
    after the last step.
    """
    pauses = []
    monkeypatch.setattr(ContinuousBatch, "device_idle", property(lambda batch: idle, lambda batch, value: None), False)
    monkeypatch.setattr("arpg.serve.batcher.time", SimpleNamespace(**{**vars(time), "sleep": pauses.append}))
    batcher = slow(max_batch=4, pause=0.0002, num_jobs=lambda: jobs)
    submitted = [SubmittedRows(model, owner) for owner in range(2)]
    with batcher._wake:  # both are in the first batch
        for rows in submitted:
            batcher.submit(rows.pending)
    batcher.step(5)
    assert all(rows.is_right() for rows in submitted)
    batcher.close()
    assert pauses == pytest.approx([] if expected is None else [expected] * 4)
