"""Records as text and as a picture: the table of a run, two runs side by side, speed over steps and batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arpg.bench.record import LESS, MORE
from arpg.bench.split import PARTS
from arpg.bench.throughput import PERCENTILES, Row
from arpg.files import write_whole

log = logging.getLogger(__name__)


def table(rows: Sequence[Row]) -> str:
    """Markdown. Settings that are the same in all rows stand above it."""
    if not rows:
        return "nothing was measured"
    above, shown = _shared([row["settings"] for row in rows])
    lines = []
    for row in rows:
        line = {name: row["settings"].get(name, "") for name in shown}
        line["images/s"] = row["images/s"]
        line["of tokens"] = row["token images/s"]
        line |= {f"p{p} ms": row["latency ms"][f"p{p}"] for p in PERCENTILES}
        line["GiB"] = row["peak GiB"]
        if "roofline share" in row:
            line |= {"roofline": row["roofline token images/s"], "share": f"{100 * row['roofline share']:.1f}%"}
        if "split ms" in row:
            whole = sum(row["split ms"].values()) or 1.0
            line |= {name: f"{100 * row['split ms'][name] / whole:.0f}%" for name in PARTS}
        if "recording" in row:
            line["recorded in s"] = row["recording"]["s"]
        lines.append(line)
    return f"{above}\n\n{_markdown(lines)}"


def kernel_table(rows: Sequence[Row]) -> str:
    """Milliseconds of a batch's tokens by kind of kernel; empty where there was no GPU."""
    found = [row for row in rows if "kernels ms" in row]
    _, shown = _shared([row["settings"] for row in found])
    lines = [
        {name: row["settings"].get(name, "") for name in shown} | {"kernels": row["kernels"]} | row["kernels ms"]
        for row in found
    ]
    return f"ms of the kernels of a batch's tokens:\n\n{_markdown(lines)}" if lines else ""


def top_kernels(rows: Sequence[Row]) -> str:
    """The most expensive kernels of each row that was profiled."""
    parts = []
    for row in rows:
        if "top kernels" in row:
            lines = [f"{k['ms']:9.3f} ms {k['launches']:6d} x {k['group']}: {k['kernel']}" for k in row["top kernels"]]
            parts.append("\n".join([_short(row["settings"]), *lines]))
    return "\n\n".join(parts)


def comparison(found: dict[str, Any]) -> str:
    """`record.compare` as text: ratios (above 1: the second is better), then what got slower."""
    above, shown = _shared([pair["settings"] for pair in found["pairs"]])
    lines = [
        {name: pair["settings"].get(name, "") for name in shown}
        | {name: f"{pair['ratios'][name]:.3f}" if name in pair["ratios"] else "" for name in (*MORE, *LESS)}
        for pair in found["pairs"]
    ]
    parts = [f"{above}\n\n{_markdown(lines)}\n" if lines else "no row is in both records"]
    parts += [f"only in the first: {_short(settings)}" for settings in found["gone"]]
    parts += [f"only in the second: {_short(settings)}" for settings in found["new"]]
    parts += [f"not the same: {name} was {a!r}, is {b!r}" for name, (a, b) in found["differs"].items()]
    for settings, name, ratio in found["slower"]:
        parts.append(f"worse: {name}, {ratio:.3f} times as good ({_short({n: settings.get(n) for n in shown})})")
    if lines and not found["slower"]:
        parts.append("nothing got slower")
    return "\n".join(parts)


def scaling_text(series: Sequence[Row]) -> str:
    lines = []
    for one in series:
        points = ", ".join(f"{n}: {s:.4g} s" for n, s in zip(one["sizes"], one["seconds per batch"], strict=True))
        grows = f"cost grows like {one['over']}^{one['exponent']}" if "exponent" in one else "one size has no exponent"
        last = f" (at the end ^{one['last exponent']})" if "last exponent" in one else ""
        left = f"; left out, too slow: {', '.join(map(str, one['left out']))}" if one.get("left out") else ""
        lines.append(f"{one['over']}: {grows}{last}; per batch {points}{left}")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Images/s over steps, a line per batch, and over batch, a line per number of steps. Whether it could be drawn."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    except ImportError:
        log.warning("no %s: matplotlib is not installed (pip install 'arpg[train]')", path)
        return False
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, over, by in zip(figure.subplots(1, 2), ("steps", "batch"), ("batch", "steps"), strict=True):
        lines = series(rows, over, by)
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xlabel=over, ylabel="images/s", xscale="log", yscale="log")
        measured = sorted({point[0] for points in lines.values() for point in points})
        axes.set_xticks(measured, labels=[str(value) for value in measured])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=120, format=path.suffix.lstrip(".") or "png"))
    return True


def series(rows: Sequence[Row], over: str, by: str) -> dict[str, list[tuple[float, float]]]:
    """Lines of (`over`, images/s), the fastest first: one for each value of `by` and of whatever else varies."""
    names = list(dict.fromkeys(name for row in rows for name in row["settings"]))
    else_varied = [n for n in names if n not in (over, by) and len({str(row["settings"].get(n)) for row in rows}) > 1]
    if over == "steps" or by == "steps":  # guidance follows the number of steps unless it was given
        pairs = {(row["settings"].get("steps"), row["settings"].get("guidance")) for row in rows}
        if len(pairs) == len({steps for steps, _ in pairs}):
            else_varied = [name for name in else_varied if name != "guidance"]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = ", ".join(f"{key} {row['settings'].get(key)}" for key in (by, *else_varied))
        lines.setdefault(name, []).append((row["settings"][over], row["images/s"]))
    fastest = sorted(lines, key=lambda name: -max(speed for _, speed in lines[name]))
    return {name: sorted(lines[name]) for name in fastest}


def _shared(all_settings: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """What is the same in all, as text, and the names of what varies; batch and steps always count as that."""
    names = list(dict.fromkeys(name for settings in all_settings for name in settings))
    varied = [name for name in names if len({str(settings.get(name)) for settings in all_settings}) > 1]
    shown = [name for name in names if name in varied or name in ("batch", "steps")]
    return ", ".join(f"{name} {all_settings[0][name]}" for name in names if name not in shown), shown


def _short(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _markdown(lines: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for line in lines for name in line))
    cells = [names, *([str(line.get(name, "")) for name in names] for line in lines)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    text = ["| " + " | ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([text[0], rule, *text[1:]])
