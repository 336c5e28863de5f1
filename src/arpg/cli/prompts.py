"""Prompt files: a prompt per line, or JSON lines with prompt, negative and seed (GenEval's metadata is such a file)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpg.errors import InputError, require


@dataclass(frozen=True)
class Line:
    prompt: str
    negative: str | None = None
    seed: int | None = None  # of its first image


def read_prompts(path: Path, negative: str | None = None) -> list[Line]:
    """Empty lines, and in plain files those that begin with #, are left out. `negative`: where a line has none."""
    require(path.is_file(), f"{path} does not exist; expected a file with a prompt per line")
    try:
        rows = [row.strip() for row in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); save it as such") from None
    if path.suffix != ".jsonl":
        lines = [Line(row, negative) for row in rows if row and not row.startswith("#")]
    else:
        lines = [_line(f"{path}, line {i + 1}", row, negative) for i, row in enumerate(rows) if row]
    require(bool(lines), f"{path} has no prompts; expected one per line")
    return lines


def _line(where: str, row: str, negative: str | None) -> Line:
    try:
        data: Any = json.loads(row)
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON: {error}") from None
    require(isinstance(data, dict) and isinstance(data.get("prompt"), str), f'{where} has no "prompt"; expected a text')
    seed, own = data.get("seed"), data.get("negative", negative)
    require(seed is None or (isinstance(seed, int) and seed >= 0), f"{where}: seed is {seed!r}; expected 0 or more")
    require(own is None or isinstance(own, str), f"{where}: negative is {own!r}; expected a text")
    return Line(data["prompt"], own, seed)
