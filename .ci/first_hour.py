"""Run docs/get-started.md as a new user does: from a wheel, in a fresh environment without extras.

    python3 .ci/first_hour.py

Builds the wheel, installs it into a new virtual environment in a temporary folder (versions from constraints.txt), and
runs the `sh` blocks (without make) and the `python` blocks of the page there, outside the repository.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "get-started.md"
CHECKS = ("arpg --version", "arpg --help", "python -m arpg selftest --device cpu")
MADE = ("out.png", "first.png", "preview.png")


def blocks(language: str) -> list[str]:
    """Return the code blocks of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.S | re.M)


def main() -> None:
    """Run everything; a command that fails ends this with its exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment, work = folder / "venv", folder / "work"
        work.mkdir()
        binaries = environment / ("Scripts" if os.name == "nt" else "bin")
        variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        variables["PATH"] = f"{binaries}{os.pathsep}{variables['PATH']}"

        def run(*words: str | Path) -> None:
            sys.stderr.write(f"$ {shlex.join(map(str, words))}\n")
            result = subprocess.run([str(word) for word in words], cwd=work, env=variables, check=False)
            if result.returncode:
                sys.exit(result.returncode)

        pip = (binaries / "python", "-m", "pip", "--quiet", "--disable-pip-version-check")
        run(sys.executable, "-m", "venv", environment)
        run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT)
        (wheel,) = folder.glob("arpg-*.whl")
        run(*pip, "install", "--no-compile", "--constraint", ROOT / "constraints.txt", wheel)
        commands = [line for block in blocks("sh") for line in block.splitlines() if not line.startswith("make ")]
        for line in (*CHECKS, *commands):
            program, *rest = shlex.split(line)
            run(binaries / program, *rest)
        for block in blocks("python"):
            run(binaries / "python", "-c", block)
        missing = [file for file in MADE if not (work / file).is_file()]
        if missing:
            sys.exit(f"{PAGE.name} did not write {', '.join(missing)}")
        sys.stderr.write(f"{len(commands)} commands and {len(blocks('python'))} snippets of {PAGE.name} ran\n")


if __name__ == "__main__":
    main()
