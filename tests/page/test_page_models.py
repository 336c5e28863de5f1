"""The page of a server with several models: the switch, and what comes along when the model changes."""

import base64
import io
import json

import pytest
from PIL import Image

from support.page_browser import choose, result, submit, switch, task, upload
from support.page_server import MODELS, info_of


@pytest.fixture
def page(fake, visit):
    fake.models = {name: info_of(name) for name in MODELS}
    return visit(fake.url)


def test_one_model_needs_no_switch(fake, visit):
    page = visit(fake.url)
    assert page.is_hidden("#models")
    assert page.inner_text("#model").startswith("fruits")
    assert "model" not in submit(page)


def test_all_models_are_shown_with_what_they_take(page):
    shown = [text.split("\n") for text in page.locator("#models label").all_inner_texts()]
    assert shown == [["fruits", "classes"], ["fruits-text", "prompts"], ["fruits-control", "classes, sketch"]]
    assert page.is_checked("input[value=fruits]")
    assert submit(page)["model"] == "fruits"
    switch(page, "fruits-text")
    assert page.is_visible("#prompt")
    assert not page.is_visible("#class-input")
    page.fill("#prompt", "bananas")
    body = submit(page)
    assert (body["model"], body["prompt"]) == ("fruits-text", "bananas")  # not the name of a class
    switch(page, "fruits-control")
    assert page.is_visible("#sketch")
    assert page.is_visible("#class-input")
    page.reload()  # the address names the model
    page.wait_for_selector("#go:not([disabled])")
    assert page.is_checked("input[value=fruits-control]")


def test_by_keyboard_alone(page):
    page.focus("input[name=model]:checked")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#prompt", state="visible")
    assert page.evaluate("document.activeElement.value") == "fruits-text"
    assert page.inner_text("#live") == "Model: fruits-text"


def test_the_image_and_the_settings_stay(page):
    choose(page, "Kiwi")
    page.fill("#set-steps", "6")
    submit(page)
    on_stage = result(page)
    switch(page, "fruits-text")
    switch(page, "fruits-control")
    assert page.input_value("#class-input") == "Kiwi"
    assert page.input_value("#set-steps") == "6"
    task(page, "inpaint")
    page.click("#mask-invert")
    body = submit(page, "inpaint")
    assert base64.b64decode(body["image"]) == on_stage
    assert (body["model"], body["steps"]) == ("fruits-control", 6)
    page.click("#settings-reset")  # one listener for each button, however often the model was changed
    assert "steps" not in submit(page, "inpaint")


def test_past_runs_and_images_bring_their_model_back(page, fake):
    submit(page)
    switch(page, "fruits-text")
    body = submit(page)
    data = result(page)
    assert json.loads(Image.open(io.BytesIO(data)).text["arpg"])["model"] == "fruits-text"
    page.locator("#history .pick").nth(1).click()
    page.wait_for_selector("#class-input", state="visible")
    assert page.is_checked("input[value=fruits]")
    page.wait_for_selector("#actions", state="visible")
    upload(page, data)
    page.wait_for_selector("#prompt", state="visible")
    page.wait_for_selector("#notice:has-text('its prompt, seed')")
    task(page, "generate")
    assert submit(page) == body
    del fake.models["fruits-text"]
    page.goto(page.url.split("?")[0])
    page.wait_for_selector("#go:not([disabled])")
    page.wait_for_selector("#history .pick")
    page.locator("#history .pick").first.click()
    page.wait_for_selector("#notice.error:has-text('fruits-text')")


def test_an_address_of_a_model_that_is_gone_shows_the_default(fake, visit, page):
    old = visit(f"{fake.url}/?model=gone")
    assert old.is_checked("input[value=fruits]")


def test_a_model_that_cannot_be_loaded_leaves_the_page_as_it_is(page, fake):
    del fake.models["fruits-text"]
    page.locator("label:has(input[value=fruits-text])").click()  # not check(): it is switched back at once
    page.wait_for_selector("#notice.error")
    assert page.is_checked("input[value=fruits]")
    assert page.is_visible("#class-input")


def test_snippets_name_the_model(page):
    switch(page, "fruits-control")
    assert "--model fruits-control" in page.inner_text("#snippet")
    page.locator("input[name=snippet][value=curl]").check(force=True)
    assert '"model":"fruits-control"' in page.inner_text("#snippet")


def test_axe_finds_nothing(page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install '.[dev]'").Axe()
    problems = []
    for name in MODELS:
        switch(page, name)
        problems += axe.run(page).response["violations"]
    assert problems == []
