"""The page in a real browser: every task, watching, history, failures, small screens, keyboard, accessibility."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image, ImageChops, PngImagePlugin

from arpg.config import SamplingDefaults
from arpg.grid_picture import ramp
from page_browser import PATIENCE, choose, close_to, drag, draw, encoded, on_board, opened, result, shown, task, upload
from page_server import INFO, NAMES, SPRITE, STATIC

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def test_generates_what_is_chosen_and_shows_it(page):
    choose(page, "Kiwi")
    page.fill("#seed", "7")
    body = draw(page)
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
    draw(page)
    counts = [int(text.split(" / ")[0]) for text in page.evaluate("seen") if "/" in text]
    assert len(set(counts)) >= 4
    assert counts == sorted(counts)
    assert counts[-1] == 144
    # The slider goes back to any of them: after the first step most of the picture is still grey.
    page.locator("#replay-step").fill("0")
    page.wait_for_timeout(100)
    grey = (np.asarray(shown(page)).astype(int) - 224).__abs__().max(-1) < 6
    assert grey.mean() > 0.5
    assert page.inner_text("#replay-out") == "1 / 12"


def test_the_order_map_has_the_colours_of_the_command_line(page):
    page.fill("#set-steps", "9")
    with page.expect_response("**/v1/arpg/generate") as caught:
        draw(page)
    steps = re.findall(r"^event: step\r?\ndata: (.*)$", caught.value.text(), flags=re.M)
    decoded = np.array(json.loads(steps[-1])["decoded_at"][0])
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
    body = draw(page)
    named = {"steps": 90, "temperature": 0.5, "order": "halton", "top_p": 0.9}
    assert {name: body[name] for name in INFO["defaults"] if name in body} == named
    page.click("#settings-reset")
    assert not set(draw(page)) & set(INFO["defaults"])


def test_exact_decoding_leaves_out_what_it_does_not_take(page):
    page.fill("#set-steps", "8")
    page.select_option("#set-attention", "causal")
    page.select_option("#set-decode", "exact")
    assert not page.is_visible("#set-steps")  # it finds its own steps, and is guided as for the most of them
    assert page.get_by_label("Guidance, exact value").input_value() == "3"
    page.fill("#set-draft", "12")
    body = draw(page)
    assert {name: body[name] for name in INFO["defaults"] if name in body} == {"decode": "exact", "draft": 12}
    assert "exact decoding" in page.inner_text("#stage-about")
    page.select_option("#set-decode", "steps")  # what was set before is still there
    body = draw(page)
    assert {name: body[name] for name in INFO["defaults"] if name in body} == {"steps": 8, "attention": "causal"}


def test_the_seed_is_new_each_time_unless_it_is_kept(page):
    seeds = [draw(page)["seed"] for _ in range(3)]
    assert len(set(seeds)) == 3
    page.click("#seed-lock")
    assert [draw(page)["seed"] for _ in range(2)] == [seeds[-1]] * 2
    page.click("#seed-roll")
    assert draw(page)["seed"] != seeds[-1]


def test_several_images(page):
    page.fill("#num", "3")
    page.fill("#seed", "0")
    draw(page)
    assert page.locator("#results button").count() == 3
    page.locator("#results button").nth(2).click()
    page.wait_for_timeout(100)
    made = Image.open(io.BytesIO(result(page)))
    assert close_to(shown(page), made.convert("RGB"))
    assert json.loads(made.text["arpg"])["seed"] == 2


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
    page.wait_for_selector("#actions", state="visible", timeout=PATIENCE)
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
    row, column = divmod(NAMES.index("Pear Williams"), 17)
    cell = Image.open(SPRITE).convert("RGB").crop((column * 48, row * 48, column * 48 + 48, row * 48 + 48))
    assert close_to(shot.resize((24, 24)).crop((3, 3, 21, 21)), cell.resize((24, 24)).crop((3, 3, 21, 21)), most=14)


def test_inpaints_what_was_painted(page):
    choose(page, "Apple Red 1")
    draw(page)
    before = result(page)
    task(page, "inpaint")
    page.click("#go")
    assert "Paint over" in page.inner_text("#notice")
    drag(page, on_board(page, (0.25, 0.5), (0.75, 0.5)))
    choose(page, "Kiwi")
    body = draw(page, "inpaint")
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
    tokens = (grey.reshape(12, 8, 12, 8) > 0).any((1, 3)).sum()  # those that the mask touches are drawn anew
    assert page.inner_text("#fact-tokens") == f"{tokens} / {tokens}"
    # Painting on the result goes on from it; without a class the picture decides.
    drag(page, on_board(page, (0.5, 0.1), (0.5, 0.15)))
    page.check("#fits")
    again = draw(page, "inpaint")
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
    page.locator("input[value=eraser]").check(force=True)
    drag(page, on_board(page, (0.3, 0.4), (0.3, 0.41)))
    erased = share()
    assert not erased[38, 29]
    assert erased.sum() < expected.sum()
    page.click("#mask-clear")
    assert not share().any()


def test_edits_a_box(page):
    choose(page, "Apple Red 1")
    draw(page)
    task(page, "edit")
    drag(page, on_board(page, (0.25, 0.125), (0.5, 0.75)))
    choose(page, "Lemon")
    page.fill("#feather", "3")
    body = draw(page, "edit")
    assert body["box"] == pytest.approx([24, 12, 48, 72], abs=1)
    assert (body["class"], body["feather"]) == ("Lemon", 3)
    page.click("#back")
    page.fill("#box-r", "90")
    assert draw(page, "edit")["box"][2] == 90


def test_outpaints_by_pulling_an_edge(page):
    choose(page, "daisy")
    draw(page)
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
    body = draw(page, "outpaint")
    assert {side: body[side] for side in ("left", "top", "right", "bottom")} == {
        "left": 5, "top": 16, "right": pulled, "bottom": 0
    }  # fmt: skip
    assert f"{101 + pulled} × 112" in page.inner_text("#stage-about")
    page.click("#keep")  # the wide picture is now the one to go on from
    assert page.input_value("#side-right") == "0"
    page.focus(".handle.right")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert opened(draw(page, "outpaint")["image"]).size == (101 + pulled, 112)


def test_expands_a_class_or_a_picture(page):
    task(page, "expand")
    page.click("text=2 ×")
    page.select_option("#way", "positions")
    body = draw(page, "expand")
    assert (body["size"], body["way"], body["class"]) == ([192, 192], "positions", "Banana")
    assert "image" not in body
    page.locator("#from-picture").check(force=True)
    page.fill("#size-w", "256")
    page.check("#fits")
    body = draw(page, "expand")
    assert opened(body["image"]).size == (192, 192)
    assert (body["size"], body["class"]) == ([256, 192], None)


def test_own_pictures_are_scaled_to_what_the_server_takes(page):
    wide = Image.linear_gradient("L").resize((1600, 800)).convert("RGB")
    upload(page, encoded(wide, "JPEG"), "photo.jpg", "image/jpeg")
    page.wait_for_selector("#notice", state="visible")
    assert "1600 × 800 to 768 × 384" in page.inner_text("#notice")
    page.click("#mask-invert")
    body = draw(page, "inpaint")
    assert opened(body["image"]).size == opened(body["mask"]).size == (768, 384)
    upload(page, b"no picture", "letter.png")
    page.wait_for_selector("#notice.error")
    assert "letter.png is no image" in page.inner_text("#notice")


def test_a_downloaded_picture_brings_its_settings_back(page):
    choose(page, "Mango Red")
    page.fill("#set-steps", "6")
    page.select_option("#set-order", "raster")
    body = draw(page)
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
    again = draw(page)
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


def test_compares_two_settings(page):
    page.fill("#set-steps", "10")
    page.check("#comparing")
    page.fill("#set-steps", "4")
    asked = []
    page.on("request", lambda request: request.method == "POST" and asked.append(request.post_data_json))
    page.click("#go")
    page.wait_for_selector("#compare a:visible >> nth=1", timeout=PATIENCE)
    assert sorted(body["steps"] for body in asked) == [4, 10]
    assert len({body["seed"] for body in asked}) == 1
    captions = page.locator("#compare .compare-about").all_inner_texts()
    assert captions == ["steps 10", "steps 4"]  # what differs, and nothing else (guidance is the same for both)
    page.locator("input[name=variant][value='0']").check(force=True)
    assert page.input_value("#set-steps") == "10"


def test_history_brings_picture_and_settings_back_even_after_a_reload(page):
    choose(page, "Kiwi")
    page.fill("#set-steps", "5")
    first = draw(page)
    kept = shown(page)
    choose(page, "Lemon")
    page.fill("#set-steps", "7")
    draw(page)
    page.wait_for_selector("#history li >> nth=1")
    page.reload()
    page.wait_for_selector("#history li >> nth=1")
    assert page.locator("#history .name").all_inner_texts() == ["Lemon", "Kiwi"]
    page.locator("#history button").nth(1).click()
    page.wait_for_selector("#actions", state="visible")
    page.wait_for_timeout(100)
    assert close_to(shown(page), kept, most=2)
    assert draw(page) == first
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
    first = draw(page, "inpaint")
    task(page, "generate")
    draw(page)
    page.locator("#history button").nth(1).click()
    page.wait_for_selector("#keep", state="visible")
    again = draw(page, "inpaint")
    assert again["image"] == first["image"]
    assert (np.asarray(opened(again["mask"])) == np.asarray(opened(first["mask"]))).all()


def test_a_model_that_takes_text_is_given_a_prompt(fake, visit):
    fake.takes = "text"
    page = visit(fake.url)
    assert not page.is_visible("#class-input")
    page.click("#go")
    assert "Write a prompt" in page.inner_text("#notice")
    page.fill("#prompt", 'two "red" apples')
    body = draw(page)
    assert body["prompt"] == 'two "red" apples'
    assert "class" not in body


def test_busy_waits_and_tries_again(fake, visit):
    page = visit(fake.url)
    fake.failures = [(429, {"message": "The queue is full.", "type": "rate_limit_error"}, [("Retry-After", "1")])]
    page.click("#go")
    page.wait_for_selector("#notice.busy")
    assert "busy" in page.inner_text("#notice")
    assert "1 s" in page.inner_text("#notice strong")
    page.wait_for_selector("#actions", state="visible")
    assert len(fake.asked) == 2
    assert fake.asked[0] == fake.asked[1]
    assert page.is_hidden("#notice")
    fake.failures = [(429, {"message": "The queue is full."}, [("Retry-After", "60")])]
    page.click("#go")
    page.click("#notice >> text=Cancel")
    page.wait_for_selector("#go", state="visible")
    assert len(fake.asked) == 3


def test_a_server_that_goes_away_is_looked_for(fake, visit):
    page = visit(fake.url)
    fake.stop()
    page.click("#go")
    page.wait_for_selector("#notice.gone")
    assert "does not answer" in page.inner_text("#notice")
    fake.start(fake.port)
    page.click("#notice >> text=Try again")
    page.wait_for_selector("#actions", state="visible")
    fake.break_after = 4  # and one that breaks off in the middle
    page.click("#go")
    page.wait_for_selector("#notice.gone")
    assert page.is_visible("#actions")  # the last picture is still there


@pytest.mark.parametrize("late", [False, True], ids=["at once", "in the stream"])
def test_an_unknown_class_is_answered_with_the_nearest(fake, visit, late):
    fake.late, page = late, visit(fake.url)
    page.fill("#class-input", "Appel")
    page.keyboard.press("Escape")
    page.click("#go")
    page.wait_for_selector("#notice.error")
    assert "'Appel' is unknown" in page.inner_text("#notice")
    assert page.get_attribute("#class-input", "aria-invalid") == "true"
    page.click("#notice >> role=button[name='Apple Crimson Snow']")
    page.wait_for_selector("#actions", state="visible")
    assert fake.asked[-1][1]["class"] == "Apple Crimson Snow"


def test_a_key_is_asked_for_and_kept_for_the_tab(fake, visit):
    fake.key = "secret"
    page = visit(fake.url, ready=False)
    page.wait_for_selector("#notice.key")
    page.fill("#key", "wrong")
    with page.expect_response("**/v1/arpg/info") as refused:
        page.keyboard.press("Enter")
    assert refused.value.status == 401
    page.wait_for_timeout(200)
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector("#go:not([disabled])")
    draw(page)
    page.locator("input[value=curl]").check(force=True)
    assert "secret" not in page.content()
    assert "$ARPG_KEY" in page.inner_text("#snippet")
    page.reload()
    page.wait_for_selector("#go:not([disabled])")


def test_cancel_ends_the_job_on_the_server(fake, visit):
    page = visit(fake.url)
    fake.pause = 0.1
    page.click("#go")
    page.locator("#stage-about", has_text="step").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_selector("#go", state="visible")
    assert fake.cancelled.wait(5)
    assert page.inner_text("#stage-title") == "Picture"


def test_a_phone_needs_no_sideways_scrolling(visit, fake):
    page = visit(fake.url, **PHONE)
    fake.key = "secret"
    page.click("#go")
    page.wait_for_selector("#notice.key")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    button = page.locator("#notice form button").bounding_box()
    assert button["x"] + button["width"] < 390
    fake.key = None
    draw(page)
    for name in ("generate", "inpaint", "edit", "outpaint", "expand"):
        task(page, name)
        page.evaluate("document.querySelectorAll('details').forEach((d) => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        button = page.locator("#go").bounding_box()
        assert 0 <= button["y"] <= 844 - button["height"]  # always in reach
        assert button["height"] >= 44
    task(page, "inpaint")
    page.locator("#board").scroll_into_view_if_needed()
    (point,) = on_board(page, (0.5, 0.5))
    page.touchscreen.tap(*point)
    assert np.asarray(opened(draw(page, "inpaint")["mask"]).convert("L"))[48, 48] == 255


def lightness(page):
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_dark_follows_the_system_or_the_button(visit):
    page = visit(color_scheme="dark")
    assert lightness(page) < 40
    page.click("#theme")
    assert page.get_attribute("#theme", "aria-label") == "Theme: light"
    assert lightness(page) > 220
    page.reload()
    assert lightness(page) > 220
    page.click("#theme")
    assert lightness(page) < 40
    assert lightness(visit(color_scheme="light")) > 220


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, PHONE], ids=["light", "dark", "phone"])
def test_axe_finds_nothing_serious(visit, fake, options):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install '.[dev]'").Axe()
    page = visit(fake.url, **options)

    def serious(where):
        found = axe.run(page).response["violations"]
        return [(where, one["id"], [node["html"][:90] for node in one["nodes"]]) for one in found]

    problems = serious("empty")
    page.fill("#num", "2")
    draw(page)
    page.evaluate("document.querySelectorAll('details').forEach((d) => d.open = true)")
    page.fill("#set-steps", "9")
    problems += serious("result")
    for name in ("inpaint", "edit", "outpaint", "expand"):
        task(page, name)
        problems += serious(name)
    task(page, "generate")
    page.check("#comparing")
    page.click("#go")
    page.wait_for_selector("#compare a:visible >> nth=1")
    problems += serious("compare")
    page.fill("#class-input", "Appel")
    page.click("#go")
    page.wait_for_selector("#notice.error")
    page.fill("#class-input", "app")
    problems += serious("error and list")
    fake.key = "secret"
    page.keyboard.press("Escape")
    choose(page, "Banana")
    page.click("#go")
    page.wait_for_selector("#notice.key")
    problems += serious("key")
    assert problems == []


def test_modules_say_what_they_are_and_nothing_is_inline():
    for path in STATIC.iterdir():
        text = path.read_text()
        first = text.splitlines()[0]
        assert path.suffix in (".html", ".svg") or first.startswith(("// ", "/* ")), path.name
        assert len(text.splitlines()) <= 400, path.name
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), f"{path.name} refers to another host"
        assert not re.search(r"\beval\(|new Function|innerHTML", text), path.name
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)


def test_the_sprite_has_a_cell_for_each_class():
    with Image.open(SPRITE) as sprite:
        assert sprite.size == (17 * 48, -(-len(NAMES) // 17) * 48)
        cells = np.asarray(sprite.convert("L")).reshape(-1, 48, 17, 48).swapaxes(1, 2).reshape(-1, 48 * 48)
    assert (cells[: len(NAMES)].std(1) > 5).all()  # none is empty
    assert SPRITE.stat().st_size < 150_000
