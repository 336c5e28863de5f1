"""Measurements as JSON lines: a run that is cut off loses the line it was measuring, not the rest.

A folder holds one file for each call that measured something, so that what comes back from several machines is
collected by copying files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from arpg.errors import InputError, require

Line = dict[str, Any]


class OutOfTimeError(Exception):
    """There is no time left for the next measurement; all others are kept."""


def read_lines(folder: Path) -> list[Line]:
    """Read the lines of all files of a folder, each measurement once; a last line that was cut off is left out.

    Of a measurement that was made twice, on machines that did not know of each other, the first counts: both have the
    same seeds, so their mean would be no better than one of them.
    """
    found: dict[str, Line] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in _read_file(path):
            what = {name: line[name] for name in line.get("key", line)}
            found.setdefault(json.dumps(what, sort_keys=True), line)
    return list(found.values())


def _read_file(path: Path) -> list[Line]:
    found, texts = [], path.read_text(encoding="utf-8").split("\n")
    for number, text in enumerate(texts):
        try:
            if text:
                found.append(json.loads(text))
        except ValueError as error:
            if number == len(texts) - 1:
                break
            raise InputError(f"{path}: line {number + 1} is not valid JSON ({error}); repair or delete it") from None
    return found


def matching(lines: list[Line], **key: Any) -> list[Line]:
    """Return the lines that have these values."""
    return [line for line in lines if all(line.get(name) == value for name, value in key.items())]


class Queue:
    """Measures what a folder of lines does not have yet, until a deadline.

    `shared`: options that are written into every line; lines of the folder that have them must have the same.
    """

    def __init__(self, folder: Path, shared: Mapping[str, Any], *, deadline: float) -> None:
        self.deadline, self.shared = deadline, dict(shared)
        self.lines = read_lines(folder)
        for line in self.lines:
            found = {**self.shared, **line.get("options", {})}
            other = [f"{name} {found[name]}, not {value}" for name, value in shared.items() if found[name] != value]
            require(not other, f"{folder} has lines of other options ({'; '.join(other)}); choose another --out")
        self.path = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}.jsonl"

    def has(self, key: Mapping[str, Any]) -> bool:
        """Whether there is a line of `key`."""
        return bool(matching(self.lines, **json.loads(json.dumps(key))))

    def line(
        self, key: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]], *, same: Mapping[str, Any] | None = None
    ) -> Line:
        """Return the line of `key`; where there is none, measure and append it. No measurement begins too late.

        `same`: a line with these values, of another table, is the same measurement.
        """
        wanted = json.loads(json.dumps(key))
        if found := matching(self.lines, **wanted):
            return found[0]
        if same is not None and (found := matching(self.lines, **same)):
            return self._append({**found[0], **wanted, "key": list(wanted)})
        if time.monotonic() > self.deadline:
            raise OutOfTimeError
        began = time.monotonic()
        made = measure()
        more = {"seconds": round(time.monotonic() - began, 2), "options": self.shared, "key": list(wanted)}
        return self._append({**wanted, **made, **more})

    def _append(self, line: Line) -> Line:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(json.loads(json.dumps(line)))
        return self.lines[-1]
