"""Records: what was measured, where and with which code, as JSON; as tables, as a plot, and two of them compared."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import arpg
from arpg.bench.profile import SPLIT_PARTS
from arpg.bench.throughput import PERCENTILES, Row
from arpg.device import cpu_name
from arpg.errors import InputError, require
from arpg.figures import new_plot, save_plot
from arpg.files import write_json
from arpg.kernels.dispatch import working_gemms
from arpg.tables import text_table

FORMAT = "arpg-bench-1"

# The measures that are compared: those where a higher value is better, and those where a lower one is.
HIGHER_IS_BETTER = ("images/s", "token images/s")
LOWER_IS_BETTER = ("p50 ms", "p95 ms", "p99 ms", "peak GiB")
MEASURES = (*HIGHER_IS_BETTER, *LOWER_IS_BETTER)


def environment(device: torch.device) -> dict[str, Any]:
    """Return hardware, versions and the commit, for a record."""
    found: dict[str, Any] = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "device": "CPU"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "device GiB": round(properties.total_memory / 2**30, 1)}
        found |= {"cuda": torch.version.cuda, "fused GEMMs": working_gemms(device)}
    found |= {"torch": torch.__version__, "python": platform.python_version(), "system": platform.platform()}
    found["arpg"] = _version("arpg")
    if (triton := _version("triton")) is not None:
        found["triton"] = triton
    found["commit"] = commit()
    return found


def commit(folder: Path | None = None) -> str | None:
    """Return the commit of the code, with a + where files differ from it; None outside a repository."""
    folder = folder or Path(arpg.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed, or vendored in another repository
        return None
    head, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--untracked-files=no", ".")
    return None if head is None else head + ("+" if changed else "")


def error_line(error: Exception) -> str:
    """Return the type and the first line of `error`, for a report that goes on with the next measurement."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0][:200]}"


def write_record(path: Path, about: dict[str, Any], rows: Sequence[Row], **more: Any) -> None:
    """Write a record atomically. `more`: scaling and cold starts; empty ones are left out."""
    extra = {name: value for name, value in more.items() if value}
    write_json(path, {"format": FORMAT, "about": about, "rows": list(rows), **extra})


def read_record(path: Path) -> dict[str, Any]:
    """Read a record that `write_record` has written."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); expected a record of `arpg bench`") from None
    except ValueError:
        raise InputError(f"{path} is not JSON; expected a record of `arpg bench`") from None
    good = isinstance(record, dict) and record.get("format") == FORMAT and isinstance(record.get("rows"), list)
    require(good, f"{path} is not a record of `arpg bench` ({FORMAT}); is it another kind of result?")
    whole = all(isinstance(row, dict) and isinstance(row.get("settings"), dict) for row in record["rows"])
    require(whole, f"{path} has rows without settings; expected a record of `arpg bench`")
    return dict(record)


def compare(before: dict[str, Any], after: dict[str, Any], *, tolerance: float) -> dict[str, Any]:
    """Compare rows with equal settings: for each measure, how many times better `after` is.

    A ratio above 1 is better, also where a lower value is. `slower` lists what is worse by more than `tolerance`.
    """
    require(0 <= tolerance < 1, f"tolerance is {tolerance}; expected a share from 0 to below 1, like 0.05")
    old = {_key(row): row for row in before["rows"]}
    new = {_key(row): row for row in after["rows"]}
    pairs, slower = [], []
    for key, row in new.items():
        if key not in old:
            continue
        ratios = {name: _gain(name, _measures(old[key]), _measures(row)) for name in MEASURES}
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        pairs.append({"settings": row["settings"], "ratios": known})
        slower += [(row["settings"], name, ratio) for name, ratio in known.items() if ratio < 1 - tolerance]
    return {
        "pairs": pairs,
        "slower": slower,
        "gone": [row["settings"] for key, row in old.items() if key not in new],
        "new": [row["settings"] for key, row in new.items() if key not in old],
        "differs": _differs(before.get("about", {}), after.get("about", {})),
    }


def _measures(row: Row) -> dict[str, Any]:
    return {**row, **{f"{name} ms": value for name, value in row.get("latency ms", {}).items()}}


def _gain(name: str, old: Row, new: Row) -> float | None:
    a, b = old.get(name), new.get(name)
    if not isinstance(a, int | float) or not isinstance(b, int | float) or a <= 0 or b <= 0:
        return None
    return float(b / a if name in HIGHER_IS_BETTER else a / b)


def _key(row: Row) -> str:
    """Identify a row by its settings; records without an engine are of eager runs."""
    return json.dumps({"pixels": row.get("pixels"), "engine": "eager", **row["settings"]}, sort_keys=True)


def _differs(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between the two machines and programs, except for the commit."""
    names = sorted((set(a) | set(b)) - {"commit"})
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# Records as text and as a plot


def render_rows(rows: Sequence[Row]) -> str:
    """Return a table of rows; settings that are equal in all of them stand above it."""
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
            line |= {name: f"{100 * row['split ms'][name] / whole:.0f}%" for name in SPLIT_PARTS}
        if "capture" in row:
            line["captured in s"] = row["capture"]["s"]
        lines.append(line)
    return f"{above}\n\n{_table(lines)}"


def render_kernels(rows: Sequence[Row]) -> str:
    """Return the milliseconds of a batch's tokens by kind of kernel; empty where there was no GPU."""
    found = [row for row in rows if "kernels ms" in row]
    _, shown = _shared([row["settings"] for row in found])
    lines = [
        {name: row["settings"].get(name, "") for name in shown} | {"kernels": row["kernels"]} | row["kernels ms"]
        for row in found
    ]
    return f"ms of the kernels of a batch's tokens:\n\n{_table(lines)}" if lines else ""


def render_top_kernels(rows: Sequence[Row]) -> str:
    """Return the most expensive kernels of each profiled row."""
    parts = []
    for row in rows:
        if "top kernels" in row:
            lines = [f"{k['ms']:9.3f} ms {k['launches']:6d} x {k['group']}: {k['kernel']}" for k in row["top kernels"]]
            parts.append("\n".join([_short(row["settings"]), *lines]))
    return "\n\n".join(parts)


def render_comparison(found: dict[str, Any]) -> str:
    """Return the result of `compare` as text: ratios (above 1: the second is better), then what got slower."""
    above, shown = _shared([pair["settings"] for pair in found["pairs"]])
    lines = [
        {name: pair["settings"].get(name, "") for name in shown}
        | {name: f"{pair['ratios'][name]:.3f}" if name in pair["ratios"] else "" for name in MEASURES}
        for pair in found["pairs"]
    ]
    parts = [f"{above}\n\n{_table(lines)}\n" if lines else "no row is in both records"]
    parts += [f"only in the first: {_short(settings)}" for settings in found["gone"]]
    parts += [f"only in the second: {_short(settings)}" for settings in found["new"]]
    parts += [f"not the same: {name} was {a!r}, is {b!r}" for name, (a, b) in found["differs"].items()]
    for settings, name, ratio in found["slower"]:
        parts.append(f"worse: {name}, {ratio:.3f} times as good ({_short({n: settings.get(n) for n in shown})})")
    if lines and not found["slower"]:
        parts.append("nothing got slower")
    return "\n".join(parts)


def render_scaling(series: Sequence[Row]) -> str:
    """Return one line for each series of growing size, with the fitted exponent."""
    lines = []
    for one in series:
        points = ", ".join(f"{n}: {s:.4g} s" for n, s in zip(one["sizes"], one["seconds per batch"], strict=True))
        grows = f"cost grows like {one['over']}^{one['exponent']}" if "exponent" in one else "one size has no exponent"
        last = f" (at the end ^{one['last exponent']})" if "last exponent" in one else ""
        left = f"; left out, too slow: {', '.join(map(str, one['left out']))}" if one.get("left out") else ""
        lines.append(f"{one['over']}: {grows}{last}; per batch {points}{left}")
    return "\n".join(lines)


def plot_rows(rows: Sequence[Row], path: Path) -> bool:
    """Plot images/s over steps, a line per batch, and over batch, a line per number of steps.

    Return whether matplotlib is installed and the file was written.
    """
    figure = new_plot((10, 4.2), file=path)
    if figure is None:
        return False
    from matplotlib.ticker import LogLocator

    for axes, over, by in zip(figure.subplots(1, 2), ("steps", "batch"), ("batch", "steps"), strict=True):
        lines = plot_lines(rows, over, by)
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
    save_plot(figure, path)
    return True


def plot_lines(rows: Sequence[Row], over: str, by: str) -> dict[str, list[tuple[float, float]]]:
    """Return lines of (`over`, images/s), the fastest first: one for each value of `by` and of all else that varies."""
    names = list(dict.fromkeys(name for row in rows for name in row["settings"]))
    others = [n for n in names if n not in (over, by) and len({str(row["settings"].get(n)) for row in rows}) > 1]
    if over == "steps" or by == "steps":  # guidance follows the number of steps unless it was given
        pairs = {(row["settings"].get("steps"), row["settings"].get("guidance")) for row in rows}
        if len(pairs) == len({steps for steps, _ in pairs}):
            others = [name for name in others if name != "guidance"]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = ", ".join(f"{key} {row['settings'].get(key)}" for key in (by, *others))
        lines.setdefault(name, []).append((row["settings"][over], row["images/s"]))
    fastest = sorted(lines, key=lambda name: -max(speed for _, speed in lines[name]))
    return {name: sorted(lines[name]) for name in fastest}


def _shared(all_settings: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the equal settings as text and the names of the others, which always include batch and steps."""
    names = list(dict.fromkeys(name for settings in all_settings for name in settings))
    varied = [name for name in names if len({str(settings.get(name)) for settings in all_settings}) > 1]
    shown = [name for name in names if name in varied or name in ("batch", "steps")]
    return ", ".join(f"{name} {all_settings[0][name]}" for name in names if name not in shown), shown


def _short(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _table(lines: Sequence[dict[str, Any]]) -> str:
    """Return a table whose columns are the keys of `lines`."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    return text_table(names, [[line.get(name, "") for name in names] for line in lines], align="r")
