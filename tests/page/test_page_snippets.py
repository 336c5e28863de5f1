"""What the page offers to copy: the command lines and the Python run, and curl sends what the page sends."""

import io
import json
import shlex
import shutil
import subprocess
import sys

import pytest
from PIL import Image

from arpg import cli
from arpg.image import open_image
from support.distribution import install
from support.page_browser import choose, drag, encoded, on_board, submit, task, upload
from support.page_server import fruits_pipeline, info_of

IMAGES = {
    "generate": "orange.png",
    "inpaint": "filled.png",
    "edit": "edited.png",
    "outpaint": "wide.png",
    "expand": "large.png",
}


def snippet(page, kind):
    page.locator(f"input[name=snippet][value={kind}]").check(force=True)
    return page.inner_text("#snippet")


@pytest.fixture
def page(visit, fake):
    return visit(fake.url)  # never a real server: the fake server records the requests


@pytest.fixture(scope="module")
def provided(tmp_path_factory):
    """A distribution that provides the model of the fake server, with random weights."""
    site = tmp_path_factory.mktemp("site")
    fruits_pipeline().save_pretrained(site / "fruit_models" / "fruits")
    (site / "fruit_models" / "__init__.py").touch()
    return install(site, "fruit-models", {"fruits": "fruit_models"})


LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("edit", "outpaint", "expand")]


@pytest.fixture(params=["generate", "inpaint", *LONG])
def prepared(request, page, tmp_path, monkeypatch):
    """The task that the page is set up for, in an empty folder with the files that its snippets read."""
    monkeypatch.chdir(tmp_path)
    if request.param not in ("generate", "expand"):
        upload(page, encoded(Image.linear_gradient("L").resize((96, 96)).convert("RGB")))
        page.wait_for_selector("#stage-title:has-text('own')")
    task(page, request.param)
    choose(page, "Orange")
    if request.param == "inpaint":
        drag(page, on_board(page, (0.4, 0.4), (0.6, 0.6)))
    if request.param == "outpaint":
        page.fill("#side-right", "40")
    page.fill("#set-steps", "2")
    page.fill("#set-guidance", "1.5")
    page.select_option("#set-order", "spiral-in")
    page.fill("#seed", "11")
    for name in ("image", "mask"):
        if page.is_visible(f"#save-{name}"):
            with page.expect_download() as caught:
                page.click(f"#save-{name}")
            caught.value.save_as(tmp_path / f"{name}.png")
    return request.param


def commands():
    return {command.name or command.callback.__name__ for command in cli.app.registered_commands}


def test_the_command_line_and_the_python_make_the_same_image(prepared, page, provided, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(provided)
    if prepared not in commands():
        pytest.skip(f"this command line has no {prepared} yet")
    line = snippet(page, "cli")
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert not exited.value.code, line
    made = Image.open(io.BytesIO((tmp_path / IMAGES[prepared]).read_bytes()))
    about = json.loads(made.text["arpg"])
    assert (about["steps"], about["guidance"], about["order"], about["seed"]) == (2, 1.5, "spiral-in", 11)
    pixels = made.convert("RGB").tobytes()
    (tmp_path / IMAGES[prepared]).unlink()
    exec(compile(snippet(page, "python"), "snippet", "exec"), {})
    assert open_image(tmp_path / IMAGES[prepared]).convert("RGB").tobytes() == pixels


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="curl or jq is missing")
def test_curl_sends_what_the_page_sends(prepared, page, fake, tmp_path):
    sent = submit(page, prepared)
    subprocess.run(["bash", "-c", snippet(page, "curl")], check=True, capture_output=True, cwd=tmp_path)
    name, body = fake.requests[-1]
    assert name == prepared
    assert {**body, "stream": True} == sent
    assert open_image(tmp_path / IMAGES[prepared]).width >= 96


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="curl or jq is missing")
def test_quotes_and_dollars_survive_the_shell(fake, visit, tmp_path):
    fake.info = info_of("fruits-text")
    page = visit(fake.url)
    prompt = """it's "5 $HOME" `date` \\ 100% <b>"""
    page.fill("#prompt", prompt)
    assert shlex.split(snippet(page, "cli"))[:4] == ["arpg", "generate", "--prompt", prompt]
    page.fill("#num", "2")
    page.fill("#seed", "1")
    subprocess.run(["bash", "-c", snippet(page, "curl")], check=True, capture_output=True, cwd=tmp_path)
    assert fake.requests[-1][1]["prompt"] == prompt
    assert len(list(tmp_path.glob("*.png"))) == 2
    upload(page, encoded(Image.new("RGB", (96, 96))))
    page.wait_for_selector("#stage-title:has-text('own')")
    task(page, "outpaint")
    page.fill("#side-top", "8")
    with page.expect_download() as caught:
        page.click("#save-image")
    caught.value.save_as(tmp_path / "image.png")
    page.fill("#num", "1")
    subprocess.run(["bash", "-c", snippet(page, "curl")], check=True, capture_output=True, cwd=tmp_path)
    assert fake.requests[-1][1]["prompt"] == prompt
    assert (tmp_path / "wide.png").exists()
