"""Figures of the ablations: FID over steps, speed and guidance, and by order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ablation_lines import ORDER_STEPS, SEARCH, STEPS, Measured, comparable, final, matching, of_order

from arpg.config import ORDERS
from arpg.evaluation.results import Line
from arpg.files import write_whole


def draw(measured: Measured, folder: Path) -> list[Path]:
    """What has been measured: FID over steps, over speed, over guidance, and by order."""
    from matplotlib.figure import Figure

    lines = measured.lines
    figures: dict[str, Any] = {}

    def axes_of(name: str, x: str, y: str = "FID") -> Any:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        figures[name] = figure
        return axes

    found = {
        attention: [line for steps in sorted(STEPS) if (line := final(lines, steps=steps, attention=attention))]
        for attention in ("block", "causal")
    }
    if comparable(lines):
        for name, label in (("steps", "steps"), ("speed", "images/s")):
            places = {
                attention: [(x, line) for line in of if (x := _place(measured, line, name))]
                for attention, of in found.items()
            }
            if not any(places.values()):
                continue
            axes = axes_of(name, label)
            for attention, points in places.items():
                if not points:
                    continue
                x, of = zip(*points, strict=True)
                axes.errorbar(x, [line["fid"] for line in of], yerr=_errors(of), marker="o", capsize=3, label=attention)
                for place, line in zip(x, of, strict=True):
                    text = f"{line['settings']['guidance']:g}" if name == "steps" else f"{line['settings']['steps']}"
                    axes.annotate(text, (place, line["fid"]), textcoords="offset points", xytext=(5, 6), fontsize=8)
            for style, (title, line) in zip(("--", ":"), measured.baselines.items(), strict=False):
                axes.axhline(line["fid"], linestyle=style, color="grey", label=title)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.legend(title="number: best guidance" if name == "steps" else "number: steps")
    searches = {steps: matching(lines, SEARCH, steps=steps) for steps in sorted(STEPS)}
    if any(searches.values()):
        axes = axes_of("guidance", f"guidance (linear), {SEARCH:,} images")
        for steps, of in searches.items():
            points = sorted((line["settings"]["guidance"], line["fid"]) for line in of)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{steps} steps")
        axes.legend()
    orders = {
        steps: {order: line for order in ORDERS if (line := of_order(lines, order, steps))} for steps in ORDER_STEPS
    }
    if len({order for of in orders.values() for order in of}) > 1:
        axes = axes_of("orders", "")
        width = 0.8 / len(ORDER_STEPS)
        for k, steps in enumerate(sorted(ORDER_STEPS)):
            of = list(orders[steps].values())
            x = [ORDERS.index(order) + (k - 1) * width for order in orders[steps]]
            if of:
                axes.bar(
                    x, [line["fid"] for line in of], width, yerr=_errors(of), color=f"C{k}", label=f"{steps} steps"
                )
        axes.set_xticks(range(len(ORDERS)), ORDERS, rotation=20)
        axes.legend()
    written = []
    for name, figure in figures.items():
        path = folder / f"ablations-{name}.png"
        write_whole(path, lambda temporary, figure=figure: figure.savefig(temporary, dpi=110, format="png"))  # type: ignore[misc]
        written.append(path)
    return written


def _place(measured: Measured, line: Line, name: str) -> float | None:
    return float(line["settings"]["steps"]) if name == "steps" else measured.rate(line["settings"])


def _errors(lines: Sequence[Line]) -> list[list[float]]:
    def of(line: Line) -> tuple[float, float]:
        low, high = line.get("fid interval", (line["fid"], line["fid"]))
        return max(0.0, line["fid"] - low), max(0.0, high - line["fid"])

    return [list(side) for side in zip(*(of(line) for line in lines), strict=True)]
