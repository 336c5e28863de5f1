"""Figures of the ablations: FID over steps, speed and guidance, and by order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ablation_lines import ORDER_STEPS, SEARCH, STEPS, Measured, comparable, final, matching, of_order

from arpg.evaluation.sweep import Line
from arpg.files import write_whole
from arpg.settings import ORDERS

ATTENTIONS = {"block": "block-wise", "causal": "causal"}


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
        for attention in ATTENTIONS
    }
    if comparable(lines):
        for name, label in (("steps", "steps (labels: best guidance)"), ("speed", "images/s (labels: steps)")):
            places = {
                attention: [(x, line) for line in of if (x := _place(measured, line, name))]
                for attention, of in found.items()
            }
            if not any(places.values()):
                continue
            axes = axes_of(name, label)
            for (attention, points), marker, below in zip(places.items(), "os", (True, False), strict=True):
                if not points:
                    continue
                x, of = zip(*points, strict=True)
                fids = [line["fid"] for line in of]
                # Speeds are too noisy for a curve.
                style = {"marker": marker, "capsize": 3, "linestyle": "-" if name == "steps" else "none"}
                drawn = axes.errorbar(x, fids, yerr=_errors(of), label=ATTENTIONS[attention], **style)
                others = [(at, other) for rest, each in places.items() if rest != attention for at, other in each]
                for place, line in points:
                    steps = line["settings"]["steps"]
                    text = f"{line['settings']['guidance']:g}" if name == "steps" else str(steps)
                    right = all(place >= at for at, other in others if other["settings"]["steps"] == steps)
                    side = ("below" if below else "above") if name == "steps" else "right" if right else "left"
                    _label(axes, text, (place, line), side=side, color=drawn.lines[0].get_color())
            for style, (title, line) in zip(("--", ":"), measured.baselines.items(), strict=False):
                axes.axhline(line["fid"], linestyle=style, color="grey", label=title)
            if name == "steps":
                axes.set_xscale("log")
                axes.set_xticks(sorted(STEPS), [str(steps) for steps in sorted(STEPS)])
                axes.minorticks_off()
            else:
                axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
            axes.legend(loc="lower left" if name == "steps" else "upper left")
    searches = {steps: matching(lines, SEARCH, steps=steps) for steps in sorted(STEPS)}
    if any(searches.values()):
        axes = axes_of("guidance", "guidance (linear, block-wise)", f"FID of {SEARCH:,} images")
        for steps, of in searches.items():
            points = sorted((line["settings"]["guidance"], line["fid"]) for line in of)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{steps} steps")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    orders = {
        steps: {order: line for order in ORDERS if (line := of_order(lines, order, steps))} for steps in ORDER_STEPS
    }
    if len({order for of in orders.values() for order in of}) > 1:
        axes = axes_of("orders", "order")
        width = 0.8 / len(ORDER_STEPS)
        for k, steps in enumerate(sorted(ORDER_STEPS)):
            of = list(orders[steps].values())
            x = [ORDERS.index(order) + (k - 1) * width for order in orders[steps]]
            if of:
                axes.bar(
                    x, [line["fid"] for line in of], width, yerr=_errors(of), color=f"C{k}", label=f"{steps} steps"
                )
        axes.set_xticks(range(len(ORDERS)), ORDERS, rotation=20)
        axes.grid(visible=False, axis="x")
        axes.legend(loc="upper center", ncols=len(ORDER_STEPS), bbox_to_anchor=(0.5, 1.12))
    written = []
    for name, figure in figures.items():
        path = folder / f"ablations-{name}.png"
        write_whole(path, lambda temporary, figure=figure: figure.savefig(temporary, dpi=110, format="png"))  # type: ignore[misc]
        written.append(path)
    return written


def _place(measured: Measured, line: Line, name: str) -> float | None:
    return float(line["settings"]["steps"]) if name == "steps" else measured.rate(line["settings"])


def _label(axes: Any, text: str, at: tuple[float, Line], *, side: str, color: str) -> None:
    """Beside a point, or at an end of its interval."""
    x, line = at
    low, high = line.get("fid interval", (line["fid"], line["fid"]))
    y, offset, across, along = {
        "below": (low, (0, -3), "center", "top"),
        "above": (high, (0, 3), "center", "bottom"),
        "right": (line["fid"], (6, 0), "left", "center"),
        "left": (line["fid"], (-6, 0), "right", "center"),
    }[side]
    align = {"ha": across, "va": along}
    axes.annotate(text, (x, y), textcoords="offset points", xytext=offset, fontsize=8, color=color, **align)


def _errors(lines: Sequence[Line]) -> list[list[float]]:
    def of(line: Line) -> tuple[float, float]:
        low, high = line.get("fid interval", (line["fid"], line["fid"]))
        return max(0.0, line["fid"] - low), max(0.0, high - line["fid"])

    return [list(side) for side in zip(*(of(line) for line in lines), strict=True)]
