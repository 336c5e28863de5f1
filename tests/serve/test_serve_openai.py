"""The official `openai` client, unchanged, against a real server."""

import base64
import io
import threading

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from arpg.serve.auth import ApiKeys
from arpg.serve.openai import ImageStore, random_patches
from arpg.serve.server_config import Limits
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
    assert (answer.size, answer.output_format, answer.quality, answer.background) == ("8x8", "png", "medium", "opaque")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (1, 32, 33)  # a class; 2 of 16 tokens
    assert usage.input_tokens_details.text_tokens == usage.input_tokens
    assert usage.output_tokens_details.image_tokens == usage.output_tokens


def test_every_field_of_the_client_is_accepted(client):
    """What has no meaning here is ignored; what is not known at all is refused, since it may be a misspelt setting."""
    answer = client.images.generate(
        prompt="1",
        model="small",
        n=1,
        size="auto",
        quality="max",
        style="vivid",
        moderation="low",
        background="auto",
        output_format="png",
        output_compression=80,
        response_format="b64_json",
        safety_identifier="somebody",
        user="user",
        complexity="low",
        frame_count=1,
        frame_duration_ms=10,
        extra_body={"metadata": {"a": "b"}, "store": False, "steps": 2},
    )
    assert (answer.quality, answer.safety_identifier) == ("max", "somebody")
    assert client.images.generate(prompt="1", user="user", extra_body={"steps": 1}).safety_identifier == "user"
    with pytest.raises(openai.BadRequestError, match="unknown field 'gudance'"):
        client.images.generate(prompt="1", extra_body={"gudance": 3})


@pytest.mark.parametrize(
    ("size", "expected"),
    [("auto", "8x8"), ("8x8", "8x8"), ("24x24", "24x24"), ("1024x1024", "32x32"), ("1536x1024", "32x32")],
)
def test_sizes_are_the_nearest_that_the_model_makes(live, size, expected):
    address, _ = live(limits=Limits(side=32))
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        answer = client.images.generate(prompt="1", size=size, extra_body={"steps": 1})
        assert answer.size == expected == "{}x{}".format(*image_of(answer.data[0].b64_json).size)
        with pytest.raises(openai.BadRequestError, match=r"8x8 \(or auto\), larger ones of that shape up to 32x32"):
            client.images.generate(prompt="1", size="16x8")
        with pytest.raises(openai.BadRequestError, match="larger ones"):
            client.images.generate(prompt="1", size="4x4")


def test_an_edit_without_a_mask_keeps_a_quarter_of_the_patches(client):
    source = noise(8, 8)
    options = {"seed": 3, "steps": 3}
    answer = client.images.edit(image=png(source), prompt="1", size="1024x1024", extra_body=options)
    found, before = np.asarray(image_of(answer.data[0].b64_json)), np.asarray(source)
    same = (found == before).all(-1).reshape(4, 2, 4, 2).all((1, 3))  # by patch
    kept = np.asarray(random_patches((4, 4), (4, 4), 3)) == 0
    assert kept.sum() == 4
    assert (same | ~kept).all()
    assert not same.all()
    assert (answer.size, answer.usage.input_tokens_details.image_tokens) == ("8x8", 4)


@pytest.mark.filterwarnings("ignore:deprecated")  # in the client, like the model it was made for
def test_variations(client, pipeline):
    source, options = noise(8, 8), {"seed": 3, "steps": 3}
    answer = client.images.create_variation(image=png(source), n=2, size="256x256", extra_body=options)
    expected = pipeline.inpaint(source, random_patches((8, 8), (4, 4), 3), None, num_images=2, **options)
    assert [np.array_equal(image_of(d.b64_json), e) for d, e in zip(answer.data, expected, strict=True)] == [True] * 2
    with pytest.raises(openai.BadRequestError, match="size is 9x9"):
        client.images.create_variation(image=png(source), size="9x9")


@pytest.mark.filterwarnings("ignore:deprecated")
@pytest.mark.parametrize("method", ["edit", "create_variation"])
def test_the_seed_of_a_response_makes_the_same_image_again(client, method):
    """It chooses the patches that are sampled as well as their content."""
    call, options = getattr(client.images, method), {"image": png(noise(8, 8))}
    if method == "edit":
        options["prompt"] = "1"
    (first,) = call(**options, extra_body={"steps": 3}).data
    (again,) = call(**options, extra_body={"steps": 3, "seed": first.seed}).data
    assert first.b64_json == again.b64_json


def test_images_as_urls(client, live):
    answer = client.images.generate(
        prompt="1", n=2, response_format="url", output_format="webp", extra_body={"steps": 1}
    )
    for datum in answer.data:
        assert datum.b64_json is None
        fetched = httpx.get(datum.url)  # without the key
        assert (fetched.status_code, fetched.headers["content-type"]) == (200, "image/webp")
        assert Image.open(io.BytesIO(fetched.content)).size == (8, 8)
        assert len(datum.url.rsplit("/", 1)[1]) > 40
    assert len({datum.url for datum in answer.data}) == 2
    other = answer.data[0].url.rsplit("/", 1)[0]
    assert httpx.get(f"{other}/nothing.png").status_code == 404
    address, _ = live(url_bytes=0)
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as without,
        pytest.raises(openai.BadRequestError, match="use b64_json"),
    ):
        without.images.generate(prompt="1", response_format="url")


def test_a_url_is_valid_for_url_seconds(live):
    address, _ = live(url_seconds=1e-6)
    body = {"prompt": "1", "response_format": "url", "steps": 1}
    answer = httpx.post(f"{address}/v1/images/generations", json=body, timeout=60)
    assert httpx.get(answer.json()["data"][0]["url"]).status_code == 404


def test_urls_have_the_address_that_clients_see(live):
    """Behind a proxy that speaks TLS, the address of the request is that of the proxy's own connection."""
    address, _ = live(public_url="https://images.example.org/arpg/")
    body = {"prompt": "1", "response_format": "url", "steps": 1}
    url = httpx.post(f"{address}/v1/images/generations", json=body, timeout=60).json()["data"][0]["url"]
    start, _, name = url.rpartition("/")
    assert start == "https://images.example.org/arpg/images"
    assert httpx.get(f"{address}/images/{name}").status_code == 200


def test_stored_images_are_bounded_in_bytes_and_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("arpg.serve.openai.time.monotonic", lambda: now[0])
    store = ImageStore(max_bytes=100, seconds=10)
    first, second, third = (store.add(b"x" * 40, "image/png") for _ in range(3))
    assert store.find(first) is None  # dropped for the third
    assert store.find(second).data == store.find(third).data == b"x" * 40
    assert store.num_bytes == 80
    now[0] = 10.0
    assert store.find(third) is None
    assert store.num_bytes == 0


def test_files_are_encoded_in_threads_of_the_service(client, monkeypatch):
    """Not on the event loop, where all other responses would wait."""
    threads, save = [], Image.Image.save

    def recorded(image, *arguments, **options):
        threads.append(threading.current_thread().name)
        save(image, *arguments, **options)

    monkeypatch.setattr(Image.Image, "save", recorded)
    client.images.generate(prompt="3", output_format="webp", extra_body={"steps": 1})
    assert [name.split("_")[0] for name in threads] == ["arpg-encode"]


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
    for wrong in ({"output_format": "svg"}, {"size": "7x"}, {"size": "4000x4000"}, {"background": "transparent"}):
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
