"""Records: what was measured, where, and with which code, as JSON; and two of them side by side."""

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
from arpg.bench.throughput import Row
from arpg.device import cpu_name
from arpg.errors import InputError, require
from arpg.files import write_whole

FORMAT = "arpg-bench-1"

# Where more is better, and where less is. What else a row holds is not compared.
MORE = ("images/s", "token images/s")
LESS = ("p50 ms", "p95 ms", "p99 ms", "peak GiB")


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and the commit."""
    found: dict[str, Any] = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "device": "CPU"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "device GiB": round(properties.total_memory / 2**30, 1)}
        found["cuda"] = torch.version.cuda
    found |= {"torch": torch.__version__, "python": platform.python_version(), "system": platform.platform()}
    found["arpg"] = _version("arpg")
    if (triton := _version("triton")) is not None:
        found["triton"] = triton
    found["commit"] = commit()
    return found


def commit(folder: Path | None = None) -> str | None:
    """The commit that the code is from, with a + where files differ from it; None outside a repository."""
    folder = folder or Path(arpg.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed, or a copy that somebody else tracks
        return None
    head, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--untracked-files=no", ".")
    return None if head is None else head + ("+" if changed else "")


def write_record(path: Path, about: dict[str, Any], rows: Sequence[Row], **more: Any) -> None:
    """Whole or not at all. `more`: scaling, cold starts; what is empty is left out."""
    extra = {name: value for name, value in more.items() if value}
    text = json.dumps({"format": FORMAT, "about": about, "rows": list(rows), **extra}, indent=1) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); expected what `arpg bench` has written") from None
    except ValueError:
        raise InputError(f"{path} is not JSON; expected what `arpg bench` has written") from None
    good = isinstance(record, dict) and record.get("format") == FORMAT and isinstance(record.get("rows"), list)
    require(good, f"{path} is not a record of `arpg bench` ({FORMAT}); is it another kind of result?")
    whole = all(isinstance(row, dict) and isinstance(row.get("settings"), dict) for row in record["rows"])
    require(whole, f"{path} has rows without settings; expected what `arpg bench` has written")
    return dict(record)


def compare(before: dict[str, Any], after: dict[str, Any], *, tolerance: float) -> dict[str, Any]:
    """Rows with the same settings side by side: for each measure how many times better the second is.

    Above 1 is better, also where less is better. `slower`: what is worse by more than the tolerance.
    """
    require(0 <= tolerance < 1, f"tolerance is {tolerance}; expected a share from 0 to below 1, like 0.05")
    old = {_key(row): row for row in before["rows"]}
    new = {_key(row): row for row in after["rows"]}
    pairs, slower = [], []
    for key, row in new.items():
        if key not in old:
            continue
        ratios = {name: _gain(name, _measures(old[key]), _measures(row)) for name in (*MORE, *LESS)}
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
    return float(b / a if name in MORE else a / b)


def _key(row: Row) -> str:
    """Records from before there were engines are of eager runs."""
    return json.dumps({"pixels": row.get("pixels"), "engine": "eager", **row["settings"]}, sort_keys=True)


def _differs(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What is not the same about the two machines and programs; the commit is bound to differ."""
    names = sorted((set(a) | set(b)) - {"commit"})
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
