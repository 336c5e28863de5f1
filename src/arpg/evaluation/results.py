"""Measurements that are kept: one JSON line each, found again by their settings; and their tables.

FOLDER/
  about.json        what all lines share: the model, the reference, the seed
  results.jsonl     {"num": ..., "settings": {...}, "fid": ..., ...} per line
  results-1.jsonl   the lines of another process, if several work at once: each writes its own file and reads all
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arpg.config import to_dict
from arpg.errors import InputError, require
from arpg.files import write_whole
from arpg.settings import SamplingSettings

ABOUT, RESULTS = "about.json", "results.jsonl"

Line = dict[str, Any]


class Results:
    """The lines of a folder. Every line is on disk, whole, before `add` returns."""

    def __init__(self, folder: Path, about: Mapping[str, Any], *, process: int = 0) -> None:
        self.folder = folder
        self.path = folder / (f"results-{process}.jsonl" if process else RESULTS)
        claim(folder, about)
        self.own = _read(self.path)
        self.lines = read_lines(folder)

    def find(self, settings: SamplingSettings, num: int) -> Line | None:
        """The line of these settings, whichever process measured it."""
        key = plain(settings)
        default = plain(SamplingSettings())  # of a setting that did not exist yet when a line was written
        self.lines = read_lines(self.folder)
        return next((line for line in self.lines if default | line["settings"] == key and line["num"] == num), None)

    def add(self, settings: SamplingSettings, num: int, line: Mapping[str, Any]) -> Line:
        entry = {"num": num, "settings": plain(settings), **line}
        self.own.append(entry)
        text = "".join(json.dumps(each) + "\n" for each in self.own)
        write_whole(self.path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        self.lines = read_lines(self.folder)
        return entry


def claim(folder: Path, about: Mapping[str, Any]) -> None:
    """Say what a folder's results are of; an error where it holds those of something else."""
    wanted = json.loads(json.dumps(about))
    path = folder / ABOUT
    if path.exists():
        found = read_about(folder)
        other = [f"{key} {found.get(key)!r}, not {wanted[key]!r}" for key in wanted if found.get(key) != wanted[key]]
        require(not other, f"{folder} holds results of something else ({'; '.join(other)}); choose another folder")
        return
    text = json.dumps(wanted, indent=1) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_about(folder: Path) -> dict[str, Any]:
    return _parse(folder / ABOUT, (folder / ABOUT).read_text(encoding="utf-8"))


def read_lines(folder: Path) -> list[Line]:
    """Of all processes."""
    return [line for path in (folder / RESULTS, *sorted(folder.glob("results-*.jsonl"))) for line in _read(path)]


def _read(path: Path) -> list[Line]:
    if not path.exists():
        return []
    return [_parse(path, line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def plain(settings: SamplingSettings) -> dict[str, Any]:
    """Settings as they come back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(to_dict(settings)))
    return found


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table: first column as it is, the others to the right; None is an empty cell."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); repair or delete it") from None
    require(isinstance(found, dict), f"{path} holds {text[:40]!r}; expected JSON objects")
    return dict(found)
