"""One measurement: images under some settings, generated and judged on the device, as a flat line of numbers.

Shapes: B batch, H W pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arpg.data.images import ImageSet
from arpg.evaluation.bootstrap import bootstrap
from arpg.evaluation.classifier import Classifier
from arpg.evaluation.features import Features, collect
from arpg.evaluation.frechet import frechet_distance, frechet_influence
from arpg.evaluation.image_source import ImageSource, from_images
from arpg.evaluation.inception import Inception
from arpg.evaluation.report import INTERVAL, evaluate
from arpg.evaluation.sampling import Labels, PixelBatches, Progress
from arpg.image import to_images
from arpg.pipeline import Pipeline
from arpg.settings import SamplingSettings

CHUNK = 250  # images that go through the judges together
METRICS = ("fid", "kid", "precision", "recall")


@dataclass(frozen=True, eq=False)
class Judge:
    """What images are measured with: features, a reference, and a classifier of the model's classes if there is one."""

    inception: Inception
    reference: Features
    classifier: Classifier | None = None


@dataclass(frozen=True, eq=False)
class Sampled:
    """What is left of the images of one measurement."""

    features: Features
    accuracy: float | None  # the share of images that the classifier takes for their class
    rate: float  # images per second, from labels to pixels


def reference_features(
    inception: Inception,
    images: ImageSet,
    size: int,
    *,
    keep: Path | None = None,
    progress: Progress | None = None,
) -> Features:
    """Of the centre crops of real images at the model's size, which are what it was trained to draw.

    In the folder `keep` they are kept under a hash of all the pixels, so that other images are not taken for them.
    """
    source = from_images(images, size=size)
    path = None if keep is None else keep / f"reference-{_digest(source, inception)}.npz"
    if path is not None and path.exists():
        return Features.load(path)
    told = None if progress is None else (lambda done: progress(done, len(images)))
    features = collect(inception, source.batches(CHUNK), progress=told)
    if path is not None:
        features.save(path)
    return features


def _digest(source: ImageSource, inception: Inception) -> str:
    digest = hashlib.sha256(inception.identity.encode())
    for pixels_BHW3 in source.batches(CHUNK):
        digest.update(f"{pixels_BHW3.shape[1:]}".encode())
        digest.update(np.ascontiguousarray(pixels_BHW3).data)
    return digest.hexdigest()[:16]


def generate_features(
    pipe: Pipeline,
    settings: SamplingSettings,
    judge: Judge,
    *,
    labels: Labels,
    seed: int = 0,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> Sampled:
    """Image i has seed `seed + i` and the i-th label. The pixels stay on the device and are not kept."""
    seeds = range(seed, seed + len(labels))
    batches = PixelBatches(pipe, labels, settings, seeds=seeds, batch_size=batch_size)
    predicted: list[Tensor] = []

    def watched() -> Iterator[Tensor]:
        done = 0
        for pixels_BHW3 in batches:
            for chunk in torch.split(pixels_BHW3, CHUNK):
                if judge.classifier is not None:
                    predicted.append(_classify(judge.classifier, chunk))
                yield chunk
            done += len(pixels_BHW3)
            if progress is not None:
                progress(done, len(labels))

    features = collect(judge.inception, watched())
    accuracy = None
    if predicted:
        accuracy = (torch.cat(predicted).cpu() == torch.from_numpy(labels)).double().mean().item()
    return Sampled(features, accuracy, batches.rate)


def quick_fid(sampled: Sampled, judge: Judge) -> float:
    """The number alone, for searches."""
    return frechet_distance(sampled.features.pool.to(judge.inception.device), judge.reference.pool)


def measure(sampled: Sampled, judge: Judge, *, metrics: Sequence[str] = METRICS) -> dict[str, Any]:
    """`{metric: value, metric interval: [low, high], ..., "accuracy", "images/s"}`; without what cannot be had."""
    device = judge.inception.device
    line: dict[str, Any] = {}
    if "fid" in metrics:  # not through `evaluate`, which also estimates the bias and so takes twice as long
        ours, theirs = sampled.features.pool.to(device), judge.reference.pool.to(device)
        line["fid"] = frechet_distance(ours, theirs)
        if sampled.features.n >= INTERVAL and sampled.features.pool_MF is not None:
            influence = frechet_influence(ours, theirs, sampled.features.pool_MF)
            line["fid interval"] = list(bootstrap(line["fid"], influence.cpu().numpy()))
    others = [metric for metric in metrics if metric != "fid" and judge.reference.pool_MF is not None]
    if judge.inception.has_logits:
        others.append("is")
    report = evaluate(sampled.features, judge.reference, metrics=others, device=device) if others else {}
    for metric in others:
        line[metric] = report[metric]["value"]
        if "interval" in report[metric]:
            line[f"{metric} interval"] = list(report[metric]["interval"])
    if sampled.accuracy is not None:
        line["accuracy"] = sampled.accuracy
    line["images/s"] = sampled.rate
    return {key: _short(value) for key, value in line.items()}


@torch.no_grad()
def _classify(classifier: Classifier, pixels_BHW3: Tensor) -> Tensor:
    logits_BK: Tensor = classifier(to_images(pixels_BHW3, classifier.device))
    return logits_BK.argmax(1)


def _short(value: float | list[float]) -> float | list[float]:
    """Five digits: what is measured here has no more."""
    return [float(f"{v:.5g}") for v in value] if isinstance(value, list) else float(f"{value:.5g}")
