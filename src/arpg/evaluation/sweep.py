"""Sweeps: every combination of some settings is measured once, and shown as a table and as curves."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arpg.errors import require
from arpg.evaluation.measure import Judge, generate_features, measure
from arpg.evaluation.results import Line, Results, markdown
from arpg.evaluation.sampling import Labels, Progress, fingerprint
from arpg.files import write_whole
from arpg.pipeline import Pipeline
from arpg.settings import SamplingDefaults, SamplingSettings

AXES = ("attention", "order", "schedule", "guidance_schedule", "temperature", "steps", "guidance")
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

log = logging.getLogger(__name__)


def combinations(defaults: SamplingDefaults, grid: Mapping[str, Sequence[Any]]) -> list[SamplingSettings]:
    """All combinations of the values given per setting, each once; what is not given is the model's own choice."""
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
    judge: Judge,
    folder: Path,
    *,
    combos: Sequence[SamplingSettings],
    labels: Labels,
    about: Mapping[str, Any] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    on_result: Callable[[Line], None] | None = None,
    progress: Progress | None = None,
) -> list[Line]:
    """Measure what `folder` does not have yet; the lines of all combinations, in their order.

    `about` says what else the lines depend on (the reference, how labels are spread), so that nothing else is mixed in.
    """
    shared = {"model": fingerprint(pipe), "inception": judge.inception.identity, "seed": seed, **(about or {})}
    results = Results(folder, shared)
    lines = []
    for settings in combos:
        line = results.find(settings, len(labels))
        if line is None:
            sampled = generate_features(
                pipe, settings, judge, labels=labels, seed=seed, batch_size=batch_size, progress=progress
            )
            line = results.add(settings, len(labels), measure(sampled, judge))
        elif progress is not None:
            progress(len(labels), len(labels))
        if on_result is not None:
            on_result(line)
        lines.append(line)
    return lines


def table(lines: Sequence[Line]) -> str:
    """Markdown: the settings that differ, then what was measured."""
    axes = [axis for axis in AXES if len({str(line["settings"][axis]) for line in lines}) > 1] or ["steps"]
    metrics = [name for name in NUMBERS if any(name in line for line in lines)]
    rows = []
    for line in lines:
        cells = [_cell(line["settings"][axis]) for axis in axes]
        rows.append([*cells, *(number(line, name) for name in metrics)])
    return markdown([*(axis.replace("_", " ") for axis in axes), *(NUMBERS[name][0] for name in metrics)], rows)


def number(line: Line, name: str, *, interval: bool = False) -> str | None:
    """A measured value with its digits, and half the width of its interval where there is one."""
    if name not in line:
        return None
    _, digits, scale = NUMBERS[name]
    text = f"{scale * line[name]:.{digits}f}"
    if interval and f"{name} interval" in line:
        low, high = line[f"{name} interval"]
        text += f" ± {scale * (high - low) / 2:.{digits}f}"
    return text


def draw(lines: Sequence[Line], folder: Path) -> list[Path]:
    """`steps.png` and `speed.png`: FID over steps and over images per second.

    Curves take the best guidance at each number of steps; the other scales are dots. Without matplotlib nothing is
    drawn, and a warning says so.
    """
    measured = [line for line in lines if "fid" in line]
    if not measured:
        return []
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("no plots: matplotlib is not installed (pip install 'arpg[train]')")
        return []
    names = [axis for axis in AXES if axis not in ("steps", "guidance")]
    varying = [axis for axis in names if len({str(line["settings"][axis]) for line in measured}) > 1]
    series: dict[str, list[Line]] = defaultdict(list)
    for line in measured:
        series[", ".join(_cell(line["settings"][axis]) for axis in varying) or "all"].append(line)
    written = []
    for name, x_of, label in (("steps", _steps, "steps"), ("speed", _speed, "images/s")):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for title, of_series in series.items():
            best = best_of(of_series)
            points = sorted((x_of(line), line["fid"]) for line in best)
            (curve,) = axes.plot(*zip(*points, strict=True), marker="o", linewidth=1.4, label=title)
            rest = [line for line in of_series if line not in best]
            axes.scatter([x_of(r) for r in rest], [r["fid"] for r in rest], s=10, alpha=0.35, color=curve.get_color())
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(label)
        axes.set_ylabel("FID")
        axes.grid(alpha=0.3)
        if varying:
            axes.legend()
        path = folder / f"{name}.png"
        write_whole(path, lambda temporary, figure=figure: figure.savefig(temporary, dpi=120, format="png"))  # type: ignore[misc]
        written.append(path)
    return written


def best_of(lines: Sequence[Line]) -> list[Line]:
    """For each number of steps, the line with the least FID."""
    best: dict[int, Line] = {}
    for line in lines:
        steps = line["settings"]["steps"]
        if steps not in best or line["fid"] < best[steps]["fid"]:
            best[steps] = line
    return [best[steps] for steps in sorted(best)]


def _steps(line: Line) -> float:
    return float(line["settings"]["steps"])


def _speed(line: Line) -> float:
    return float(line["images/s"])


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
