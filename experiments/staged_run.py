"""Runs that are cut into calls of a few minutes on a machine that forgets: stages until a deadline, training that
resumes, and results that come back in pieces.

A call trains until its time is over. While the machine is held, the next call resumes from the snapshot; later, a call
starts from the weights that came back in 8 bits (`init_from`).
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import logging
import shutil
import time
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from arpg.device import choose_device
from arpg.errors import require
from arpg.files import write_whole
from arpg.storage import AnyPath
from arpg.train.loop import TrainingStoppedError
from arpg.train.model import train_model
from arpg.train.recipe import ModelRecipe, TokenizerRecipe
from arpg.train.tokenizer import train_tokenizer

log = logging.getLogger("experiments")

PIECE = 15_000_000  # bytes of a piece: files of up to 16 MiB come back
FINISHED = "finished"  # the file that marks a run which has reached its end
SHORTEST = 60.0  # seconds below which training is not begun


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a run, which is finished where the results have the file `done`."""

    done: str = ""  # none: the stage itself knows what it has done
    seconds: float = 0.0  # on a GPU, where it cannot be interrupted


def add_run_options(parser: argparse.ArgumentParser, *, stages: Collection[str], recipe: str) -> None:
    """Add the options of a `StagedRun`; `recipe` is the default of --recipe."""
    parser.add_argument("--stages", nargs="*", default=list(stages), choices=stages)
    parser.add_argument("--recipe", type=Path, default=Path(recipe))
    parser.add_argument("--set", action="append", default=[], help="Override a value of the recipe.")
    parser.add_argument("--work", type=Path, required=True, help="Data, snapshots, images; kept between calls.")
    parser.add_argument("--out", type=Path, required=True, help="The results: model, scorers, numbers, sheets.")
    parser.add_argument("--pieces", type=Path, help="Also write the results here, as pieces of 15 MB of one zip.")
    parser.add_argument("--minutes", type=float, default=9.0, help="Time of this call.")
    parser.add_argument("--device", default="auto")


class StagedRun:
    """One call of a run that makes a model: its stages that are not finished, until its time is over.

    A stage is a method of that name, with _ for -. One that returns False is not finished.
    """

    stages: Mapping[str, Stage]
    recipe: ModelRecipe

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work, self.results = options, options.work, options.out
        self.deadline = time.monotonic() + 60 * options.minutes
        self.work.mkdir(parents=True, exist_ok=True)
        self.results.mkdir(parents=True, exist_ok=True)
        self.device = choose_device(options.device)

    def run(self) -> None:
        """Run the stages of `--stages` until one is not finished; none begins that would end after the deadline.

        With `--pieces`, the results are also written there as pieces of a zip file.
        """
        for name in (name for name in self.stages if name in self.options.stages):
            stage, began = self.stages[name], time.monotonic()
            if not (stage.done and (self.results / stage.done).exists()):
                late = began + stage.seconds > self.deadline
                if late or getattr(self, name.replace("-", "_"))() is False:
                    log.info("%s is not finished; run this again", name)
                    break
                log.info("%s: %.0f s", name, time.monotonic() - began)
        else:
            log.info("done")
        if self.options.pieces is not None:
            write_pieces(self.results, self.options.pieces)

    def train(self) -> bool:
        """Train the model, or resume its training."""
        return train_until(self.deadline, self.recipe, self.work / "train", self.results, device=self.options.device)


def train_until(
    deadline: float,
    recipe: ModelRecipe | TokenizerRecipe,
    folder: Path,
    results: Path,
    *,
    device: str,
    store: Callable[[Path, Path], None] | None = None,
    train: Callable[..., AnyPath] | None = None,
) -> bool:
    """Train or resume training until `deadline`; return whether it is finished.

    `train`: what runs the recipe, where it is not `train_model` or `train_tokenizer`.
    The newest sheet and metrics are copied to `results`. `store(folder, target)` writes the model so far to
    RESULTS/model in the form in which it comes back.
    """
    if (folder / FINISHED).exists():
        return True
    left = deadline - time.monotonic()
    if left < SHORTEST:
        return False
    results.mkdir(parents=True, exist_ok=True)
    limited = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, max_minutes=left / 60))
    resume = (folder / "snapshots").exists()
    run: Callable[..., AnyPath] = train or (train_tokenizer if isinstance(limited, TokenizerRecipe) else train_model)
    try:
        run(limited, folder, resume=resume, device=device)
    except TrainingStoppedError as error:
        log.info("%s", error)
        return False
    finally:
        for path in (*sorted(folder.glob("samples-*.png"))[-1:], *folder.glob("metrics.jsonl")):
            shutil.copyfile(path, results / path.name)
        if store is not None and (folder / "model" / "config.json").exists():
            store(folder / "model", results / "model")
    (folder / FINISHED).touch()
    return True


def write_pieces(results: Path, folder: Path, piece: int = PIECE, *, leave_out: Collection[Path] = ()) -> list[Path]:
    """Write all results as one zip, cut into pieces, and return them; `join_pieces` is the inverse.

    `leave_out`: files, and folders with all that is in them.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(p for p in results.rglob("*") if p.is_file()):
            if not {path, *path.parents}.isdisjoint(leave_out):
                continue
            archive.write(path, path.relative_to(results).as_posix())
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("results.zip.*"):  # an earlier call may have written more
        old.unlink()
    data, written = buffer.getvalue(), []
    for number, start in enumerate(range(0, len(data), piece)):
        written.append(folder / f"results.zip.{number:03d}")
        written[-1].write_bytes(data[start : start + piece])
    return written


def join_pieces(folder: Path, target: Path) -> None:
    """Unpack the pieces that `write_pieces` wrote into `target`; files of that name there are replaced."""
    pieces = sorted(folder.glob("results.zip.*"))
    require(bool(pieces), f"{folder} has no results.zip.*; expected the pieces of a run")
    numbers = [int(path.suffix[1:]) for path in pieces]
    require(numbers == list(range(len(pieces))), f"{folder} has the pieces {numbers}; some of them are missing")
    try:
        with zipfile.ZipFile(io.BytesIO(b"".join(path.read_bytes() for path in pieces))) as archive:
            for name in archive.namelist():
                data = archive.read(name)
                write_whole(target / name, lambda path, data=data: path.write_bytes(data))  # type: ignore[misc]
    except zipfile.BadZipFile as error:
        require(False, f"{folder}: the pieces are no whole zip file ({error}); fetch them again")
