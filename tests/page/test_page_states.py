"""The page under failures, on small screens, in dark mode and for screen readers; and its files."""

import re

import numpy as np
import pytest

from support.page_browser import choose, on_board, opened, submit, switch, task
from support.page_server import MODELS, STATIC, info_of

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def test_busy_waits_and_tries_again(fake, visit):
    page = visit(fake.url)
    fake.failures = [(429, {"message": "The queue is full.", "type": "rate_limit_error"}, [("Retry-After", "1")])]
    page.click("#go")
    page.wait_for_selector("#notice.busy")
    assert "busy" in page.inner_text("#notice")
    assert "1 s" in page.inner_text("#notice strong")
    page.wait_for_selector("#actions", state="visible")
    assert len(fake.requests) == 2
    assert fake.requests[0] == fake.requests[1]
    assert page.is_hidden("#notice")
    fake.failures = [(429, {"message": "The queue is full."}, [("Retry-After", "60")])]
    page.click("#go")
    page.click("#notice >> text=Cancel")
    page.wait_for_selector("#go", state="visible")
    assert len(fake.requests) == 3


def test_the_page_waits_for_a_server_that_stops(fake, visit):
    page = visit(fake.url)
    fake.stop()
    page.click("#go")
    page.wait_for_selector("#notice.gone")
    assert "does not respond" in page.inner_text("#notice")
    fake.start(fake.port)
    page.click("#notice >> text=Try again")
    page.wait_for_selector("#actions", state="visible")
    fake.break_after = 4  # and one that breaks off in the middle
    page.click("#go")
    page.wait_for_selector("#notice.gone")
    assert page.is_visible("#actions")  # the last image is still there


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
    assert fake.requests[-1][1]["class"] == "Apple Crimson Snow"


def test_a_key_is_requested_and_kept_for_the_tab(fake, visit):
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
    submit(page)
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
    assert page.inner_text("#stage-title") == "Image"


def test_a_phone_needs_no_sideways_scrolling(visit, fake):
    page = visit(fake.url, **PHONE)
    fake.key = "secret"
    page.click("#go")
    page.wait_for_selector("#notice.key")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    button = page.locator("#notice form button").bounding_box()
    assert button["x"] + button["width"] < 390
    fake.key = None
    submit(page)
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
    assert np.asarray(opened(submit(page, "inpaint")["mask"]).convert("L"))[48, 48] == 255


def test_download_and_replay_are_in_view_and_the_settings_folded_on_a_small_screen(visit, fake):
    page = visit(fake.url, viewport={"width": 1280, "height": 800})
    assert not page.is_visible("#set-steps")
    assert "24 steps" in page.inner_text("#settings-brief")
    for number in ("1", "4"):
        page.fill("#num", number)
        submit(page)
        for part in ("#replay-step", "#download" if number == "1" else "#download-all", "#go"):
            box = page.locator(part).bounding_box()
            assert box["y"] + box["height"] <= 800, part
    page.fill("#num", "1")
    task(page, "inpaint")  # also with the tools above the image
    page.click("#mask-invert")
    submit(page, "inpaint")
    for part in ("#replay-step", "#download"):
        box = page.locator(part).bounding_box()
        assert box["y"] + box["height"] <= 800, part
    assert page.evaluate("scrollY") == 0
    tall = visit(fake.url, viewport={"width": 1920, "height": 1080})
    assert tall.is_visible("#set-steps")


TARGETS = "button, a[href], select, summary, textarea, input, [role=slider], [role=option]"
SMALL_TARGETS = """(targets) => [...document.querySelectorAll(targets)].flatMap((element) => {
  const target = element.closest("label") ?? element;  // a press on the label counts
  const {width, height} = target.getBoundingClientRect();
  const hidden = width <= 1 || height <= 1 || !element.checkVisibility();
  return hidden || (width >= 24 && height >= 24) ? [] : [`${element.id || element.outerHTML}: ${width} x ${height}`];
})"""


@pytest.mark.parametrize("options", [{}, PHONE], ids=["desktop", "phone"])
def test_touch_targets_are_at_least_24_pixels(visit, fake, options):
    fake.models = {name: info_of(name) for name in MODELS}
    page = visit(fake.url, **options)
    page.fill("#num", "2")
    submit(page)
    page.locator("#gallery button").first.click()
    page.wait_for_selector("#history li")
    small = []
    for name in fake.models:
        switch(page, name)
        for chosen in ("generate", "inpaint", "edit", "outpaint", "expand"):
            task(page, chosen)
            page.evaluate("document.querySelectorAll('details').forEach((d) => d.open = true)")
            small += page.evaluate(SMALL_TARGETS, TARGETS)
    switch(page, "fruits")
    page.fill("#class-input", "app")
    small += page.evaluate(SMALL_TARGETS, TARGETS)
    assert small == []


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


def test_the_page_may_be_used_before_the_model_is_known(fake, visit):
    fake.loaded.clear()
    page = visit(fake.url, ready=False)
    page.click("#theme")  # draws the canvases again
    page.keyboard.press("Control+Enter")
    assert page.evaluate("document.querySelector('main').inert")
    for _ in range(6):
        page.keyboard.press("Tab")
        assert not page.evaluate("document.querySelector('main').contains(document.activeElement)")
    fake.loaded.set()
    page.wait_for_selector("#go:not([disabled])")
    submit(page)


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({}, None),
        ({"color_scheme": "dark"}, ["color-contrast"]),  # names and roles do not depend on colours and sizes
        (PHONE, ["color-contrast", "target-size", "scrollable-region-focusable", "aria-hidden-focus"]),
    ],
    ids=["light", "dark", "phone"],
)
def test_axe_finds_nothing_serious(visit, fake, options, rules):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install '.[dev]'").Axe()
    page = visit(fake.url, **options)

    chosen = None if rules is None else {"runOnly": {"type": "rule", "values": rules}}

    def serious(where):
        found = axe.run(page, options=chosen).response["violations"]
        return [(where, one["id"], [node["html"][:90] for node in one["nodes"]]) for one in found]

    problems = serious("empty")
    page.fill("#num", "2")
    submit(page)
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


def test_modules_have_a_header_and_nothing_is_inline():
    for path in STATIC.iterdir():
        text = path.read_text()
        first = text.splitlines()[0]
        assert path.suffix in (".html", ".svg") or first.startswith(("// ", "/* ")), path.name
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), f"{path.name} refers to another host"
        assert not re.search(r"\beval\(|new Function|innerHTML", text), path.name
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
