"""Several models in one server: the `model` of a request chooses, an unknown one is listed against those that exist."""

import hashlib

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from arpg import Pipeline
from arpg.checkpoint import FolderConfig, installed_models, read_folder, write_folder
from arpg.classes import ClassNames
from arpg.config import DEFAULT_MODEL
from arpg.errors import InputError
from arpg.serve.app import create_app
from arpg.serve.auth import read_keys
from arpg.serve.served_model import ServedModel, default_models
from arpg.serve.service import ImageService
from arpg.text_encoder import PromptCache
from support.http import b64, error, image_of, pixels, post
from support.small import TEXT, FakeEncoder, noise, small_tokenizer


@pytest.fixture(scope="module")
def text_pipeline(text_model):
    prompts = PromptCache(TEXT.text, load=FakeEncoder)
    return Pipeline(text_model, small_tokenizer(), license="MIT", prompts=prompts)


@pytest.fixture(scope="module")
def service(served_module, text_pipeline):
    return served_module(more={"words": text_pipeline})


@pytest.fixture(scope="module")
def client(service):
    return TestClient(create_app(service), raise_server_exceptions=False)


def test_the_model_of_a_request_chooses(client, pipeline, text_pipeline):
    body = {"seed": 3, "steps": 3}
    for name in (None, "small"):
        answer = post(client, "generate", {**body, "class": 2, "model": name})
        assert np.array_equal(pixels(image_of(answer["images"][0])), pixels(pipeline.generate(2, **body)[0]))
        assert answer["settings"]["model"] == "small"
    answer = post(client, "generate", {**body, "prompt": "pear", "model": "words"})
    expected = text_pipeline.generate(prompt="pear", **body)
    assert np.array_equal(pixels(image_of(answer["images"][0])), pixels(expected[0]))
    assert answer["settings"]["model"] == "words"
    source = noise(8, 8)
    answer = post(client, "outpaint", {**body, "image": b64(source), "right": 4, "prompt": "pear", "model": "words"})
    expected = text_pipeline.outpaint(source, right=4, prompt="pear", **body)
    assert np.array_equal(pixels(image_of(answer["images"][0])), pixels(expected[0]))
    assert error(client.post("/v1/arpg/generate", json={"class": 2, "model": "words"}), 400)["code"] == "takes_text"


def test_the_choice_of_a_model_searches_for_no_names_like_the_prompt(service, monkeypatch):
    """That takes long for a long prompt, and the event loop waits."""
    monkeypatch.setattr(ClassNames, "nearest", lambda *_: pytest.fail("searched"))
    prompts = {"a red cat": "words", "class 3": "small", " 2 ": "small", "-2": "words", "99": "words"}
    assert {prompt: service.find_for(None, prompt).name for prompt in prompts} == prompts


def test_models_are_listed_and_described(client, service):
    assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["small", "words"]
    assert client.get("/v1/models/words").json()["id"] == "words"
    info, words = (client.get("/v1/arpg/info", params=query).json() for query in ({}, {"model": "words"}))
    assert (info["model"], info["takes"], words["model"], words["takes"]) == ("small", "class", "words", "text")
    assert info["models"] == words["models"]
    weights = [entry.pop("weight_bytes") for entry in info["models"]]
    assert info["models"] == [
        {"name": "small", "takes": "classes", "control": False, "default": True},
        {"name": "words", "takes": "prompts", "control": False, "default": False},
    ]
    model = service.worker.loaded.pipeline.model
    assert weights[0] > sum(p.numel() * p.element_size() for p in model.parameters())
    value = service.metrics.registry.get_sample_value("arpg_model_weight_bytes", {"model": "words"})
    assert value == weights[1]
    assert len(client.get("/v1/arpg/classes").json()["classes"]) == 5
    assert client.get("/v1/arpg/classes?model=words").json() == {"classes": [], "thumbnails": None}


def test_an_unknown_model_is_a_404_that_lists_the_names(client):
    answers = [
        client.get("/v1/arpg/info?model=other"),
        client.get("/v1/arpg/classes?model=other"),
        client.get("/v1/arpg/thumbnails.webp?model=other"),
        client.get("/v1/models/other"),
        client.post("/v1/arpg/generate", json={"class": 1, "model": "other"}),
        client.post("/v1/arpg/generate", json={"class": 1, "model": "other", "stream": True}),
        client.post("/v1/arpg/condition", json={"image": b64(noise(8, 8)), "model": "other"}),
        client.post("/v1/images/generations", json={"prompt": "1", "model": "other"}),
    ]
    for answer in answers:
        found = error(answer, 404)
        assert found["message"] == "model 'other' is not served here; expected 'small', 'words'"
        assert (found["code"], found["param"], found["nearest"]) == ("model_not_found", "model", ["small", "words"])
    assert error(client.post("/v1/arpg/generate", json={"class": 1, "model": "x" * 201}), 400)["param"] == "model"


def test_a_prompt_that_is_no_class_goes_to_the_model_that_takes_prompts(live, text_pipeline, pipeline):
    address, _ = live(more={"words": text_pipeline})
    options = {"seed": 4, "steps": 3}

    def pixels_of(answer):
        return pixels(image_of({"png": answer.data[0].b64_json}))

    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        answer = client.images.generate(prompt="a photo of a banana", extra_body=options)
        expected = text_pipeline.generate(prompt="a photo of a banana", **options)
        assert np.array_equal(pixels_of(answer), pixels(expected[0]))
        answer = client.images.generate(prompt="class 3", extra_body=options)
        assert np.array_equal(pixels_of(answer), pixels(pipeline.generate(3, **options)[0]))
        answer = client.images.generate(prompt="class 3", model="words", extra_body=options)
        assert np.array_equal(pixels_of(answer), pixels(text_pipeline.generate(prompt="class 3", **options)[0]))
        with pytest.raises(openai.BadRequestError, match="photo"):
            client.images.generate(prompt="a photo of a banana", model="small", extra_body=options)


def test_two_models_of_one_name_are_refused(pipeline):
    with pytest.raises(InputError, match="two models are named 'a'"):
        ImageService([ServedModel("a", lambda: pipeline), ServedModel("a", lambda: pipeline)])


# Keys


@pytest.fixture
def keys_file(tmp_path, monkeypatch):
    monkeypatch.setattr("arpg.serve.auth.RELOAD_S", 0.0)
    file = tmp_path / "keys.txt"
    file.write_text("alice the-first-key-of-alice\n")
    return file


def test_keys_are_rotated_without_a_restart(served, keys_file, caplog):
    caplog.set_level("INFO")
    client = TestClient(create_app(served(keys=read_keys(keys_file, "a-key-of-the-environment"))))

    def status(key):
        return client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    assert (status("the-first-key-of-alice"), status("a-key-of-the-environment")) == (200, 200)
    new = keys_file.with_suffix(".new")
    new.write_text("alice the-second-key-of-alice\nthe-key-of-somebody\n")
    new.replace(keys_file)  # atomic, as `mv` and the mounted secrets of Kubernetes
    assert (status("the-first-key-of-alice"), status("the-second-key-of-alice")) == (401, 200)
    assert (status("the-key-of-somebody"), status("a-key-of-the-environment")) == (200, 200)
    for broken in ("", "short\n", "# nothing\n"):
        keys_file.write_text(broken)
        assert status("the-second-key-of-alice") == 200
    keys_file.unlink()
    assert status("the-second-key-of-alice") == 200
    assert caplog.text.count("the keys stay as they were") == 4
    assert "short" not in caplog.text
    assert "of-alice" not in caplog.text


def test_keys_have_labels(keys_file):
    keys_file.write_text("# keys\nalice the-first-key-of-alice\n  the-key-of-somebody  \n")
    keys = read_keys(keys_file, "bob a-key-of-the-environment,another-one-of-the-environment")
    assert keys.find("the-first-key-of-alice") == "alice"
    assert keys.find("a-key-of-the-environment") == "bob"
    assert keys.find("the-key-of-somebody") == "key-" + hashlib.sha256(b"the-key-of-somebody").hexdigest()[:6]
    assert keys.find("alice") is None
    for wrong in ("a b the-first-key-of-alice", "über the-first-key-of-alice", "alice tooshort"):
        keys_file.write_text(wrong)
        with pytest.raises(InputError, match="key 1") as refused:
            read_keys(keys_file, None)
        assert wrong.split()[-1] not in str(refused.value)


def test_a_folder_says_what_its_model_knows(served, folder, pipeline):
    write_folder(folder, FolderConfig(about="Five fruits.", examples=("2", "4")))
    service = ImageService([ServedModel("known", lambda: pipeline, folder=folder)])
    service.open()
    info = TestClient(create_app(service)).get("/v1/arpg/info").json()
    service.close()
    assert (info["about"], info["examples"]) == ("Five fruits.", ["2", "4"])


def test_all_installed_models_are_served_unless_something_is_missing(monkeypatch, tmp_path):
    assets = installed_models()
    assert next(iter(default_models())) == DEFAULT_MODEL
    assert default_models().keys() == assets.keys()
    monkeypatch.setattr("arpg.text_encoder.MINILM_PACKAGE", "no_such_package")
    text = [name for name, model in assets.items() if read_folder(model.folder).model.text is not None]
    problems = {name: problem for name, problem in default_models().items() if problem}
    assert problems == dict.fromkeys(text, "prompts need the extra: pip install 'arpg[text]'")
