"""The page in a real browser: every task, previews, settings and history, by mouse and by keyboard."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image, ImageChops, PngImagePlugin

from arpg.figures import ramp
from arpg.settings import SamplingDefaults
from support.page_browser import (
    TIMEOUT_MS,
    choose,
    close_to,
    drag,
    encoded,
    on_board,
    opened,
    result,
    shown,
    submit,
    task,
    upload,
)
from support.page_server import INFO, NAMES, Handler, cell


def test_generates_what_is_chosen_and_shows_it(page):
    choose(page, "Kiwi")
    page.fill("#seed", "7")
    body = submit(page)
    assert body == {"class": "Kiwi", "num": 1, "seed": 7, "stream": True}  # nothing but what was said
    assert page.inner_text("#stage-title") == "Kiwi"
    assert "seed 7" in page.inner_text("#stage-about")
    made = Image.open(io.BytesIO(result(page)))
    assert close_to(shown(page), made.convert("RGB"))
    assert json.loads(made.text["arpg"])["seed"] == 7


def test_the_tokens_appear_step_by_step(page, fake):
    fake.pause = 0.05  # a real one takes longer
    page.evaluate(
        """() => {
          window.seen = [];
          new MutationObserver(() => seen.push(document.getElementById("fact-tokens").textContent))
            .observe(document.getElementById("fact-tokens"), {childList: true});
        }"""
    )
    page.fill("#set-steps", "12")
    page.fill("#seed", "3")
    submit(page)
    counts = [int(text.split(" / ")[0]) for text in page.evaluate("seen") if "/" in text]
    assert len(set(counts)) >= 4
    assert counts == sorted(counts)
    assert counts[-1] == 144
    # The slider goes back to any of them: after the first step most of the image is still grey.
    page.locator("#replay-step").fill("0")
    page.wait_for_timeout(100)
    grey = (np.asarray(shown(page)).astype(int) - 224).__abs__().max(-1) < 6
    assert grey.mean() > 0.5
    assert page.inner_text("#replay-out") == "1 / 12"


def test_the_order_map_has_the_colours_of_the_command_line(visit, fake):
    page = visit(fake.url)
    page.fill("#set-steps", "9")
    reported = [data for event, data in Handler.job(None, "generate", submit(page)) if event == "step"]
    decoded = np.array(reported[-1]["decoded_at"][0])
    page.wait_for_timeout(100)
    pixels = page.evaluate(
        """() => {
          const map = document.getElementById("order-map"), cell = map.width / 12, context = map.getContext("2d");
          return Array.from({length: 144}, (_, i) =>
            [...context.getImageData((i % 12 + 0.5) * cell, (Math.floor(i / 12) + 0.5) * cell, 1, 1).data].slice(0, 3));
        }"""
    )
    assert np.abs(np.array(pixels) - ramp(decoded / decoded.max())).max() <= 1


def test_settings_are_sent_and_guidance_follows_the_steps(page, info):
    defaults = SamplingDefaults(guidance_by_steps=tuple(map(tuple, info["guidance_by_steps"])))
    for steps in (8, 12, 17, 24, 90):
        page.fill("#set-steps", str(steps))
        assert float(page.get_by_label("Guidance, exact value").input_value()) == defaults.guidance_for(steps)
    page.fill("#set-temperature", "0.5")
    page.select_option("#set-order", "halton")
    abouts = {choice["name"]: choice["about"] for choice in info["choices"]["order"]}
    assert page.inner_text("#about-order") == abouts["halton"]
    page.click("#settings-rows summary")
    page.fill("#set-top_p", "0.9")
    body = submit(page)
    named = {"steps": 90, "temperature": 0.5, "order": "halton", "top_p": 0.9}
    assert {name: body[name] for name in INFO["defaults"] if name in body} == named
    page.click("#settings-reset")
    assert not set(submit(page)) & set(INFO["defaults"])


def test_exact_decoding_leaves_out_what_it_does_not_take(page):
    page.fill("#set-steps", "8")
    page.select_option("#set-attention", "causal")
    page.select_option("#set-decode", "exact")
    assert not page.is_visible("#set-steps")  # it finds its own steps, and is guided as for the most of them
    assert page.get_by_label("Guidance, exact value").input_value() == "3"
    page.fill("#set-draft", "12")
    body = submit(page)
    assert {name: body[name] for name in INFO["defaults"] if name in body} == {"decode": "exact", "draft": 12}
    assert "exact decoding" in page.inner_text("#stage-about")
    page.select_option("#set-decode", "steps")  # what was set before is still there
    body = submit(page)
    assert {name: body[name] for name in INFO["defaults"] if name in body} == {"steps": 8, "attention": "causal"}


def test_the_seed_is_new_each_time_unless_it_is_kept(page):
    seeds = [submit(page)["seed"] for _ in range(3)]
    assert len(set(seeds)) == 3
    page.click("#seed-lock")
    assert [submit(page)["seed"] for _ in range(2)] == [seeds[-1]] * 2
    page.click("#seed-roll")
    assert submit(page)["seed"] != seeds[-1]


def test_by_keyboard_alone(page):
    page.keyboard.press("Tab")  # the link past the controls
    for _ in range(20):
        if page.evaluate("document.activeElement.id") == "class-input":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("lemon m")
    assert page.get_attribute("#class-input", "aria-expanded") == "true"
    page.keyboard.press("ArrowDown")
    active = page.get_attribute("#class-input", "aria-activedescendant")
    assert page.inner_text(f"#{active}") == "Lemon Meyer"
    page.keyboard.press("Enter")
    assert page.get_attribute("#class-input", "aria-expanded") == "false"
    with page.expect_request("**/v1/arpg/generate") as caught:
        page.keyboard.press("Control+Enter")
    assert caught.value.post_data_json["class"] == "Lemon Meyer"
    page.wait_for_selector("#actions", state="visible", timeout=TIMEOUT_MS)
    assert page.inner_text("#live").startswith("Done")


def test_the_picker_shows_thumbnails_and_ranks(page):
    page.fill("#class-input", "pea")
    names = page.locator("#class-list li").all_inner_texts()
    assert names[0] == "Peach"
    assert set(names) == {name for name in NAMES if "pea" in name.lower()}
    page.click("#class-list li:has-text('Pear Williams')")
    assert page.input_value("#class-input") == "Pear Williams"
    # The sprite's cell of that class is what the box shows.
    shot = Image.open(io.BytesIO(page.locator("#class-thumb").screenshot())).convert("RGB")
    expected = cell(NAMES.index("Pear Williams"))
    assert close_to(shot.resize((24, 24)).crop((3, 3, 21, 21)), expected.resize((24, 24)).crop((3, 3, 21, 21)), most=14)


def test_the_class_list_starts_at_the_top_while_typing_and_finds_plurals(page):
    page.click("#class-input")
    page.locator("#class-list").evaluate("(list) => (list.scrollTop = list.scrollHeight)")
    page.fill("#class-input", "e")
    assert page.locator("#class-list").evaluate("(list) => list.scrollTop") == 0
    for typed, first in [("strawberries", "Strawberry"), ("Kiwis", "Kiwi"), ("daisies", "daisy"), ("peaches", "Peach")]:
        page.fill("#class-input", typed)
        assert page.locator("#class-list li").first.inner_text() == first
    page.fill("#class-input", "tomatoes")
    found = page.locator("#class-list li").all_inner_texts()
    assert set(found) == {name for name in NAMES if name.startswith("Tomato")}
    page.fill("#class-input", "bananas")
    page.keyboard.press("Escape")  # nothing is picked from the list
    assert submit(page)["class"] == "Banana"


def test_inpaints_what_was_masked(page):
    choose(page, "Apple Red 1")
    submit(page)
    before = result(page)
    task(page, "inpaint")
    page.click("#go")
    assert "Brush over" in page.inner_text("#notice")
    drag(page, on_board(page, (0.25, 0.5), (0.75, 0.5)))
    choose(page, "Kiwi")
    body = submit(page, "inpaint")
    assert base64.b64decode(body["image"]) == before  # the very file, not a copy
    assert opened(body["mask"]).size == (96, 96)
    grey = np.asarray(opened(body["mask"]).convert("L"))
    assert set(np.unique(grey)) == {0, 255}
    assert grey[48, 30:66].all()  # the stroke
    assert not grey[:34].any()
    assert not grey[62:].any()
    assert body["class"] == "Kiwi"
    made = Image.open(io.BytesIO(result(page))).convert("RGB")
    assert close_to(shown(page), made)
    changed = np.asarray(ImageChops.difference(made, opened(body["image"]).convert("RGB"))).any(-1)
    assert changed.any()
    assert not changed[grey == 0].any()
    tokens = (grey.reshape(12, 8, 12, 8) > 0).any((1, 3)).sum()  # those that the mask touches are sampled again
    assert page.inner_text("#fact-tokens") == f"{tokens} / {tokens}"
    # Painting on the result goes on from it; without a class the image decides.
    drag(page, on_board(page, (0.5, 0.1), (0.5, 0.15)))
    page.check("#fits")
    again = submit(page, "inpaint")
    assert again["class"] is None
    assert again["image"] != body["image"]
    assert not np.asarray(opened(again["mask"]).convert("L"))[40:].any()


def test_the_mask_can_be_erased_undone_inverted_and_boxed(page):
    upload(page, encoded(Image.new("RGB", (96, 96), "white")))
    page.locator("#stage-title", has_text="own").wait_for()
    assert page.is_checked("input[value=inpaint]")

    def share():
        with page.expect_download() as caught:
            page.click("#save-mask")
        return np.asarray(Image.open(caught.value.path()).convert("L")) > 0

    for side, value in zip("ltrb", (10, 20, 50, 60), strict=True):
        page.fill(f"#box-{side}", str(value))
    page.click("#box-fill")
    boxed = share()
    expected = np.zeros((96, 96), bool)
    expected[20:60, 10:50] = True
    assert (boxed == expected).all()
    page.click("#mask-invert")
    assert (share() == ~expected).all()
    page.keyboard.press("Control+z")
    assert (share() == expected).all()
    page.locator("input[name=tool][value=eraser]").check(force=True)
    drag(page, on_board(page, (0.3, 0.4), (0.3, 0.41)))
    erased = share()
    assert not erased[38, 29]
    assert erased.sum() < expected.sum()
    page.click("#mask-clear")
    assert not share().any()


def test_edits_a_box(page):
    choose(page, "Apple Red 1")
    submit(page)
    task(page, "edit")
    drag(page, on_board(page, (0.25, 0.125), (0.5, 0.75)))
    choose(page, "Lemon")
    page.fill("#feather", "3")
    body = submit(page, "edit")
    assert body["box"] == pytest.approx([24, 12, 48, 72], abs=1)
    assert (body["class"], body["feather"]) == ("Lemon", 3)
    page.click("#back")
    page.fill("#box-r", "90")
    assert submit(page, "edit")["box"][2] == 90


def test_outpaints_by_pulling_an_edge(page):
    choose(page, "daisy")
    submit(page)
    task(page, "outpaint")
    handle = page.locator(".handle.right").bounding_box()
    x, y = handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2
    drag(page, [(x, y), (x + 80, y)])
    pulled = int(page.input_value("#side-right"))
    assert pulled > 0
    assert pulled % 8 == 0
    page.focus(".handle.top")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    page.fill("#side-left", "5")
    assert page.get_attribute(".handle.left", "aria-valuenow") == "5"
    body = submit(page, "outpaint")
    assert {side: body[side] for side in ("left", "top", "right", "bottom")} == {
        "left": 5, "top": 16, "right": pulled, "bottom": 0
    }  # fmt: skip
    assert f"{101 + pulled} × 112" in page.inner_text("#stage-about")
    page.click("#keep")  # the wide image is now the one to go on from
    assert page.input_value("#side-right") == "0"
    page.focus(".handle.right")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert opened(submit(page, "outpaint")["image"]).size == (101 + pulled, 112)


def test_expanding_starts_from_the_image_on_the_stage(page):
    choose(page, "Kiwi")
    submit(page)
    on_stage = result(page)
    task(page, "expand")
    assert page.is_checked("#from-image")
    body = submit(page, "expand")
    assert base64.b64decode(body["image"]) == on_stage
    assert body["size"] == [192, 192]
    page.locator("#from-class").check(force=True)  # is still a choice
    assert "image" not in submit(page, "expand")


def test_expands_a_class_or_an_image(page):
    task(page, "expand")
    page.click("text=2 ×")
    page.select_option("#method", "positions")
    body = submit(page, "expand")
    assert (body["size"], body["method"], body["class"]) == ([192, 192], "positions", "Banana")
    assert "image" not in body
    page.locator("#from-image").check(force=True)
    page.fill("#size-w", "256")
    page.check("#fits")
    body = submit(page, "expand")
    assert opened(body["image"]).size == (192, 192)
    assert (body["size"], body["class"]) == ([256, 256], None)
    upload(page, encoded(Image.new("RGB", (120, 60), "white")))  # another shape, which is kept
    page.locator("#stage-title", has_text="own").wait_for()
    assert (page.input_value("#size-w"), page.input_value("#size-h")) == ("240", "120")
    page.fill("#size-h", "90")
    assert page.input_value("#size-w") == "180"


def test_own_images_are_scaled_to_the_limits(page):
    wide = Image.linear_gradient("L").resize((1600, 800)).convert("RGB")
    upload(page, encoded(wide, "JPEG"), "photo.jpg", "image/jpeg")
    page.wait_for_selector("#notice", state="visible")
    assert "1600 × 800 to 768 × 384" in page.inner_text("#notice")
    page.click("#mask-invert")
    body = submit(page, "inpaint")
    assert opened(body["image"]).size == opened(body["mask"]).size == (768, 384)
    upload(page, b"no image", "letter.png")
    page.wait_for_selector("#notice.error")
    assert "letter.png is not an image" in page.inner_text("#notice")


def test_a_downloaded_image_restores_its_settings(page):
    choose(page, "Mango Red")
    page.fill("#set-steps", "6")
    page.select_option("#set-order", "raster")
    body = submit(page)
    data = result(page)
    assert json.loads(Image.open(io.BytesIO(data)).text["arpg"])["steps"] == 6
    page.click("#settings-reset")
    choose(page, "Banana")
    # Dropped, not chosen: the other way in.
    page.evaluate(
        """(text) => {
          const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([bytes], "mango.png", {type: "image/png"}));
          dispatchEvent(new DragEvent("drop", {dataTransfer, cancelable: true}));
        }""",
        base64.b64encode(data).decode(),
    )
    page.wait_for_selector("#notice", state="visible")
    assert page.input_value("#class-input") == "Mango Red"
    again = submit(page)
    assert again == body


def test_text_chunks_of_every_kind_are_read(page):
    plain, compressed, unicode_text = (PngImagePlugin.PngInfo() for _ in range(3))
    plain.add_text("arpg", '{"a": 1}')
    compressed.add_text("arpg", '{"a": 2}', zip=True)
    unicode_text.add_itxt("arpg", '{"a": "ü→"}', zip=True)
    for info, text in ((plain, '{"a": 1}'), (compressed, '{"a": 2}'), (unicode_text, '{"a": "ü→"}')):
        data = encoded(Image.new("RGB", (4, 4)), pnginfo=info)
        read = """async (text) => (await import("/static/png_text.js"))
          .readText(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)), "arpg")"""
        assert page.evaluate(read, base64.b64encode(data).decode()) == text
        assert page.evaluate(read, base64.b64encode(data[: len(data) // 2]).decode()) in (text, None)


def test_comparing_starts_with_two_different_settings(page):
    page.check("#comparing")
    assert page.input_value("#set-steps") == "8"  # a third of the first
    bodies = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    page.click("#go")
    page.wait_for_selector("#compare a:visible >> nth=1", timeout=TIMEOUT_MS)
    assert sorted(body.get("steps", 24) for body in bodies) == [8, 24]
    assert page.locator("#compare .compare-about").all_inner_texts() == ["steps 24, guidance 3", "steps 8, guidance 4"]
    page.fill("#set-steps", "5")  # what the user sets for the second stays
    page.uncheck("#comparing")
    page.check("#comparing")
    assert page.input_value("#set-steps") == "5"


def test_compares_two_settings(page):
    page.fill("#set-steps", "10")
    page.check("#comparing")
    page.fill("#set-steps", "4")
    bodies = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    page.click("#go")
    page.wait_for_selector("#compare a:visible >> nth=1", timeout=TIMEOUT_MS)
    assert sorted(body["steps"] for body in bodies) == [4, 10]
    assert len({body["seed"] for body in bodies}) == 1
    captions = page.locator("#compare .compare-about").all_inner_texts()
    assert captions == ["steps 10", "steps 4"]  # what differs, and nothing else (guidance is the same for both)
    page.locator("input[name=variant][value='0']").check(force=True)
    assert page.input_value("#set-steps") == "10"


def test_history_restores_image_and_settings_after_a_reload(page):
    choose(page, "Kiwi")
    page.fill("#set-steps", "5")
    first = submit(page)
    kept = shown(page)
    choose(page, "Lemon")
    page.fill("#set-steps", "7")
    submit(page)
    page.wait_for_selector("#history li >> nth=1")
    page.reload()
    page.wait_for_selector("#history li >> nth=1")
    assert page.locator("#history .name").all_inner_texts() == ["Lemon", "Kiwi"]
    page.locator("#history .pick").nth(1).click()
    page.wait_for_selector("#actions", state="visible")
    page.wait_for_timeout(100)
    assert close_to(shown(page), kept, most=2)
    assert submit(page) == first
    page.wait_for_selector("#history li >> nth=2")
    page.click("#history-clear")
    page.wait_for_selector("#history-empty", state="visible")
    page.reload()
    page.wait_for_selector("#go:not([disabled])")
    page.wait_for_timeout(200)
    assert page.locator("#history li").count() == 0


def test_history_brings_a_mask_back(page):
    upload(page, encoded(Image.new("RGB", (96, 96), "white")))
    page.locator("#stage-title", has_text="own").wait_for()
    page.click("#box-fill")
    first = submit(page, "inpaint")
    task(page, "generate")
    submit(page)
    page.locator("#history .pick").nth(1).click()
    page.wait_for_selector("#keep", state="visible")
    again = submit(page, "inpaint")
    assert again["image"] == first["image"]
    assert (np.asarray(opened(again["mask"])) == np.asarray(opened(first["mask"]))).all()
