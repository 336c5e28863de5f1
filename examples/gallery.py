"""Make the images that the guides show: run the commands that write them, and those that write what they read.

    python examples/gallery.py [--out docs/images/gallery] [--only PAGE ...]

The commands are those of the guides' `sh` and `console` blocks, as they stand there.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent
GUIDES = ROOT / "docs" / "guides"
CONVERTED = {"surprise.webp": "surprise.png"}  # shown in another format than the command writes


def documented(page: Path) -> tuple[list[list[str]], list[str]]:
    """Return the `arpg` commands of a page in their order, and the names of the images that it shows."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = "".join(re.findall(r"^```(?:sh|console)\n(.*?)^```", text, flags=re.S | re.M))
    lines = re.findall(r"^(?:\$ )?(arpg [^\n]*)", blocks, flags=re.M)
    return [shlex.split(line) for line in lines], re.findall(r"images/gallery/([^)]+)\)", text)


def written(words: list[str]) -> set[str]:
    """Return the files that a command writes."""
    return {words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-o", "--output", "--gif")}


def needed(commands: list[list[str]], shown: list[str]) -> list[list[str]]:
    """Return the commands that write what is shown, and those that write what such commands read."""
    wanted, chosen = {CONVERTED.get(name, name) for name in shown}, []
    for words in reversed(commands):
        if made := written(words) & wanted:
            chosen.append(words)
            wanted = (wanted - made) | (set(words) - written(words))
    return chosen[::-1]


def make(page: Path, out: Path) -> None:
    """Make the images of a page."""
    commands, shown = documented(page)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        for words in needed(commands, shown):
            sys.stderr.write(f"{shlex.join(words)}\n")
            subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
        for name in shown:
            source = folder / CONVERTED.get(name, name)
            if name in CONVERTED:
                Image.open(source).save(out / name, quality=85, method=6)
            else:
                shutil.copyfile(source, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "gallery")
    parser.add_argument("--only", nargs="+", default=[], help="names of guides, like edit")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for page in sorted(GUIDES.glob("*.md")):
        if documented(page)[1] and (not options.only or page.stem in options.only):
            make(page, options.out)


if __name__ == "__main__":
    main()
