"""GenEval on the objects of the composer: prompts of held-out combinations, the scoring rules, the folder layout.

    FOLDER/00000/metadata.jsonl     one line: tag, include, exclude, prompt
    FOLDER/00000/samples/0000.png   the images of the prompt

Images in this layout can be given to the official scorer; `--prompts` reads metadata in this form.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from arpg.config import ENGINES, PRECISIONS
from arpg.device import set_threads
from arpg.errors import InputError, require, require_file
from arpg.evaluation.metrics import wilson
from arpg.evaluation.sample import fingerprint
from arpg.evaluation.sweep import claim_folder
from arpg.files import write_json, write_text
from arpg.image import Pixels, save
from arpg.pipeline import Pipeline
from arpg.settings import SETTINGS, SamplingDefaults
from arpg.tables import text_table
from experiments.garden.composer import SIZE, Composer
from experiments.garden.detector import Detection, Detector
from experiments.garden.objects import BACKGROUNDS, KINDS, TINTS, held_out
from experiments.garden.scene_sets import add_set_options
from experiments.garden.scene_spec import MAX_OBJECTS, SIZES, Group, SceneSpec, plain_caption

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
METADATA, SAMPLES = "metadata.jsonl", "samples"
# The settings of the official scorer.
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9  # confidence that a detection must exceed
MAX_PER_CLASS = 16  # detections of a class that count
POSITION_THRESHOLD = 0.1  # the share of both sizes that an offset must exceed

Entry = dict[str, Any]

log = logging.getLogger("garden")


@dataclass(frozen=True)
class GenEvalPrompt:
    """A prompt with the objects that its images must show (`include`) and must not show (`exclude`)."""

    tag: str
    text: str
    include: tuple[Entry, ...]
    exclude: tuple[Entry, ...] = field(default=())

    def to_json(self) -> str:
        data: Entry = {"tag": self.tag, "include": list(self.include)}
        if self.exclude:
            data["exclude"] = list(self.exclude)
        return json.dumps(data | {"prompt": self.text})


def read_prompts(path: Path) -> list[GenEvalPrompt]:
    """Read GenEval's evaluation_metadata.jsonl, or a file of the same form."""
    require_file(path, "GenEval's evaluation_metadata.jsonl")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            prompts.append(
                GenEvalPrompt(data["tag"], data["prompt"], tuple(data["include"]), tuple(data.get("exclude", ())))
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}, line {number} is not GenEval metadata ({type(error).__name__}: {error})"
            ) from None
    require(bool(prompts), f"{path} has no prompts")
    return prompts


def prepare_folder(folder: Path, number: int, prompt: GenEvalPrompt) -> Path:
    """Make the folder for the images of a prompt, and write its metadata."""
    here = folder / f"{number:05d}"
    write_text(here / METADATA, prompt.to_json() + "\n")
    (here / SAMPLES).mkdir(exist_ok=True)
    return here / SAMPLES


def is_correct(prompt: GenEvalPrompt, found: Sequence[Detection]) -> bool:
    """Return whether the detections of an image (best first) match the prompt: counts, colours and positions.

    The rules are those of `evaluate` in GenEval's evaluate_images.py.
    """
    least = COUNTING_THRESHOLD if prompt.tag == "counting" else THRESHOLD
    of_class: dict[str, list[Detection]] = defaultdict(list)
    for detection in found:
        if detection.score > least and len(of_class[detection.kind]) < MAX_PER_CLASS:
            of_class[detection.kind].append(detection)
    matched: list[list[Detection] | None] = []
    for entry in prompt.include:
        here = of_class[entry["class"]][: entry["count"]]
        good = len(here) == entry["count"]
        if good and "color" in entry:
            good = all(f.colour == entry["color"] for f in here)
        if good and "position" in entry:
            relation, other = entry["position"]
            others = matched[other]
            good = others is not None and all(relation in relations(a, b) for a in here for b in others)
        matched.append(here if good else None)
    too_many = any(len(of_class[entry["class"]]) >= entry["count"] for entry in prompt.exclude)
    return None not in matched and not too_many


def relations(a: Detection, b: Detection) -> set[str]:
    """Return the relations of `a` to `b`: the offset of their centres, less a share of their sizes, over its norm."""
    offsets, clear = [], []
    for low in (0, 1):
        offset = (a.box[low] + a.box[low + 2] - b.box[low] - b.box[low + 2]) / 2
        slack = POSITION_THRESHOLD * (a.box[low + 2] - a.box[low] + b.box[low + 2] - b.box[low])
        offsets.append(offset)
        clear.append(math.copysign(max(abs(offset) - slack, 0.0), offset))
    if max(map(abs, clear)) < 1e-3:
        return set()
    x, y = (part / math.hypot(*offsets) for part in clear)
    names = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in names.items() if holds}


RELATIONS = {"left": "left of", "right": "right of", "above": "above", "below": "below"}


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt with the spec from which real scenes of it can be composed."""

    spec: SceneSpec
    prompt: GenEvalPrompt


def held_out_prompts(per_task: int = 60) -> list[HeldOutPrompt]:
    """Return `per_task` different prompts of each task, always the same, each with a combination that is held out."""
    prompts = []
    for number, tag in enumerate(TASKS):
        rng = np.random.default_rng([2026, number])
        specs = list(dict.fromkeys(spec for spec in _specs(tag, rng) if spec.visible()))
        require(len(specs) >= per_task, f"per_task is {per_task}; there are {len(specs)} prompts of {tag}")
        chosen = [specs[i] for i in rng.permutation(len(specs))[:per_task]]
        prompts += [HeldOutPrompt(spec, to_prompt(tag, spec)) for spec in chosen]
    return prompts


def to_prompt(tag: str, spec: SceneSpec) -> GenEvalPrompt:
    """Return a spec as a GenEval prompt; there, the object that has a position comes second."""
    entries: list[Entry] = []
    for group in spec.groups:
        entry: Entry = {"class": group.kind, "count": group.count}
        if group.colour:
            entry["color"] = group.colour
        entries.append(entry)
    if spec.relation:
        entries = [entries[1], {**entries[0], "position": [RELATIONS[spec.relation], 0]}]
    exclude: tuple[Entry, ...] = ()
    if tag == "counting":
        exclude = ({"class": spec.groups[0].kind, "count": spec.groups[0].count + 1},)
    return GenEvalPrompt(tag, plain_caption(spec), tuple(entries), exclude)


def _specs(tag: str, rng: np.random.Generator) -> Iterator[SceneSpec]:
    pairs = [pair for pair in itertools.permutations(KINDS, 2) if held_out("pair", *pair)]
    if tag == "single_object":
        for kind, background, size in itertools.product(KINDS, BACKGROUNDS, SIZES):
            if background != "white" and held_out("ground", kind, background):
                yield SceneSpec((Group(kind, size=size),), background=background)
    elif tag == "counting":
        for kind, count, background in itertools.product(KINDS, range(2, MAX_OBJECTS + 1), BACKGROUNDS):
            if held_out("count", kind, str(count)) and not held_out("ground", kind, background):
                yield SceneSpec((Group(kind, count),), background=background)
    elif tag == "colors":
        for (kind, about), colour, background in itertools.product(KINDS.items(), TINTS, BACKGROUNDS):
            group = Group(kind, colour=colour)
            if about.tintable and group.tinted and held_out("colour", kind, colour):
                yield SceneSpec((group,), background=background)
    elif tag == "two_object":
        yield from (SceneSpec((Group(a), Group(b))) for a, b in pairs if a < b)
    elif tag == "position":
        yield from (SceneSpec((Group(a), Group(b)), str(rng.choice(list(RELATIONS)))) for a, b in pairs)
    else:
        for a, b in pairs:
            groups = [Group(kind, colour=str(rng.choice(_colours(kind)))) for kind in (a, b) if _colours(kind)]
            if len(groups) == 2 and groups[0].colour != groups[1].colour:
                yield SceneSpec((groups[0], groups[1]))


def _colours(kind: str) -> list[str]:
    """Return the colours in which training shows a kind."""
    tints = [c for c in TINTS if KINDS[kind].tintable and not held_out("colour", kind, c)]
    return sorted({*KINDS[kind].natural, *tints})


def ceiling(
    prompts: Sequence[HeldOutPrompt], composer: Composer, detector: Detector, *, images: int = 4, seed: int = 0
) -> dict[str, Any]:
    """Score composed scenes of the same prompts: what a perfect model would reach with this detector."""
    rng = np.random.default_rng([seed, 7])
    pixels = np.stack([composer.compose(q.spec, rng).pixels_HW3 for q in prompts for _ in range(images)])
    return score([q.prompt for q in prompts], pixels, detector, images=images)


def score(prompts: Sequence[GenEvalPrompt], pixels: Pixels, detector: Detector, *, images: int) -> dict[str, Any]:
    """Return the accuracy of each task, and their mean; `pixels` has `images` images of each prompt in turn."""
    found = detector.detect(pixels, threshold=THRESHOLD)
    correct = np.array([is_correct(prompts[i // images], f) for i, f in enumerate(found)])
    tags = np.repeat([prompt.tag for prompt in prompts], images)
    report: dict[str, Any] = {}
    for tag in TASKS:
        here = correct[tags == tag]
        if len(here):
            hits = int(here.sum())
            report[tag] = {"accuracy": hits / len(here), "interval": wilson(hits, len(here)), "images": len(here)}
    report["overall"] = float(np.mean([report[tag]["accuracy"] for tag in TASKS if tag in report]))
    return report


def generate(
    pipe: Pipeline,
    prompts: Sequence[GenEvalPrompt],
    folder: Path,
    *,
    images: int = 4,
    seed: int = 0,
    batch_size: int = 64,
    **settings: Any,
) -> list[Path]:
    """Generate the images of prompts in GenEval's layout; image k of prompt i has seed `seed + i * images + k`.

    Images that exist are kept, so an interrupted run continues; a folder of other images is refused.
    """
    require(images >= 1, f"the number of images is {images}; expected 1 or more for each prompt")
    texts = "\n".join(prompt.to_json() for prompt in prompts)
    about: dict[str, Any] = {"model": fingerprint(pipe), "images": images, "seed": seed, "settings": settings}
    claim_folder(folder, about | {"prompts": hashlib.sha256(texts.encode()).hexdigest()[:16]})
    paths = [prepare_folder(folder, i, p) / f"{k:04d}.png" for i, p in enumerate(prompts) for k in range(images)]
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    for start in range(0, len(missing), batch_size):
        part = missing[start : start + batch_size]
        asked = [prompts[i // images].text for i in part]
        made = pipe.generate(prompt=asked, seed=[seed + i for i in part], batch_size=batch_size, **settings)
        for i, image in zip(part, made, strict=True):
            save(image, paths[i])
        log.info("generated %d of %d", len(paths) - len(missing) + start + len(part), len(paths))
    return paths


def read_pixels(paths: Sequence[Path], size: int) -> Pixels:
    """Read the images from their files, at the detector's size."""
    pixels = []
    for path in paths:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
        pixels.append(np.asarray(rgb if rgb.size == (size, size) else rgb.resize((size, size))))
    return np.stack(pixels)


def table(report: dict[str, Any]) -> str:
    """Return one line per task: the score, the ceiling and their ratio."""
    found, most = report["score"], report.get("ceiling")
    rows = []
    for name, value in found.items():
        ours = value if name == "overall" else value["accuracy"]
        row = [name, f"{ours:.3f}"]
        if most is not None:
            best = most[name] if name == "overall" else most[name]["accuracy"]
            row += [f"{best:.3f}", f"{ours / best if best else 0.0:.3f}"]
        rows.append(row)
    return text_table(["task", "score", "ceiling", "ratio"][: len(rows[0])], rows)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add --model, --seed, --device, --precision, --engine and one option per sampling setting."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--model", "-m", default="garden-text", help="A folder, a bundled or published name, or a hub id."
    )
    group.add_argument("--seed", type=int, default=0, help="Image i has seed SEED + i.")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:0.")
    group.add_argument("--precision", "--dtype", default="auto", choices=PRECISIONS)
    group.add_argument("--engine", default="auto", choices=ENGINES)
    for setting in SETTINGS.values():
        flag = f"--{setting.name.replace('_', '-')}"
        if setting.name == "schedule":
            group.add_argument(flag, type=_schedule, help=setting.help)
        else:
            group.add_argument(flag, type=setting.kind, choices=setting.names or None, help=setting.help)


def _schedule(text: str) -> str | tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text[:1].isdigit() else text


def main(arguments: Sequence[str] | None = None) -> None:
    """Score a text model with GenEval's six tasks, beside composed scenes of the same prompts."""
    parser = argparse.ArgumentParser(prog="experiments.garden evaluate-text", description=main.__doc__)
    parser.add_argument("--out", "-o", type=Path, required=True, help="Where the images go, in GenEval's layout.")
    parser.add_argument("--detector", type=Path, help="The folder of the detector; without it, only generate.")
    add_set_options(parser, required=False)
    parser.add_argument("--prompts", type=Path, help="GenEval's evaluation_metadata.jsonl; default: held-out prompts.")
    parser.add_argument("--per-task", type=int, default=60, help="Prompts of each of the six tasks.")
    parser.add_argument("--images", type=int, default=4, help="Images per prompt.")
    parser.add_argument("--batch-size", type=int, default=64, help="Images per batch; tokens do not depend on it.")
    parser.add_argument("--json", type=Path, help="Also write the result to this JSON file.")
    add_sampling_options(parser)
    options = parser.parse_args(arguments)
    require(
        (options.fruits is None) == (options.emoji is None), "the ceiling needs --fruits and --emoji, both or neither"
    )
    require(options.fruits is None or options.detector is not None, "the ceiling needs a detector; give --detector")
    require(
        options.prompts is None or options.fruits is None,
        "the ceiling is of the held-out prompts; leave --fruits or --prompts out",
    )
    held_out_ = [] if options.prompts is not None else held_out_prompts(options.per_task)
    prompts = [q.prompt for q in held_out_] if options.prompts is None else read_prompts(options.prompts)
    settings = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    SamplingDefaults().settings(**settings)  # bad settings fail before the model is loaded
    set_threads()
    pipe = Pipeline.from_pretrained(
        options.model, device=options.device, dtype=options.precision, engine=options.engine
    )
    require(pipe.prompts is not None, f"{options.model} takes classes; expected a model that takes prompts")
    paths = generate(
        pipe,
        prompts,
        options.out,
        images=options.images,
        seed=options.seed,
        batch_size=options.batch_size,
        **settings,
    )
    log.info("%d images in %s/", len(paths), options.out)
    if options.detector is None:
        return
    detector = Detector.load(options.detector, device=pipe.model.device)
    report: dict[str, Any] = {"score": score(prompts, read_pixels(paths, SIZE), detector, images=options.images)}
    if options.fruits is not None:
        composer = Composer(options.fruits, options.emoji)
        report["ceiling"] = ceiling(held_out_, composer, detector, images=options.images)
    log.info("%s", table(report))
    if options.json is not None:
        about = {"model": options.model, "detector": str(options.detector), "prompts": len(prompts)}
        about |= {"images": options.images, "seed": options.seed, "settings": settings}
        write_json(options.json, about | report)
        log.info("wrote %s", options.json)
