"""README, Get started and the guides: their commands and snippets run as written, their links and images exist.

`sh` and `python` blocks are run, page by page, in one folder; what an earlier page has run is not
run again. `console` and `py` blocks are not run.
"""

import re
import runpy
import shlex
import subprocess
import sys

import pytest
import typer.main

from arpg import cli
from arpg.config import DEFAULT_CONTROL_MODEL, DEFAULT_MODEL, DEFAULT_TEXT_MODEL
from support.distribution import require_model
from support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "get-started.md", *sorted((DOCS / "guides").glob("*.md"))]
MADE = {
    "README.md": ["out.png", "sunflower.png"],
    "get-started.md": ["out.png", "first.png", "preview.png"],
    "generate.md": ["pug.png", "images/", "exact.png", "surprise.png", "attention.png", "orders.png"],
    "edit.md": ["edited.png", "filled/", "wide.png", "large.png", "outpainting.png"],
    "text.md": ["prompts.png"],
    "python.md": ["pugs.png", "filled.png", "mine/"],
    "finetune.md": ["star.png", "mine/"],
    "control.md": ["lemon.png", "kiwi-apples.png", "half-and-half.png"],
}


# The models that the pages need besides the default one.
NEEDS = {"text.md": DEFAULT_TEXT_MODEL, "control.md": DEFAULT_CONTROL_MODEL, "finetune.md": "garden"}


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.S | re.M)


def commands(path):
    return [line for block in blocks(path, "sh") for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture(scope="module")
def done():
    """The commands that have been run."""
    return set()


def slow_guide(path):
    """The guides run in `make test-all`; README and the first steps in `make test`, too."""
    marks = [pytest.mark.slow] if path.parent.name == "guides" else []
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [slow_guide(path) for path in PAGES if path.name in MADE])
def test_commands_and_snippets_run(path, folder, done, monkeypatch):
    """In this process: starting Python and torch anew for each would take longer than all of them together."""
    require_model(NEEDS.get(path.name, DEFAULT_MODEL))
    monkeypatch.chdir(folder)
    for line in commands(path):
        if line.startswith("make ") or line in done:
            continue
        done.add(line)
        words = shlex.split(line)
        if words[0] == "python":
            monkeypatch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
            continue
        monkeypatch.setattr(sys, "argv", words)
        assert words[0] == "arpg", f"{line!r} is not an arpg command; run it here too"
        with pytest.raises(SystemExit) as exited:
            cli.main()
        assert not exited.value.code, line
    for block in blocks(path, "python"):
        exec(compile(block, path.name, "exec"), {})
    for name in MADE[path.name]:
        made = folder / name
        files = list(made.iterdir()) if name.endswith("/") else [made]
        assert files
        for file in files:
            assert file.stat().st_size > 100


def test_every_page_with_commands_is_run():
    assert {path.name for path in PAGES if commands(path) or blocks(path, "python")} == set(MADE)


def documented_commands():
    """Every `arpg` command of the documentation: page, words."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        text = path.read_text().replace("\\\n", " ")
        text = re.sub(r"torchrun [^\n]*-m arpg ", "arpg ", text)
        for found in re.findall(r"^(?:\$ )?(arpg [^\n#]*)|`(arpg [a-z][^`]*)`", text, flags=re.M):
            yield path.name, shlex.split("".join(found))


def test_options_of_documented_commands_exist():
    root = typer.main.get_command(cli.app)
    num = 0
    for page, words in documented_commands():
        command, rest = root, words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, *rest = command.commands[rest[0]], *rest[1:]
        assert command is not root, f"{page}: {words}"
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        for word in rest:
            if re.match(r"--?[a-z]", word):
                assert word in known, f"{page}: {words} has no {word}"
        num += 1
    assert num > 100


@pytest.mark.parametrize("target", re.findall(r"^make ([\w-]+)", "\n".join(commands(ROOT / "README.md")), flags=re.M))
def test_make_targets_exist(target):
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_gallery_images_are_results_of_the_commands_beside_them():
    folder = DOCS / "images" / "gallery"
    text = "".join(path.read_text() for path in PAGES)
    written = set(re.findall(r"(?:-o|--gif) (\S+)", text)) | {"surprise.webp"}  # written there as a PNG
    shown = set(re.findall(r"images/gallery/([^)]+)\)", text))
    assert shown <= written
    assert max(path.stat().st_size for path in folder.iterdir()) <= 200_000


def test_the_script_of_the_gallery_runs_the_commands_of_the_guides(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import gallery

    commands, shown = gallery.documented(DOCS / "guides" / "edit.md")
    chosen = gallery.needed(commands, shown)
    assert {name for words in chosen for name in gallery.written(words)} >= set(shown)
    for i, words in enumerate(chosen):  # what a command reads is there already
        before = {name for earlier in chosen[:i] for name in gallery.written(earlier)}
        images = {word for word in words if word.endswith(".png")} - gallery.written(words)
        assert all(name in before or (ROOT / name).exists() for name in images), words
    assert len(chosen) < len(commands)


def test_every_image_of_the_documentation_is_shown():
    text = "".join(path.read_text() for path in (ROOT / "README.md", *DOCS.rglob("*.md")))
    for path in (DOCS / "images").rglob("*.*"):
        assert path.relative_to(DOCS).as_posix() in text, path


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS.rglob("*.md")], ids=lambda path: path.stem)
def test_links_and_images_exist(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)#\s]+)", prose):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
