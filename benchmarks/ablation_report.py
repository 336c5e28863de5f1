"""Tables and figures of the ablations, from the lines that `ablations.py` left.

    python benchmarks/ablation_report.py
    python benchmarks/ablation_report.py --write

prints the tables; with --write they go into docs/ablations.md, and docs/images/ablations-*.png are drawn. In the
page a table stands between <!-- NAME: begin --> and <!-- NAME: end -->.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpg.config import ORDERS, SCHEDULES
from arpg.evaluation.results import Line, markdown, read_about, read_lines
from arpg.evaluation.sweep import NUMBERS, number
from arpg.files import write_whole

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "ablations"
PAGE = ROOT / "docs" / "ablations.md"
IMAGES = ROOT / "docs" / "images"
BASELINES, SPEED = "baselines.json", "speed.json"

FINAL, SEARCH = 5000, 2000  # images of a measurement, and of one in the search for the guidance
STEPS = (24, 12, 8, 144, 16, 32, 64)  # in the order in which they are measured
ORDER_STEPS = (24, 12, 144)
FEW_STEPS = (24, 12)
SPEED_STEPS = 24  # at which the speed of orders, schedules and guidance is measured
PLAIN = {"attention": "block", "order": "random", "schedule": "arccos", "guidance_schedule": "linear"}
SHOWN = ("fid", "kid", "precision", "recall", "accuracy")
TITLES = tuple(NUMBERS[name][0] for name in SHOWN)
NOTHING = "Not measured yet.\n"


@dataclass(frozen=True)
class Measured:
    """What a folder of results holds."""

    lines: list[Line] = field(default_factory=list)  # quality
    baselines: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # of the lines
    speed: dict[str, Any] = field(default_factory=lambda: {"about": {}, "lines": []})

    def rate(self, settings: dict[str, Any]) -> float | None:
        """Images per second with these settings; the scale of the guidance makes no difference."""
        names = ("steps", *PLAIN)
        for line in self.speed["lines"]:
            if all(line["settings"][name] == settings[name] for name in names):
                return float(line["images/s"])
        return None


def read(folder: Path) -> Measured:
    path = folder / BASELINES
    baselines = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    about = read_about(folder) if (folder / "about.json").exists() else {}
    return Measured(read_lines(folder), baselines, about, read_speed(folder))


def read_speed(folder: Path) -> dict[str, Any]:
    path = folder / SPEED
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"about": {}, "lines": [], **found}


def matching(lines: Sequence[Line], num: int, **settings: Any) -> list[Line]:
    """The lines of so many images with these settings; of what is not given, the model's own."""
    wanted = {**PLAIN, **settings}
    return [
        line
        for line in lines
        if line["num"] == num and all(line["settings"][name] == value for name, value in wanted.items())
    ]


def lowest(lines: Sequence[Line]) -> Line:
    return min(lines, key=lambda line: float(line["fid"]))


def final(lines: Sequence[Line], **settings: Any) -> Line | None:
    """The final measurement at the guidance that the search found."""
    searched = matching(lines, SEARCH, **settings)
    if not searched:
        return None
    guidance = lowest(searched)["settings"]["guidance"]
    return next(iter(matching(lines, FINAL, guidance=guidance, **settings)), None)


def of_order(lines: Sequence[Line], order: str, steps: int) -> Line | None:
    """Orders share the guidance that is best for the random one."""
    searched = matching(lines, SEARCH, steps=steps)
    if not searched:
        return None
    guidance = lowest(searched)["settings"]["guidance"]
    return next(iter(matching(lines, FINAL, order=order, steps=steps, guidance=guidance)), None)


def tables(measured: Measured) -> dict[str, str]:
    """The Markdown of each part of the page."""
    return {
        "conditions": _conditions(measured),
        "baselines": _baselines(measured),
        "steps": _steps(measured),
        "gap": _gap(measured.lines),
        "orders": _orders(measured),
        "schedules": _rows(measured, "schedule", SCHEDULES),
        "guidance": _rows(measured, "guidance_schedule", ("linear", "constant", "none")),
    }


def _conditions(measured: Measured) -> str:
    about, speed, text = measured.about, measured.speed["about"], ""
    if about:
        text += (
            f"Quality: {about['device']}, torch {about['torch']}, {about['precision']}, batches of "
            f"{about['batch size']}; reference: {about['reference']}; features: {about['inception']}.\n"
        )
    if speed:
        text += (
            f"Speed: {speed['device']}, torch {speed['torch']}, {speed['precision']}, {speed['batches timed']} batches "
            f"of {speed['batch size']} after one that warms up.\n"
        )
    return text or NOTHING


def _baselines(measured: Measured) -> str:
    rows = [[name, line["num"], *_numbers(line)] for name, line in measured.baselines.items()]
    defaults = measured.about.get("defaults")
    for line in measured.lines:
        if line["num"] == FINAL and line["settings"] == defaults:
            name = f"samples, all defaults ({defaults['steps']} steps, guidance {defaults['guidance']:g})"
            rows.append([name, FINAL, *_numbers(line)])
            break
    return markdown(["images", "number", *TITLES], rows) if rows else NOTHING


def _steps(measured: Measured) -> str:
    rows = []
    for steps in sorted(STEPS):
        for attention in ("block", "causal"):
            line = final(measured.lines, steps=steps, attention=attention)
            if line is not None:
                scale = f"{line['settings']['guidance']:g}"
                rows.append([steps, attention, scale, *_numbers(line), _rate(measured, line["settings"])])
    header = ["steps", "attention", "best guidance", *TITLES, "images/s"]
    figures = [("FID over steps", "steps"), ("FID over guidance", "guidance")]
    if measured.speed["lines"]:
        figures.insert(1, ("FID over images per second", "speed"))
    return markdown(header, rows) + "".join(_figure(*each) for each in figures) if rows else NOTHING


def _gap(lines: Sequence[Line]) -> str:
    """Causal less block-wise."""
    rows = []
    for steps in sorted(STEPS):
        block, causal = (final(lines, steps=steps, attention=attention) for attention in ("block", "causal"))
        if block is not None and causal is not None:
            apart = causal["fid"] - block["fid"]
            rows.append([steps, f"{apart:+.2f}", f"{100 * apart / block['fid']:+.0f}%"])
    return markdown(["steps", "FID, causal less block-wise", "of block-wise"], rows) if rows else NOTHING


def _orders(measured: Measured) -> str:
    """FID, and in brackets precision / recall / recognised."""
    rows = []
    for order in ORDERS:
        cells = []
        for steps in sorted(ORDER_STEPS):
            line = of_order(measured.lines, order, steps)
            rest = () if line is None else (number(line, name) for name in ("precision", "recall", "accuracy"))
            shown = " / ".join(text for text in rest if text)
            cells.append(None if line is None else f"{number(line, 'fid', interval=True)} ({shown})")
        if any(cells):
            rate = _rate(measured, {**PLAIN, "order": order, "steps": SPEED_STEPS})
            rows.append([order, *cells, rate])
    header = ["order", *(f"{steps} steps" for steps in sorted(ORDER_STEPS)), f"images/s, {SPEED_STEPS} steps"]
    return markdown(header, rows) + _figure("FID by order", "orders") if rows else NOTHING


def _rows(measured: Measured, axis: str, values: Sequence[str]) -> str:
    rows = []
    for value in values:
        for steps in sorted(FEW_STEPS):
            if value == "none":
                line = next(iter(matching(measured.lines, FINAL, steps=steps, guidance_schedule="none")), None)
            else:
                line = final(measured.lines, steps=steps, **{axis: value})
            if line is not None:
                scale = f"{line['settings']['guidance']:g}"
                rows.append([value, steps, scale, *_numbers(line), _rate(measured, line["settings"])])
    header = [axis.replace("_", " "), "steps", "best guidance", *TITLES, "images/s"]
    return markdown(header, rows) if rows else NOTHING


def _rate(measured: Measured, settings: dict[str, Any]) -> str | None:
    rate = measured.rate(settings)
    return None if rate is None else f"{rate:.0f}"


def _figure(title: str, name: str) -> str:
    return f"\n![{title}](images/ablations-{name}.png)\n"


def _numbers(line: Line) -> list[str | None]:
    return [number(line, name, interval=name == "fid") for name in SHOWN]


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
    if any(found.values()):
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
    if any(orders.values()):
        axes = axes_of("orders", "")
        width = 0.8 / len(ORDER_STEPS)
        for k, steps in enumerate(sorted(ORDER_STEPS)):
            of = list(orders[steps].values())
            x = [ORDERS.index(order) + (k - 1) * width for order in orders[steps]]
            axes.bar(x, [line["fid"] for line in of], width, yerr=_errors(of) if of else None, label=f"{steps} steps")
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


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with each part between its marks."""
    for name, text in parts.items():
        pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
        page, times = re.subn(pattern, lambda m, text=text: f"{m[1]}{text}{m[2]}", page, flags=re.S)  # type: ignore[misc]
        assert times == 1, f"{name} has no place in the page"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    measured = read(options.results)
    parts = tables(measured)
    for name, text in parts.items():
        sys.stdout.write(f"{name}\n\n{text}\n")
    if options.write:
        page = fill(PAGE.read_text(encoding="utf-8"), parts)
        write_whole(PAGE, lambda path: path.write_text(page, encoding="utf-8"))
        for path in draw(measured, IMAGES):
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
