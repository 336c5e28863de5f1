"""A server whose model takes prompts: every route and task, unusual prompts, prompts of all lengths in one batch."""

import asyncio
import base64
import gc
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from PIL import Image
from starlette.testclient import TestClient

from arpg import Pipeline
from arpg.image import to_rgb
from arpg.serve.app import create_app
from arpg.serve.batcher import Batcher
from arpg.serve.server_config import Limits
from arpg.settings import SamplingSettings
from arpg.text_encoder import PromptCache
from support.http import b64, error, events, image_of, pixels, post
from support.rows import SteppedBatcher, SubmittedRows
from support.small import TEXT, FakeEncoder, noise, small_tokenizer

ODD = ["", "  ", "яблоко на столе", "🍓", "两个苹果", "a" * 2000, "tab\tand\nline", "'\"<b>&\\"]


class Paused(FakeEncoder):
    """Encodes a prompt that begins with "slow" only when it is allowed to."""

    def __init__(self):
        super().__init__()
        self.may, self.began = threading.Event(), threading.Event()

    def states(self, prompts, **options):
        if prompts[0].startswith("slow"):
            self.began.set()
            assert self.may.wait(30)
        return super().states(prompts, **options)


def pipeline_of(model, load=FakeEncoder, **options):
    return Pipeline(model, small_tokenizer(), license="MIT", prompts=PromptCache(TEXT.text, load=load, **options))


@pytest.fixture(scope="module")
def pipe(text_model):
    return pipeline_of(text_model)


@pytest.fixture(scope="module")
def service(served_module, pipe):
    return served_module(pipeline=pipe)


@pytest.fixture(scope="module")
def client(service):
    return TestClient(create_app(service), raise_server_exceptions=False)


def test_an_image_is_the_one_that_the_pipeline_makes(client, pipe):
    body = {"prompt": "a red star", "negative": "pear", "num": 2, "seed": 7, "steps": 5, "guidance": 3.0}
    answer = post(client, "generate", body)
    options = {"num_images": 2, "seed": 7, "steps": 5, "guidance": 3.0}
    expected = pipe.generate(prompt="a red star", negative="pear", **options)
    assert [np.array_equal(pixels(image_of(e)), i) for e, i in zip(answer["images"], expected, strict=True)] == [
        True
    ] * 2
    about = json.loads(image_of(answer["images"][1]).text["arpg"])
    assert about == {**answer["settings"], "seed": 8}
    assert (about["prompt"], about["negative"], about["task"]) == ("a red star", "pear", "generate")
    assert "class" not in about
    without = post(client, "generate", {**body, "negative": None})
    assert "negative" not in without["settings"]
    assert without["images"][0]["png"] != answer["images"][0]["png"]
    assert np.array_equal(pixels(image_of(without["images"][0])), pipe.generate(prompt="a red star", **options)[0])


def test_every_task_takes_prompts(client, pipe):
    source, options = noise(20, 14), {"seed": 3, "steps": 4, "guidance": 3.0}
    texts = {"prompt": "two pears", "negative": "star"}
    mask = Image.new("L", (20, 14))
    mask.paste(255, (4, 4, 12, 10))
    calls = {
        "inpaint": ({"mask": b64(mask)}, lambda **o: pipe.inpaint(source, mask, **o)),
        "edit": ({"box": [4, 2, 12, 9]}, lambda **o: pipe.edit(source, (4, 2, 12, 9), **o)),
        "outpaint": ({"right": 6}, lambda **o: pipe.outpaint(source, right=6, **o)),
        "expand": ({"size": [40, 28]}, lambda **o: pipe.expand(source, size=(40, 28), **o)),
    }
    for route, (body, call) in calls.items():
        answer = post(client, route, {"image": b64(source), **body, **texts, **options})
        assert np.array_equal(pixels(image_of(answer["images"][0])), call(**texts, **options)[0]), route
        if route != "edit":  # without a prompt: unconditional
            answer = post(client, route, {"image": b64(source), **body, **options})
            assert np.array_equal(pixels(image_of(answer["images"][0])), call(**options)[0]), route
            assert answer["settings"]["prompt"] is None
    answer = post(client, "expand", {"size": [16, 16], **texts, **options})
    assert np.array_equal(pixels(image_of(answer["images"][0])), pipe.expand(size=(16, 16), **texts, **options)[0])
    best = post(client, "generate", {**texts, **options, "best_of": 3})
    image_task = pipe.generate_task(**texts, **options, best_of=3)
    image_task.run()
    assert best["images"][0]["seed"] == image_task.seeds[0]


def test_a_stream_shows_every_step(client, pipe):
    body = {"prompt": "apple", "negative": "a red star", "steps": 4, "seed": 5}
    (first, _), *steps, (last, done) = events(
        client.post("/v1/arpg/generate", json={**body, "previews": 3, "stream": True}).text
    )
    assert (first, last) == ("queued", "done")
    assert [data["step"] for _, data in steps] == [1, 2, 3, 4]
    assert done["images"] == post(client, "generate", body)["images"]
    *_, expected, _ = pipe.generate_task(**body).stream()
    shown = pixels(image_of({"png": steps[2][1]["previews"][0]}))
    assert np.abs(shown.astype(int) - pixels(expected[0])).max() <= 1


@pytest.mark.parametrize("prompt", ODD)
def test_unusual_prompts_are_accepted(client, pipe, prompt):
    answer = post(client, "generate", {"prompt": prompt, "steps": 2, "seed": 1})
    assert answer["settings"]["prompt"] == prompt
    assert json.loads(image_of(answer["images"][0]).text["arpg"])["prompt"] == prompt
    assert np.array_equal(pixels(image_of(answer["images"][0])), pipe.generate(prompt=prompt, steps=2, seed=1)[0])


@pytest.mark.parametrize(
    ("route", "body", "param", "says"),
    [
        ("generate", {}, "prompt", "no prompt is given"),
        ("generate", {"negative": "star"}, "prompt", "no prompt is given"),
        ("generate", {"class": 1}, "class", "class is 1, but the model takes prompts"),
        ("generate", {"class": "apple", "prompt": "apple"}, "class", "class is 'apple', but the model takes prompts"),
        ("generate", {"prompt": "a" * 2001}, "prompt", "at most 2000 characters"),
        ("generate", {"prompt": "a", "negative": "a" * 2001}, "negative", "at most 2000 characters"),
        ("generate", {"prompt": 3}, "prompt", "valid string"),
        ("generate", {"prompt": "\ud800"}, "prompt", "unicode"),
        ("edit", {"image": b64(noise(8, 8)), "box": [0, 0, 4, 4]}, "prompt", "no prompt is given"),
        ("outpaint", {"image": b64(noise(8, 8)), "right": 4, "class": 1}, "class", "takes prompts"),
        ("expand", {"size": [16, 16]}, "prompt", "no prompt is given"),
    ],
)
def test_the_error_names_what_is_wrong(client, route, body, param, says):
    headers = {"content-type": "application/json"}
    found = error(client.post(f"/v1/arpg/{route}", content=json.dumps(body), headers=headers), 400)
    assert says in found["message"]
    assert found["param"] == param
    assert "\n" not in found["message"]


def test_info_metrics_and_the_servers_own_limit(served, pipe):
    service = served(pipeline=pipe, limits=Limits(prompt=5))
    client = TestClient(create_app(service))
    info = client.get("/v1/arpg/info").json()
    assert (info["takes"], info["prompt_tokens"], info["classes"], info["limits"]["prompt"]) == ("text", 7, 0, 5)
    assert client.get("/v1/arpg/classes").json() == {"classes": [], "thumbnails": None}
    for body, param in (({"prompt": "apples"}, "prompt"), ({"prompt": "apple", "negative": "apples"}, "negative")):
        found = error(client.post("/v1/arpg/generate", json=body), 400)
        assert (found["param"], found["code"]) == (param, "too_long")
        assert "6 characters; at most 5" in found["message"]
        assert error(client.post("/v1/images/generations", json=body), 400)["param"] == param
    for _ in range(2):
        post(client, "generate", {"prompt": "apple", "negative": "pear", "steps": 1})
    assert "arpg_prompt_seconds_count 2.0" in client.get("/metrics").text.splitlines()  # each once


def test_a_server_keeps_prompts_off_the_disk(served, text_model, tmp_path):
    client = TestClient(create_app(served(pipeline=pipeline_of(text_model, folder=tmp_path))))
    post(client, "generate", {"prompt": "apple", "steps": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_its_encoder_does_not_start(served, text_model):
    def load():
        raise ImportError("there is none")

    with pytest.raises(ImportError, match="there is none"):
        served(pipeline=pipeline_of(text_model, load))


def test_a_slow_encoder_delays_only_the_requests_that_need_it(live, text_model):
    """While a prompt is encoded, other requests, health checks, deadlines and cached prompts are served."""
    encoder = Paused()
    address, _ = live(pipeline=pipeline_of(text_model, lambda: encoder))
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        known = client.images.generate(prompt="apple", extra_body={"steps": 2, "seed": 1})
        slow = pool.submit(client.images.generate, prompt="slow apple", extra_body={"steps": 2, "seed": 1})
        try:
            assert encoder.began.wait(30)
            assert client.models.list().data
            again = client.images.generate(
                prompt="apple", stream=True, partial_images=1, extra_body={"steps": 2, "seed": 1}
            )
            assert list(again)[-1].b64_json == known.data[0].b64_json
            assert not slow.done()
        finally:
            encoder.may.set()
        assert slow.result().data[0].b64_json != known.data[0].b64_json


# The OpenAI API


def test_the_official_client_sends_prompts(live, pipe):
    address, _ = live(pipeline=pipe)
    options = {"seed": 4, "steps": 5, "guidance": 3.0}

    def same(datum, image):
        return np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(datum.b64_json)))), np.asarray(image))

    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        answer = client.images.generate(prompt="🍓 two pears", n=2, extra_body=options)
        expected = pipe.generate(prompt="🍓 two pears", num_images=2, **options)
        assert all(same(datum, image) for datum, image in zip(answer.data, expected, strict=True))
        answer = client.images.generate(prompt="3", extra_body={**options, "negative": "star"})  # not a class
        assert same(answer.data[0], pipe.generate(prompt="3", negative="star", **options)[0])
        answer = client.images.generate(prompt="pear", size="16x16", extra_body=options)
        assert same(answer.data[0], pipe.expand(prompt="pear", size=(16, 16), **options)[0])
        source = noise(8, 8).convert("RGBA")
        source.paste((0, 0, 0, 0), (0, 0, 4, 8))
        file = io.BytesIO()
        source.save(file, format="PNG")
        sent = ("a.png", file.getvalue(), "image/png")
        answer = client.images.edit(image=sent, prompt="pear", extra_body={**options, "negative": "star"})
        mask = Image.new("L", (8, 8))
        mask.paste(255, (0, 0, 4, 8))
        expected = pipe.inpaint(to_rgb(source), mask, prompt="pear", negative="star", **options)
        assert same(answer.data[0], expected[0])
        *parts, last = client.images.generate(prompt="pear", stream=True, partial_images=2, extra_body=options)
        assert len(parts) == 2
        assert same(last, pipe.generate(prompt="pear", **options)[0])
        with pytest.raises(openai.BadRequestError, match="at most 2000"):
            client.images.generate(prompt="a" * 2001)


def test_a_model_of_classes_takes_no_negative_prompt(served):
    client = TestClient(create_app(served()))
    found = error(client.post("/v1/images/generations", json={"prompt": "class 1", "negative": "class 2"}), 400)
    assert (found["param"], found["code"]) == ("negative", "takes_class")


# Batches

PROMPTS = ["apple", "a red star on a blue", "two pears", "", "one two three four five six seven eight"]
SETTINGS = SamplingSettings(steps=5, guidance=3.0)


def submitted_rows(pipe, owner, prompt, *, negative=None, settings=SETTINGS, num=1, seed=0):
    image_task = pipe.generate_task(prompt=prompt, negative=negative, num_images=num, seed=seed)
    return SubmittedRows(pipe.model, owner, settings=settings, request=image_task.next_request())


def test_prompts_of_all_lengths_share_a_batch_and_are_as_alone(pipe):
    """One joins before each step, some with a negative prompt. Each gets the tokens that it gets alone."""
    batcher = SteppedBatcher(pipe.model, max_batch=16)
    try:
        submitted = [
            submitted_rows(pipe, i, text, seed=i, negative="star" if i % 2 else None) for i, text in enumerate(PROMPTS)
        ]
        batcher.submit(submitted[0].pending)
        for made in submitted[1:]:
            assert batcher.stepped.acquire(timeout=30)  # it waits before a step
            batcher.submit(made.pending)
            batcher.allowed.release()
        batcher.allowed.release(1000)
        assert all(made.is_right() for made in submitted)
        assert max(len(who) for who in batcher.seen) == 5
    finally:
        batcher.close()


def test_every_strategy_takes_prompts_of_all_lengths(pipe):
    kinds = [
        SETTINGS,
        SamplingSettings(steps=8, guidance=1.0),
        SamplingSettings(steps=4, guidance=2.0, temperature=0.5, top_k=5, attention="causal"),
        SamplingSettings(guidance=2.0, decode="exact", attention="causal", draft=3),
    ]
    submitted = [
        submitted_rows(
            pipe,
            i,
            PROMPTS[i % 5],
            negative=PROMPTS[(i + 2) % 5] if i % 3 else None,
            settings=kinds[i % 4],
            seed=i,
            num=2,
        )
        for i in range(10)
    ]
    batcher = Batcher(pipe.model, max_batch=16)
    try:
        for made in submitted:
            batcher.submit(made.pending)
        assert all(made.is_right() for made in submitted)
    finally:
        batcher.close()


def test_concurrent_requests_get_what_they_get_alone(client, pipe):
    bodies = [
        {"prompt": PROMPTS[i % 5], "negative": PROMPTS[(i + 1) % 5] if i % 2 else None, "seed": i, "steps": 3 + i % 3}
        for i in range(20)
    ]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda body: post(client, "generate", {**body, "guidance": 3.0}), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert np.array_equal(pixels(image_of(answer["images"][0])), pipe.generate(**body, guidance=3.0)[0]), body


# Ray Serve


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_replica_takes_prompts(pipe, tmp_path, monkeypatch):
    """A replica loads the model and its text encoder from the folder, and is called with ASGI messages."""
    pytest.importorskip("ray", reason="needs the extra ray")
    from arpg.serve.ray_serve import Replica
    from arpg.serve.server_config import ServeSettings

    pipe.save_pretrained(tmp_path / "small")
    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("arpg.text_encoder.open_encoder", lambda config, device: FakeEncoder())
    replica = Replica([str(tmp_path / "small")], ServeSettings(device="cpu", precision="float32"))
    assert gc.get_freeze_count() > 10_000
    gc.unfreeze()
    scope = {"method": "POST", "path": "/v1/arpg/generate", "query_string": b"", "scheme": "http"}
    scope |= {"headers": [(b"content-type", b"application/json"), (b"host", b"x")], "state": {"id": "req_1"}}
    body = {"prompt": "a red star", "negative": "pear", "steps": 3, "seed": 2}

    async def call():
        return [message async for message in replica.respond(scope, json.dumps(body).encode())]

    try:
        first, *rest = asyncio.run(call())
    finally:
        replica.service.close()
    assert first["status"] == 200
    answer = json.loads(b"".join(message.get("body", b"") for message in rest))
    assert np.array_equal(pixels(image_of(answer["images"][0])), pipe.generate(**body)[0])


def test_the_encoder_is_warm_before_the_first_prompt(served, text_model):
    encoder = FakeEncoder()
    client = TestClient(create_app(served(pipeline=pipeline_of(text_model, load=lambda: encoder))))
    assert encoder.asked == 1
    post(client, "generate", {"prompt": "pear", "steps": 1})
    assert encoder.asked == 2
