r"""The best sampling settings of a model, searched by halves: few samples for many settings, more for the better ones.

    python -m experiments.meadow search-settings --model runs/meadow/model --inception weights/inception.safetensors \
        --steps 12 24 --guidance 2 3 4 6 --order random halton --schedule arccos --out results/settings

For each number of steps, all combinations are measured with FID on `--first` samples against the training split; the
better half goes on with twice as many, until one is left or `--last` samples are reached. The seeds are not those of
the model card, so that what is reported was not what was chosen by. Lines are those of a sweep: an interrupted search
continues. `best.json` has the best settings and all that were searched.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from arpg import Pipeline
from arpg.checkpoint import FolderConfig, write_folder
from arpg.errors import require
from arpg.evaluation.inception import Inception
from arpg.evaluation.sample import count_classes, json_settings, labels_like
from arpg.evaluation.sweep import Scorers, combinations, sweep
from arpg.files import write_json
from arpg.hub import resolve
from arpg.settings import SamplingDefaults, SamplingSettings
from experiments.photo_measures import photo_parser
from experiments.photos import photo_set

log = logging.getLogger("experiments")

AXES = ("guidance", "guidance_schedule", "order", "schedule", "temperature", "top_p")  # what is searched

GuidanceTable = tuple[tuple[int, float], ...]  # (steps, guidance scale)
T = TypeVar("T")  # settings, or whatever is measured with a number of samples


def halving(
    settings: Sequence[T], measure: Callable[[T, int], float], *, first: int, last: int
) -> list[tuple[T, float, int]]:
    """Return the settings of every round with their FID and number of samples; the best of the last round comes first.

    Rounds have `first`, twice as many, ... samples; the better half (rounded up) of each goes on.
    """
    require(1 <= first <= last, f"first is {first} and last {last}; expected 1 <= first <= last")
    left, num, rounds = list(settings), first, []
    while True:
        found = sorted(((measure(each, num), i) for i, each in enumerate(left)))
        rounds.append([(left[i], fid, num) for fid, i in found])
        left = [left[i] for _, i in found[: -(-len(found) // 2)]]
        if len(found) == 1 or 2 * num > last:
            return [line for each in reversed(rounds) for line in each]
        num *= 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Search the best sampling settings for each number of steps."""
    parser = photo_parser("search-settings", main.__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[12, 24])
    parser.add_argument("--guidance", type=float, nargs="+", default=[2.0, 3.0, 4.0, 6.0])
    parser.add_argument("--guidance-schedule", nargs="+", default=["linear", "constant"])
    parser.add_argument("--order", nargs="+", default=["random", "halton"])
    parser.add_argument("--schedule", nargs="+", default=["arccos", "linear"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--top-p", type=float, nargs="+", default=[1.0])
    parser.add_argument("--first", type=int, default=1000, help="Samples of the first round.")
    parser.add_argument("--last", type=int, default=4000, help="Samples of the last round.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="Make the best settings the defaults of the model folder.")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    pipe = Pipeline.from_pretrained(options.model, device=options.device)
    photos = photo_set(options.set)
    images = photos.open(options.data, "train", options.limit)
    inception = Inception.load(options.inception, device=pipe.model.device)
    reference = photos.features(options.data, "train", inception, limit=options.limit, folder=options.features)
    scorers = Scorers(inception, dataclasses.replace(reference, pool_MF=None, gain_M=None))  # FID alone
    counts = count_classes(images, pipe.classes)

    def measure(settings: SamplingSettings, num: int) -> float:
        if time.monotonic() > deadline:
            raise TimeoutError
        (line,) = sweep(
            pipe,
            scorers,
            options.out / f"samples-{num}",
            combos=[settings],
            labels=labels_like(counts, num),
            about={"set": options.set, "reference": len(images)},
            seed=options.seed,
            batch_size=options.batch_size,
        )
        log.info("%5d samples  FID %7.3f  %s", num, line["fid"], json_settings(settings))
        return float(line["fid"])

    axes: Mapping[str, Sequence[Any]] = {name: getattr(options, name) for name in AXES}
    best: dict[str, Any] = {}
    try:
        for steps in options.steps:
            combos = combinations(pipe.sampling, {**axes, "steps": [steps]})
            lines = halving(combos, measure, first=options.first, last=options.last)
            searched = [
                {**{name: getattr(settings, name) for name in AXES}, "fid": fid, "samples": num}
                for settings, fid, num in lines
            ]
            settings, fid, num = lines[0]
            best[str(steps)] = {"settings": json_settings(settings), "fid": fid, "samples": num, "searched": searched}
            write_json(options.out / "best.json", best)
    except TimeoutError:
        log.info("no time is left; run it again to go on")
    if options.write and len(best) == len(options.steps):
        defaults = recommend({int(steps): found["searched"] for steps, found in best.items()})
        write_folder(resolve(options.model), FolderConfig(sampling=defaults))
        log.info("defaults of %s: %s", options.model, defaults)


def recommend(searched: Mapping[int, Sequence[Mapping[str, Any]]]) -> SamplingDefaults:
    """Return the settings that suit all numbers of steps best, with the guidance scales that are best for each of them.

    The product of the FIDs is least, each with its best scale. Settings count that reached the same, largest possible
    number of samples for every number of steps.
    """
    shared = [name for name in AXES if name != "guidance"]
    for num in sorted({line["samples"] for lines in searched.values() for line in lines}, reverse=True):
        per_steps = []
        for steps in sorted(searched):
            found: dict[tuple[Any, ...], tuple[float, float]] = {}
            for line in searched[steps]:
                key = tuple(line[name] for name in shared)
                if line["samples"] == num:
                    found[key] = min(found.get(key, (math.inf, 0.0)), (line["fid"], line["guidance"]))
            per_steps.append(found)
        if common := set.intersection(*map(set, per_steps)):
            best = min(common, key=lambda key: (math.prod(found[key][0] for found in per_steps), key))
            table = tuple((steps, found[best][1]) for steps, found in zip(sorted(searched), per_steps, strict=True))
            return SamplingDefaults(
                steps=max(searched), guidance_by_steps=shortened(table), **dict(zip(shared, best, strict=True))
            )
    raise AssertionError("the first round measures all settings")


def shortened(table: GuidanceTable) -> GuidanceTable:
    """Leave out the entries of `guidance_by_steps` that follow from the others, by interpolation or as the nearest."""
    left = table
    for entry in table:
        others = tuple(each for each in left if each != entry)
        if others and all(SamplingDefaults(guidance_by_steps=others).guidance_for(n) == scale for n, scale in table):
            left = others
    return left
