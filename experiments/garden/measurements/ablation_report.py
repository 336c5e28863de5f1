"""Tables and figures of the ablations, from what `ablations` and `order-bits` measured.

    python -m experiments.garden ablation-report
    python -m experiments.garden ablation-report --write

prints the tables; with --write they go into docs/results/ablations-appendix.md, between <!-- NAME: begin --> and
<!-- NAME: end -->, and docs/images/ablations-*.png are written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arpg.evaluation.sweep import NUMBERS, Line, format_number
from arpg.files import write_text, write_whole
from arpg.settings import ORDERS, SCHEDULES
from arpg.tables import fill_page, markdown_table
from experiments.garden.measurements.ablations import (
    FEW_STEPS,
    FINAL,
    ORDER_STEPS,
    PLAIN,
    RESULTS,
    SEARCH,
    SPEED_STEPS,
    STEPS,
    Measured,
    comparable,
    final,
    matching,
    noise,
    of_order,
    read,
    unguided,
)

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results" / "ablations-appendix.md"
IMAGES = ROOT / "docs" / "images"

SHOWN = ("fid", "kid", "precision", "recall", "accuracy")
TITLES = tuple(NUMBERS[name][0] for name in SHOWN)
NOTHING = "Not measured yet.\n"


def tables(measured: Measured) -> dict[str, str]:
    """Return the Markdown of each part of the page."""
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
    return markdown_table(["images", "number", *TITLES], rows) if rows else NOTHING


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
    return markdown_table(header, rows) + "".join(_figure(*each) for each in figures) if rows else NOTHING


def _bits(measured: Measured) -> str:
    """Return a table of the bits per token of each order, teacher-forced."""
    rows = []
    for order, found in measured.bits.get("orders", {}).items():
        above, apart = found["above random"]
        thirds = " / ".join(f"{bits:.2f}" for bits in found["thirds"])
        cost = None if order == "random" else f"{above:+.3f} ± {apart:.3f}"
        rows.append([order, f"{found['bits']:.3f}", cost, thirds])
    header = ["order", "bits per token", "above random", "first / middle / last third"]
    return markdown_table(header, rows) + f"\n{measured.bits['images']} images.\n" if rows else NOTHING


def _orders(measured: Measured) -> str:
    """FID, and in brackets precision / recall / recognised."""
    rows = []
    for order in ORDERS:
        cells = []
        for steps in sorted(ORDER_STEPS):
            line = of_order(measured.lines, order, steps)
            rest = () if line is None else (format_number(line, name) for name in ("precision", "recall", "accuracy"))
            shown = " / ".join(text for text in rest if text)
            cells.append(None if line is None else f"{format_number(line, 'fid', interval=True)} ({shown})")
        if any(cells):
            rate = _rate(measured, {**PLAIN, "order": order, "steps": SPEED_STEPS})
            rows.append([order, *cells, rate])
    header = ["order", *(f"{steps} steps" for steps in sorted(ORDER_STEPS)), f"images/s, {SPEED_STEPS} steps"]
    figure = _figure("FID by order", "orders") if len(rows) > 1 else ""
    return markdown_table(header, rows) + figure if rows else NOTHING


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
    return markdown_table(header, rows) if rows else NOTHING


def _rate(measured: Measured, settings: dict[str, Any]) -> str | None:
    rate = measured.rate(settings)
    return None if rate is None else f"{rate:.0f}"


def _figure(title: str, name: str) -> str:
    return f"\n![{title}](../images/ablations-{name}.png)\n"


def _numbers(line: Line) -> list[str | None]:
    return [format_number(line, name, interval=name == "fid") for name in SHOWN]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of the ablations; with --write, put them and the figures into the documentation."""
    parser = argparse.ArgumentParser(prog="experiments.garden ablation-report", description=main.__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    measured = read(options.results)
    parts = tables(measured)
    for name, text in parts.items():
        sys.stdout.write(f"{name}\n\n{text}\n")
    if options.write:
        page = fill_page(PAGE.read_text(encoding="utf-8"), parts)
        write_text(PAGE, page)
        for path in draw_figures(measured, IMAGES):
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")


PAPER_ORDERS = ("random", "raster", "spiral-in", "spiral-out", "z-curve", "alternate")


def verdicts(lines: Sequence[Line]) -> str:
    """Return the paper's findings, each with what was measured here; differences count where they exceed the noise."""
    few, many = min(STEPS), max(STEPS)
    of = {(s, a): final(lines, steps=s, attention=a) for s in STEPS for a in ("block", "causal")}
    rows: list[list[Any]] = []
    pairs = [(s, block, causal) for s in STEPS if (block := of[s, "block"]) and (causal := of[s, "causal"])]
    if len(pairs) == len(STEPS):
        better = [s for s, block, causal in pairs if causal["fid"] - block["fid"] > noise(causal, block)]
        s, block, causal = max(pairs, key=lambda pair: float(pair[2]["fid"] - pair[1]["fid"]))
        apart_most = f"{causal['fid'] - block['fid']:+.2f} ± {noise(causal, block):.2f}"
        text = f"causal less block-wise is at most {apart_most}, at {s} steps"
        rows.append(["With few steps block-wise is better than causal", text, bool(better)])
    ends = [of[s, a] for s in (few, many) for a in ("block", "causal")]
    if None not in ends:
        block_few, causal_few, block_many, causal_many = (line for line in ends if line)
        apart = [causal["fid"] - block["fid"] for block, causal in ((block_few, causal_few), (block_many, causal_many))]
        noises = [noise(causal_few, block_few), noise(causal_many, block_many)]
        shown = [f"{d:+.2f} ± {n:.2f} at {s} steps" for d, n, s in zip(apart, noises, (few, many), strict=True)]
        rows.append(
            [
                "Fewer steps hurt causal decoding more than block-wise",
                ", ".join(shown),
                apart[0] - apart[1] > sum(noises),
            ]
        )
        rows.append([f"With one token per step ({many}) both are the same", shown[1], abs(apart[1]) <= noises[1]])
        scales = [line["settings"]["guidance"] for line in (block_few, block_many)]
        text = f"{scales[0]:g} at {few} steps, {scales[1]:g} at {many}"
        rows.append(["The best guidance falls with the number of steps", text, scales[0] > scales[1]])
    blocks = [line for s in sorted(STEPS) if (line := of[s, "block"])]
    if len(blocks) == len(STEPS):
        best, most = min(blocks[:-1], key=lambda line: float(line["fid"])), blocks[-1]
        text = f"{best['fid']:.2f} at {best['settings']['steps']} steps, {most['fid']:.2f} at {many}"
        better = most["fid"] - best["fid"] > noise(most, best)
        rows.append(["Block-wise, some steps are better than one token per step", text, better])
    orders = {order: line for order in PAPER_ORDERS if (line := of_order(lines, order, many))}
    if len(orders) == len(PAPER_ORDERS):
        ranked = sorted(orders, key=lambda order: float(orders[order]["fid"]))
        text = ", ".join(f"{order} {orders[order]['fid']:.2f}" for order in ranked)
        first = orders["random"]["fid"] - orders[ranked[0]]["fid"] <= noise(orders["random"], orders[ranked[0]])
        rows.append([f"No order is better than random ({many} steps)", text, first])
        rows.append([f"Spirals are worst ({many} steps)", text, set(ranked[-2:]) == {"spiral-in", "spiral-out"}])
    header = ["the paper", "here", "agrees"]
    return markdown_table(header, [[*row[:2], "yes" if row[2] else "no"] for row in rows]) if rows else ""


def gap(lines: Sequence[Line]) -> str:
    """Causal less block-wise, and what fewer steps cost block-wise; then the same pairs in the search."""
    most, rows, pairs = final(lines, steps=max(STEPS)), [], []
    for steps in sorted(STEPS):
        block, causal = (final(lines, steps=steps, attention=attention) for attention in ("block", "causal"))
        if block is None or causal is None:
            continue
        share, apart, half = 100 / block["fid"], causal["fid"] - block["fid"], noise(causal, block)
        cost = None if most in (None, block) else _difference(block, most)
        rows.append([steps, f"{apart:+.2f} ± {half:.2f}", f"{share * apart:+.1f} ± {share * half:.1f}%", cost])
        if steps != max(STEPS):
            for searched in matching(lines, SEARCH, steps=steps):
                scale = searched["settings"]["guidance"]
                others = matching(lines, SEARCH, steps=steps, attention="causal", guidance=scale)
                pairs += [other["fid"] - searched["fid"] for other in others]
    if not rows:
        return ""
    header = ["steps", "FID, causal less block-wise", "of block-wise", f"block-wise, less that of {max(STEPS)} steps"]
    if not pairs:
        return markdown_table(header, rows)
    return markdown_table(header, rows) + (
        f"\nIn the search ({SEARCH:,} images; the same scale, fewer than {max(STEPS)} steps) causal is higher in "
        f"{sum(apart > 0 for apart in pairs)} of {len(pairs)} pairs, by {sum(pairs) / len(pairs):.2f} on average.\n"
    )


def differences(lines: Sequence[Line]) -> str:
    """FID less that of the model's own way with as many steps; in bold where it exceeds the noise."""
    columns = sorted(ORDER_STEPS)
    plain = {steps: final(lines, steps=steps) for steps in columns}
    changed: dict[str, dict[int, Line | None]] = {}
    for order in ORDERS[1:]:
        changed[f"order {order}, not random"] = {steps: of_order(lines, order, steps) for steps in columns}
    for schedule in SCHEDULES[1:]:
        found = {steps: final(lines, steps=steps, schedule=schedule) for steps in FEW_STEPS}
        changed[f"{schedule} steps, not arccos"] = found
    constant = {steps: final(lines, steps=steps, guidance_schedule="constant") for steps in FEW_STEPS}
    changed["constant guidance, not linear"] = constant
    changed["no guidance"] = {steps: unguided(lines, steps) for steps in FEW_STEPS}
    rows = []
    for name, of in changed.items():
        cells = [_difference(of.get(steps), plain[steps]) for steps in columns]
        if any(cells):
            rows.append([name, *cells])
    return markdown_table(["FID, changed less plain", *(f"{steps} steps" for steps in columns)], rows) if rows else ""


def _difference(line: Line | None, plain: Line | None) -> str | None:
    if line is None or plain is None:
        return None
    apart, half = line["fid"] - plain["fid"], noise(line, plain)
    text = f"{apart:+.2f} ± {half:.2f}"
    return f"**{text}**" if abs(apart) > half else text


ATTENTIONS = {"block": "block-wise", "causal": "causal"}


def draw_figures(measured: Measured, folder: Path) -> list[Path]:
    """Plot what has been measured: FID over steps, over speed, over guidance, and by order."""
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
                attention: [(at, line) for line in of if (at := _place(measured, line, name))]
                for attention, of in found.items()
            }
            if not any(places.values()):
                continue
            axes = axes_of(name, label)
            for (attention, points), marker, below in zip(places.items(), "os", (True, False), strict=True):
                if not points:
                    continue
                x, of = [each for each, _ in points], [line for _, line in points]
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
            for dashes, (title, line) in zip(("--", ":"), measured.baselines.items(), strict=False):
                axes.axhline(line["fid"], linestyle=dashes, color="grey", label=title)
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
