"""Sweeps: measure every combination of some settings once, keep the lines, show them as a table and as curves.

FOLDER/
  about.json        what all lines share: the model, the reference, the seed
  results.jsonl     {"num": ..., "settings": {...}, "fid": ..., ...} per line
  results-1.jsonl   the lines of another process, if several work at once: each writes its own file and reads all

Shapes: B batch, H W pixels.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arpg.errors import InputError, require
from arpg.evaluation.classifier import Classifier
from arpg.evaluation.features import CHUNK, Features, collect
from arpg.evaluation.inception import Inception
from arpg.evaluation.metric_report import evaluate
from arpg.evaluation.sample import Labels, PixelBatches, Progress, fingerprint, json_settings
from arpg.figures import new_plot, save_plot
from arpg.files import write_json, write_text
from arpg.image import to_images
from arpg.pipeline import Pipeline
from arpg.settings import SETTINGS, SamplingDefaults, SamplingSettings
from arpg.tables import markdown_table, significant

ABOUT, RESULTS = "about.json", "results.jsonl"
# Every sampling setting can be swept over; steps and guidance vary fastest.
AXES = (*(name for name in SETTINGS if name not in ("steps", "guidance")), "steps", "guidance")
# How each number is shown: its title, its digits, and what it is multiplied by.
NUMBERS = {
    "fid": ("FID", 2, 1),
    "kid": ("KID x 1000", 2, 1000),
    "is": ("IS", 1, 1),
    "precision": ("precision", 3, 1),
    "recall": ("recall", 3, 1),
    "accuracy": ("recognised", 3, 1),
    "images/s": ("images/s", 1, 1),
}

Line = dict[str, Any]


class Results:
    """The lines of a folder. Every line is on disk, whole, before `add` returns."""

    def __init__(self, folder: Path, about: Mapping[str, Any], *, process: int = 0) -> None:
        self.folder = folder
        self.path = folder / (f"results-{process}.jsonl" if process else RESULTS)
        claim_folder(folder, about)
        self.own = _read(self.path)
        self.lines = read_lines(folder)

    def find(self, settings: SamplingSettings, num: int) -> Line | None:
        """Return the line of these settings, whichever process measured it."""
        key = json_settings(settings)
        default = json_settings(SamplingSettings())  # of a setting that did not exist yet when a line was written
        self.lines = read_lines(self.folder)
        return next((line for line in self.lines if default | line["settings"] == key and line["num"] == num), None)

    def add(self, settings: SamplingSettings, num: int, line: Mapping[str, Any]) -> Line:
        """Write a line, and return it."""
        entry = {"num": num, "settings": json_settings(settings), **line}
        self.own.append(entry)
        write_text(self.path, "".join(json.dumps(each) + "\n" for each in self.own))
        self.lines = read_lines(self.folder)
        return entry


def claim_folder(folder: Path, about: Mapping[str, Any]) -> None:
    """Write `about` into `folder`, or raise an `InputError` where it holds results of something else."""
    wanted = json.loads(json.dumps(about))
    path = folder / ABOUT
    if path.exists():
        found = read_about(folder)
        other = [f"{key} {found.get(key)!r}, not {wanted[key]!r}" for key in wanted if found.get(key) != wanted[key]]
        require(not other, f"{folder} holds results of something else ({'; '.join(other)}); choose another folder")
        return
    write_json(path, wanted)


def read_about(folder: Path) -> dict[str, Any]:
    """Read what all lines of a folder share."""
    return _parse(folder / ABOUT, (folder / ABOUT).read_text(encoding="utf-8"))


def read_lines(folder: Path) -> list[Line]:
    """Read the lines of all processes."""
    return [line for path in (folder / RESULTS, *sorted(folder.glob("results-*.jsonl"))) for line in _read(path)]


def _read(path: Path) -> list[Line]:
    if not path.exists():
        return []
    return [_parse(path, line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); repair or delete it") from None
    require(isinstance(found, dict), f"{path} holds {text[:40]!r}; expected JSON objects")
    return dict(found)


@dataclass(frozen=True, eq=False)
class Scorers:
    """The networks and the reference that a measurement needs; without a classifier it has no class accuracy."""

    inception: Inception
    reference: Features
    classifier: Classifier | None = None


@dataclass(frozen=True, eq=False)
class SampleStats:
    """The features, class accuracy and speed of the images of one measurement; the pixels are not kept."""

    features: Features
    accuracy: float | None  # the share of images that the classifier takes for their class
    rate: float  # images per second, from labels to pixels


def generate_features(
    pipe: Pipeline,
    settings: SamplingSettings,
    scorers: Scorers,
    *,
    labels: Labels,
    seed: int = 0,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> SampleStats:
    """Generate image i with seed `seed + i` and the i-th label, and collect features; pixels stay on the device."""
    seeds = range(seed, seed + len(labels))
    batches = PixelBatches(pipe, labels, settings, seeds=seeds, batch_size=batch_size)
    found = collect_classified(scorers.inception, scorers.classifier, batches, labels, progress=progress)
    return SampleStats(*found, batches.rate)


def collect_classified(
    inception: Inception,
    classifier: Classifier | None,
    batches: Iterable[Tensor],
    labels: Labels,
    *,
    progress: Progress | None = None,
) -> tuple[Features, float | None]:
    """Return the features of images, uint8 `[B, H, W, 3]`, and the share that the classifier takes for their class."""
    predicted: list[Tensor] = []

    def pixels_with_classes() -> Iterator[Tensor]:
        done = 0
        for pixels_BHW3 in batches:
            for chunk in torch.split(pixels_BHW3, CHUNK):
                if classifier is not None:
                    predicted.append(_classify(classifier, chunk))
                yield chunk
            done += len(pixels_BHW3)
            if progress is not None:
                progress(done, len(labels))

    features = collect(inception, pixels_with_classes())
    if not predicted:
        return features, None
    return features, (torch.cat(predicted).cpu() == torch.from_numpy(labels)).double().mean().item()


def measure(sampled: SampleStats, scorers: Scorers) -> dict[str, Any]:
    """Return `{metric: value, metric interval: [low, high], ..., "accuracy", "images/s"}`, as far as available."""
    device = scorers.inception.device
    line: dict[str, Any] = {}
    metrics = ["fid", *(["kid", "precision", "recall"] if scorers.reference.pool_MF is not None else [])]
    if scorers.inception.has_logits:
        metrics.append("is")
    # Without the bias of FID, which takes as long as FID.
    report = evaluate(sampled.features, scorers.reference, metrics=metrics, device=device, bias=False)
    for metric in metrics:
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
    """Round to five significant digits; measurements have no more."""
    return [significant(v, 5) for v in value] if isinstance(value, list) else significant(value, 5)


def combinations(defaults: SamplingDefaults, grid: Mapping[str, Sequence[Any]]) -> list[SamplingSettings]:
    """Return all combinations of the values given per setting, each once; other settings are the model's defaults."""
    unknown = sorted(set(grid) - set(AXES))
    require(not unknown, f"{', '.join(unknown)} cannot be swept over; expected {', '.join(AXES)}")
    axes = [axis for axis in AXES if grid.get(axis)]
    found: dict[SamplingSettings, None] = {}
    for values in itertools.product(*(grid[axis] for axis in axes)):
        settings = defaults.settings(**dict(zip(axes, values, strict=True)))
        if settings.guidance_schedule == "none":  # the scale has no effect then
            settings = defaults.settings(**{**dict(zip(axes, values, strict=True)), "guidance": 1.0})
        found[settings] = None
    return list(found)


def sweep(
    pipe: Pipeline,
    scorers: Scorers,
    folder: Path,
    *,
    combos: Sequence[SamplingSettings],
    labels: Labels,
    about: Mapping[str, Any] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> list[Line]:
    """Measure what `folder` does not have yet, and return the lines of all combinations, in their order.

    `about` says what else the lines depend on (the reference, how labels are spread), so that nothing else is mixed in.
    `progress` is about the images of all combinations.
    """
    shared = {"model": fingerprint(pipe), "inception": scorers.inception.identity, "seed": seed, **(about or {})}
    results = Results(folder, shared)
    lines: list[Line] = []

    def on_progress(done: int, _: int) -> None:
        if progress is not None:
            progress(len(lines) * len(labels) + done, len(combos) * len(labels))

    for settings in combos:
        line = results.find(settings, len(labels))
        if line is None:
            sampled = generate_features(
                pipe, settings, scorers, labels=labels, seed=seed, batch_size=batch_size, progress=on_progress
            )
            line = results.add(settings, len(labels), measure(sampled, scorers))
        else:
            on_progress(len(labels), len(labels))
        lines.append(line)
    return lines


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table of the settings that differ and the measurements."""
    axes = [axis for axis in AXES if len({_cell(line, axis) for line in lines}) > 1] or ["steps"]
    metrics = [name for name in NUMBERS if any(name in line for line in lines)]
    rows = []
    for line in lines:
        cells = [_cell(line, axis) for axis in axes]
        rows.append([*cells, *(format_number(line, name) for name in metrics)])
    return markdown_table([*(axis.replace("_", " ") for axis in axes), *(NUMBERS[name][0] for name in metrics)], rows)


def format_number(line: Line, name: str, *, interval: bool = False) -> str | None:
    """Return a value with its digits, and with `interval` half the width of its interval."""
    if name not in line:
        return None
    _, digits, scale = NUMBERS[name]
    text = f"{scale * line[name]:.{digits}f}"
    if interval and f"{name} interval" in line:
        low, high = line[f"{name} interval"]
        text += f" ± {scale * (high - low) / 2:.{digits}f}"
    return text


def draw_curves(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Write `steps.png` and `speed.png`: FID over steps and over images per second.

    Curves take the best guidance at each number of steps; the other scales are dots. Without matplotlib
    nothing is written, and a warning says so.
    """
    measured = [{"steps": line["settings"]["steps"], **line} for line in lines if "fid" in line]
    if not measured:
        return []
    names = [axis for axis in AXES if axis not in ("steps", "guidance")]
    varying = [axis for axis in names if len({_cell(line, axis) for line in measured}) > 1]
    series: dict[str, list[Line]] = defaultdict(list)
    for line in measured:
        series[", ".join(_cell(line, axis) for axis in varying) or "all"].append(line)
    written = []
    for name, label in (("steps", "steps"), ("speed", "images/s")):
        figure = new_plot((7, 4.5), file=f"{name}.png")
        if figure is None:
            return []
        axes = figure.subplots()
        for title, of_series in series.items():
            best = best_of(of_series)
            points = sorted((line[label], line["fid"]) for line in best)
            (curve,) = axes.plot(*zip(*points, strict=True), marker="o", linewidth=1.4, label=title)
            rest = [line for line in of_series if line not in best]
            axes.scatter([r[label] for r in rest], [r["fid"] for r in rest], s=10, alpha=0.35, color=curve.get_color())
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(label)
        axes.set_ylabel("FID")
        axes.grid(alpha=0.3)
        if varying:
            axes.legend()
        path = folder / f"{name}.png"
        save_plot(figure, path)
        written.append(path)
    return written


def best_of(lines: Sequence[Line]) -> list[Line]:
    """Return for each number of steps the line with the least FID."""
    best: dict[int, Line] = {}
    for line in lines:
        steps = line["settings"]["steps"]
        if steps not in best or line["fid"] < best[steps]["fid"]:
            best[steps] = line
    return [best[steps] for steps in sorted(best)]


def _cell(line: Line, axis: str) -> str:
    """Return a setting as text; a line may be older than the setting, which then had its default."""
    value = line["settings"].get(axis, SETTINGS[axis].default)
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
