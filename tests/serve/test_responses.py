"""PNG files and JSON of responses."""

import base64
import io
import json

from PIL import Image

from arpg.serve.responses import to_base64, to_json, to_png
from benchmarks.null_server import photo_like


def read(file):
    image = Image.open(io.BytesIO(file))
    image.load()
    return image


def test_the_settings_are_in_the_file():
    settings = {"class": 3, "prompt": 'é "quoted"\n', "seed": 2**40}
    found = read(to_png(Image.new("RGB", (4, 4)), settings))
    assert json.loads(found.text["arpg"]) == settings


def test_a_file_is_about_as_small_as_with_pillows_default_compression():
    image = Image.fromarray(photo_like(0))
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=6)
    assert len(to_png(image)) < 1.1 * len(file.getvalue())


def test_json_has_files_as_strings():
    files = [to_base64(bytes(range(i))) for i in (1, 0, 250)]
    body = {
        "id": 'a"b',
        "images": [{"png": files[0], "n": None}, {"png": files[1]}],
        "last": files[2],
        "text": "ü\u2028",
    }
    texts = [file.decode() for file in files]
    expected = {**body, "images": [{"png": texts[0], "n": None}, {"png": texts[1]}], "last": texts[2]}
    assert to_json(body) == json.dumps(expected).encode()
    assert base64.b64decode(json.loads(to_json(body))["last"]) == bytes(range(250))
    assert to_json({"a": 1}) == b'{"a": 1}'
