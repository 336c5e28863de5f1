"""Runs that are cut into calls of a few minutes: stages until a deadline, training that resumes, results as a zip."""

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

log = logging.getLogger("garden")


def run_stages(stages: Mapping[str, Callable[[], bool]], deadline: float, results: Path, target: Path | None) -> None:
    """Run one stage after the other until one returns that it is not finished; none begins after the deadline.

    With `target`, the results are also written there as pieces of a zip file.
    """
    for name, stage in stages.items():
        began = time.monotonic()
        if began > deadline or not stage():
            log.info("%s is not finished; run this again", name)
            break
        log.info("%s: %.0f s", name, time.monotonic() - began)
    else:
        log.info("done")
    if target is not None:
        write_pieces(results, target)


def train_until(deadline: float, recipe: ModelRecipe, folder: Path, results: Path, *, device: str) -> bool:
    """Train or resume training; return whether it is finished. The newest sheet and metrics are copied to `results`."""
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


def write_pieces(results: Path, folder: Path, piece: int = 15_000_000) -> None:
    """Write all results as one zip, cut into pieces (cat joins them)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(p for p in results.rglob("*") if p.is_file()):
            archive.write(path, path.relative_to(results).as_posix())
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("results.zip.*"):  # an earlier call may have written more
        old.unlink()
    data = buffer.getvalue()
    for number, start in enumerate(range(0, len(data), piece)):
        (folder / f"results.zip.{number:03d}").write_bytes(data[start : start + piece])
