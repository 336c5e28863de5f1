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
BASELINES = "baselines.json"

FINAL, SEARCH = 5000, 2000  # images of a measurement, and of one in the search for the guidance
STEPS = (24, 12, 8, 144, 16, 32, 64)  # in the order in which they are measured
ORDER_STEPS = (24, 12, 144)
FEW_STEPS = (24, 12)
PLAIN = {"attention": "block", "order": "random", "schedule": "arccos", "guidance_schedule": "linear"}
SHOWN = ("fid", "kid", "precision", "recall", "accuracy")
TITLES = tuple(NUMBERS[name][0] for name in SHOWN)
NOTHING = "Not measured yet.\n"


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


def tables(lines: Sequence[Line], baselines: dict[str, Any], about: dict[str, Any]) -> dict[str, str]:
    """The Markdown of each part of the page."""
    return {
        "conditions": _conditions(about),
        "baselines": _baselines(baselines),
        "steps": _steps(lines),
        "gap": _gap(lines),
        "orders": _orders(lines),
        "schedules": _rows(lines, "schedule", SCHEDULES),
        "guidance": _rows(lines, "guidance_schedule", ("linear", "constant", "none")),
    }


def _conditions(about: dict[str, Any]) -> str:
    if not about:
        return NOTHING
    return (
        f"{about['device']}, torch {about['torch']}, {about['precision']}, batches of {about['batch size']}; "
        f"reference: {about['reference']}; features: {about['inception']}.\n"
    )


def _baselines(baselines: dict[str, Any]) -> str:
    rows = [[name, line["num"], *_numbers(line)] for name, line in baselines.items()]
    return markdown(["images", "number", *TITLES], rows) if rows else NOTHING


def _steps(lines: Sequence[Line]) -> str:
    rows = []
    for steps in sorted(STEPS):
        for attention in ("block", "causal"):
            line = final(lines, steps=steps, attention=attention)
            if line is not None:
                scale = f"{line['settings']['guidance']:g}"
                rows.append([steps, attention, scale, *_numbers(line), number(line, "images/s")])
    header = ["steps", "attention", "best guidance", *TITLES, "images/s"]
    figures = ("FID over steps", "steps"), ("FID over images per second", "speed"), ("FID over guidance", "guidance")
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


def _orders(lines: Sequence[Line]) -> str:
    """FID, and in brackets precision / recall / recognised."""
    rows = []
    for order in ORDERS:
        cells = []
        for steps in sorted(ORDER_STEPS):
            line = of_order(lines, order, steps)
            rest = () if line is None else (number(line, name) for name in ("precision", "recall", "accuracy"))
            shown = " / ".join(text for text in rest if text)
            cells.append(None if line is None else f"{number(line, 'fid', interval=True)} ({shown})")
        if any(cells):
            rows.append([order, *cells])
    header = ["order", *(f"{steps} steps" for steps in sorted(ORDER_STEPS))]
    return markdown(header, rows) + _figure("FID by order", "orders") if rows else NOTHING


def _rows(lines: Sequence[Line], axis: str, values: Sequence[str]) -> str:
    rows = []
    for value in values:
        for steps in sorted(FEW_STEPS):
            if value == "none":
                line = next(iter(matching(lines, FINAL, steps=steps, guidance_schedule="none")), None)
            else:
                line = final(lines, steps=steps, **{axis: value})
            if line is not None:
                rows.append([value, steps, f"{line['settings']['guidance']:g}", *_numbers(line)])
    header = [axis.replace("_", " "), "steps", "best guidance", *TITLES]
    return markdown(header, rows) if rows else NOTHING


def _figure(title: str, name: str) -> str:
    return f"\n![{title}](images/ablations-{name}.png)\n"


def _numbers(line: Line) -> list[str | None]:
    return [number(line, name, interval=name == "fid") for name in SHOWN]


def draw(lines: Sequence[Line], baselines: dict[str, Any], folder: Path) -> list[Path]:
    """What has been measured: FID over steps, over speed, over guidance, and by order."""
    from matplotlib.figure import Figure

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
            axes = axes_of(name, label)
            for attention, of in found.items():
                if not of:
                    continue
                x = [line["settings"]["steps"] if name == "steps" else line["images/s"] for line in of]
                axes.errorbar(x, [line["fid"] for line in of], yerr=_errors(of), marker="o", capsize=3, label=attention)
                for place, line in zip(x, of, strict=True):
                    text = f"{line['settings']['guidance']:g}" if name == "steps" else f"{line['settings']['steps']}"
                    axes.annotate(text, (place, line["fid"]), textcoords="offset points", xytext=(5, 6), fontsize=8)
            for style, (title, line) in zip(("--", ":"), baselines.items(), strict=False):
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


def _errors(lines: Sequence[Line]) -> list[list[float]]:
    def of(line: Line) -> tuple[float, float]:
        low, high = line.get("fid interval", (line["fid"], line["fid"]))
        return max(0.0, line["fid"] - low), max(0.0, high - line["fid"])

    return [list(side) for side in zip(*(of(line) for line in lines), strict=True)]


def read(folder: Path) -> tuple[list[Line], dict[str, Any], dict[str, Any]]:
    path = folder / BASELINES
    baselines = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    about = read_about(folder) if (folder / "about.json").exists() else {}
    return read_lines(folder), baselines, about


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
    lines, baselines, about = read(options.results)
    parts = tables(lines, baselines, about)
    for name, text in parts.items():
        sys.stdout.write(f"{name}\n\n{text}\n")
    if options.write:
        page = fill(PAGE.read_text(encoding="utf-8"), parts)
        write_whole(PAGE, lambda path: path.write_text(page, encoding="utf-8"))
        for path in draw(lines, baselines, IMAGES):
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
