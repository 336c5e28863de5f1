"""The page of a model that takes condition images: drawn, opened or extracted from images; all tasks."""

import base64
import io
import json
import shlex
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from arpg import ControlInput, Pipeline, cli
from arpg.image import open_image
from support.page_browser import choose, drag, encoded, result, submit, task, upload
from support.page_server import info_of
from support.small import controlled_model, noise, small_tokenizer


@pytest.fixture
def page(fake, visit):
    fake.info = info_of("fruits-control")
    return visit(fake.url)


def on_sketch(page, *points):
    page.locator("#sketch").scroll_into_view_if_needed()
    box = page.locator("#sketch").bounding_box()
    return [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]


def sent(body):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body["control"]["image"]))).convert("L"))


def strength(page, value):
    page.locator("#control-strength").evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", value)


def snippet(page, kind):
    page.locator(f"input[name=snippet][value={kind}]").check(force=True)
    return page.inner_text("#snippet")


def test_the_field_is_hidden_for_models_without_control(fake, visit):
    page = visit(fake.url)
    assert not page.is_visible("#control-field")
    choose(page, "Banana")
    assert "control" not in submit(page)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_sketch_is_open_where_the_model_takes_it(fake, visit, width):
    fake.info = info_of("fruits-control")
    page = visit(fake.url, viewport={"width": width, "height": 844})
    assert page.inner_text("#control-field > summary") == "Sketch"
    assert page.is_visible("#sketch")


def test_lines_that_are_drawn_are_followed(page):
    choose(page, "Banana")
    assert "control" not in submit(page)  # nothing is drawn
    drag(page, on_sketch(page, (0.1, 0.5), (0.9, 0.5)))
    strength(page, "0.5")
    body = submit(page)
    assert (body["control"]["kind"], body["control"]["strength"]) == ("canny", 0.5)
    image = sent(body)
    assert image.shape == (96, 96)
    assert image[47:50, 20:76].max(0).min() > 100  # a line across the middle
    assert image[:40].max() == 0
    assert set(np.unique(image)) == {0, 255}
    page.locator("input[name=sketch-tool][value=eraser]").check(force=True)
    drag(page, on_sketch(page, (0.3, 0.5), (0.6, 0.5)))
    erased = sent(submit(page))
    assert erased[:, 35:50].max() == 0
    assert erased[:, 70].max() > 100
    page.click("#sketch-undo")
    assert np.array_equal(sent(submit(page)), image)
    page.click("#control-clear")
    assert "control" not in submit(page)


def test_the_sliders_of_tasks_follow_the_info(page, info):
    sliders = {"feather": "#feather", "strength": "#control-strength"}
    for setting in info["task_settings"]:
        slider = page.locator(sliders[setting["name"]])
        shown = [float(slider.get_attribute(name)) for name in ("min", "max", "step")]
        assert shown == setting["slider"]
        assert float(slider.input_value()) == setting["default"]
        assert page.locator(f"{sliders[setting['name']]}-about").text_content() == setting["help"]


def test_by_keyboard_alone(page):
    page.focus("#sketch")
    for key in ("ArrowLeft", " ", "ArrowRight", "ArrowRight", "ArrowDown", " ", "ArrowDown"):
        page.keyboard.press(key)
    with page.expect_request("**/v1/arpg/generate") as caught:
        page.check("#fits")
        page.keyboard.press("Control+Enter")
    body = caught.value.post_data_json
    image = sent(body)
    assert body["class"] is None  # null: the condition image alone decides
    assert image[48, 46] > 100
    assert image[50, 52] > 100
    assert image[56:].max() == 0  # the pen was lifted
    page.wait_for_selector("#actions", state="visible")


def test_an_extracted_condition_is_shown_and_can_be_edited(page, fake):
    photo = Image.new("RGB", (120, 60))
    photo.paste("white", (0, 0, 60, 60))
    with page.expect_request("**/v1/arpg/condition") as caught:
        page.set_input_files("#control-file", {"name": "a.png", "mimeType": "image/png", "buffer": encoded(photo)})
    assert caught.value.post_data_json["size"] == [96, 96]
    page.wait_for_selector("#control-clear:not([disabled])")
    drag(page, on_sketch(page, (0.8, 0.1), (0.8, 0.9)))
    choose(page, "Banana")
    image = sent(submit(page))
    assert image[48, 10] == 255
    assert image[48, 60] == 0
    assert image[48, 76:78].max() > 100
    page.select_option("#control-kind", "depth")  # of which this server takes none from images
    assert not page.is_visible("#control-extract-field")
    assert page.is_visible("#shade-field")
    page.set_input_files("#control-file", {"name": "b.png", "mimeType": "image/png", "buffer": encoded(photo)})
    body = submit(page)
    assert body["control"]["kind"] == "depth"
    assert sum(name == "condition" for name, _ in fake.requests) == 1
    page.set_input_files("#control-file", {"name": "c.png", "mimeType": "image/png", "buffer": b"no image"})
    page.wait_for_selector("#notice.error:has-text('c.png is not an image')")


def test_an_image_dropped_on_the_sketch_is_opened_there(page):
    data = base64.b64encode(encoded(Image.new("RGB", (20, 20), "white"))).decode()
    page.uncheck("#control-extract")
    page.evaluate(
        """data => {
            const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], "white.png", { type: "image/png" }));
            const event = (name) => new DragEvent(name, { dataTransfer: transfer, bubbles: true, cancelable: true });
            const target = document.getElementById("sketch");
            for (const name of ["dragenter", "dragover", "drop"]) target.dispatchEvent(event(name));
        }""",
        data,
    )
    page.wait_for_selector("#control-clear:not([disabled])")
    assert page.is_hidden("#drop")
    choose(page, "Banana")
    assert sent(submit(page)).min() == 255


def test_the_sketch_has_the_size_of_the_image_and_is_restored(page):
    drag(page, on_sketch(page, (0.1, 0.5), (0.9, 0.5)))
    upload(page, encoded(noise(80, 40)))
    page.locator("#stage-title", has_text="own").wait_for()
    page.check("#fits")
    page.click("#mask-invert")
    first = submit(page, "inpaint")
    assert sent(first).shape == (40, 80)
    page.click("#back")
    task(page, "outpaint")
    page.fill("#side-right", "16")
    assert sent(submit(page, "outpaint")).shape == (40, 96)
    page.click("#control-clear")
    page.locator("#history .pick").nth(1).click()
    page.wait_for_selector("#control-clear:not([disabled])")
    assert np.array_equal(sent(submit(page, "inpaint")), sent(first))


def test_axe_finds_nothing(page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install '.[dev]'").Axe()
    page.select_option("#control-kind", "depth")
    drag(page, on_sketch(page, (0.1, 0.5), (0.9, 0.5)))
    assert axe.run(page).response["violations"] == []


def test_the_page_the_server_and_a_model_together(live, visit, tmp_path, monkeypatch):
    """The page, the pipeline, and the Python, command line and curl snippets generate the same image."""
    pipe = Pipeline(controlled_model(), small_tokenizer(), license="MIT")
    monkeypatch.chdir(tmp_path)
    pipe.save_pretrained("small")
    address, _ = live(pipeline=pipe)
    page = visit(address)
    page.select_option("#control-kind", "depth")
    drag(page, on_sketch(page, (0.1, 0.2), (0.9, 0.7)))
    strength(page, "0.5")
    choose(page, "3")
    page.fill("#set-steps", "3")
    page.fill("#seed", "5")
    body = submit(page)
    made = Image.open(io.BytesIO(result(page)))
    condition = base64.b64decode(body["control"]["image"])
    (tmp_path / "condition.png").write_bytes(condition)
    control = ControlInput(Image.open(io.BytesIO(condition)), "depth", 0.5)
    (alone,) = pipe.generate(3, control=control, steps=3, seed=5)
    assert made.convert("RGB").tobytes() == alone.tobytes()
    assert alone.tobytes() != pipe.generate(3, steps=3, seed=5)[0].tobytes()
    assert json.loads(made.text["arpg"])["control"] == {"kind": "depth", "strength": 0.5}

    command, code, curl = (snippet(page, kind) for kind in ("cli", "python", "curl"))
    name = tmp_path / f"{shlex.split(command)[-1]}"
    exec(compile(code, "snippet", "exec"), {})
    assert open_image(name).convert("RGB").tobytes() == alone.tobytes()
    name.unlink()
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert not exited.value.code
    assert open_image(name).convert("RGB").tobytes() == alone.tobytes()
    fill = "cat <<END\n" + curl.split("\n", 1)[1]  # what the shell makes of it, without a server
    filled = subprocess.run(["sh", "-c", fill], capture_output=True, text=True, check=True).stdout
    assert json.loads(filled)["control"] == body["control"]
