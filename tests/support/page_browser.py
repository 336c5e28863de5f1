"""The page in a browser: fixtures (loaded by conftest.py) and actions that its tests share."""

import base64
import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops

from support.page_server import Fake

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TIMEOUT_MS = 60_000  # for an image; a real model on a busy machine is slow
DESKTOP = {"viewport": {"width": 1280, "height": 1000}}  # tall enough for open settings
VIOLATIONS = """window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));"""


@pytest.fixture(scope="module")  # while it is open, asyncio.run does not work in this process
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install '.[dev]'")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def fake():
    fake = Fake()
    fake.url = fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def url(fake):
    """The server under test: the fake one, or a real one that is running already."""
    return os.environ.get("ARPG_PAGE_URL", fake.url)


@pytest.fixture
def visit(browser, url):
    """Open the page; at the end, there may be no exception and no violation of the security policy in it."""
    opened, errors = [], []

    def visit(address=url, *, ready=True, **options):
        context = browser.new_context(**{**DESKTOP, **options})
        context.set_default_timeout(10_000)
        context.add_init_script(VIOLATIONS)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: "Content Security" in message.text and errors.append(message.text))
        opened.append((context, page))
        page.goto(address)
        if ready:
            page.wait_for_selector("#go:not([disabled])")
        return page

    yield visit
    for context, page in opened:
        assert page.evaluate("window.violations") == []
        context.close()
    assert errors == [], errors  # spelled out: pytest does not rewrite the asserts of this file


@pytest.fixture
def page(visit):
    return visit()


@pytest.fixture
def info(page, url):
    return page.request.get(f"{url}/v1/arpg/info").json()


def choose(page, name):
    page.fill("#class-input", name)
    page.keyboard.press("Enter")


def submit(page, task="generate"):
    """Press the button and wait for the result; return the body of the request."""
    with page.expect_request(f"**/v1/arpg/{task}") as caught:
        page.click("#go")
    page.wait_for_selector("#actions", state="visible", timeout=TIMEOUT_MS)
    return caught.value.post_data_json


def task(page, name):
    page.locator(f"input[name=task][value={name}]").check(force=True)


def switch(page, name):
    """Choose another model."""
    page.locator(f"input[name=model][value={name}]").check(force=True)
    page.wait_for_function("(name) => document.title === `ARPG · ${name}`", arg=name)


def opened(base64_png):
    return Image.open(io.BytesIO(base64.b64decode(base64_png)))


def shown(page):
    """The board, scaled to 96 x 96 pixels."""
    image = Image.open(io.BytesIO(page.locator("#board").screenshot())).convert("RGB")
    return image.resize((96, 96), Image.Resampling.BOX)


def result(page):
    """The finished image, as it is downloaded."""
    with page.expect_download() as caught:
        page.click("#download")
    return Path(caught.value.path()).read_bytes()


def close_to(a, b, most=12.0):
    return float(np.asarray(ImageChops.difference(a, b)).mean()) < most


def drag(page, points):
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=4)
    page.mouse.up()


def on_board(page, *points):
    box = page.locator("#board").bounding_box()
    return [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]


def upload(page, data, name="own.png", kind="image/png"):
    page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": data})


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
