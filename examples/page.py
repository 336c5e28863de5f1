"""Screenshots of the web page for the documentation: a generation in progress, and a mask for inpainting.

    arpg serve --port 8000 &
    python examples/page.py http://127.0.0.1:8000

Needs playwright and a chromium.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SIZE = (1200, 760)


def main(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
        page.goto(url)
        page.get_by_text("225 classes").wait_for()
        page.fill("#seed", "663274")
        page.get_by_role("button", name="sunflower").first.click()
        page.keyboard.press("Control+Enter")
        page.locator("#stage-about", has_text=re.compile(r"step 1[5-9] of")).wait_for()
        save_screenshot(page, "page-drawing.webp")

        page.locator("#stage-about", has_text="seed 663274").wait_for()  # shown when the image is finished
        page.get_by_text("Inpaint", exact=True).click()
        board = page.locator("#board").bounding_box()
        assert board is not None
        x, y, size = board["x"], board["y"], board["width"]
        page.mouse.move(x + 0.35 * size, y + 0.45 * size)
        page.mouse.down()
        for i in range(12):
            page.mouse.move(x + (0.35 + 0.025 * i) * size, y + (0.45 + 0.05 * (i % 3)) * size)
        page.mouse.up()
        save_screenshot(page, "page-inpaint.webp")
        browser.close()


def save_screenshot(page: Page, name: str) -> None:
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(IMAGES / name, quality=85)


if __name__ == "__main__":
    main(sys.argv[1])
