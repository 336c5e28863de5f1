"""The README: its commands and snippets run as they stand, in order, in one empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


def test_commands_and_snippets_run(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    shell = [line for block in blocks("sh") for line in block.splitlines() if not line.startswith("make ")]
    commands = [["bash", "-c", line] for line in shell]
    commands += [[sys.executable, "-c", block] for block in blocks("python")]
    assert len(commands) >= 8
    for command in commands:
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{command[-1]}\n{result.stderr}"
    for made in (
        "out.png",
        "orders.png",
        "first.png",
        "preview.png",
        "kiwi.png",
        "edited.png",
        "wide.png",
        "kiwi-inside.png",
    ):
        assert (tmp_path / made).stat().st_size > 100
    assert len(list((tmp_path / "images").iterdir())) == 4


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", "\n".join(blocks("sh")), flags=re.M))
def test_make_targets_exist(target):
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_the_tree_names_every_module():
    for path in (ROOT / "src" / "arpg").rglob("*.py"):
        if path.name != "__init__.py":
            assert path.name in README, f"{path.name} is not in the README's tree"


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
