"""Whether a model listens: GenEval's six tasks on combinations that training never saw, judged by the detector."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from arpg.data.asks import MOST, SIZES, Ask, Group
from arpg.data.captions import plain_caption
from arpg.data.catalogue import GROUNDS, KINDS, TINTS, held_out
from arpg.data.composer import Composer
from arpg.errors import require
from arpg.evaluation.detector import Detector
from arpg.evaluation.geneval import TASKS, Entry, Task, is_right, prepare_folder
from arpg.evaluation.metrics import wilson
from arpg.image import Pixels, save
from arpg.pipeline import Pipeline

RELATIONS = {"left": "left of", "right": "right of", "above": "above", "below": "below"}


@dataclass(frozen=True)
class Question:
    """A prompt with all that belongs to it: the ask from which a real scene can be made, and how it is judged."""

    ask: Ask
    task: Task


def held_out_questions(per_task: int = 60) -> list[Question]:
    """The same for ever: so many of each task, no two alike, each with a combination that is held out."""
    questions = []
    for number, tag in enumerate(TASKS):
        rng = np.random.default_rng([2026, number])
        asks = list(dict.fromkeys(ask for ask in _asks(tag, rng) if ask.visible()))
        require(len(asks) >= per_task, f"per_task is {per_task}; there are {len(asks)} prompts of {tag}")
        chosen = [asks[i] for i in rng.permutation(len(asks))[:per_task]]
        questions += [Question(ask, to_task(tag, ask)) for ask in chosen]
    return questions


def to_task(tag: str, ask: Ask) -> Task:
    """An ask in GenEval's words. What a position is said of comes second there."""
    entries: list[Entry] = []
    for group in ask.groups:
        entry: Entry = {"class": group.kind, "count": group.count}
        if group.colour:
            entry["color"] = group.colour
        entries.append(entry)
    if ask.relation:
        entries = [entries[1], {**entries[0], "position": [RELATIONS[ask.relation], 0]}]
    exclude: tuple[Entry, ...] = ()
    if tag == "counting":
        exclude = ({"class": ask.groups[0].kind, "count": ask.groups[0].count + 1},)
    return Task(tag, plain_caption(ask), tuple(entries), exclude)


def _asks(tag: str, rng: np.random.Generator) -> Iterator[Ask]:
    pairs = [pair for pair in itertools.permutations(KINDS, 2) if held_out("pair", *pair)]
    if tag == "single_object":
        for kind, ground, size in itertools.product(KINDS, GROUNDS, SIZES):
            if ground != "white" and held_out("ground", kind, ground):
                yield Ask((Group(kind, size=size),), ground=ground)
    elif tag == "counting":
        for kind, count, ground in itertools.product(KINDS, range(2, MOST + 1), GROUNDS):
            if held_out("count", kind, str(count)) and not held_out("ground", kind, ground):
                yield Ask((Group(kind, count),), ground=ground)
    elif tag == "colors":
        for (kind, about), colour, ground in itertools.product(KINDS.items(), TINTS, GROUNDS):
            group = Group(kind, colour=colour)
            if about.tintable and group.tinted and held_out("colour", kind, colour):
                yield Ask((group,), ground=ground)
    elif tag == "two_object":
        yield from (Ask((Group(a), Group(b))) for a, b in pairs if a < b)
    elif tag == "position":
        yield from (Ask((Group(a), Group(b)), str(rng.choice(list(RELATIONS)))) for a, b in pairs)
    else:
        for a, b in pairs:
            groups = [Group(kind, colour=str(rng.choice(_colours(kind)))) for kind in (a, b) if _colours(kind)]
            if len(groups) == 2 and groups[0].colour != groups[1].colour:
                yield Ask((groups[0], groups[1]))


def _colours(kind: str) -> list[str]:
    """In which it is known from training."""
    tints = [c for c in TINTS if KINDS[kind].tintable and not held_out("colour", kind, c)]
    return sorted({*KINDS[kind].natural, *tints})


def ceiling(
    questions: Sequence[Question], composer: Composer, detector: Detector, *, images: int = 4, seed: int = 0
) -> dict[str, Any]:
    """How often the judge is right about real scenes of the same prompts: what a perfect model would reach."""
    rng = np.random.default_rng([seed, 7])
    pixels = np.stack([composer.compose(q.ask, rng).pixels_HW3 for q in questions for _ in range(images)])
    return judge([q.task for q in questions], pixels, detector, images=images)


def judge(tasks: Sequence[Task], pixels: Pixels, detector: Detector, *, images: int) -> dict[str, Any]:
    """Accuracy of each task over images, and their mean; `pixels` are those of the prompts one after the other."""
    found = detector.detect(pixels)
    right = np.array([is_right(tasks[i // images], f) for i, f in enumerate(found)])
    tags = np.repeat([task.tag for task in tasks], images)
    report: dict[str, Any] = {}
    for tag in TASKS:
        here = right[tags == tag]
        if len(here):
            hits = int(here.sum())
            report[tag] = {"accuracy": hits / len(here), "interval": wilson(hits, len(here)), "images": len(here)}
    report["overall"] = float(np.mean([report[tag]["accuracy"] for tag in TASKS if tag in report]))
    return report


def generate(
    pipe: Pipeline,
    tasks: Sequence[Task],
    folder: Path,
    *,
    images: int = 4,
    seed: int = 0,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> list[Path]:
    """Draw the prompts into GenEval's layout; image k of prompt i has seed `seed + i * images + k`.

    What is there already is left as it is, so an interrupted run goes on.
    """
    require(images >= 1, f"the number of images is {images}; expected 1 or more for each prompt")
    paths = [prepare_folder(folder, i, task) / f"{k:04d}.png" for i, task in enumerate(tasks) for k in range(images)]
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    for start in range(0, len(missing), batch_size):
        part = missing[start : start + batch_size]
        prompts = [tasks[i // images].prompt for i in part]
        drawn = pipe.generate(prompt=prompts, seed=[seed + i for i in part], batch_size=batch_size, **settings)
        for i, image in zip(part, drawn, strict=True):
            save(image, paths[i])
        if progress is not None:
            progress(len(paths) - len(missing) + start + len(part), len(paths))
    return paths


def read_pixels(paths: Sequence[Path], size: int) -> Pixels:
    """The images again, as files hold them, at the detector's size."""
    pixels = []
    for path in paths:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
        pixels.append(np.asarray(rgb if rgb.size == (size, size) else rgb.resize((size, size))))
    return np.stack(pixels)
