"""Crash-safe snapshots of the training state: sharded, written in the background, verified before they are loaded."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter

from arpg.errors import InputError, require
from arpg.files import write_json
from arpg.storage import AnyPath, RemotePath, fetch, list_files, remove_folder
from arpg.train.distributed import World

log = logging.getLogger(__name__)

T = TypeVar("T")
MANIFEST, METADATA = "manifest.json", ".metadata"


class Snapshots:
    """The newest `keep` snapshots, `folder/step-00000123/`. Every rank makes every call; all share the folder.

    A snapshot is complete where it has a manifest, which is written last and removed first. A process that loads one
    checks the files that it reads. The folder may be in an object store.
    """

    def __init__(self, folder: AnyPath, world: World, *, keep: int = 2) -> None:
        require(keep >= 1, f"keep is {keep}; expected 1 or more snapshots")
        self.folder, self.world, self.keep = folder, world, keep
        # A group of its own: the background thread's messages must not mix with those of the training.
        self._group = dist.new_group(backend="gloo")
        self._publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._flight: Future[Any] | None = None
        self._damaged: dict[int, str] = {}  # what is wrong with snapshots that were to be loaded
        self._on_main(self._tidy)

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> None:
        """Copy the state now and write it in the background; `state` may change as soon as this returns.

        A failure of the write before this one is raised here.
        """
        self.finish()
        self._on_main(lambda: _remove(self._path(step)))  # a damaged one of the same step
        # As a stager the writer copies every tensor before async_save returns, those on the CPU too.
        writer = _Writer(self._path(step), step)
        writing = state_dict_saver.async_save(state, storage_writer=writer, process_group=self._group)
        assert isinstance(writing, Future)
        self._flight = writing
        if self.world.main:
            self._flight = self._publisher.submit(self._complete, step, writing, writer)
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait until the snapshot in flight, if any, is complete."""
        flight, self._flight = self._flight, None
        if flight is not None:
            wait([flight])
            self._on_main(flight.result)  # DCP reports a failure of any rank to all, so rank 0 has it

    def steps(self) -> list[int]:
        """Return the steps of the complete snapshots, newest last."""
        return sorted(step for step, names in self._found().items() if MANIFEST in names)

    def exist(self) -> bool:
        """Return whether there are complete snapshots; the same on every rank."""
        return bool(self._on_main(self.steps))

    def load(self, state: dict[str, Any]) -> int | None:
        """Load the newest intact snapshot into `state`, in place, and return its step; None where there is none."""
        self.finish()
        while (step := self._on_main(self._newest_intact)) is not None:
            try:
                state_dict_loader.load(state, storage_reader=self._reader(step), process_group=self._group)
                return step
            except CheckpointException as error:
                causes = _causes(error)
                if damage := [cause for cause in causes if isinstance(cause, _DamagedError)]:
                    self._damaged[step] = str(damage[0])
                    continue
                _raise_input_error(causes)
                path, reason = self._path(step), str(causes[0]).splitlines()[0]
                raise InputError(
                    f"{path} does not fit this run: {reason}; resume with the recipe of its run"
                ) from error
        return None

    def _path(self, step: int) -> AnyPath:
        return self.folder / f"step-{step:08d}"

    def _reader(self, step: int) -> FileSystemReader:
        reader = FileSystemReader(str(self._path(step)))
        reader.fs = _CheckedFiles(self._path(step))
        return reader

    def _found(self) -> dict[int, set[str]]:
        """Return the names of the files of every step, also of incomplete ones."""
        found: dict[int, set[str]] = {}
        for name in list_files(self.folder) if self.folder.is_dir() else ():
            if match := re.fullmatch(r"step-(\d{8,})/([^/]+)", name):
                found.setdefault(int(match[1]), set()).add(match[2])
        return found

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
        """Remove what a crash left."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for step, names in self._found().items():
                if MANIFEST not in names:
                    _remove(self._path(step))
        except OSError as error:
            raise InputError(f"{self.folder} cannot be used: {error.strerror}; choose another place") from error

    def _complete(self, step: int, writing: Future[Any], writer: _Writer) -> None:
        """Wait for a snapshot, and remove those that it supersedes."""
        try:
            writing.result()
        except (OSError, CheckpointException) as error:
            failure = _disk_failure(error, Path(writer.path))
            shutil.rmtree(writer.path, ignore_errors=True)
            message = f"{self.folder}: the snapshot of step {step} could not be written:"
            _raise_input_error(_causes(error), message, ", and continue with --resume")
            if failure is None:
                raise RuntimeError(f"{message} {_causes(error)[0]}") from error
            full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "free some space" if full else "make the folder writable"
            raise InputError(f"{message} {failure.strerror}; {advice} and continue with --resume") from error
        self._damaged.pop(step, None)
        for old in self._superseded(step):
            try:
                _remove(self._path(old))
            except (OSError, InputError) as error:
                log.warning("%s could not be removed: %s", self._path(old), getattr(error, "strerror", error))

    def _superseded(self, step: int) -> list[int]:
        """Return all but the newest `keep` and the one just written; damaged snapshots do not count as kept."""
        steps = self.steps()
        good = [other for other in steps if other not in self._damaged]
        return [other for other in steps if other not in good[-self.keep :] and other != step]

    def _newest_intact(self) -> int | None:
        """Return the newest snapshot with a good manifest and metadata, in which no rank has found damage."""
        steps = self.steps()
        for step in reversed(steps):
            if step not in self._damaged:
                try:
                    _CheckedFiles(self._path(step)).concat_path("", METADATA)
                    return step
                except _DamagedError as error:
                    self._damaged[step] = str(error)
            log.warning("the snapshot of step %d is not used: %s", step, self._damaged[step])
        require(not steps, f"{self.folder}: none of its {len(steps)} snapshots is intact; restore one or start anew")
        return None


class _DamagedError(Exception):
    """A file of a snapshot is not the one that was written."""


class _Writer(FileSystemWriter):
    """Writes the files of this process, and on rank 0 the manifest of all files after them.

    What is for an object store goes to a temporary folder and is uploaded. All methods run inside
    torch.distributed.checkpoint, in the background, which tells every rank of a failure on any of them.
    """

    def __init__(self, target: AnyPath, step: int) -> None:
        self.target, self.step = target, step
        local = Path(tempfile.mkdtemp(prefix="arpg-snapshot-")) if isinstance(target, RemotePath) else target
        super().__init__(local, overwrite=False)
        if isinstance(target, RemotePath):
            weakref.finalize(self, shutil.rmtree, local, ignore_errors=True)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's files; their sizes and checksums are added to the results."""
        future = super().write_data(plan, planner)
        written = list(future.wait())
        done: Any = type(future)()
        done.set_result([*written, self._keep({each.storage_data.relative_path for each in written})])
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Write the metadata and then the manifest of all ranks' files (on rank 0)."""
        super().finish(metadata, [written for *written, _ in results])
        files = {name: entry for *_, sums in results for name, entry in sums.items()} | self._keep([METADATA])
        manifest = {"step": self.step, "files": dict(sorted(files.items()))}
        if isinstance(self.target, RemotePath):
            write_json(self.target / MANIFEST, manifest)
            return
        with (self.target / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        for folder in (self.target, self.target.parent):
            _sync_folder(folder)

    def _keep(self, names: Iterable[str]) -> dict[str, list[int]]:
        """Return sizes and checksums of files, which are uploaded where the snapshot is in an object store."""
        sums = {}
        for name in sorted(names):
            path = Path(self.path) / name
            if isinstance(self.target, RemotePath):
                target = self.target / name
                target.upload(path).replace(target)
            sums[name] = [path.stat().st_size, _crc32(path)]
        return sums


class _CheckedFiles(FileSystem):
    """The files of a snapshot, checked when they are opened; those in an object store are fetched into the cache."""

    def __init__(self, snapshot: AnyPath) -> None:
        self.snapshot = snapshot

    @cached_property
    def files(self) -> dict[str, list[int]]:
        """Sizes and checksums by name."""
        files: dict[str, list[int]] = json.loads((self.snapshot / MANIFEST).read_text())["files"]
        return files

    def concat_path(self, path: Any, suffix: str) -> Path:
        """Return the file `suffix`, or its fetched copy."""
        where = self.snapshot / suffix
        try:
            size, checksum = self.files[suffix]
            local = fetch(where)
            found, same = local.stat().st_size, _crc32(local) == checksum
        except InputError:  # the store cannot be reached, which says nothing about the snapshot
            raise
        except FileNotFoundError:
            raise _DamagedError(f"{where} is missing") from None
        except OSError as error:
            raise _DamagedError(f"{where}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _DamagedError(f"{self.snapshot / MANIFEST} is not a manifest of {suffix}") from None
        if found == size and same:
            return local
        if local != where:
            local.unlink(missing_ok=True)  # other processes share the cache
        if found != size:
            raise _DamagedError(f"{where} has {found} bytes instead of {size}")
        raise _DamagedError(f"{where} has changed since it was written (its checksum differs)")


def _remove(snapshot: AnyPath) -> None:
    """Remove a snapshot; without its manifest, which goes first, it does not count."""
    (snapshot / MANIFEST).unlink(missing_ok=True)
    if snapshot.is_dir():
        remove_folder(snapshot)


def _disk_failure(error: OSError | CheckpointException, folder: Path) -> OSError | None:
    """Return the disk error of a failed write. torch.save can hide it ("unexpected pos"), so a probe is written."""
    for cause in _causes(error):
        if isinstance(cause, OSError):
            return cause
    try:
        with (folder / "probe").open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as cause:
        return cause
    return None


def _causes(error: OSError | CheckpointException) -> list[BaseException]:
    return [error] if isinstance(error, OSError) else [cause for cause, _ in error.failures.values()]


def _raise_input_error(causes: list[BaseException], before: str = "", after: str = "") -> None:
    """Raise the error of an object store, if one of `causes` is one, with words around its own."""
    for cause in causes:
        if isinstance(cause, InputError):
            raise InputError(f"{before} {cause}{after}".strip()) from cause


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
