"""Admission by cost: what a task costs, budgets of small and large ones, shares of tenants; lanes that do not wait."""

import threading
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
import torch
from starlette.testclient import TestClient

from arpg.serve.admission import AdmissionLimiter, CostLimiter, task_cost
from arpg.serve.api_error import ApiError
from arpg.serve.app import create_app
from arpg.serve.auth import ApiKeys
from arpg.serve.batcher import ContinuousBatch
from arpg.serve.observability import HttpMetrics, WorkerMetrics
from arpg.serve.server_config import ServeSettings
from support.http import error, image_of, pixels, post
from support.rows import SteppedBatcher, SubmittedRows
from support.small import noise


def limiter(num_tenants=0, **settings):
    return AdmissionLimiter(ServeSettings(**settings), SimpleNamespace(num_tenants=num_tenants), HttpMetrics())


def cost_limiter(share=1.0, **settings):
    limits = CostLimiter(ServeSettings(**settings), WorkerMetrics())
    limits.reserve = partial(limits.reserve, share=share)
    return limits


def refused(code, call, *arguments, **options):
    with pytest.raises(ApiError) as error:
        call(*arguments, **options)
    assert (error.value.status, error.value.code) == (429, code)
    assert 1 <= error.value.retry_after <= 60
    return error.value.message


def test_a_default_image_costs_one(pipeline):
    steps = pipeline.sampling.settings().steps  # 16 tokens: at most 16 steps

    def cost(**options):
        return task_cost(pipeline.generate_task(1, **options), pipeline)

    assert steps >= 16
    assert cost() == 1
    assert cost(num_images=3, best_of=2) == 6
    assert cost(steps=8) == 0.5
    assert cost(guidance=1.0) == 0.5
    assert cost(schedule=[4, 4, 4, 4]) == 0.25
    assert cost(decode="exact", attention="causal") == 1
    expand = pipeline.expand_task(noise(8, 8), 1, size=(16, 16), method="checkerboard", steps=16)
    assert task_cost(expand, pipeline) == 4  # four times the tokens
    windows = pipeline.outpaint_task(noise(8, 8), 1, right=8, steps=16)
    assert task_cost(windows, pipeline) == len(windows)


def test_the_budget_of_small_tasks_is_their_own():
    costs = cost_limiter(max_pending_cost=16)
    big = costs.reserve("none", 100, large=True)  # beyond the budget, but alone
    refused("cost_limit", costs.reserve, "none", 3, large=True)
    refused("cost_limit", costs.reserve, "none", 2.5, large=False)  # more than an eighth: a large one, too
    small = [costs.reserve("none", 2, large=False) for _ in range(8)]
    refused("cost_limit", costs.reserve, "none", 0.1, large=False)
    assert (costs.pending_cost("small"), costs.pending_cost("large")) == (16, 100)
    for release in [big, *small]:
        release()
    assert (costs.pending_cost("small"), costs.pending_cost("large")) == (0, 0)
    costs.reserve("none", 16, large=True)


def test_a_tenant_has_a_share():
    costs = cost_limiter(share=0.5, max_pending_cost=16)
    for _ in range(4):
        costs.reserve("alice", 2, large=False)
    message = refused("key_quota", costs.reserve, "alice", 1, large=False)
    assert "8.0 images are in progress for keys labelled 'alice'; this one costs 1.0 and the limit is 8;" in message
    costs.reserve("bob", 2, large=False)
    admission = limiter(num_tenants=2, max_pending_requests=4, key_share=0.5)
    assert admission.share == 0.5
    admission.enter("alice")
    admission.enter("alice")
    refused("key_quota", admission.enter, "alice")
    admission.enter("bob")
    admission.leave("alice")
    admission.enter("alice")
    admission.enter("bob")
    refused("queue_full", admission.enter, "carol")
    alone = limiter(num_tenants=1, max_pending_requests=4, key_share=0.5)
    assert alone.share == 1
    for _ in range(4):
        alone.enter("alice")


def test_a_request_over_the_budget_is_a_429(served):
    service = served(max_pending_cost=8)
    client = TestClient(create_app(service))
    release = service.worker.costs.reserve("none", 7.9, share=1.0, large=True)
    answer = client.post("/v1/arpg/generate", json={"class": 1, "num": 2})
    assert error(answer, 429)["code"] == "cost_limit"
    assert int(answer.headers["retry-after"]) >= 1
    assert error(client.post("/v1/arpg/generate", json={"class": 1, "num": 2, "stream": True}), 429)
    post(client, "generate", {"class": 1, "steps": 4})
    release()
    post(client, "generate", {"class": 1, "num": 2, "steps": 16})
    assert (service.worker.costs.pending_cost("small"), service.worker.costs.pending_cost("large")) == (0, 0)


def test_a_body_that_does_not_arrive_takes_no_place(live):
    address, _ = live(max_pending_requests=1)
    begun, more = threading.Semaphore(0), threading.Event()

    def slow_body():
        yield b'{"class": 1,'
        begun.release()  # the headers and this part are sent
        assert more.wait(60)
        yield b'"steps": 2}'

    url, answers = f"{address}/v1/arpg/generate", []

    def send():
        headers = {"content-type": "application/json"}
        answers.append(httpx.post(url, content=slow_body(), headers=headers, timeout=60))

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
        assert begun.acquire(timeout=60)
    for _ in range(3):
        assert httpx.post(url, json={"class": 1, "steps": 2}, timeout=60).status_code == 200
    more.set()
    for thread in threads:
        thread.join(60)
    assert {answer.status_code for answer in answers} <= {200, 429}


def test_a_step_over_a_large_grid_delays_no_small_request(served, pipeline, monkeypatch):
    service = served()
    client = TestClient(create_app(service))
    step, inside, go = ContinuousBatch.step, threading.Event(), threading.Event()

    def held_step(batch):
        if batch.num_tokens > 16:
            inside.set()
            assert go.wait(60)
        step(batch)

    monkeypatch.setattr(ContinuousBatch, "step", held_step)
    large, options = [], {"seed": 3, "steps": 4}
    body = {"class": 1, "size": [32, 32], "method": "checkerboard", **options}
    thread = threading.Thread(target=lambda: large.append(post(client, "expand", body)))
    thread.start()
    assert inside.wait(60)
    small = post(client, "generate", {"class": 2, **options})  # while the large step is running
    assert (pixels(image_of(small["images"][0])) == pixels(pipeline.generate(2, **options)[0])).all()
    assert not large
    go.set()
    thread.join(60)
    expected = pipeline.expand(None, 1, size=(32, 32), method="checkerboard", **options)
    assert (pixels(image_of(large[0]["images"][0])) == pixels(expected[0])).all()


def test_pixels_of_a_large_image_delay_no_small_one(served, monkeypatch):
    lanes = served().worker.loaded.codec
    inside, go = threading.Event(), threading.Event()
    execute = lanes.large._execute

    def held(calls):
        inside.set()
        assert go.wait(60)
        return execute(calls)

    monkeypatch.setattr(lanes.large, "_execute", held)
    ids, found = torch.zeros(1, 16, dtype=torch.long), []
    large = threading.Thread(target=lambda: found.append(lanes.decode(ids.repeat(1, 4), (8, 8)).shape))
    large.start()
    assert inside.wait(60)
    assert lanes.decode(ids, (4, 4)).shape[1:3] == (8, 8)
    go.set()
    large.join(60)
    assert found[0][1:3] == (16, 16)


def test_tenants_take_turns(model):
    """One tenant with many requests and another with one: rows alternate between the tenants."""
    batcher = SteppedBatcher(model, max_batch=4)
    try:
        many = [SubmittedRows(model, f"a{i}", seed=i) for i in range(6)]
        one = SubmittedRows(model, "b0", num=2, seed=9)
        for rows in many:
            rows.pending.tenant = "alice"
        one.pending.tenant = "bob"
        with batcher._wake:  # they all arrive before it admits any; bob is last
            batcher._arrived += [rows.pending for rows in [*many, one]]
            batcher._wake.notify()
        batcher.step(1)
        assert sorted(batcher.seen[0]) == [("a0", 0), ("a1", 0), ("a2", 0), ("b0", 0)]
        batcher.allowed.release(1000)
        assert all(rows.is_right() for rows in [*many, one])
    finally:
        batcher.close()


OLD, NEW, BOB = "the-first-key-of-alice", "the-second-key-of-alice", "the-first-key-of-bob!"
ALICE_KEYS = (f"alice {OLD}", f"alice {NEW}")  # while a key is rotated, its label has two


def send(client, key):
    headers = {"authorization": f"Bearer {key}"}
    return client.post("/v1/arpg/generate", json={"class": 1, "steps": 1}, headers=headers)


def test_the_label_of_a_key_is_its_tenant(served):
    service = served(keys=ApiKeys([*ALICE_KEYS, f"bob {BOB}"]))
    client, seen = TestClient(create_app(service)), []
    submit = service.worker.loaded.batcher.small.submit
    service.worker.loaded.batcher.small.submit = lambda pending: (seen.append(pending.tenant), submit(pending))
    for key in (OLD, NEW, BOB):
        assert send(client, key).status_code == 200
    assert seen == ["alice", "alice", "bob"]
    value = service.metrics.registry.get_sample_value
    assert [value("arpg_key_images_total", {"key": label}) for label in ("alice", "bob")] == [2, 1]


def test_a_label_that_is_alone_has_the_whole_limits_with_two_keys(served):
    service = served(keys=ApiKeys(ALICE_KEYS), max_pending_requests=4, max_pending_cost=16, key_share=0.5)
    admission, costs = service.admission, service.worker.costs
    for _ in range(4):
        admission.enter("alice")
        costs.reserve("alice", 4, share=admission.share, large=True)
    refused("queue_full", admission.enter, "alice")
    refused("cost_limit", costs.reserve, "alice", 4, share=admission.share, large=True)


def test_keys_of_one_label_have_one_share(served):
    service = served(keys=ApiKeys([*ALICE_KEYS, f"bob {BOB}"]), max_pending_requests=4, key_share=0.5)
    client = TestClient(create_app(service))
    service.admission.enter("alice")
    assert send(client, NEW).status_code == 200
    service.admission.enter("alice")
    for key in (OLD, NEW):
        refusal = error(send(client, key), 429)
        assert refusal["code"] == "key_quota"
        assert "keys labelled 'alice' have 2 requests waiting or running, their share;" in refusal["message"]
    assert send(client, BOB).status_code == 200
