"""Reports of a run: a progress line, metrics as JSON lines, TensorBoard, sample sheets, and a plot of the losses."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arpg.errors import InputError
from arpg.figures import new_plot, save_plot
from arpg.files import write_text, write_whole
from arpg.storage import AnyPath, RemotePath, list_files

log = logging.getLogger(__name__)


class Report:
    """`metrics.jsonl`, `tensorboard/` and `loss.png` in the run's folder. Only the main process writes.

    Of a remote folder `self.folder` is a local copy, whose new and changed files `upload` uploads.
    """

    def __init__(self, folder: AnyPath, *, num_steps: int, start: int, active: bool) -> None:
        self.store = folder if active and isinstance(folder, RemotePath) else None
        self.folder = Path(tempfile.mkdtemp(prefix="arpg-report-") if self.store is not None else str(folder))
        self.uploaded: dict[str, tuple[int, int]] = {}  # sizes and times of change
        self.num_steps, self.active = num_steps, active
        self.since, self.since_step = time.perf_counter(), start
        self.last_line = self.since
        self.board = _tensorboard(self.folder / "tensorboard") if active else None
        if active:
            self.folder.mkdir(parents=True, exist_ok=True)
            metrics = self.folder / "metrics.jsonl"
            if self.store is not None and (self.store / metrics.name).exists():
                metrics.write_bytes((self.store / metrics.name).read_bytes())
            metrics.touch()  # the plot reads it, also of a run that ends before its first metrics
            _drop_after(metrics, start)

    def rate(self, step: int) -> float:
        """Return the steps per second since the last call."""
        now = time.perf_counter()
        rate = (step - self.since_step) / max(now - self.since, 1e-9)
        self.since, self.since_step = now, step
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what happens inside (validation, sheets, saving) from the training time."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Report the metrics of a step."""
        if not self.active:
            return
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self.board is not None:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
        self._print(step, metrics)

    def silent(self, seconds: float) -> bool:
        """Return whether this process is the one that reports and has printed nothing for `seconds`."""
        return self.active and time.perf_counter() - self.last_line >= seconds

    def progress(self, step: int, loss: float) -> None:
        """Print how far the run is, with the mean loss since the last metrics; nothing is written to a file."""
        rate = (step - self.since_step) / max(time.perf_counter() - self.since, 1e-9)
        self._print(step, {"loss": loss, "steps/s": rate})

    def _print(self, step: int, metrics: dict[str, float]) -> None:
        self.last_line = time.perf_counter()
        shown = "  ".join(f"{name} {_short(value)}" for name, value in metrics.items())
        left = ""
        if rate := metrics.get("steps/s"):
            seconds = int((self.num_steps - step) / rate)
            left = f"  left {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        log.info("step %d/%d  %s%s", step, self.num_steps, shown, left)

    def save_image(self, name: str, image: Any) -> None:
        """Write a PIL image to the run's folder."""
        if self.active:
            write_whole(self.folder / f"{name}.png", lambda path: image.save(path, format="PNG"))

    def plot(self) -> None:
        """Update `loss.png`."""
        if self.active:
            plot_losses(self.folder)

    def upload(self) -> None:
        """Upload what has changed to a remote folder. A failure is logged; the next call tries again."""
        if self.store is None:
            return
        if self.board is not None:
            self.board.flush()
        try:
            for name in list_files(self.folder):
                path, target = self.folder / name, self.store / name
                version = path.stat().st_size, path.stat().st_mtime_ns
                if self.uploaded.get(name) != version:
                    target.upload(path).replace(target)
                    self.uploaded[name] = version
        except InputError as error:
            log.warning("the reports are not uploaded: %s", error)

    def close(self) -> None:
        """Write the last plot, close the TensorBoard files and upload all."""
        self.plot()
        if self.board is not None:
            self.board.close()
        self.upload()
        if self.store is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def plot_losses(folder: Path) -> None:
    """Plot every metric of `metrics.jsonl` with "loss" in its name over the steps, into `loss.png`."""
    figure = new_plot((8, 4.5), file="loss.png")
    if figure is None:
        return
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        for name, value in entry.items():
            if "loss" in name:
                series[name].append((entry["step"], value))
    axes = figure.subplots()
    for name, points in sorted(series.items()):
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2, marker="o" if "validation" in name else "")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    if series:
        axes.legend()
    save_plot(figure, folder / "loss.png")


def _drop_after(path: Path, step: int) -> None:
    """Drop the metrics after `step`, which a resumed run will report again."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    write_text(path, "".join(line + "\n" for line in lines))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):  # a line cut short by a crash
        return float("inf")


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.warning("no TensorBoard files: tensorboard is not installed (pip install 'arpg[train]')")
        return None
    return SummaryWriter(str(folder))


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
