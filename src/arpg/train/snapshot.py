"""Crash-safe snapshots of the training state: sharded, written in the background, verified before they are loaded."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from arpg.errors import InputError, require
from arpg.train.distributed import World

log = logging.getLogger(__name__)

T = TypeVar("T")
MANIFEST = "manifest.json"
PARTIAL, REPLACED = ".partial", ".replaced"


class Snapshots:
    """The newest `keep` snapshots, `folder/step-00000123/`. Every rank makes every call; all share the folder.

    A snapshot gets its name once it is complete on all ranks and its manifest is written.
    """

    def __init__(self, folder: Path, world: World, *, keep: int = 2) -> None:
        require(keep >= 1, f"keep is {keep}; expected 1 or more snapshots")
        self.folder, self.world, self.keep = folder, world, keep
        # A group of its own: the background thread's messages must not mix with those of the training.
        self._group = dist.new_group(backend="gloo")
        self._publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._flight: Future[Any] | None = None
        self._bad: set[int] = set()
        self._on_main(self._tidy)

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> None:
        """Copy the state now and write it in the background; `state` may change as soon as this returns.

        A failure of the write before this one is raised here.
        """
        self.finish()
        partial = self._path(step, PARTIAL)
        # As a stager the writer copies every tensor before async_save returns, those on the CPU too.
        writer = FileSystemWriter(partial, overwrite=False)
        writing = state_dict_saver.async_save(state, storage_writer=writer, process_group=self._group)
        assert isinstance(writing, Future)
        # Published from the background too: a crash long before the next save must not cost this one.
        self._flight = self._publisher.submit(self._complete, step, writing) if self.world.main else writing
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait until the snapshot in flight, if any, is published."""
        flight, self._flight = self._flight, None
        if flight is not None:
            wait([flight])
            self._on_main(flight.result)  # DCP reports a failure of any rank to all, so rank 0 has it

    def steps(self) -> list[int]:
        """Return the steps of the published snapshots, newest last."""
        if not self.folder.is_dir():
            return []
        found = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def exist(self) -> bool:
        """Return whether there are published snapshots; the same on every rank."""
        return bool(self._on_main(self.steps))

    def load(self, state: dict[str, Any]) -> int | None:
        """Load the newest intact snapshot into `state`, in place, and return its step; None where there is none."""
        self.finish()
        step = self._on_main(self._newest_intact)
        if step is None:
            return None
        path = self._path(step)
        try:
            state_dict_loader.load(state, storage_reader=FileSystemReader(path), process_group=self._group)
        except CheckpointException as error:
            reason = str(_causes(error)[0]).splitlines()[0]
            raise InputError(f"{path} does not fit this run: {reason}; resume with the recipe of its run") from error
        return step

    def _path(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step-{step:08d}{suffix}"

    def _on_main(self, act: Callable[[], T]) -> T:
        """Run `act` on rank 0; return its value or raise its exception on every rank."""
        outcome: list[Any] = [None, None]
        if self.world.main:
            try:
                outcome[0] = act()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        value: T = outcome[0]
        return value

    # From here on: rank 0 only.

    def _tidy(self) -> None:
        """Remove what a crash left, and restore a snapshot that was being replaced by one of the same step."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"step-*{REPLACED}"):
                if not path.with_suffix("").exists():
                    path.rename(path.with_suffix(""))
            for path in (*self.folder.glob(f"step-*{REPLACED}"), *self.folder.glob(f"step-*{PARTIAL}")):
                shutil.rmtree(path)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be used: {error.strerror}; choose another place") from error

    def _complete(self, step: int, writing: Future[Any]) -> None:
        partial = self._path(step, PARTIAL)
        try:
            writing.result()
            self._publish(step)
        except (OSError, CheckpointException) as error:
            failure = _disk_failure(error, partial)
            shutil.rmtree(partial, ignore_errors=True)
            message = f"{self.folder}: the snapshot of step {step} could not be written:"
            if failure is None:
                raise RuntimeError(f"{message} {_causes(error)[0]}") from error
            full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "free some space" if full else "make the folder writable"
            raise InputError(f"{message} {failure.strerror}; {advice} and continue with --resume") from error
        for old in self._superseded(step):
            # Renamed first: a crash in the middle of a removal must not leave half a snapshot under its name.
            try:
                shutil.rmtree(self._path(old).rename(self._path(old, PARTIAL)))
            except OSError as error:
                log.warning("%s could not be removed: %s", self._path(old), error.strerror)

    def _publish(self, step: int) -> None:
        partial, published, replaced = self._path(step, PARTIAL), self._path(step), self._path(step, REPLACED)
        files = {path.name: [path.stat().st_size, _crc32(path)] for path in sorted(partial.iterdir())}
        with (partial / MANIFEST).open("w") as file:
            json.dump({"step": step, "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        if published.exists():  # damaged, or the run reached this step before
            published.rename(replaced)
        partial.rename(published)
        _sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._bad.discard(step)

    def _superseded(self, step: int) -> list[int]:
        """Return all but the newest `keep` and the one just written; damaged snapshots do not count as kept."""
        good = [other for other in self.steps() if other not in self._bad]
        return [other for other in self.steps() if other not in good[-self.keep :] and other != step]

    def _newest_intact(self) -> int | None:
        steps = self.steps()
        for step in reversed(steps):
            damage = _damage(self._path(step))
            if damage is None:
                return step
            log.warning("the snapshot of step %d is not used: %s", step, damage)
            self._bad.add(step)
        require(not steps, f"{self.folder}: none of its {len(steps)} snapshots is intact; restore one or start anew")
        return None


def _damage(snapshot: Path) -> str | None:
    """Return what is wrong with a published snapshot, with the file; None where it is intact."""
    path = snapshot / MANIFEST
    try:
        files: dict[str, list[int]] = json.loads(path.read_text())["files"]
        for name, (size, checksum) in files.items():
            path = snapshot / name
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes instead of {size}"
            if _crc32(path) != checksum:
                return f"{path} has changed since it was written (its checksum differs)"
    except OSError as error:
        return f"{path}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{path} is not a manifest"
    return None


def _disk_failure(error: OSError | CheckpointException, partial: Path) -> OSError | None:
    """Return the disk error of a failed write. torch.save can hide it ("unexpected pos"), so a probe is written."""
    for cause in _causes(error):
        if isinstance(cause, OSError):
            return cause
    try:
        with (partial / "probe").open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as cause:
        return cause
    return None


def _causes(error: OSError | CheckpointException) -> list[BaseException]:
    return [error] if isinstance(error, OSError) else [cause for cause, _ in error.failures.values()]


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; Windows, which cannot open folders, does that by itself."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
