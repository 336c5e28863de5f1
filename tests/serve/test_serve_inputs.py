"""What clients send: images of every kind and size, JSON, forms and headers; whatever it is, never a 500."""

import base64
import io
import json
import threading

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient

from arpg import Pipeline
from arpg.image import MAX_INTERMEDIATE_PIXELS, to_rgb
from arpg.serve.api_error import ApiError
from arpg.serve.app import create_app
from arpg.serve.request_body import MAX_DEPTH, MAX_KEYS, parse_json
from arpg.serve.server_config import Limits
from support.http import ask, b64, error, image_of, pixels, post, until
from support.small import controlled_model, noise, small_tokenizer


def client_of(service):
    return TestClient(create_app(service), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def app(served_module):
    return create_app(served_module())


@pytest.fixture(scope="module")
def client(app):
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def control_client(served_module):
    return client_of(served_module(pipeline=Pipeline(controlled_model(), small_tokenizer(), license="MIT")))


def png(image, **options):
    file = io.BytesIO()
    image.save(file, format="PNG", **options)
    return file.getvalue()


# Images


def grey_16_bit():
    return Image.fromarray(np.linspace(0, 65535, 20 * 14).reshape(14, 20).astype(np.uint16))


def turned(image):
    """A PNG file that says: rotate by 90 degrees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return png(image, exif=exif)


def half_transparent():
    image = noise(20, 14).convert("RGBA")
    image.putalpha(128)
    return image


FILES = {"16-bit": png(grey_16_bit()), "turned": turned(noise(20, 14)), "half transparent": png(half_transparent())}


@pytest.mark.parametrize("kind", FILES)
def test_every_route_reads_an_image_alike(client, kind):
    """Outside of the mask, an edit through either API returns the pixels that `to_rgb` reads."""
    file = FILES[kind]
    expected = to_rgb(Image.open(io.BytesIO(file)))
    width, height = expected.size
    mask = Image.new("RGBA", expected.size, "black")
    mask.paste((0, 0, 0, 0), (0, 0, 4, 4))
    form = {"prompt": "1", "steps": "1"}
    answer = client.post("/v1/images/edits", files={"image": file, "mask": png(mask)}, data=form)
    assert answer.status_code == 200, answer.text
    found = [image_of({"png": answer.json()["data"][0]["b64_json"]})]
    body = {"image": base64.b64encode(file).decode(), "box": [0, 0, 4, 4], "class": 1, "steps": 1}
    found.append(image_of(post(client, "edit", body)["images"][0]))
    for image in found:
        assert image.size == (width, height)
        assert np.array_equal(pixels(image)[4:], pixels(expected)[4:])


def test_a_condition_image_of_16_bits_keeps_its_greys(control_client):
    """Depth maps are often 16-bit; read as 8 bits they would be white almost everywhere."""
    grey, eight = grey_16_bit(), Image.fromarray((np.asarray(grey_16_bit()) // 257).astype(np.uint8))
    body = {"class": 1, "steps": 2}
    one, two = (
        post(control_client, "generate", {**body, "control": {"image": b64(image), "kind": "depth"}})["images"]
        for image in (grey, eight)
    )
    assert image_of(one[0]).tobytes() == image_of(two[0]).tobytes()


# Memory


@pytest.mark.parametrize("size", [(2000, 1), (1, 2000), (16384, 1)])
def test_a_long_image_does_not_become_large(control_client, intermediates, size):
    image = b64(Image.new("RGB", size, (9, 80, 200)))
    body = {"image": image, "kind": "canny", "size": [768, 768]}
    assert post(control_client, "condition", body)["width"] == 768
    control = {"image": image, "kind": "canny", "from_image": True}
    post(control_client, "generate", {"class": 1, "steps": 1, "control": control})
    mask = b64(Image.new("L", size, 255))
    post(control_client, "inpaint", {"image": image, "mask": mask, "class": 1, "steps": 1})
    assert 0 < max(intermediates) <= MAX_INTERMEDIATE_PIXELS


@pytest.mark.parametrize("size", [(1 << 22, 1), (50000, 1), (1, 16385)])
def test_a_longer_one_is_refused_before_it_is_decoded(control_client, size):
    image = b64(Image.new("L", size))
    for route, more in (("condition", {"size": [768, 768]}), ("outpaint", {"right": 1})):
        found = error(control_client.post(f"/v1/arpg/{route}", json={"image": image, **more}), 413)
        assert f"{size[0]}x{size[1]} pixels" in found["message"]
        assert found["code"] == "too_large"


# JSON

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{" + ", ".join(f'"k{i}": 1' for i in range(MAX_KEYS + 1)) + "}", "an object has 101 keys"),
        ('{"class": {' + ", ".join(f'"k{i}": 1' for i in range(MAX_KEYS + 1)) + "}}", "an object has 101 keys"),
        ("{" + ", ".join(f'"k{i}": 1' for i in range(1 << 20)) + "}", "more than 100000 braces"),
        ('{"class": ' + "[" * 9 + "]" * 9 + "}", "deeper than 8 levels"),
        ('{"class": ' + "[" * 40000 + "]" * 40000 + "}", "deeper than 8 levels"),
        ('{"class": 1' + "0" * 5000 + "}", "not valid JSON"),
        ('{"class": ', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
    ],
    ids=["keys", "inner keys", "a million keys", "deep", "very deep", "digits", "cut", "not text"],
)
def test_the_structure_of_json_is_bounded(client, body, says):
    found = error(client.post("/v1/arpg/generate", content=body, headers=JSON), 400)
    assert says in found["message"]


def test_json_within_the_bounds_is_what_json_loads_returns():
    value = {"image": "A" * 200_000, "prompt": ',:"[]{}' * 2000, "schedule": list(range(1024)), "a": {"b": [1.5, None]}}
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    with pytest.raises(ApiError, match="deeper"):
        parse_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


def test_a_media_type_ignores_case(client):
    answer = client.post(
        "/v1/arpg/generate", content=b'{"class": 1, "steps": 1}', headers={"content-type": "Application/JSON"}
    )
    assert answer.status_code == 200, answer.text


def test_a_large_body_is_not_parsed_on_the_event_loop(served, monkeypatch):
    threads = []
    monkeypatch.setattr("arpg.serve.request_body.parse_json", lambda body: threads.append(threading.current_thread()))
    with TestClient(create_app(served())) as client:
        for size in (10, 1 << 17):
            client.post("/v1/arpg/generate", content=b"{" + b" " * size + b"}", headers=JSON)
        loop = []
        client.portal.call(lambda: loop.append(threading.current_thread()))
    assert [thread is loop[0] for thread in threads] == [True, False]


@pytest.mark.parametrize("name", ["²", "--5", "-", "9" * 5000])
def test_a_class_that_looks_like_a_number_is_no_500(client, name):
    found = error(client.post("/v1/images/generations", json={"prompt": name}), 400)
    assert found["param"] == "prompt"
    assert len(found["message"]) < 300


def test_an_image_of_too_many_tokens_is_not_encoded(served, monkeypatch):
    """A small file can stand for a large grid: its shorter side is scaled to that of the model."""
    service = served(limits=Limits(side=64))
    monkeypatch.setattr(service.worker.loaded.codec.large, "_codec", None)
    wide = {"image": b64(noise(300, 1)), "right": 8, "class": 1}
    found = error(client_of(service).post("/v1/arpg/outpaint", json=wide), 400)
    assert "the result would have 4928 tokens; at most 1024" in found["message"]


# Forms


def edit(client, fields, **options):
    mask = Image.new("RGBA", (8, 8))
    return client.post("/v1/images/edits", files={"image": png(noise(8, 8)), "mask": png(mask)}, data=fields, **options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", "1,,2"),
        ("schedule", "1" * 5000),
        ("schedule", "[]"),
        ("schedule", "[,]"),
        ("order", "3,,1"),
        ("seed", "9" * 5000),
        ("steps", "1e999"),
        ("n", "٣" * 4),
        ("temperature", "nan"),
        ("size", "9" * 300 + "x8"),
    ],
)
def test_a_form_field_that_is_not_valid_is_a_400(client, field, value):
    assert error(edit(client, {"prompt": "1", "steps": "1", field: value}), 400)["param"] == field


def test_an_error_of_a_form_is_that_of_json(client):
    """It shows the value, and says what an unknown field is."""
    for wrong in ({"gudance": "3"}, {"n": "99"}):
        form = error(edit(client, {"prompt": "1", **wrong}), 400)
        body = {name: int(value) for name, value in wrong.items()}
        of_json = error(client.post("/v1/images/generations", json={"prompt": "1", **body}), 400)
        assert form == {**of_json, "message": of_json["message"].replace("99", "'99'")}


def test_numbers_of_a_schedule_may_be_padded(client):
    plain, padded = (edit(client, {"prompt": "1", "seed": "1", "schedule": s}) for s in ("8,8", "[08, 08]"))
    assert (plain.status_code, plain.json()["data"]) == (200, padded.json()["data"])


def form_bytes(*parts, end="--b--\r\n"):
    lines = [f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in parts]
    return ("".join(lines) + end).encode()


@pytest.mark.parametrize("charset", ["undefined", "no-such-charset", "idna", "rot13", "utf-7", "hex", "\\", "a" * 3000])
def test_a_charset_that_does_not_exist_is_no_500(client, charset):
    headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    body = form_bytes(("prompt", "\xfc.xn--"))
    assert error(client.post("/v1/images/edits", content=body, headers=headers), 400)
    headers = {"content-type": f"application/json; charset={charset}"}
    assert error(client.post("/v1/arpg/generate", content=b"{}", headers=headers), 400)["param"] == "class"


@pytest.mark.parametrize("end", ["", "--b\r\n", "--b", "--c--\r\n"])
def test_a_form_without_an_end_is_a_400(client, end):
    headers = {"content-type": "multipart/form-data; boundary=b"}
    found = error(client.post("/v1/images/edits", content=form_bytes(("prompt", "1"), end=end), headers=headers), 400)
    assert "end" in found["message"] or "valid form" in found["message"]


def test_a_form_needs_no_temporary_folder(client, monkeypatch):
    """A file of more than a megabyte would be written there; a full folder would be a 500."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    large = noise(800, 600)
    mask = Image.new("RGBA", large.size)
    files = {"image": png(large), "mask": png(mask)}
    assert len(files["image"]) > 1 << 20
    answer = client.post("/v1/images/edits", files=files, data={"prompt": "1", "steps": "1"})
    assert answer.status_code == 200, answer.text


# Anything at all

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = ["host", "origin", "authorization", "content-type", "content-length", "accept", "expect", "connection"]
NAMES += ["x-forwarded-for", "forwarded", "transfer-encoding", "cookie", "range", "if-modified-since", "x"]
VALUES = ["", "http://[", "null", "bytes=0-", "multipart/form-data", "application/json; charset=undefined", "*/*", "-1"]
VALUES += ["multipart/form-data; boundary=", 'multipart/form-data; boundary="', "Bearer", "Bearer \xff", "chunked"]
HEADER = st.tuples(
    st.sampled_from(NAMES).map(str.encode),
    st.one_of(st.sampled_from(VALUES).map(lambda v: v.encode("latin-1")), st.binary(max_size=40)),
)
ROUTES = [
    "/v1/images/edits",
    "/v1/images/generations",
    "/v1/arpg/generate",
    "/v1/arpg/condition",
    "/v1/arpg/upscale",
    "/v1/models",
    "/static/x",
]


def never_a_500(status, body, caplog):
    assert 200 <= status < 500, body
    if status >= 400:
        assert set(json.loads(body)) == {"error"}
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


@FUZZ
@given(
    headers=st.lists(HEADER, max_size=6),
    method=st.sampled_from(["GET", "POST", "PUT", "OPTIONS", "HEAD"]),
    path=st.sampled_from(ROUTES),
    body=st.sampled_from([b"", b"{}", b"--\r\n", b"[1]", form_bytes(("prompt", "1"))]),
)
def test_no_headers_are_a_500(app, caplog, headers, method, path, body):
    status, answer = ask(app, *headers, method=method, path=path, body=body)
    never_a_500(status, answer if method != "HEAD" else b'{"error": 0}', caplog)


FIELDS = [
    "prompt",
    "n",
    "size",
    "steps",
    "schedule",
    "order",
    "seed",
    "guidance",
    "quality",
    "stream",
    "feather",
    "model",
]
TEXT = st.one_of(
    st.text(max_size=12),
    st.text("0123456789,[] .-+ex", max_size=12),
    st.sampled_from(["0" * 5000, "1,,2", "01", "true", "null", "1_0", "\x00", "\ud7ff", "8x8", "0x8", "auto"]),
)


@FUZZ
@given(fields=st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text(max_size=5)), TEXT, max_size=5))
def test_no_form_is_a_500(client, caplog, fields):
    answer = edit(client, {"prompt": "1", "steps": "1", **fields})
    if answer.headers["content-type"].startswith("text/event-stream"):
        return
    never_a_500(answer.status_code, answer.content, caplog)


# Condition images


@pytest.fixture
def blocked(monkeypatch):
    """A control service whose extraction waits until it is released."""
    release = threading.Event()
    yield release
    release.set()


def test_an_extraction_has_a_deadline_and_threads_of_its_own(served, blocked, monkeypatch):
    service = served(pipeline=Pipeline(controlled_model(), small_tokenizer(), license="MIT"), deadline=0.5)
    client, body = client_of(service), {"image": b64(noise(8, 8)), "kind": "canny"}
    monkeypatch.setattr(service.worker.loaded.builder, "extract_condition", lambda _: blocked.wait(60))
    for _ in range(5):  # more than there are threads
        assert error(client.post("/v1/arpg/condition", json=body), 504)["code"] == "deadline_exceeded"
    post(client, "generate", {"class": 1, "steps": 1})
    assert service.admission.num_admitted == 0


def test_an_extraction_whose_client_is_gone_is_dropped(live, blocked, monkeypatch):
    address, service = live(pipeline=Pipeline(controlled_model(), small_tokenizer(), license="MIT"))
    monkeypatch.setattr(service.worker.loaded.builder, "extract_condition", lambda _: blocked.wait(60))
    body = {"image": b64(noise(8, 8)), "kind": "canny"}
    for _ in range(5):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/arpg/condition", json=body, timeout=0.3)
    assert until(lambda: service.admission.num_admitted == 0)
    assert service.metrics.registry.get_sample_value("arpg_cancelled_total") == 5
