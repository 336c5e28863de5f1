"""The page of a model that takes prompts: with a fake server, and with a small model."""

import base64
import io
import json
import shlex
import sys

import numpy as np
import pytest
from PIL import Image

from arpg import Pipeline, cli
from arpg.image import open_image
from arpg.text_encoder import PromptCache
from support.page_browser import encoded, result, submit, task, upload
from support.page_server import info_of
from support.small import TEXT, FakeEncoder, small_tokenizer

PROMPT, NEGATIVE = 'two "red" apples on a 🍓', "it's a gray\nbackground"


@pytest.fixture
def page(fake, visit):
    fake.info = info_of("fruits-text")
    return visit(fake.url)


def write(page, prompt, negative=None):
    page.fill("#prompt", prompt)
    if negative is not None:
        page.evaluate("document.getElementById('negative-field').open = true")
        page.fill("#negative", negative)


def snippet(page, kind):
    page.locator(f"input[name=snippet][value={kind}]").check(force=True)
    return page.inner_text("#snippet")


def test_prompts_instead_of_classes(page):
    assert not page.is_visible("#class-input")
    assert "32 tokens" in page.inner_text("#prompt-about")
    assert "classes" not in page.inner_text("#model")
    page.fill("#prompt", "")
    page.click("#go")
    assert "Write a prompt" in page.inner_text("#notice")
    assert page.evaluate("document.activeElement.id") == "prompt"
    write(page, PROMPT)
    body = submit(page)
    assert body["prompt"] == PROMPT
    assert not {"class", "negative"} & set(body)
    assert page.inner_text("#stage-title") == PROMPT
    write(page, PROMPT, NEGATIVE)
    assert submit(page)["negative"] == NEGATIVE
    page.fill("#prompt", "x" * 3000)
    assert len(submit(page)["prompt"]) == 2000


def test_examples_and_what_the_model_knows(page, info):
    assert page.input_value("#prompt") == info["examples"][0]  # so that Generate works at once
    chips = page.locator("#prompt-chips button")
    assert chips.all_inner_texts() == info["examples"]
    chips.nth(2).click()
    assert submit(page)["prompt"] == info["examples"][2]
    assert not page.is_visible("#known")
    page.click("summary:has-text('What this model knows')")
    assert page.inner_text("#known") == info["about"]
    assert "penguin" in info["about"]


def test_by_keyboard_alone(page):
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("apple")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.parentElement.id") == "negative-field":
            break
    page.keyboard.press("Enter")  # unfolds
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "negative"
    page.keyboard.type("gray")
    with page.expect_request("**/v1/arpg/generate") as caught:
        page.keyboard.press("Control+Enter")
    body = caught.value.post_data_json
    assert (body["prompt"], body["negative"]) == ("apple", "gray")
    page.wait_for_selector("#actions", state="visible")


def test_every_task_sends_prompts(page):
    write(page, "apple", "gray")
    submit(page)
    task(page, "inpaint")
    page.click("#mask-invert")
    body = submit(page, "inpaint")
    assert (body["prompt"], body["negative"]) == ("apple", "gray")
    page.click("#back")
    page.check("#fits")
    assert page.is_disabled("#prompt")
    assert page.is_disabled("#negative")
    body = submit(page, "inpaint")
    assert body["prompt"] is None
    assert "negative" not in body
    task(page, "expand")
    assert page.inner_text("label:has(#from-class)") == "From the prompt"
    page.locator("#from-class").check(force=True)
    assert submit(page, "expand")["prompt"] == "apple"


def test_prompts_are_restored(page):
    """From the history, and from the settings in an image."""
    write(page, PROMPT, "gray")
    page.fill("#set-steps", "5")
    first = submit(page)
    data = result(page)
    page.fill("#negative", "")
    write(page, "pear")
    assert "negative" not in submit(page)
    page.locator("#history .pick").nth(1).click()
    page.wait_for_function("() => document.getElementById('prompt').value !== 'pear'")
    assert submit(page) == first
    page.click("#settings-reset")
    write(page, "pear", "")
    upload(page, data)
    page.wait_for_selector("#notice:has-text('its prompt, seed')")
    task(page, "generate")
    assert page.is_visible("#negative")
    assert submit(page) == first


def test_what_is_wrong_with_a_field_is_shown_there(page, fake):
    error = {"message": "negative is too long", "type": "invalid_request_error", "param": "negative", "code": None}
    fake.failures.append((400, error, ()))
    write(page, "apple")
    page.click("#go")
    page.wait_for_selector("#notice.error")
    assert page.evaluate("document.activeElement.id") == "negative"
    assert page.get_attribute("#negative", "aria-invalid") == "true"
    page.keyboard.type("g")
    assert page.get_attribute("#negative", "aria-invalid") is None


def test_axe_finds_nothing(page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install '.[dev]'").Axe()
    write(page, PROMPT, NEGATIVE)
    assert axe.run(page).response["violations"] == []


def test_the_page_the_server_and_a_model_together(text_model, live, visit, tmp_path, monkeypatch):
    """The page, the pipeline, and the Python and command line snippets generate the same image."""
    pipe = Pipeline(text_model, small_tokenizer(), license="MIT", prompts=PromptCache(TEXT.text, load=FakeEncoder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("arpg.text_encoder.open_encoder", lambda config, device: FakeEncoder())
    pipe.save_pretrained("small")  # what the server calls it
    address, _ = live(pipeline=pipe)
    page = visit(address)
    write(page, PROMPT, NEGATIVE)
    page.fill("#set-steps", "3")
    page.fill("#set-guidance", "4")
    page.fill("#seed", "5")
    submit(page)
    made = Image.open(io.BytesIO(result(page)))
    (alone,) = pipe.generate(prompt=PROMPT, negative=NEGATIVE, steps=3, guidance=4.0, seed=5)
    assert made.convert("RGB").tobytes() == alone.tobytes()
    about = json.loads(made.text["arpg"])
    assert (about["prompt"], about["negative"]) == (PROMPT, NEGATIVE)

    exec(compile(snippet(page, "python"), "snippet", "exec"), {})
    name = tmp_path / "two-red-apples-on-a.png"
    assert open_image(name).convert("RGB").tobytes() == alone.tobytes()
    name.unlink()
    monkeypatch.setattr(sys, "argv", shlex.split(snippet(page, "cli")))
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert not exited.value.code
    assert open_image(name).convert("RGB").tobytes() == alone.tobytes()

    upload(page, encoded(alone))
    page.locator("#stage-title", has_text="own").wait_for()
    page.fill("#box-r", "4")
    page.click("#box-fill")
    body = submit(page, "inpaint")
    filled = np.asarray(Image.open(io.BytesIO(result(page))).convert("RGB"))
    mask = Image.open(io.BytesIO(base64.b64decode(body["mask"])))
    options = {"steps": 3, "guidance": 4.0, "seed": body["seed"]}
    expected = pipe.inpaint(alone, mask, prompt=PROMPT, negative=NEGATIVE, **options)
    assert np.array_equal(filled, np.asarray(expected[0]))
