"""What clients send: images of every kind through one reader, and images that would become large."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from arpg import Pipeline
from arpg.image import MAX_INTERMEDIATE_PIXELS, to_rgb
from arpg.serve.app import create_app
from support.http import b64, error, image_of, pixels, post
from support.small import controlled_model, noise, small_tokenizer


def client_of(service):
    return TestClient(create_app(service), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(served_module):
    return client_of(served_module())


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
