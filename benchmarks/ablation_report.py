"""Tables and figures of the ablations, from the lines that `ablations.py` left.

    python benchmarks/ablation_report.py
    python benchmarks/ablation_report.py --write

prints the tables; with --write they go into docs/ablations.md, and docs/images/ablations-*.png are drawn. In the
page a table stands between <!-- NAME: begin --> and <!-- NAME: end -->.
"""

from __future__ import annotations

import argparse
import math
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
    matching,
    of_order,
    read,
)
from marks import fill

from arpg.config import ORDERS, SCHEDULES
from arpg.evaluation.results import Line, markdown
from arpg.evaluation.sweep import NUMBERS, number
from arpg.files import write_whole

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "ablations"
PAGE = ROOT / "docs" / "ablations.md"
IMAGES = ROOT / "docs" / "images"

SHOWN = ("fid", "kid", "precision", "recall", "accuracy")
TITLES = tuple(NUMBERS[name][0] for name in SHOWN)
PAPER_ORDERS = ("random", "raster", "spiral-in", "spiral-out", "z-curve", "alternate")
NOTHING = "Not measured yet.\n"


def tables(measured: Measured) -> dict[str, str]:
    """The Markdown of each part of the page."""
    return {
        "conditions": _conditions(measured),
        "baselines": _baselines(measured),
        "verdicts": _verdicts(measured.lines),
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


def _verdicts(lines: Sequence[Line]) -> str:
    """The paper's findings, each with what was measured here; differences count where they exceed the noise."""
    few, many = min(STEPS), max(STEPS)
    of = {(s, a): final(lines, steps=s, attention=a) for s in STEPS for a in ("block", "causal")}
    rows = []
    ends = [of[s, a] for s in (few, many) for a in ("block", "causal")]
    if None not in ends:
        block_few, causal_few, block_many, causal_many = (line for line in ends if line)
        apart = [causal["fid"] - block["fid"] for block, causal in ((block_few, causal_few), (block_many, causal_many))]
        noise = [_noise(causal_few, block_few), _noise(causal_many, block_many)]
        shown = [f"{d:+.2f} ± {n:.2f} at {s} steps" for d, n, s in zip(apart, noise, (few, many), strict=True)]
        rows.append(
            [
                "Fewer steps hurt causal decoding more than block-wise",
                ", ".join(shown),
                apart[0] - apart[1] > sum(noise),
            ]
        )
        rows.append([f"With one token per step ({many}) both are the same", shown[1], abs(apart[1]) <= noise[1]])
        scales = [line["settings"]["guidance"] for line in (block_few, block_many)]
        text = f"{scales[0]:g} at {few} steps, {scales[1]:g} at {many}"
        rows.append(["The best guidance falls with the number of steps", text, scales[0] > scales[1]])
    blocks = [line for s in sorted(STEPS) if (line := of[s, "block"])]
    if len(blocks) == len(STEPS):
        best, most = min(blocks, key=lambda line: float(line["fid"])), blocks[-1]
        text = f"{best['fid']:.2f} at {best['settings']['steps']} steps, {most['fid']:.2f} at {many}"
        better = most["fid"] - best["fid"] > _noise(most, best)
        rows.append(["Block-wise, some steps are better than one token per step", text, better])
    orders = {order: line for order in PAPER_ORDERS if (line := of_order(lines, order, many))}
    if len(orders) == len(PAPER_ORDERS):
        ranked = sorted(orders, key=lambda order: float(orders[order]["fid"]))
        text = ", ".join(f"{order} {orders[order]['fid']:.2f}" for order in ranked)
        first = orders["random"]["fid"] - orders[ranked[0]]["fid"] <= _noise(orders["random"], orders[ranked[0]])
        rows.append([f"No order is better than random ({many} steps)", text, first])
        rows.append([f"Spirals are worst ({many} steps)", text, set(ranked[-2:]) == {"spiral-in", "spiral-out"}])
    header = ["the paper", "here", "agrees"]
    return markdown(header, [[*row[:2], "yes" if row[2] else "no"] for row in rows]) if rows else NOTHING


def _noise(a: Line, b: Line) -> float:
    """Half the width of the interval of a difference."""
    halves = [(line["fid interval"][1] - line["fid interval"][0]) / 2 for line in (a, b) if "fid interval" in line]
    return math.hypot(*halves)


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
    figure = _figure("FID by order", "orders") if len(rows) > 1 else ""
    return markdown(header, rows) + figure if rows else NOTHING


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
