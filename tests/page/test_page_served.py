"""The page, the server and a model together, in a real browser."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from arpg import Pipeline
from arpg.text_encoder import PromptCache
from support.page_browser import (
    TIMEOUT_MS,
    choose,
    close_to,
    drag,
    on_board,
    opened,
    result,
    shown,
    submit,
    switch,
    task,
)
from support.page_server import fruits_pipeline
from support.small import TEXT, FakeEncoder, small_tokenizer


@pytest.fixture(scope="module")
def fruits():
    return fruits_pipeline()


def test_generate_fill_and_extend_an_image(live, visit, fruits):
    address, _ = live(pipeline=fruits)
    page = visit(address)
    page.fill("#set-steps", "4")
    choose(page, "Lemon")
    page.fill("#seed", "3")
    page.evaluate(
        """() => {
          window.seen = [];
          const about = document.getElementById("stage-about");
          new MutationObserver(() => seen.push(about.textContent)).observe(about, {childList: true, subtree: true});
        }"""
    )
    submit(page)
    assert any(re.match(r"step [1-4] of 4", text) for text in page.evaluate("seen"))  # watched
    made = Image.open(io.BytesIO(result(page)))
    (alone,) = fruits.generate("Lemon", seed=3, steps=4)
    assert made.convert("RGB").tobytes() == alone.tobytes()  # the image of the command line and of Python
    assert json.loads(made.text["arpg"])["steps"] == 4
    coarse = [image.resize((24, 24), Image.Resampling.BOX) for image in (shown(page), alone)]  # noise is resampled
    assert close_to(*coarse)

    task(page, "inpaint")
    drag(page, on_board(page, (0.3, 0.5), (0.7, 0.5)))
    choose(page, "Kiwi")
    body = submit(page, "inpaint")
    filled = np.asarray(Image.open(io.BytesIO(result(page))).convert("RGB"))
    masked = np.asarray(opened(body["mask"]).convert("L")) > 127
    assert (filled != np.asarray(alone))[masked].any()
    assert (filled == np.asarray(alone))[~masked].all()  # given pixels are untouched

    task(page, "outpaint")
    page.fill("#side-right", "48")
    submit(page, "outpaint")
    assert Image.open(io.BytesIO(result(page))).size == (144, 96)


def test_models_are_switched_on_a_real_server(live, visit, pipeline, text_model):
    """Two small models in one server: each makes its own image, and outpainting's map covers the canvas."""
    words = Pipeline(text_model, small_tokenizer(), license="MIT", prompts=PromptCache(TEXT.text, load=FakeEncoder))
    address, _ = live(more={"words": words})
    page = visit(address)
    page.fill("#seed", "3")
    page.fill("#set-steps", "3")
    choose(page, "2")
    page.fill("#num", "4")
    submit(page)
    page.locator("#gallery button").nth(2).click()
    (expected,) = pipeline.generate(2, steps=3, seed=5)
    assert Image.open(io.BytesIO(result(page))).convert("RGB").tobytes() == expected.tobytes()
    task(page, "outpaint")
    page.fill("#side-right", "8")
    page.fill("#num", "1")
    submit(page, "outpaint")
    assert page.inner_text("#fact-tokens") == "16 / 16"
    assert page.get_attribute("#order-map", "aria-label").endswith("16 were known")
    task(page, "generate")
    switch(page, "words")
    page.fill("#prompt", "pear")
    submit(page)
    (expected,) = words.generate(prompt="pear", steps=3, seed=3)
    made = Image.open(io.BytesIO(result(page)))
    assert made.convert("RGB").tobytes() == expected.tobytes()
    assert json.loads(made.text["arpg"])["model"] == "words"


def test_an_unknown_class_and_a_server_that_stops(live, visit, fruits):
    address, service = live(pipeline=fruits)
    page = visit(address)
    answer = page.request.post(f"{address}/v1/arpg/generate", data={"class": "Bananna"})
    assert answer.status == 400
    assert "Banana" in answer.json()["error"]["nearest"]
    service.close()
    page.click("#go")
    page.wait_for_selector("#notice:visible", timeout=TIMEOUT_MS)
    assert page.inner_text("#notice").strip()
