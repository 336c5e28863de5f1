"""The paper's ablations on `garden`: steps, attention, orders, schedules and guidance, each measured on 5,000 images.

    python benchmarks/ablations.py --inception weights/inception.safetensors --minutes 9

Every finished measurement is a line in --out; run it again to go on. `ablation_report.py` makes tables and figures of
the lines. Samples have the class frequencies of the training split, which is what FID compares them with.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ablation_report import (
    BASELINES,
    FEW_STEPS,
    FINAL,
    ORDER_STEPS,
    SEARCH,
    STEPS,
    lowest,
    matching,
)

from arpg import Pipeline
from arpg.config import ORDERS, SCHEDULES, SamplingSettings
from arpg.data.images import concatenate, open_images
from arpg.data.pixels import eval_pixels
from arpg.evaluation.classifier import Classifier, accuracy, train_classifier
from arpg.evaluation.features import Features, collect
from arpg.evaluation.image_source import from_array
from arpg.evaluation.inception import Inception
from arpg.evaluation.measure import CHUNK, Judge, Sampled, generate_features, measure, quick_fid
from arpg.evaluation.results import Line, Results
from arpg.evaluation.sampling import fingerprint, labels_like
from arpg.files import write_whole
from arpg.image import Pixels, adm_crop, to_images, to_uint8

log = logging.getLogger("ablations")

DOMAINS = ("fruits", "flowers")
SIZE = 96
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
    took: dict[int, float] = field(default_factory=dict)  # seconds of the slowest measurement of so many images

    def line(self, settings: SamplingSettings, num: int) -> Line:
        """A final measurement has all numbers, one of the search only the FID."""
        found = self.results.find(settings, num)
        if found is not None:
            return found
        if time.monotonic() + 1.2 * self.took.get(num, 0.0) > self.deadline:
            raise OutOfTimeError
        began = time.monotonic()
        labels = labels_like(self.counts, max(8, round(self.share * num)))
        sampled = generate_features(self.pipe, settings, self.judge, labels=labels, batch_size=self.batch_size)
        line = measure(sampled, self.judge) if num == FINAL else {"fid": round(quick_fid(sampled, self.judge), 4)}
        seconds = time.monotonic() - began
        self.took[num] = max(seconds, self.took.get(num, 0.0))
        kept = self.results.add(settings, num, {**line, "seconds": round(seconds, 2)})
        shown = {name: value for name, value in line.items() if " " not in name}
        log.info("%5d images in %5.1f s  %s  %s", len(labels), seconds, _name(settings), shown)
        return kept

    def best(self, settings: SamplingSettings, start: float) -> SamplingSettings:
        """The settings with the guidance that has the least FID: a walk downhill over SCALES from `start`."""
        place = SCALES.index(min(SCALES, key=lambda scale: abs(scale - start)))

        def fid(i: int) -> float:
            found: float = self.line(dataclasses.replace(settings, guidance=SCALES[i]), SEARCH)["fid"]
            return found

        while True:
            around = [i for i in (place, place + 1, place - 1) if 0 <= i < len(SCALES)]
            best = min(around, key=fid)
            if best == place:
                return dataclasses.replace(settings, guidance=SCALES[place])
            place = best


def experiments(bench: Bench) -> Iterator[Callable[[], object]]:
    """What is to be measured, the most important first."""
    base = bench.pipe.sampling.settings(steps=24)
    scale = {"block": 3.0, "causal": 3.0}

    def steps_and_attention(steps: int, attention: str) -> None:
        settings = bench.best(dataclasses.replace(base, steps=steps, attention=attention), scale[attention])
        scale[attention] = settings.guidance  # the next number of steps starts there
        bench.line(settings, FINAL)

    def with_best_of_random(**changes: Any) -> None:
        found = lowest(matching(bench.results.lines, SEARCH, steps=changes["steps"]))
        bench.line(dataclasses.replace(base, guidance=found["settings"]["guidance"], **changes), FINAL)

    def searched(start: float, **changes: Any) -> None:
        bench.line(bench.best(dataclasses.replace(base, **changes), start), FINAL)

    for steps in STEPS:
        for attention in ("block", "causal"):
            yield lambda steps=steps, attention=attention: steps_and_attention(steps, attention)  # type: ignore[misc]
    for steps in ORDER_STEPS:
        for order in ORDERS:
            yield lambda steps=steps, order=order: with_best_of_random(steps=steps, order=order)  # type: ignore[misc]
    for steps in FEW_STEPS:
        for schedule in SCHEDULES[1:]:
            yield lambda steps=steps, schedule=schedule: searched(3.0, steps=steps, schedule=schedule)  # type: ignore[misc]
        yield lambda steps=steps: searched(2.0, steps=steps, guidance_schedule="constant")  # type: ignore[misc]
        yield lambda steps=steps: bench.line(  # type: ignore[misc]
            dataclasses.replace(base, steps=steps, guidance_schedule="none", guidance=1.0), FINAL
        )


def read_split(data: Path, split: str, limit: int | None) -> tuple[Pixels, Any]:
    """The centre crops of a split and their labels; of a limited number, evenly from all classes."""
    images = concatenate([open_images(f"{data}/{domain}.zip/{domain}/{split}") for domain in DOMAINS])
    if limit is None or limit >= len(images):
        return eval_pixels(images, SIZE), np.asarray(images.labels)
    chosen = np.linspace(0, len(images) - 1, limit).astype(int).tolist()
    pixels = np.stack([np.asarray(adm_crop(images.read(i), SIZE)) for i in chosen])
    return pixels, np.asarray(images.labels)[chosen]


def measure_baselines(
    judge: Judge, pipe: Pipeline, train: Pixels, test: Pixels, *, labels: tuple[Any, Any], num: int
) -> dict[str, Any]:
    """What is possible: real images that the model has not seen, and training images through the tokenizer."""
    chosen = np.linspace(0, len(train) - 1, min(num, len(train))).astype(int)  # all classes in their proportion
    again = _reconstruct(pipe, train[chosen])
    found = {}
    for name, pixels, classes in (
        ("real test images", test, labels[1]),
        ("training images through the tokenizer", again, labels[0][chosen]),
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
    folder: Path | None, pixels: Pixels, labels: Any, *, num_classes: int, steps: int, device: torch.device
) -> Classifier:
    if folder is not None and folder.is_dir():
        return Classifier.load(folder, device=device)
    counts = np.bincount(labels, minlength=num_classes)
    weights = 1.0 / np.sqrt(counts[labels])
    began = time.monotonic()
    classifier = train_classifier(pixels, labels, num_classes=num_classes, steps=steps, device=device, weights=weights)
    log.info("classifier trained in %.0f s", time.monotonic() - began)
    if folder is not None:
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="garden")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--inception", type=Path, help="Inception weights; none: those of the extra eval.")
    parser.add_argument("--classifier", type=Path, help="Its folder; it is trained and put there if there is none.")
    parser.add_argument("--classifier-steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=1250)
    parser.add_argument("--minutes", type=float, default=1e9, help="No measurement is begun that would end later.")
    parser.add_argument("--limit", type=int, help="So many real images per split and samples (a trial run).")
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"), help="For the reference features.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ablations"))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    deadline = time.monotonic() + 60 * options.minutes

    pipe = Pipeline.from_pretrained(options.model)
    device = pipe.model.device
    inception = Inception.load(options.inception, device=device)
    train, train_labels = read_split(options.data, "train", options.limit)
    test, test_labels = read_split(options.data, "test", options.limit)
    log.info("%d training and %d test images", len(train), len(test))
    classifier = _classifier(
        options.classifier,
        train,
        train_labels,
        num_classes=len(pipe.classes),
        steps=options.classifier_steps,
        device=device,
    )
    name = f"reference-{len(train)}-{inception.identity[:12]}.npz"
    judge = Judge(inception, _reference(inception, train, options.work / name), classifier)
    about = {
        "benchmark": "ablations",
        "model": options.model,
        "weights": fingerprint(pipe),
        "inception": inception.source,
        "reference": f"training split, {len(train)} images",
        "seed": 0,
        "batch size": options.batch_size,
        "precision": str(pipe.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    results = Results(options.out, about)
    share = min(1.0, (options.limit or FINAL) / FINAL)
    counts = np.bincount(train_labels, minlength=len(pipe.classes))
    bench = Bench(pipe, judge, results, counts, options.batch_size, deadline, share)
    path = options.out / BASELINES
    if not path.exists():
        labels = (train_labels, test_labels)
        found = measure_baselines(judge, pipe, train, test, labels=labels, num=round(share * FINAL))
        write_whole(path, lambda temporary: temporary.write_text(json.dumps(found, indent=1) + "\n"))
    try:
        for experiment in experiments(bench):
            experiment()
    except OutOfTimeError:
        log.info("no time is left; run it again to go on")
    else:
        log.info("everything is measured")


if __name__ == "__main__":
    main()
