"""What runs that are cut into calls of a few minutes share: training until a deadline, results as pieces of a zip."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from arpg import InputError
from arpg.train.model import train_model
from arpg.train.recipe import ModelRecipe

log = logging.getLogger("resumable")


def go(steps: Mapping[str, Callable[[], bool]], deadline: float, results: Path, target: Path | None) -> None:
    """One step after the other, each of which says whether it is finished; none begins when time is up."""
    for name, step in steps.items():
        began = time.monotonic()
        if began > deadline or not step():
            log.info("%s is not finished; run this again", name)
            break
        log.info("%s: %.0f s", name, time.monotonic() - began)
    else:
        log.info("done")
    if target is not None:
        ship(results, target)


def train_until(deadline: float, recipe: ModelRecipe, folder: Path, results: Path, *, device: str) -> bool:
    """Train, or go on with it; whether it is finished. The newest sheet and the metrics are copied to the results."""
    if (folder / "model" / "config.json").exists():
        return True
    left = deadline - time.monotonic()
    if left < 60:
        return False
    timer = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        train_model(recipe, folder, resume=(folder / "snapshots").exists(), device=device)
    except InputError as error:
        if "stopped by a signal" not in str(error):
            raise
        log.info("%s", error)
        return False
    finally:
        timer.cancel()
        for path in (*sorted(folder.glob("samples-*.png"))[-1:], *folder.glob("metrics.jsonl")):
            (results / path.name).write_bytes(path.read_bytes())
    return True


def ship(results: Path, folder: Path, piece: int = 15_000_000) -> None:
    """All results as one zip, cut into pieces (cat joins them)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(p for p in results.rglob("*") if p.is_file()):
            archive.write(path, path.relative_to(results).as_posix())
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("results.zip.*"):  # there may have been more of them
        old.unlink()
    data = buffer.getvalue()
    for number, start in enumerate(range(0, len(data), piece)):
        (folder / f"results.zip.{number:03d}").write_bytes(data[start : start + piece])
