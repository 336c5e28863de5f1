"""The paper's ablations on `garden`: steps, attention, orders, schedules and guidance, each measured on 5,000 images.

    python benchmarks/ablations.py --inception weights/inception.safetensors --minutes 9
    python benchmarks/ablations.py --parts speed

Every finished measurement is a line in --out; run it again to go on. `ablation_report.py` makes tables and figures of
the lines. Samples have the class frequencies of the training split, which is what FID compares them with. Quality can
be shared: processes with --share 0/3, 1/3 and 2/3 work at once. Speed is for a device that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ablation_lines import (
    BASELINES,
    FEW_STEPS,
    FINAL,
    ORDER_STEPS,
    SEARCH,
    STEPS,
    lowest,
    matching,
)
from ablation_speed import measure_speed

from arpg import Pipeline
from arpg.data.crops import center_crops
from arpg.data.images import concatenate, open_images
from arpg.evaluation.classifier import Classifier, accuracy, train_classifier
from arpg.evaluation.features import Features, collect
from arpg.evaluation.image_source import from_array
from arpg.evaluation.inception import Inception
from arpg.evaluation.measure import CHUNK, Judge, Sampled, generate_features, measure, quick_fid
from arpg.evaluation.results import Line, Results, plain
from arpg.evaluation.sampling import fingerprint, labels_like
from arpg.files import write_whole
from arpg.image import Pixels, adm_crop, to_images, to_uint8
from arpg.settings import ORDERS, SCHEDULES, SamplingSettings

log = logging.getLogger("ablations")

DOMAINS = ("fruits", "flowers")
SIZE = 96
LOOK_AGAIN = 0.5  # seconds between looks for what the first process prepares
SCALES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


class OutOfTimeError(Exception):
    """There is no time left for the next measurement; all others are kept."""


@dataclass
class Bench:
    """Measures settings that were not measured yet, until the time is over."""

    pipe: Pipeline
    judge: Judge
    results: Results
    counts: Any  # of each class in the training split
    batch_size: int
    deadline: float
    share: float = 1.0  # of the images of a measurement (trial runs)
    took: dict[int, tuple[float, int]] = field(default_factory=dict)  # images: the most seconds and their steps

    def line(self, settings: SamplingSettings, num: int) -> Line:
        """A final measurement has all numbers, one of the search only the FID."""
        found = self.results.find(settings, num)
        if found is not None:
            return found
        slowest, steps = self.took.get(num, (0.0, settings.steps))
        if time.monotonic() + 1.2 * slowest * max(1.0, settings.steps / steps) > self.deadline:
            raise OutOfTimeError
        began = time.monotonic()
        labels = labels_like(self.counts, max(8, round(self.share * num)))
        sampled = generate_features(self.pipe, settings, self.judge, labels=labels, batch_size=self.batch_size)
        line = measure(sampled, self.judge) if num == FINAL else {"fid": round(quick_fid(sampled, self.judge), 4)}
        line.pop("images/s", None)  # judges, and perhaps other processes, were at work meanwhile
        seconds = time.monotonic() - began
        self.took[num] = max((seconds, settings.steps), self.took.get(num, (0.0, 0)))
        kept = self.results.add(settings, num, {**line, "seconds": round(seconds, 2)})
        shown = {name: value for name, value in line.items() if " " not in name}
        log.info("%5d images in %5.1f s  %s  %s", len(labels), seconds, _name(settings), shown)
        return kept

    def best(self, settings: SamplingSettings, start: float) -> SamplingSettings:
        """The settings with the guidance that has the least FID: a walk downhill over SCALES from `start`.

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
    """What is to be measured, the most important first: the model as it comes, then what the paper asks."""
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


def read_split(data: Path, split: str, limit: int | None) -> tuple[Pixels, Any]:
    """The centre crops of a split and their labels; of a limited number, evenly from all classes."""
    images = concatenate([open_images(f"{data}/{domain}.zip/{domain}/{split}") for domain in DOMAINS])
    if limit is None or limit >= len(images):
        return center_crops(images, SIZE), np.asarray(images.labels)
    chosen = np.linspace(0, len(images) - 1, limit).astype(int).tolist()
    pixels = np.stack([np.asarray(adm_crop(images.read(i), SIZE)) for i in chosen])
    return pixels, np.asarray(images.labels)[chosen]


def measure_baselines(
    judge: Judge, pipe: Pipeline, train: Pixels, test: Pixels, *, labels: tuple[Any, Any], num: int
) -> dict[str, Any]:
    """What is possible: real images that the model has not seen, and training images through the tokenizer.

    As many of these as there are samples, so that the numbers compare; and all of them, which is the tokenizer's rFID.
    """
    chosen = np.linspace(0, len(train) - 1, min(num, len(train))).astype(int)  # all classes in their proportion
    again = _reconstruct(pipe, train)
    found = {}
    for name, pixels, classes in (
        ("real test images", test, labels[1]),
        ("training images through the tokenizer", again[chosen], labels[0][chosen]),
        ("all of them (rFID)", again, labels[0]),
    ):
        features = collect(judge.inception, from_array(pixels).batches(CHUNK))
        seen = None if judge.classifier is None else accuracy(judge.classifier, pixels, classes)["top1"]
        line = measure(Sampled(features, seen, 0.0), judge)
        found[name] = {"num": len(pixels), **{key: value for key, value in line.items() if key != "images/s"}}
        log.info("%s: %s", name, found[name])
    return found


@torch.no_grad()
def _reconstruct(pipe: Pipeline, pixels: Pixels) -> Pixels:
    tokenizer = pipe.tokenizer
    parts = []
    for start in range(0, len(pixels), CHUNK):
        ids_BN = tokenizer.encode(to_images(pixels[start : start + CHUNK], tokenizer.device))
        parts.append(to_uint8(tokenizer.decode(ids_BN, pipe.model.config.grid)).cpu().numpy())
    return np.concatenate(parts)


def _classifier(
    folder: Path, pixels: Pixels, labels: Any, *, num_classes: int, steps: int, device: torch.device
) -> Classifier:
    if folder.is_dir():
        return Classifier.load(folder, device=device)
    counts = np.bincount(labels, minlength=num_classes)
    weights = 1.0 / np.sqrt(counts[labels])
    began = time.monotonic()
    classifier = train_classifier(pixels, labels, num_classes=num_classes, steps=steps, device=device, weights=weights)
    log.info("classifier trained in %.0f s", time.monotonic() - began)
    classifier.save(folder)
    return classifier


def _reference(inception: Inception, pixels: Pixels, path: Path) -> Features:
    if path.exists():
        return Features.load(path)
    features = collect(inception, from_array(pixels).batches(CHUNK))
    features.save(path)
    return features


def _name(settings: SamplingSettings) -> str:
    parts = (settings.attention, settings.order, settings.schedule, settings.guidance_schedule)
    return f"{settings.steps:3d} steps, guidance {settings.guidance:g}, {', '.join(map(str, parts))}"


def measure_quality(pipe: Pipeline, options: argparse.Namespace, *, deadline: float) -> bool:
    """Whether everything of this share is measured. The first share prepares what the others need."""
    process, processes = options.share
    path = options.out / BASELINES
    while process and not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_AGAIN)
    device = pipe.model.device
    inception = Inception.load(options.inception, device=device)
    train, train_labels = read_split(options.data, "train", options.limit)
    test, test_labels = read_split(options.data, "test", options.limit)
    log.info("%d training and %d test images", len(train), len(test))
    judged_by = options.classifier or options.work / f"classifier-{len(train)}"
    num_classes = len(pipe.classes)
    classifier = _classifier(
        judged_by, train, train_labels, num_classes=num_classes, steps=options.classifier_steps, device=device
    )
    name = f"reference-{len(train)}-{inception.identity[:12]}.npz"
    judge = Judge(inception, _reference(inception, train, options.work / name), classifier)
    about = {
        "benchmark": "ablations",
        "model": options.model,
        "weights": fingerprint(pipe),
        "defaults": plain(pipe.sampling.settings()),
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
    bench = Bench(pipe, judge, results, counts, options.batch_size, deadline, share)
    if not path.exists():
        labels = (train_labels, test_labels)
        found = measure_baselines(judge, pipe, train, test, labels=labels, num=round(share * FINAL))
        write_whole(path, lambda temporary: temporary.write_text(json.dumps(found, indent=1) + "\n"))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="garden")
    parser.add_argument("--parts", type=_parts, default=("speed", "quality"), help="quality, speed or quality,speed")
    parser.add_argument("--share", type=_share, default=(0, 1), help="Like 0/3: this is process 0 of 3 (quality)")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--inception", type=Path, help="Inception weights; none: those of the extra eval.")
    parser.add_argument("--classifier", type=Path, help="Its folder (none: in --work); trained if there is none.")
    parser.add_argument("--classifier-steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--speed-batch", type=int, default=512, help="Images of a timed batch.")
    parser.add_argument("--speed-repeats", type=int, default=2, help="Timed batches per setting.")
    parser.add_argument("--minutes", type=float, default=1e9, help="No measurement is begun that would end later.")
    parser.add_argument("--limit", type=int, help="So many real images per split and samples (a trial run).")
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"), help="Reference features, classifier.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ablations"))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
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


if __name__ == "__main__":
    main()
