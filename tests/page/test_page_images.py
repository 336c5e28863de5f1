"""What the page does with the images of a run: the grid, upscaling, downloads as an archive, deleting."""

import base64
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from support.page_browser import close_to, encoded, opened, result, shown, submit, task
from support.page_server import Handler
from support.small import noise

DATA_OF = """async ([text, width, height]) => {
  const {lanczos} = await import("/static/lanczos.js");
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes]));
  const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const made = lanczos(context.getImageData(0, 0, bitmap.width, bitmap.height), width, height);
  return [made.width, made.height, [...made.data]];
}"""


@pytest.fixture
def page(visit, fake):
    return visit(fake.url)


def cell(page, at):
    shot = Image.open(io.BytesIO(page.locator("#gallery canvas").nth(at).screenshot())).convert("RGB")
    return shot.resize((96, 96), Image.Resampling.BOX)


def archive(page, button):
    with page.expect_download() as caught:
        page.click(button)
    assert caught.value.suggested_filename.endswith(".zip")
    file = zipfile.ZipFile(io.BytesIO(Path(caught.value.path()).read_bytes()))
    assert file.testzip() is None
    return file


def test_four_images_are_a_grid(page):
    page.fill("#num", "4")
    page.fill("#seed", "0")
    body = submit(page)
    made = [opened(image["png"]).convert("RGB") for image in list(Handler.job(None, "generate", body))[-1][1]["images"]]
    cells = [page.locator("#gallery button").nth(i).bounding_box() for i in range(4)]
    assert page.locator("#gallery button").count() == 4
    assert cells[0]["y"] == cells[1]["y"] < cells[2]["y"] == cells[3]["y"]
    assert cells[0]["x"] == cells[2]["x"] < cells[1]["x"] == cells[3]["x"]
    page.wait_for_timeout(200)
    for i, image in enumerate(made):
        assert close_to(cell(page, i), image)
    page.locator("#gallery button").nth(2).click()  # one alone
    page.wait_for_timeout(200)
    assert page.is_hidden("#gallery")
    assert close_to(shown(page), made[2])
    assert page.inner_text("#order-title") == "Token order, image 3"
    assert json.loads(Image.open(io.BytesIO(result(page))).text["arpg"])["seed"] == 2
    page.locator("#results [aria-pressed]").nth(1).click()
    page.wait_for_timeout(200)
    assert close_to(shown(page), made[1])
    page.click("#results .all")
    assert page.is_visible("#gallery")
    page.locator("#replay-step").fill("0")  # the replay shows all of them
    page.wait_for_timeout(200)
    assert not close_to(cell(page, 3), made[3])


def test_the_grid_appears_step_by_step_and_the_chosen_image_is_worked_on(page, fake):
    fake.pause = 0.1
    page.fill("#num", "3")
    page.click("#go")
    page.locator("#stage-about", has_text="step").wait_for()
    assert page.is_visible("#gallery")
    page.keyboard.press("Escape")
    page.wait_for_selector("#gallery", state="hidden")
    fake.pause = 0.0
    body = submit(page)
    page.locator("#gallery button").nth(1).click()
    chosen = result(page)
    task(page, "inpaint")
    page.click("#mask-invert")
    again = submit(page, "inpaint")
    assert base64.b64decode(again["image"]) == chosen
    page.check("#before")  # the original in place of the grid
    page.wait_for_timeout(100)
    assert page.is_hidden("#gallery")
    assert close_to(shown(page), Image.open(io.BytesIO(chosen)).convert("RGB"))
    assert body["num"] == again["num"] == 3


def test_wide_results_keep_their_shape_in_the_grid(page):
    submit(page)
    task(page, "outpaint")
    page.fill("#side-right", "96")
    page.fill("#num", "2")
    submit(page, "outpaint")
    box = page.locator("#gallery canvas").first.bounding_box()
    assert box["width"] / box["height"] == pytest.approx(2, abs=0.02)


def test_enlarging_is_that_of_pillow(page):
    image = noise(23, 17)
    for width, height in ((161, 119), (40, 90)):
        made = page.evaluate(DATA_OF, [base64.b64encode(encoded(image)).decode(), width, height])
        assert made[:2] == [width, height]
        pixels = np.array(made[2]).reshape(height, width, 4)
        expected = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)).astype(int)
        assert np.abs(pixels[..., :3] - expected).max() <= 1
        assert (pixels[..., 3] == 255).all()


def test_what_is_upscaled_says_so_and_the_pixels_can_be_shown(page):
    assert not page.is_visible("#scaled p")
    submit(page)
    assert page.inner_text("#scaled p") == "Upscaled for display"
    assert not page.is_visible("#view-sharp")  # this server has no network for it
    made = Image.open(io.BytesIO(result(page))).convert("RGB")
    assert made.size == (96, 96)  # the download is not upscaled
    side = round(page.locator("#board").bounding_box()["width"])

    def board():
        return Image.open(io.BytesIO(page.locator("#board").screenshot())).convert("RGB").resize((side, side))

    def inner(image):
        return image.crop((20, 20, side - 20, side - 20))  # the frame's corners are round

    page.mouse.move(0, 0)
    smooth = made.resize((side, side), Image.Resampling.LANCZOS)
    blocks = made.resize((side, side), Image.Resampling.NEAREST)
    page.wait_for_timeout(100)
    assert close_to(inner(board()), inner(smooth), most=1)
    page.locator("input[name=view][value=pixels]").check(force=True)
    assert page.inner_text("#scaled p").startswith("Each pixel enlarged ")
    page.mouse.move(0, 0)
    assert close_to(inner(board()), inner(blocks), most=2)
    page.locator("input[name=view][value=smooth]").check(force=True)
    assert close_to(inner(board()), inner(smooth), most=1)


def test_images_are_sharpened_where_the_server_can(visit, fake):
    fake.info = {**fake.info, "upscales": True}
    page = visit(fake.url)
    page.fill("#num", "2")
    submit(page)
    page.locator("#scaled p", has_text="Upscaled for display by Real-ESRGAN").wait_for()
    page.locator("#gallery button").nth(1).click()
    page.wait_for_timeout(200)
    made = Image.open(io.BytesIO(result(page))).convert("RGB")
    assert close_to(shown(page), ImageOps.invert(made))  # the fake server inverts what it upscales
    page.locator("input[name=view][value=smooth]").check(force=True)
    assert close_to(shown(page), made)
    page.locator("input[name=view][value=sharp]").check(force=True)
    assert close_to(shown(page), ImageOps.invert(made))
    page.locator("#replay-step").fill("3")  # previews are not upscaled
    page.locator("#scaled p:text-is('Upscaled for display')").wait_for()
    task(page, "inpaint")
    page.click("#mask-invert")
    body = submit(page, "inpaint")
    assert opened(body["image"]).convert("RGB").tobytes() == made.tobytes()  # nor what is sent
    assert len([1 for name, _ in fake.requests if name == "upscale"]) >= 2
    fake.failures = [(429, {"message": "The queue is full."}, [])] * 2
    asked = len(fake.requests)
    page.locator("#history .pick").last.click()  # a busy server: the image stays smooth, without a notice
    page.locator("#scaled p:text-is('Upscaled for display')").wait_for()
    page.wait_for_timeout(200)
    assert len(fake.requests) > asked
    assert page.is_hidden("#notice")


def test_all_images_of_a_run_in_one_archive(page):
    page.fill("#num", "3")
    page.fill("#seed", "5")
    submit(page)
    files = archive(page, "#download-all")
    assert files.namelist() == ["banana-5-0.png", "banana-5-1.png", "banana-5-2.png"]
    seeds = [json.loads(Image.open(io.BytesIO(files.read(name))).text["arpg"])["seed"] for name in files.namelist()]
    assert seeds == [5, 6, 7]


def test_the_history_is_downloaded_whole_and_deleted_one_by_one(page):
    page.fill("#seed", "5")
    submit(page)
    first = result(page)
    submit(page)  # the same name again
    page.fill("#num", "2")
    page.fill("#seed", "8")
    submit(page)
    page.wait_for_selector("#history li >> nth=2")
    files = archive(page, "#history-save")
    assert files.namelist() == ["banana-8.png", "banana-9.png", "banana-5.png", "banana-5-2.png"]
    assert files.read("banana-5.png") == first
    page.hover("#history li >> nth=1")
    page.locator("#history .delete").nth(1).click()
    page.wait_for_selector("#history li >> nth=2", state="detached")
    assert page.evaluate("document.activeElement.className") == "delete"  # of the next one
    page.reload()
    page.wait_for_selector("#history li >> nth=1")
    assert archive(page, "#history-save").namelist() == ["banana-8.png", "banana-9.png", "banana-5.png"]
    for _ in range(2):
        page.focus("#history .delete")
        page.keyboard.press("Enter")
        page.wait_for_timeout(100)
    page.wait_for_selector("#history-empty", state="visible")
    assert page.is_hidden("#history-save")
