"""Tables and figures of the ablations, from the lines that `ablations.py` left.

    python benchmarks/ablation_report.py
    python benchmarks/ablation_report.py --write

prints the tables; with --write they go into docs/results/ablations-appendix.md, and docs/images/ablations-*.png are
drawn. In the page a table stands between <!-- NAME: begin --> and <!-- NAME: end -->.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ablation_figures import draw
from ablation_lines import (
    FEW_STEPS,
    FINAL,
    ORDER_STEPS,
    PLAIN,
    SPEED_STEPS,
    STEPS,
    Measured,
    comparable,
    final,
    of_order,
    read,
    unguided,
)
from ablation_verdicts import differences, gap, verdicts
from marks import fill

from arpg.evaluation.results import Line, markdown
from arpg.evaluation.sweep import NUMBERS, number
from arpg.files import write_whole
from arpg.settings import ORDERS, SCHEDULES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "ablations"
PAGE = ROOT / "docs" / "results" / "ablations-appendix.md"
IMAGES = ROOT / "docs" / "images"

SHOWN = ("fid", "kid", "precision", "recall", "accuracy")
TITLES = tuple(NUMBERS[name][0] for name in SHOWN)
NOTHING = "Not measured yet.\n"


def tables(measured: Measured) -> dict[str, str]:
    """The Markdown of each part of the page."""
    return {
        "conditions": _conditions(measured),
        "baselines": _baselines(measured),
        "verdicts": verdicts(measured.lines) or NOTHING,
        "steps": _steps(measured),
        "gap": gap(measured.lines) or NOTHING,
        "orders": _orders(measured),
        "bits": _bits(measured),
        "schedules": _rows(measured, "schedule", SCHEDULES),
        "guidance": _rows(measured, "guidance_schedule", ("linear", "constant", "none")),
        "differences": differences(measured.lines) or NOTHING,
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
            f"of {speed['batch size']} after three that warm up or are recorded.\n"
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
    figures = [("FID over guidance", "guidance")]
    if comparable(measured.lines):
        speed = [("FID over images per second", "speed")] if measured.speed["lines"] else []
        figures = [("FID over steps", "steps"), *speed, *figures]
    return markdown(header, rows) + "".join(_figure(*each) for each in figures) if rows else NOTHING


def _bits(measured: Measured) -> str:
    """What the orders cost, teacher-forced."""
    rows = []
    for order, found in measured.bits.get("orders", {}).items():
        above, apart = found["above random"]
        thirds = " / ".join(f"{bits:.2f}" for bits in found["thirds"])
        cost = None if order == "random" else f"{above:+.3f} ± {apart:.3f}"
        rows.append([order, f"{found['bits']:.3f}", cost, thirds])
    header = ["order", "bits per token", "above random", "first / middle / last third"]
    return markdown(header, rows) + f"\n{measured.bits['images']} images.\n" if rows else NOTHING


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
    figure = _figure("FID by order", "orders") if len(rows) > 1 else ""
    return markdown(header, rows) + figure if rows else NOTHING


def _rows(measured: Measured, axis: str, values: Sequence[str]) -> str:
    rows = []
    for value in values:
        for steps in sorted(FEW_STEPS):
            if value == "none":
                line = unguided(measured.lines, steps)
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
    return f"\n![{title}](../images/ablations-{name}.png)\n"


def _numbers(line: Line) -> list[str | None]:
    return [number(line, name, interval=name == "fid") for name in SHOWN]


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
