"""The routes under /v1/arpg, their streams, and their errors."""

import itertools
import json

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from arpg.serve.app import create_app
from arpg.serve.auth import ApiKeys
from arpg.serve.middleware import SECURITY_HEADERS
from arpg.serve.server_config import Limits
from arpg.settings import SETTINGS, TASK_SETTINGS
from support.http import b64, error, events, image_of, pixels, post
from support.small import noise


def client_of(service):
    return TestClient(create_app(service), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(served_module):
    return client_of(served_module())


@pytest.fixture
def service(served):
    """A service of its own, for tests that change it or read its metrics."""
    return served()


def test_an_image_is_the_one_that_the_pipeline_makes(client, pipeline):
    answer = post(client, "generate", {"class": 3, "num": 2, "seed": 7, "steps": 5, "guidance": 2.0})
    expected = pipeline.generate(3, num_images=2, seed=7, steps=5, guidance=2.0)
    assert [entry["seed"] for entry in answer["images"]] == [7, 8]
    for entry, image in zip(answer["images"], expected, strict=True):
        assert (entry["width"], entry["height"]) == image.size
        assert np.array_equal(pixels(image_of(entry)), pixels(image))
    about = json.loads(image_of(answer["images"][1]).text["arpg"])
    assert about == {**answer["settings"], "seed": 8}
    assert (about["class"], about["steps"], about["model"]) == (3, 5, "small")


def test_every_task_equals_the_pipeline(client, pipeline):
    source, options = noise(20, 14), {"seed": 3, "steps": 4}
    mask = Image.new("L", (20, 14))
    mask.paste(255, (4, 4, 12, 10))
    calls = {
        "inpaint": ({"mask": b64(mask), "class": 1}, pipeline.inpaint(source, mask, 1, **options)),
        "edit": ({"box": [4, 2, 12, 9], "class": 2, "feather": 1},
                 pipeline.edit(source, (4, 2, 12, 9), 2, feather=1, **options)),
        "outpaint": ({"right": 6, "class": None}, pipeline.outpaint(source, None, right=6, **options)),
        "expand": ({"size": [40, 28], "method": "windows", "class": 0},
                   pipeline.expand(source, 0, size=(40, 28), method="windows", **options)),
    }  # fmt: skip
    for route, (body, expected) in calls.items():
        answer = post(client, route, {"image": b64(source), **body, **options})
        assert np.array_equal(pixels(image_of(answer["images"][0])), pixels(expected[0])), route
    answer = post(client, "expand", {"size": [16, 16], "class": 2, **options})
    expected = pipeline.expand(None, 2, size=(16, 16), **options)
    assert np.array_equal(pixels(image_of(answer["images"][0])), pixels(expected[0]))


def test_an_order_is_a_list_of_positions(client, pipeline):
    order, body = list(range(15, -1, -1)), {"class": 1, "seed": 3, "steps": 4}
    answer = post(client, "generate", {**body, "order": order})
    assert np.array_equal(
        pixels(image_of(answer["images"][0])), pixels(pipeline.generate(1, seed=3, steps=4, order=order)[0])
    )
    assert answer["settings"]["order"] == order
    streamed = events(client.post("/v1/arpg/generate", json={**body, "order": order, "stream": True}).text)
    first = next(data for name, data in streamed if name == "step")["decoded_at"]
    assert first == [[-1] * 13 + [0] * 3]
    for wrong, says in (([0, 1, 2], "but the grid has 4x4 = 16 tokens"), ([0] * 16, "but 1 is not among them")):
        assert says in error(client.post("/v1/arpg/generate", json={**body, "order": wrong}), 400)["message"]


def test_the_old_name_of_the_method_is_accepted(client):
    body = {"size": [16, 16], "class": 2, "seed": 3, "steps": 2}
    old, new = (post(client, "expand", {**body, name: "windows"}) for name in ("way", "method"))
    assert old["images"] == new["images"]
    assert old["settings"]["way"] == "windows"
    assert error(client.post("/v1/arpg/expand", json={**body, "method": "magic"}), 400)["param"] == "method"
    expand = client.get("/openapi.json").json()["components"]["schemas"]["Expand"]["properties"]
    assert "method" in expand
    assert "way" not in expand


def test_a_stream_shows_every_step(client, pipeline):
    body = {"class": 1, "num": 2, "steps": 4, "seed": 5, "stream": True}
    answer = client.post("/v1/arpg/generate", json={**body, "previews": 2})
    assert answer.headers["content-type"].startswith("text/event-stream")
    (first, queued), *steps, (last, done) = events(answer.text)
    assert (first, last) == ("queued", "done")
    assert queued["id"] == done["id"] == answer.headers["x-request-id"]
    assert [name for name, _ in steps] == ["step"] * 4
    assert [data["step"] for _, data in steps] == [1, 2, 3, 4]
    for _, data in steps:
        assert (data["steps"], data["window"], data["windows"], data["grid"]) == (4, 0, 1, [4, 4])
        assert len(data["decoded_at"]) == 2
        assert max(max(row) for row in data["decoded_at"]) == data["step"] - 1
    assert all(sorted(set(row)) == [0, 1, 2, 3] for row in steps[-1][1]["decoded_at"])
    assert done["images"] == post(client, "generate", {**body, "stream": False})["images"]
    assert [len(data["previews"]) for _, data in steps] == [0, 2, 2, 0]  # after a third and two thirds
    expected = list(pipeline.generate_task(1, num_images=2, steps=4, seed=5).stream())
    for i in (1, 2):
        for shown, image in zip(steps[i][1]["previews"], expected[i], strict=True):
            assert np.abs(pixels(image_of({"png": shown})).astype(int) - pixels(image)).max() <= 1


def test_exact_decoding_does_not_know_its_number_of_steps(client):
    """It takes fewer than there are tokens: previews are spread over the tokens."""
    body = {"class": 1, "num": 2, "decode": "exact", "attention": "causal", "stream": True, "previews": 2}
    steps = [data for name, data in events(client.post("/v1/arpg/generate", json=body).text) if name == "step"]
    assert 3 <= len(steps) < 16
    assert {data["steps"] for data in steps} == {None}
    assert [data["step"] for data in steps] == list(range(1, len(steps) + 1))
    assert sum(bool(data["previews"]) for data in steps) == 2


def test_previews_are_made_as_they_are_read_and_as_large_as_requested(client):
    body = {"class": 1, "num": 2, "best_of": 2, "steps": 6, "seed": 5, "stream": True}
    stream = events(client.post("/v1/arpg/generate", json=body).text)
    steps = [data for name, data in stream if name == "step"]
    assert [data["step"] for data in steps] == [1, 2, 3, 4, 5, 6]
    assert {len(data["previews"]) for data in steps} <= {0, 2}  # whether the reader was fast enough
    wide = {"image": b64(noise(8, 8)), "right": 8, "previews": 1, "preview_size": 8, "stream": True, "steps": 2}
    stream = events(client.post("/v1/arpg/outpaint", json=wide).text)
    (shown,) = [data["previews"] for name, data in stream if name == "step" and data["previews"]]
    assert image_of({"png": shown[0]}).size == (8, 4)
    none = events(client.post("/v1/arpg/generate", json={**body, "previews": 0}).text)
    assert not any(data["previews"] for name, data in none if name == "step")


def test_known_tokens_and_windows_are_reported(client):
    mask = Image.new("L", (8, 8))
    mask.paste(255, (0, 0, 4, 8))
    body = {"image": b64(noise(8, 8)), "mask": b64(mask), "steps": 2, "stream": True}
    steps = [data for name, data in events(client.post("/v1/arpg/inpaint", json=body).text) if name == "step"]
    assert np.array(steps[-1]["decoded_at"][0]).reshape(4, 4)[:, 2:].tolist() == [[-2, -2]] * 4
    body = {"image": b64(noise(8, 8)), "right": 8, "steps": 2, "stream": True}
    steps = [data for name, data in events(client.post("/v1/arpg/outpaint", json=body).text) if name == "step"]
    assert {data["window"] for data in steps} == set(range(steps[0]["windows"]))
    assert steps[0]["windows"] > 1
    # The map covers the whole canvas, and its steps are counted over the windows.
    assert {tuple(data["grid"]) for data in steps} == {(4, 8)}
    assert steps[0]["decoded_at"][0].count(-1) > 8  # what later windows sample is not decoded yet
    maps = np.array([data["decoded_at"][0] for data in steps]).reshape(-1, 4, 8)
    for before, after in itertools.pairwise(maps):
        assert (after[before != -1] == before[before != -1]).all()
    assert (maps[-1][:, :4] == -2).all()
    assert sorted(set(maps[-1][:, 4:].ravel())) == list(range(len(steps)))
    # Two grids: of the model, then the larger.
    body = {"class": 1, "size": [16, 16], "method": "checkerboard", "steps": 2, "stream": True}
    steps = [data for name, data in events(client.post("/v1/arpg/expand", json=body).text) if name == "step"]
    assert [(data["window"], data["grid"], max(data["decoded_at"][0])) for data in steps] == [
        (0, [4, 4], 0), (0, [4, 4], 1), (1, [8, 8], 0), (1, [8, 8], 1)
    ]  # fmt: skip


def test_best_of_keeps_the_most_likely_candidate(client, pipeline):
    body = {"class": 1, "num": 2, "best_of": 3, "steps": 4, "seed": 5}
    answer = post(client, "generate", body)
    image_task = pipeline.generate_task(1, num_images=2, best_of=3, steps=4, seed=5)
    image_task.run()
    assert [entry["seed"] for entry in answer["images"]] == image_task.seeds
    stream = events(client.post("/v1/arpg/generate", json={**body, "previews": 3, "stream": True}).text)
    assert len(stream[1][1]["previews"]) == 2


def test_without_a_seed_a_random_one_is_reported(client):
    one, two = (post(client, "generate", {"class": 1, "seed": None, "steps": 2})["images"][0] for _ in range(2))
    assert one["seed"] != two["seed"]
    again = post(client, "generate", {"class": 1, "seed": one["seed"], "steps": 2})["images"][0]
    assert image_of(again).tobytes() == image_of(one).tobytes()


def test_info_and_classes(client, pipeline):
    info = client.get("/v1/arpg/info").json()
    assert (info["model"], info["classes"], info["image_size"], info["grid"]) == ("small", 5, [8, 8], [4, 4])
    assert info["defaults"]["guidance"] == pipeline.sampling.settings().guidance
    assert {choice["name"] for choice in info["choices"]["order"]} >= {"random", "halton"}
    assert all(choice["about"] for choices in info["choices"].values() for choice in choices)
    assert info["limits"]["images"] == 16
    assert [setting["name"] for setting in info["settings"]] == [*SETTINGS, "best_of"]
    assert [setting["name"] for setting in info["task_settings"]] == ["feather", "strength"]
    for setting in [*info["settings"], *info["task_settings"]]:
        expected = {**SETTINGS, **TASK_SETTINGS}[setting["name"]]
        assert (setting["help"], setting["type"], setting["minimum"]) == (
            expected.help,
            expected.kind.__name__,
            expected.minimum,
        )
        assert setting["choices"] or setting["slider"][0] < setting["slider"][1] <= setting["maximum"]
    schema = client.get("/openapi.json").json()["components"]["schemas"]["Generate"]["properties"]
    assert all(schema[name]["description"] == setting.help for name, setting in SETTINGS.items())
    classes = client.get("/v1/arpg/classes").json()
    assert classes["classes"][3] == {"id": 3, "name": "class 3"}
    assert classes["thumbnails"] is None
    assert error(client.get("/v1/arpg/thumbnails.webp"), 404)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "class", "no class is given"),
        ({"prompt": "class 1"}, "prompt", "prompt is 'class 1', but the model takes classes"),
        ({"class": 1, "negative": "x" * 99}, "negative", "the model takes classes"),
        ({"class": "clas 3"}, "class", "did you mean 'class 3'"),
        ({"class": 99}, "class", "0 to 4"),
        ({"class": 1, "steps": 0}, "steps", "greater than or equal to 1"),
        ({"class": 1, "steps": "8"}, "steps", "valid integer"),
        ({"class": 1, "num": 17}, "num", "less than or equal to 16"),
        ({"class": 1, "num": 16, "best_of": 8}, "best_of", "at most 32"),
        ({"class": 1, "order": "zigzag"}, "order", "'random'"),
        ({"class": 1, "schedule": [5, 5]}, None, "fills 10 tokens"),
        ({"class": 1, "decode": "exact", "attention": "block"}, "attention", "set attention to causal"),
        ({"class": 1, "temprature": 2}, "temprature", "unknown field"),
        ({"class": 1, "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"class": 1, "seed": 2**64}, "seed", "less than or equal"),
        ({"class": "\ud800"}, "class", "unicode"),
        ([], None, "JSON object"),
    ],
)
def test_the_error_names_what_is_wrong(client, body, param, says):
    found = error(client.post("/v1/arpg/generate", content=json.dumps(body), headers=JSON), 400)
    assert says in found["message"]
    assert found["param"] == param
    assert found["type"] == "invalid_request_error"
    assert "\n" not in found["message"]


JSON = {"content-type": "application/json"}


def test_an_unknown_class_gets_the_nearest_names(client):
    found = error(client.post("/v1/arpg/generate", json={"class": "clas 3"}), 400)
    assert found["code"] == "unknown_class"
    assert found["nearest"][0] == "class 3"


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100000, b'{"class": NaN}', b'{"steps": 1' + b"0" * 5000 + b"}"])
def test_a_malformed_body_is_a_400(client, content):
    assert error(client.post("/v1/arpg/generate", content=content, headers=JSON), 400)


@pytest.mark.parametrize(
    ("image", "status", "says"),
    [
        ("!!", 400, "base64"),
        ("aGVsbG8=", 400, "whole PNG"),
        ("https://example.org/a.png", 400, "nothing is fetched"),
        ("file:///etc/passwd", 400, "nothing is fetched"),
        (b64(Image.new("L", (2100, 2100))), 413, "2100x2100"),
        (b64(Image.new("1", (30000, 30000)), optimize=True), 413, "pixels"),
        (b64(noise(40, 40))[:400], 400, "whole PNG"),
        (b64(noise(8, 8), format="BMP"), 400, "whole PNG"),
    ],
)
def test_images_are_checked_before_they_are_decoded(client, image, status, says):
    found = error(client.post("/v1/arpg/outpaint", json={"image": image, "right": 8}), status)
    assert says in found["message"]
    assert found["param"] == "image"


def test_a_data_url_is_only_base64(client):
    body = {"image": "data:image/png;base64," + b64(noise(8, 8)), "right": 4, "steps": 1}
    assert post(client, "outpaint", body)["images"]


def test_images_must_fit_the_task(client):
    small, large = b64(noise(8, 8)), b64(noise(9, 8))
    assert error(client.post("/v1/arpg/inpaint", json={"image": small, "mask": large}), 400)["param"] == "mask"
    body = {"image": small, "box": [0, 0, 9, 9], "class": 1}
    assert "box" in error(client.post("/v1/arpg/edit", json=body), 400)["message"]
    assert "left 0" in error(client.post("/v1/arpg/outpaint", json={"image": small}), 400)["message"]
    assert error(client.post("/v1/arpg/expand", json={"size": [4, 4], "class": 1}), 400)


def test_the_limits_of_the_server_apply(served):
    service = served(limits=Limits(images=2, steps=8, side=16, pixels=100, bytes=2000))
    client = TestClient(create_app(service))
    assert error(client.post("/v1/arpg/generate", json={"class": 1, "num": 3}), 400)["param"] == "num"
    assert error(client.post("/v1/arpg/generate", json={"class": 1, "steps": 9}), 400)["param"] == "steps"
    assert (
        error(client.post("/v1/arpg/expand", json={"class": 1, "size": [24, 24], "steps": 2}), 400)["param"] == "size"
    )
    assert error(client.post("/v1/arpg/outpaint", json={"image": b64(noise(11, 11)), "right": 1}), 413)
    assert error(client.post("/v1/arpg/generate", json={"class": 1, "prompt": "x" * 2000}), 413)["code"] == "too_large"

    def chunks():  # without a length in the header
        yield b'{"class": 1, "prompt": "'
        for _ in range(100):
            yield b"x" * 100

    assert error(client.post("/v1/arpg/generate", content=chunks(), headers=JSON), 413)


def test_keys(served, caplog):
    key = "a-key-of-more-than-16"
    service = served(keys=ApiKeys([key, "another-key-that-is-long"]))
    client = TestClient(create_app(service))
    caplog.set_level("DEBUG")
    for headers in ({}, {"authorization": key}, {"authorization": f"Basic {key}"}, {"authorization": "Bearer wrong"}):
        for path in ("/v1/arpg/info", "/v1/models", "/metrics"):
            found = client.get(path, headers=headers)
            assert error(found, 401)["type"] == "authentication_error"
            assert found.headers["www-authenticate"] == "Bearer"
    assert error(client.post("/v1/arpg/generate", json={"class": 1}), 401)
    for good in (key, "another-key-that-is-long"):
        assert client.get("/v1/arpg/info", headers={"authorization": f"Bearer {good}"}).status_code == 200
    for path in ("/healthz", "/readyz", "/openapi.json"):
        assert client.get(path).status_code == 200
    assert key not in caplog.text
    assert key not in repr(vars(service.keys))
    assert client.get("/openapi.json").json()["security"] == [{"key": []}]


def test_headers_and_ids(client):
    answers = [client.get(path) for path in ("/healthz", "/v1/arpg/info", "/nowhere")]
    answers.append(client.post("/v1/arpg/generate", json={"class": 1, "steps": 1, "stream": True}))
    for answer in answers:
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers[name] == value
    assert len({answer.headers["x-request-id"] for answer in answers}) == 4
    policy = SECURITY_HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'self'" in policy
    assert "server" not in answers[0].headers


def test_requests_from_other_sites_are_refused(served):
    service = served()
    client = TestClient(create_app(service, hosts=frozenset({"localhost", "::1"})), base_url="http://localhost:8000")
    assert client.get("/v1/arpg/info").status_code == 200
    assert "access-control-allow-origin" not in client.get("/v1/arpg/info", headers={"origin": "http://evil"}).headers
    assert error(client.post("/v1/arpg/generate", json={"class": 1}, headers={"origin": "http://evil.example"}), 403)
    own = {"origin": "http://localhost:8000"}
    assert client.post("/v1/arpg/generate", json={"class": 1, "steps": 1}, headers=own).status_code == 200
    assert error(client.get("/v1/arpg/info", headers={"host": "evil.example"}), 421)
    assert client.get("/healthz", headers={"host": "[::1]:8000"}).status_code == 200
    assert client.options("/v1/arpg/generate", headers={"origin": "http://evil.example"}).status_code in (403, 405)


@pytest.mark.parametrize("path", ["/nowhere", "/v1/arpg/../../etc/passwd", "/static/..%2f..%2fapp.py", "/docs"])
def test_unknown_paths_are_a_404(client, path):
    assert error(client.get(path), 404)["message"]
    assert error(client.delete("/v1/arpg/info"), 405)


def test_health_metrics_and_draining(service):
    client = client_of(service)
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").status_code == 200
    post(client, "generate", {"class": 1, "num": 3, "steps": 2})
    post(client, "generate", {"class": 9}, status=400)
    text = client.get("/metrics").text
    for line in (
        'arpg_requests_total{route="/v1/arpg/generate",status="200"} 1.0',
        'arpg_requests_total{route="/v1/arpg/generate",status="400"} 1.0',
        'arpg_images_total{outcome="ok"} 3.0',
        "arpg_queue_depth 0.0",
        "arpg_batch_rows_count 2.0",
    ):
        assert line in text.splitlines()
    service.admission.draining = True
    assert client.get("/readyz").status_code == 503
    answer = client.post("/v1/arpg/generate", json={"class": 1})
    assert error(answer, 503)["code"] == "draining"
    assert int(answer.headers["retry-after"]) >= 1
    assert client.get("/healthz").status_code == 200


def test_a_full_queue_is_a_429(service):
    client = client_of(service)
    service.admission.num_admitted = service.admission.capacity
    answer = client.post("/v1/arpg/generate", json={"class": 1})
    assert error(answer, 429)["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    service.admission.num_admitted = 0
    post(client, "generate", {"class": 1, "steps": 1})
    assert service.admission.num_admitted == 0


def test_while_the_model_loads(served, pipeline):
    from arpg.serve.served_model import ServedModel
    from arpg.serve.service import ImageService

    client = TestClient(create_app(ImageService([ServedModel("small", lambda: pipeline)])))  # never opened
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 503
    assert error(client.post("/v1/arpg/generate", json={"class": 1}), 503)["code"] == "loading"
    assert client.get("/v1/models").status_code == 200


def test_an_internal_error_reveals_nothing(service, monkeypatch, caplog):
    client = client_of(service)

    def broken(*_):
        raise ZeroDivisionError("a secret detail")

    caplog.set_level("CRITICAL")
    monkeypatch.setattr(service.worker.loaded.builder, "from_params", broken)
    found = client.post("/v1/arpg/generate", json={"class": 1})
    assert error(found, 500)["type"] == "server_error"
    assert "secret" not in found.text
    assert "Traceback" not in found.text
    streamed = client.post("/v1/arpg/generate", json={"class": 1, "stream": True})
    assert error(streamed, 500)["type"] == "server_error"
    assert "secret" not in streamed.text
    monkeypatch.undo()
    post(client, "generate", {"class": 1, "steps": 1})


def test_a_deadline_is_a_504(served):
    client = TestClient(create_app(served(deadline=1e-4)))
    assert error(client.post("/v1/arpg/generate", json={"class": 1}), 504)["code"] == "deadline_exceeded"
    streamed = client.post("/v1/arpg/generate", json={"class": 1, "stream": True})
    assert error(streamed, 504)["code"] == "deadline_exceeded"
