"""A server whose model takes condition images: every task, extraction from images, shared batches."""

import asyncio
import json
import threading

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from arpg import ControlInput, Pipeline, tasks
from arpg.model import ControlMap
from arpg.serve.app import create_app
from arpg.serve.batcher import Batcher
from arpg.settings import SamplingSettings
from arpg.tasks import control_input
from support.http import b64, error, image_of, pixels, post
from support.rows import SteppedBatcher, SubmittedRows
from support.small import controlled_model, noise, small_tokenizer

STEPS = {"seed": 3, "steps": 4, "guidance": 3.0}


@pytest.fixture(scope="module")
def pipe():
    return Pipeline(controlled_model(), small_tokenizer(), license="MIT")


@pytest.fixture(scope="module")
def service(served_module, pipe):
    return served_module(pipeline=pipe)


@pytest.fixture(scope="module")
def client(service):
    return TestClient(create_app(service), raise_server_exceptions=False)


@pytest.fixture
def extractor(monkeypatch):
    """Replaces the extractor by a threshold at half brightness; the event is set when it is called."""
    gate = threading.Event()
    gate.set()

    def extract(kind, image, **_):
        assert gate.wait(30)
        return image.convert("L").point(lambda v: 255 * (v > 127))

    monkeypatch.setattr(control_input, "extract", extract)
    monkeypatch.setattr("arpg.serve.build_task.can_extract", lambda kind: True)
    return gate


def grey(width=8, height=8, seed=0):
    return noise(width, height, seed).convert("L")


def control_field(image, **more):
    return {"image": b64(image), "kind": "depth", **more}


def same(answer, expected):
    found = [pixels(image_of(each)) for each in answer["images"]]
    return all(np.array_equal(a, np.asarray(b)) for a, b in zip(found, expected, strict=True))


def test_every_task_equals_the_pipeline(client, pipe):
    source, mask = noise(20, 14), Image.new("L", (20, 14))
    mask.paste(255, (4, 4, 12, 10))
    control = {"control": ControlInput(grey(), "depth", 0.7)}
    calls = {
        "generate": ({"num": 3, "best_of": 2}, lambda **o: pipe.generate(1, num_images=3, best_of=2, **o)),
        "inpaint": ({"image": b64(source), "mask": b64(mask)}, lambda **o: pipe.inpaint(source, mask, 1, **o)),
        "edit": ({"image": b64(source), "box": [4, 2, 12, 9]}, lambda **o: pipe.edit(source, (4, 2, 12, 9), 1, **o)),
        "outpaint": ({"image": b64(source), "right": 6}, lambda **o: pipe.outpaint(source, 1, right=6, **o)),
        "expand": ({"image": b64(source), "size": [40, 28]}, lambda **o: pipe.expand(source, 1, size=(40, 28), **o)),
    }
    for route, (body, call) in calls.items():
        answer = post(client, route, {**body, "class": 1, "control": control_field(grey(), strength=0.7), **STEPS})
        assert same(answer, call(**control, **STEPS)), route
        assert answer["settings"]["control"] == {"kind": "depth", "strength": 0.7}
        plain = post(client, route, {**body, "class": 1, **STEPS})
        assert not same(answer, [image_of(each) for each in plain["images"]]), route
    about = json.loads(image_of(answer["images"][0]).text["arpg"])
    assert about["control"] == {"kind": "depth", "strength": 0.7}


def test_no_class_and_no_strength(client, pipe):
    free = post(client, "generate", {"control": control_field(grey()), **STEPS})
    assert same(free, pipe.control(grey(), kind="depth", **STEPS))
    assert free["settings"]["class"] is None
    none = post(client, "generate", {"class": 2, "control": control_field(grey(), strength=0), **STEPS})
    assert same(none, pipe.generate(2, **STEPS))
    first = post(client, "generate", {"class": 2, "control": {"image": b64(grey())}, **STEPS})
    assert same(first, pipe.control(grey(), 2, kind="canny", **STEPS))


def test_a_condition_may_be_transparent(client, pipe):
    image = grey().convert("RGBA")
    image.putalpha(grey(seed=4).point(lambda v: 255 * (v > 127)))
    answer = post(client, "generate", {"class": 2, "control": control_field(image), **STEPS})
    assert same(answer, pipe.control(image, 2, kind="depth", **STEPS))
    assert not same(answer, pipe.control(image.convert("RGB"), 2, kind="depth", **STEPS))


def test_a_condition_is_extracted_from_an_image(client, pipe, extractor):
    photo = noise(30, 21, seed=5)
    answer = post(client, "generate", {"class": 2, "control": control_field(photo, from_image=True), **STEPS})
    assert same(answer, pipe.control(photo, 2, kind="depth", from_image=True, **STEPS))
    source, mask = noise(20, 14), Image.new("L", (20, 14))
    mask.paste(255, (4, 4, 12, 10))
    body = {"image": b64(source), "mask": b64(mask), "control": control_field(source, from_image=True), **STEPS}
    expected = pipe.inpaint(source, mask, control=ControlInput.from_image(source, "depth", size=source.size), **STEPS)
    assert same(post(client, "inpaint", body), expected)
    shown = post(client, "condition", {"image": b64(photo), "kind": "depth"})
    assert (shown["kind"], shown["width"], shown["height"]) == ("depth", 8, 8)
    assert np.array_equal(np.asarray(image_of(shown)), np.asarray(pipe.extract_control(photo, "depth").image))


def test_extraction_does_not_block_the_event_loop(service, extractor):
    extractor.clear()

    async def call():
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"image": b64(noise(8, 8))}
            shown = asyncio.ensure_future(client.post("/v1/arpg/condition", json=body))
            extracted = {"class": 1, "steps": 2, "control": {**body, "from_image": True}}
            made = asyncio.ensure_future(client.post("/v1/arpg/generate", json=extracted))
            await asyncio.sleep(0.05)
            assert (await client.get("/healthz")).status_code == 200
            assert not shown.done()
            extractor.set()
            return [(await each).status_code for each in (shown, made)]

    assert asyncio.run(call()) == [200, 200]


@pytest.mark.parametrize(
    ("control", "param", "says"),
    [
        ({"kind": "soft"}, "control", "kind is 'soft'; the model takes canny, depth"),
        ({"kind": "pose"}, "control.kind", "canny"),
        ({"strength": -1.0}, "control.strength", "greater than or equal to 0"),
        ({"strength": 11.0}, "control.strength", "less than or equal to 10"),
        ({"image": "no"}, "control", "control is not base64"),
        ({"image": b64(noise(8, 8))[:40]}, "control", "control cannot be read as an image"),
        ({"size": 3}, "control.size", "unknown field"),
        ({"kind": "depth", "from_image": True}, "control", "this server cannot extract depth from an image"),
    ],
)
def test_the_error_names_what_is_wrong_with_a_condition(client, monkeypatch, tmp_path, control, param, says):
    monkeypatch.setenv("ARPG_HOME", str(tmp_path))
    body = {"class": 1, "control": {"image": b64(noise(8, 8)), **control}}
    found = error(client.post("/v1/arpg/generate", json=body), 400)
    assert says in found["message"]
    assert found["param"] == param
    assert "\n" not in found["message"]


def test_models_without_control_refuse(served):
    client = TestClient(create_app(served()))
    assert client.get("/v1/arpg/info").json()["control"] is None
    found = error(client.post("/v1/arpg/generate", json={"class": 1, "control": control_field(grey())}), 400)
    assert found["message"] == "control is given, but the model takes no condition images; leave it out"
    assert found["code"] == "no_control"
    found = error(client.post("/v1/arpg/condition", json={"image": b64(grey())}), 400)
    assert "takes no condition images" in found["message"]


def test_info_lists_the_kinds(client, monkeypatch, tmp_path):
    monkeypatch.setenv("ARPG_HOME", str(tmp_path))
    monkeypatch.setattr("arpg.serve.schemas.can_extract", lambda kind: kind == "canny")
    control = client.get("/v1/arpg/info").json()["control"]
    assert [kind["name"] for kind in control["kinds"]] == ["canny", "depth"]
    assert all(kind["about"] for kind in control["kinds"])
    assert control["extracts"] == ["canny"]


def request_with_control(model, seeds, kind, strength=1.0):
    image = torch.from_numpy(np.array(grey(seed=seeds[0])))
    control = [ControlMap(image, kind, strength)] * len(seeds)
    ids, known = torch.zeros(16, dtype=torch.long), torch.zeros(16, dtype=torch.bool)
    return tasks.fill(model, seeds[0] % 5, seeds, ids_N=ids, known_N=known, control=control)


def test_rows_with_and_without_a_condition_get_their_own_tokens(pipe):
    """All at once: kinds and strengths share a batch, rows without a condition have another."""
    model, batcher = pipe.model, Batcher(pipe.model, max_batch=8)
    exact = SamplingSettings(guidance=2.0, decode="exact", attention="causal", draft=3)
    kinds = [SamplingSettings(steps=5, guidance=2.0), SamplingSettings(steps=3, guidance=1.0), exact]
    submitted = []
    for i in range(12):
        request = (
            request_with_control(model, [i, 50 + i], ("canny", "depth")[i % 2], (1.0, 0.4, 2.0)[i % 3])
            if i % 4
            else None
        )
        submitted.append(SubmittedRows(model, i, settings=kinds[i % 3], seed=i, request=request))
    try:
        for rows in submitted:
            batcher.submit(rows.pending)
        assert all(rows.is_right() for rows in submitted)
    finally:
        batcher.close()


def test_a_row_with_a_condition_joins_a_running_batch(pipe):
    batcher, settings = (
        SteppedBatcher(pipe.model, max_batch=8),
        SamplingSettings(steps=5, guidance=2.0),
    )
    try:
        first = SubmittedRows(
            pipe.model, "a", settings=settings, request=request_with_control(pipe.model, [1], "canny")
        )
        second = SubmittedRows(
            pipe.model, "b", settings=settings, request=request_with_control(pipe.model, [2], "depth", 0.5)
        )
        plain = SubmittedRows(pipe.model, "c", settings=settings, seed=3)
        batcher.submit(first.pending)
        batcher.step(2)
        assert batcher.stepped.acquire(timeout=30)
        batcher.submit(second.pending)
        batcher.submit(plain.pending)
        batcher.allowed.release(1000)
        assert all(rows.is_right() for rows in (first, second, plain))
        assert [("a", 0), ("b", 0)] in batcher.seen
        assert not any(("c", 0) in seen and len(seen) > 1 for seen in batcher.seen)
    finally:
        batcher.close()
