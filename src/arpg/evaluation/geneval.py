"""GenEval: its way of saying what a prompt asks for, its rules of judging, and its layout of images.

    FOLDER/00000/metadata.jsonl     one line: tag, include, exclude, prompt
    FOLDER/00000/samples/0000.png   the images of the prompt

Images in this layout can be given to the official scorer; metadata in this form is also what our judge reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpg.errors import InputError, require
from arpg.evaluation.detector import Found
from arpg.files import write_whole

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
METADATA, SAMPLES = "metadata.jsonl", "samples"
NEAR = 0.1  # offsets below this share of both sizes say nothing about where something stands

Entry = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One prompt: so many of each class, with colours and places, and what there must not be."""

    tag: str
    prompt: str
    include: tuple[Entry, ...]
    exclude: tuple[Entry, ...] = field(default=())

    def to_json(self) -> str:
        data: Entry = {"tag": self.tag, "include": list(self.include)}
        if self.exclude:
            data["exclude"] = list(self.exclude)
        return json.dumps(data | {"prompt": self.prompt})


def read_tasks(path: Path) -> list[Task]:
    """GenEval's evaluation_metadata.jsonl, or a file of the same form."""
    require(path.is_file(), f"{path} does not exist; expected GenEval's evaluation_metadata.jsonl")
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            tasks.append(Task(data["tag"], data["prompt"], tuple(data["include"]), tuple(data.get("exclude", ()))))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}, line {number} is not GenEval metadata ({type(error).__name__}: {error})"
            ) from None
    require(bool(tasks), f"{path} has no prompts")
    return tasks


def prepare_folder(folder: Path, number: int, task: Task) -> Path:
    """The folder for the images of a prompt, with its metadata written."""
    here = folder / f"{number:05d}"
    write_whole(here / METADATA, lambda path: path.write_text(task.to_json() + "\n", encoding="utf-8"))
    (here / SAMPLES).mkdir(exist_ok=True)
    return here / SAMPLES


def is_right(task: Task, found: Sequence[Found]) -> bool:
    """Whether an image shows what is asked: enough of each class in the right colour and place, and not too many."""
    matched: list[list[Found] | None] = []
    for entry in task.include:
        here = [f for f in found if f.kind == entry["class"]]
        if "color" in entry:
            here = [f for f in here[: entry["count"]] if f.colour == entry["color"]]
        here = here[: entry["count"]]
        right = len(here) == entry["count"]
        if right and "position" in entry:
            relation, other = entry["position"]
            others = matched[other]
            right = others is not None and all(relation in relations(a, b) for a in here for b in others)
        matched.append(here if right else None)
    too_many = any(sum(f.kind == e["class"] for f in found) >= e["count"] for e in task.exclude)
    return None not in matched and not too_many


def relations(a: Found, b: Found) -> set[str]:
    """How `a` stands to `b`: by their centres, less what is too near to tell."""
    offsets = []
    for low in (0, 1):
        offset = (a.box[low] + a.box[low + 2] - b.box[low] - b.box[low + 2]) / 2
        slack = NEAR * (a.box[low + 2] - a.box[low] + b.box[low + 2] - b.box[low])
        offsets.append(math.copysign(max(abs(offset) - slack, 0.0), offset))
    far = math.hypot(*offsets)
    if far == 0:
        return set()
    x, y = (offset / far for offset in offsets)
    names = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in names.items() if holds}
