"""The judges of `garden_control.py` and its score: what `arpg evaluate-control` measures, without a command line."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arpg import Pipeline
from arpg.classes import ClassNames
from arpg.data.crops import center_crops
from arpg.data.images import ImageSet
from arpg.evaluation.classifier import Classifier, accuracy, train_classifier
from arpg.evaluation.control_pipeline import plain, side, steered
from arpg.evaluation.control_score import Judges, compare, depth_score, edge_score, follows_nothing, table
from arpg.evaluation.depth_judge import DepthJudge, DepthJudgeConfig
from arpg.evaluation.depth_training import depth_error, draw_depth_scenes, train_depth_judge
from arpg.evaluation.detector_scenes import half_tokenized

log = logging.getLogger("control-scoring")
SIZE = 96
TRAINING_SCENES = 5000  # among which the nearest is looked for, as `arpg evaluate-control` does
Sets = tuple[str, str]


def make_depth_judge(
    sets: Sets, folder: Path, *, num: int, steps: int, processes: int, device: torch.device, tokenizer: str = "garden"
) -> None:
    """As `arpg train-depth` does; what it is told is kept beside it."""
    scenes = draw_depth_scenes(sets, num=num, seed=0, processes=processes)
    mixed = half_tokenized(scenes.pixels_nHW3, tokenizer, device=device)
    scenes = dataclasses.replace(scenes, pixels_nHW3=mixed)
    batch = 256 if device.type == "cuda" else 8
    judge = train_depth_judge(scenes, DepthJudgeConfig(), steps=steps, batch_size=batch, device=device, progress=_tell)
    error = depth_error(judge, draw_depth_scenes(sets, num=max(8, min(1000, num // 30)), seed=1))
    log.info("the judge of depth: RMSE %.4f, seeing nothing %.4f", error["rmse"], error["blank"])
    judge.save(folder)
    (folder / "error.json").write_text(json.dumps(error, indent=1) + "\n")


def make_classifier(
    train: ImageSet, test: ImageSet, names: ClassNames, folder: Path, *, steps: int, device: torch.device
) -> None:
    """The judge of classes, as `benchmarks/garden.py` trains it. `names`: the model's classes."""
    pixels, labels = center_crops(train, SIZE), ids_of(train, names)
    counts = np.bincount(labels, minlength=len(names))
    classifier = train_classifier(
        pixels,
        labels,
        num_classes=len(names),
        steps=steps,
        device=device,
        batch_size=256 if device.type == "cuda" else 8,
        weights=1.0 / np.sqrt(counts[labels]),
        progress=_tell,
    )
    real = accuracy(classifier, center_crops(test, SIZE), ids_of(test, names))["top1"]
    log.info("the classifier is right about %.4f of the real test images", real)
    classifier.save(folder)
    (folder / "accuracy.json").write_text(json.dumps({"real test images": float(real)}, indent=1) + "\n")


def ids_of(images: ImageSet, names: ClassNames) -> Any:
    """The model's class of each image."""
    index = [names.find(name) for name in images.classes]
    return np.array([index[label] for label in images.labels])


def score(
    model: Path,
    folder: Path,
    *,
    images: tuple[ImageSet, ImageSet],
    sets: tuple[Sets, Sets],
    judges: tuple[Path, Path],
    num: int,
    processes: int,
    device: torch.device,
) -> dict[str, Any]:
    """Images and sets: of the test, of training. Judges: of classes, of depth. What lies in the folder is not drawn
    again.
    """
    pipe = Pipeline.from_pretrained(model, device=device, dtype="float32")
    base = Pipeline.from_pretrained("garden", device=device, dtype="float32")
    generate, size, batch = steered(pipe, {}), side(pipe), 250 if device.type == "cuda" else 8
    classifier, judge = Classifier.load(judges[0], device=device), DepthJudge.load(judges[1], device=device)
    report: dict[str, Any] = {"images": num}
    report["canny"] = edge_score(
        generate,
        images[0],
        [pipe.classes.find(name) for name in images[0].classes],
        folder,
        size=size,
        num=num,
        training=images[1],
        tokenizer=pipe.tokenizer,
        judges=Judges(classifier),
        base=plain(base, {}),
        batch_size=batch,
        device=device,
    )
    log.info("\n%s", table(report["canny"], title="canny"))
    others = TRAINING_SCENES if num >= 500 else 10 * num
    tests = draw_depth_scenes(sets[0], num=num, seed=2026, size=size)
    training = draw_depth_scenes(sets[1], num=others, seed=0, size=size, processes=processes if others > 1000 else 0)
    report["depth judge"] = depth_error(judge, tests)
    report["depth"] = depth_score(
        generate, tests, judge, folder, training=training, tokenizer=pipe.tokenizer, batch_size=batch
    )
    log.info("\n%s", table(report["depth"], title="depth"))
    report["strength 0 is no control"] = follows_nothing(generate, plain(pipe, {}), size=size, kind="canny")
    report["compared"] = compare(report)
    log.info("%s", json.dumps(report["compared"], indent=1))
    return report


def _tell(step: int, loss: float) -> None:
    if step % 500 == 0:
        log.info("step %d, loss %.3f", step, loss)
