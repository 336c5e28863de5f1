"""The official `openai` client, unchanged, against a real server."""

import base64
import io

import numpy as np
import openai
import pytest
from PIL import Image

from arpg.serve.auth import ApiKeys
from support.small import noise

KEY = "a-key-for-the-official-client"


@pytest.fixture(scope="module")
def client(live_module):
    address, _ = live_module(keys=ApiKeys([KEY]))
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def image_of(b64):
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def png(image):
    file = io.BytesIO()
    image.save(file, format="PNG")
    return ("image.png", file.getvalue(), "image/png")


def holed(size=(8, 8), box=(0, 0, 4, 8)):
    """Transparent in the box."""
    mask = Image.new("RGBA", size, (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), box)
    return mask


def test_generations(client, pipeline):
    options = {"seed": 4, "steps": 5, "guidance": 2.0}
    answer = client.images.generate(model="small", prompt="class 3", n=2, extra_body=options)
    expected = pipeline.generate(3, num_images=2, **options)
    assert len(answer.data) == 2
    for datum, image in zip(answer.data, expected, strict=True):
        assert np.array_equal(np.asarray(image_of(datum.b64_json)), np.asarray(image))
    assert (answer.size, answer.output_format) == ("8x8", "png")


def test_sizes_formats_and_qualities(client, pipeline):
    larger = client.images.generate(prompt="3", size="16x16", extra_body={"seed": 1, "steps": 3})
    expected = pipeline.expand(None, 3, size=(16, 16), seed=1, steps=3)
    assert np.array_equal(np.asarray(image_of(larger.data[0].b64_json)), np.asarray(expected[0]))
    for kind in ("jpeg", "webp"):
        made = client.images.generate(prompt="3", output_format=kind, output_compression=50, size="8x8")
        assert image_of(made.data[0].b64_json).format == kind.upper()
    low = client.images.generate(prompt="3", quality="low", extra_body={"seed": 1})
    assert 'steps": 16,' in image_of(low.data[0].b64_json).text["arpg"]


def test_edits_fill_what_is_transparent(client, pipeline):
    source, mask = noise(8, 8), holed()
    answer = client.images.edit(
        image=png(source), mask=png(mask), prompt="class 2", n=2, extra_body={"seed": 3, "steps": 4, "feather": 1}
    )
    white = Image.fromarray(np.where(np.asarray(mask)[..., 3] == 0, 255, 0).astype(np.uint8))
    expected = pipeline.inpaint(source, white, 2, num_images=2, seed=3, steps=4, feather=1)
    for datum, image in zip(answer.data, expected, strict=True):
        found = np.asarray(image_of(datum.b64_json))
        assert np.array_equal(found, np.asarray(image))
        assert np.array_equal(found[:, 4:], np.asarray(source)[:, 4:])


def test_an_image_may_be_its_own_mask(client):
    source = noise(8, 8).convert("RGBA")
    source.paste((0, 0, 0, 0), (0, 0, 4, 4))
    answer = client.images.edit(image=[png(source)], prompt="1", extra_body={"steps": 2})
    found = np.asarray(image_of(answer.data[0].b64_json))
    assert np.array_equal(found[4:], np.asarray(source)[4:, :, :3])


@pytest.mark.parametrize("partial", [0, 2, 3])
def test_a_stream_has_partial_images(client, partial):
    options = {"seed": 4, "steps": 6}
    stream = client.images.generate(prompt="1", stream=True, partial_images=partial, extra_body=options)
    *parts, last = list(stream)
    assert [part.type for part in parts] == ["image_generation.partial_image"] * partial
    assert [part.partial_image_index for part in parts] == list(range(partial))
    assert len({part.b64_json for part in parts}) == partial
    assert last.type == "image_generation.completed"
    assert last.b64_json == client.images.generate(prompt="1", extra_body=options).data[0].b64_json


def test_edits_stream_too(client):
    stream = client.images.edit(
        image=png(noise(8, 8)), mask=png(holed()), prompt="1", stream=True, partial_images=1, extra_body={"steps": 4}
    )
    assert [event.type for event in stream] == ["image_edit.partial_image", "image_edit.completed"]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "arpg"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("dall-e-3")


def test_errors_are_the_clients_exceptions(client, live):
    with pytest.raises(openai.BadRequestError) as unknown:
        client.images.generate(prompt="clas 3")
    assert (unknown.value.code, unknown.value.param) == ("unknown_class", "prompt")
    assert "class 3" in unknown.value.body["nearest"]
    with pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="1", model="gpt-image-1")
    for wrong in ({"response_format": "url"}, {"size": "7x"}, {"size": "4000x4000"}, {"background": "transparent"}):
        with pytest.raises(openai.BadRequestError):
            client.images.generate(prompt="1", **wrong)
    with pytest.raises(openai.BadRequestError):
        client.images.generate(prompt="1", extra_body={"stepz": 3})
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="a-wrong-key-of-the-right-length").models.list()
    address, service = live(max_pending_requests=1)
    other = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    service.admission.num_admitted = 1
    with pytest.raises(openai.RateLimitError):
        other.images.generate(prompt="1")
    service.admission.num_admitted, service.admission.draining = 0, True
    with pytest.raises(openai.InternalServerError):
        other.images.generate(prompt="1")


@pytest.mark.parametrize(
    ("image", "mask", "more"),
    [
        (png(noise(8, 8)), png(holed((9, 8))), {}),
        (png(noise(8, 8)), png(noise(8, 8)), {}),
        (("a.png", b"no image", "image/png"), None, {}),
        (png(noise(8, 8)), png(holed()), {"steps": "many"}),
        (png(noise(8, 8)), png(holed()), {"unknown": 1}),
        ([png(noise(8, 8)), png(noise(8, 8))], png(holed()), {}),
        (png(noise(8, 8)), png(holed()), {"size": "16x16"}),
    ],
)
def test_wrong_edits(client, image, mask, more):
    options = {"mask": mask} if mask else {}
    with pytest.raises(openai.BadRequestError) as error:
        client.images.edit(image=image, prompt="1", extra_body=more, **options)
    assert error.value.type == "invalid_request_error"
