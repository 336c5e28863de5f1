"""The README: its commands and snippets run as they stand, in order, in one empty folder."""

import re
import shlex
import subprocess
import sys

import pytest

from arpg import cli
from support.paths import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


def test_commands_and_snippets_run(tmp_path, monkeypatch):
    """In this process: starting Python and torch anew for each would take longer than all of them together."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    shell = [line for block in blocks("sh") for line in block.splitlines() if not line.startswith("make ")]
    assert len(shell) >= 12
    for line in shell:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        assert sys.argv[0] == "arpg", f"{line!r} is no arpg command; run it here too"
        with pytest.raises(SystemExit) as exited:
            cli.main()
        assert not exited.value.code, line
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    for made in ("out", "orders", "first", "preview", "kiwi", "edited", "wide", "surprise", "kiwi-inside"):
        assert (tmp_path / f"{made}.png").stat().st_size > 100
    assert len(list((tmp_path / "images").iterdir())) == 4
    assert len(list((tmp_path / "filled").iterdir())) == 2


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", "\n".join(blocks("sh")), flags=re.M))
def test_make_targets_exist(target):
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_the_tree_names_every_module():
    for path in (ROOT / "src" / "arpg").rglob("*.py"):
        if path.name != "__init__.py":
            assert path.name in README, f"{path.name} is not in the README's tree"


def test_the_gallery_shows_what_its_commands_write():
    """Every picture is the output of a command on the page, and small."""
    folder = ROOT / "docs" / "images" / "gallery"
    text = (ROOT / "docs" / "gallery.md").read_text()
    written = set(re.findall(r"(?:-o|--map|--gif) (\S+)", text))
    shown = set(re.findall(r"images/gallery/([^)]+)\)", text))
    assert shown <= written
    assert shown == {path.name for path in folder.iterdir()}
    assert max(path.stat().st_size for path in folder.iterdir()) <= 150_000


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
