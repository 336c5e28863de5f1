"""Whether a model follows a condition: edges and depth of what it draws, against its own ceiling and two baselines.

    FOLDER/about.json              what was drawn by whom
    FOLDER/KIND/condition/0000.png   the conditions
    FOLDER/KIND/ROW/0000.png         what was drawn (or found) for each; what is there is not drawn again

Shapes: n images, B batch, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arpg.data.images import ImageSet
from arpg.evaluation.classifier import Classifier, predict
from arpg.evaluation.control_images import (
    CHUNK,
    NO_CLASS,
    Generate,
    Grey,
    Labels,
    Told,
    choose_evenly,
    draw,
    keep,
    nearest_depth,
    nearest_image,
    read_images,
)
from arpg.evaluation.depth_judge import DepthJudge, rmse
from arpg.evaluation.depth_training import DepthScenes, to_depth
from arpg.evaluation.detector_scenes import tokenized
from arpg.evaluation.edges import Edges, agreement, edge_maps
from arpg.evaluation.features import Features, collect, from_array
from arpg.evaluation.inception import Inception
from arpg.evaluation.metric_report import evaluate
from arpg.evaluation.metrics import bootstrap, wilson
from arpg.image import Pixels
from arpg.tokenizer import VQTokenizer

CONTROL, PLAIN, BASE = "control", "no control", "base model"
NEAREST, CEILING = "nearest in training", "tokenizer"
Progress = Callable[[str, int, int], None]  # what, done, of how many
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Judges:
    """What images are measured with. Without a classifier there is no accuracy, without Inception no FID."""

    classifier: Classifier | None = None
    inception: Inception | None = None
    reference: Features | None = None


def edge_score(
    generate: Generate,
    images: ImageSet,
    class_ids: Sequence[int],
    folder: Path,
    *,
    size: int,
    num: int = 500,
    training: ImageSet | None = None,
    tokenizer: VQTokenizer | None = None,
    judges: Judges | None = None,
    base: Generate | None = None,
    seed: int = 0,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Row]:
    """Draw the edges of `num` images again, and measure how far the edges of what is drawn agree with them.

    `class_ids`: the model's class of each class of the set. `base`: another model, which draws the same classes without
    control. Rows: control, no control, that of `base`, the nearest training image, the tokenizer's reconstruction.
    """
    numbers = choose_evenly(images.labels, num)
    labels = np.array([class_ids[images.labels[i]] for i in numbers], np.int64)
    real = read_images(images, numbers, size)
    wanted = edge_maps(real)
    conditions = wanted.astype(np.uint8) * 255
    place = folder / "canny"
    keep(conditions, place / "condition")
    rows: dict[str, Pixels] = {}
    asked = {CONTROL: (generate, 1.0), PLAIN: (generate, 0.0)}
    if base is not None:
        asked[BASE] = (base, 0.0)
    for name, (who, strength) in asked.items():
        told = _told(progress, name)
        rows[name] = draw(
            who,
            conditions,
            labels,
            place / name,
            kind="canny",
            strength=strength,
            seed=seed,
            batch_size=batch_size,
            progress=told,
        )
    if training is not None:
        rows[NEAREST] = nearest_image(
            wanted, training, place / NEAREST, device=device, progress=_told(progress, NEAREST)
        )
    if tokenizer is not None:
        rows[CEILING] = tokenized(real, tokenizer)
    return {name: judge_edges(pixels, wanted, labels, judges) for name, pixels in rows.items()}


def judge_edges(pixels_nHW3: Pixels, wanted_nHW: Edges, labels_n: Labels, judges: Judges | None = None) -> Row:
    """F1, precision and recall of edges as means over images; accuracy and FID where there is something to judge by."""
    found = agreement(wanted_nHW, edge_maps(pixels_nHW3))
    f1 = float(found.f1_n.mean())
    row: Row = {"f1": f1, "f1 interval": bootstrap(f1, found.f1_n)}
    row |= {"precision": float(found.precision_n.mean()), "recall": float(found.recall_n.mean())}
    judges = judges or Judges()
    if judges.classifier is not None:
        hits = int((predict(judges.classifier, pixels_nHW3) == labels_n).sum())
        row |= {"accuracy": hits / len(labels_n), "accuracy interval": wilson(hits, len(labels_n))}
    if judges.inception is not None and judges.reference is not None:
        features = collect(judges.inception, from_array(pixels_nHW3).batches(CHUNK))
        fid = evaluate(features, judges.reference, metrics=["fid"], device=judges.inception.device)["fid"]
        row |= {"fid": fid["value"]} | ({"fid interval": fid["interval"]} if "interval" in fid else {})
    return row | {"n": len(pixels_nHW3)}


def depth_score(
    generate: Generate,
    scenes: DepthScenes,
    judge: DepthJudge,
    folder: Path,
    *,
    training: DepthScenes | None = None,
    tokenizer: VQTokenizer | None = None,
    seed: int = 0,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> dict[str, Row]:
    """Draw from the depth of scenes, without a class, and measure how far the depth of what is drawn is from it.

    Rows: control, no control, the training scene whose depth is nearest, the tokenizer's reconstruction, and the scenes
    themselves: the judge's own error.
    """
    place = folder / "depth"
    keep(scenes.near_nHW, place / "condition")
    none = np.full(len(scenes), NO_CLASS, np.int64)
    rows: dict[str, Pixels] = {}
    for name, strength in ((CONTROL, 1.0), (PLAIN, 0.0)):
        rows[name] = draw(
            generate,
            scenes.near_nHW,
            none,
            place / name,
            kind="depth",
            strength=strength,
            seed=seed,
            batch_size=batch_size,
            progress=_told(progress, f"depth, {name}"),
        )
    if training is not None:
        rows[NEAREST] = training.pixels_nHW3[nearest_depth(scenes.near_nHW, training.near_nHW)]
    if tokenizer is not None:
        rows[CEILING] = tokenized(scenes.pixels_nHW3, tokenizer)
    rows["scenes themselves"] = scenes.pixels_nHW3
    return {name: judge_depth(pixels, scenes.near_nHW, judge) for name, pixels in rows.items()}


def judge_depth(pixels_nHW3: Pixels, near_nHW: Grey, judge: DepthJudge) -> Row:
    """The mean over images of the RMSE between the condition and what the judge sees; depth is 0 to 1."""
    errors = rmse(judge.estimate(pixels_nHW3), to_depth(near_nHW))
    value = float(errors.mean())
    return {"rmse": value, "rmse interval": bootstrap(value, errors), "n": len(errors)}


def _told(progress: Progress | None, what: str) -> Told:
    return None if progress is None else (lambda done, total: progress(what, done, total))


def follows_nothing(generate: Generate, plain: Generate, *, size: int, kind: str, num: int = 8) -> bool:
    """Whether at strength 0 every pixel of a few images is that of `plain`, which draws without control."""
    conditions = np.zeros((num, size, size), np.uint8)
    conditions[:, size // 4 : size // 2] = 255
    none = np.full(num, NO_CLASS, np.int64)
    ours, theirs = (draws(conditions, none, kind=kind, seeds=range(num), strength=0.0) for draws in (generate, plain))
    return np.array_equal(ours, theirs)


def compare(report: Mapping[str, Mapping[str, Row]]) -> dict[str, float]:
    """Control against the other rows: how many times their F1, what part of their RMSE, how much more accurate."""
    found: dict[str, float] = {}
    for kind, metric in (("canny", "f1"), ("depth", "rmse")):
        rows = report.get(kind, {})
        for other in (PLAIN, NEAREST, CEILING):
            if other in rows and rows[other][metric] > 0:
                found[f"{metric}, control by {other}"] = rows[CONTROL][metric] / rows[other][metric]
    rows = report.get("canny", {})
    for other in (PLAIN, BASE):
        if "accuracy" in rows.get(other, {}):
            found[f"accuracy, control less {other}"] = rows[CONTROL]["accuracy"] - rows[other]["accuracy"]
    return found


COLUMNS = {"f1": ("F1", 3), "precision": ("precision", 3), "recall": ("recall", 3), "accuracy": ("accuracy", 3)}
COLUMNS |= {"fid": ("FID", 2), "rmse": ("RMSE", 4)}


def table(rows: Mapping[str, Row], *, title: str = "") -> str:
    """One line per row; half the width of an interval stands behind its number."""
    names = [name for name in COLUMNS if any(name in row for row in rows.values())]
    lines = [f"{title:<22}" + "".join(f"{COLUMNS[name][0]:>17}" for name in names) + f"{'images':>8}"]
    for title_, row in rows.items():
        cells = []
        for name in names:
            text = f"{row[name]:.{COLUMNS[name][1]}f}" if name in row else "-"
            if f"{name} interval" in row:
                low, high = row[f"{name} interval"]
                text += f" ± {(high - low) / 2:.{COLUMNS[name][1]}f}"
            cells.append(f"{text:>17}")
        lines.append(f"{title_:<22}" + "".join(cells) + f"{row['n']:>8}")
    return "\n".join(lines)
