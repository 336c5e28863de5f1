"""Crash-safe snapshots of the training state: sharded, written in the background, verified before they are loaded."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
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
MANIFEST = "manifest.json"
PARTIAL, REPLACED = ".partial", ".replaced"


class Snapshots:
    """The newest `keep` snapshots, `folder/step-00000123/`. Every rank makes every call; all share the folder.

    A snapshot gets its name once it is complete on all ranks and its manifest is written.
    """

    folder: Any  # a Path; in the subclass a RemotePath

    def __init__(self, folder: AnyPath, world: World, *, keep: int = 2) -> None:
        require(keep >= 1, f"keep is {keep}; expected 1 or more snapshots")
        self.folder, self.world, self.keep = folder, world, keep
        # A group of its own: the background thread's messages must not mix with those of the training.
        self._group = dist.new_group(backend="gloo")
        self._publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._flight: Future[Any] | None = None
        self._bad: set[int] = set()
        self._damaged: dict[int, str] = {}  # what is wrong with snapshots, found while they were loaded
        self._on_main(self._tidy)

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> None:
        """Copy the state now and write it in the background; `state` may change as soon as this returns.

        A failure of the write before this one is raised here.
        """
        self.finish()
        # As a stager the writer copies every tensor before async_save returns, those on the CPU too.
        writer = self._writer(step)
        writing = state_dict_saver.async_save(state, storage_writer=writer, process_group=self._group)
        assert isinstance(writing, Future)
        # Published from the background too: a crash long before the next save must not cost this one.
        self._flight = writing
        if self.world.main:
            self._flight = self._publisher.submit(self._complete, step, writing, Path(writer.path))
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

    def _path(self, step: int, suffix: str = "") -> Any:
        return self.folder / f"step-{step:08d}{suffix}"

    def _writer(self, step: int) -> FileSystemWriter:
        return FileSystemWriter(self._path(step, PARTIAL), overwrite=False)

    def _reader(self, step: int) -> FileSystemReader:
        return FileSystemReader(self._path(step))

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

    def _complete(self, step: int, writing: Future[Any], partial: Path) -> None:
        try:
            writing.result()
            self._publish(step)
        except (OSError, CheckpointException) as error:
            message = f"{self.folder}: the snapshot of step {step} could not be written:"
            _raise_input_error(_causes(error), message, ", and continue with --resume")
            failure = _disk_failure(error, partial)
            if failure is None:
                raise RuntimeError(f"{message} {_causes(error)[0]}") from error
            full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "free some space" if full else "make the folder writable"
            raise InputError(f"{message} {failure.strerror}; {advice} and continue with --resume") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._bad.discard(step)
        self._damaged.pop(step, None)
        for old in self._superseded(step):
            try:
                self._remove(old)
            except (OSError, InputError) as error:
                log.warning("%s could not be removed: %s", self._path(old), getattr(error, "strerror", error))

    def _remove(self, step: int) -> None:
        # Renamed first: a crash in the middle of a removal must not leave half a snapshot under its name.
        shutil.rmtree(self._path(step).rename(self._path(step, PARTIAL)))

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

    def _damage(self, step: int) -> str | None:
        return _damage(self._path(step))

    def _superseded(self, step: int) -> list[int]:
        """Return all but the newest `keep` and the one just written; damaged snapshots do not count as kept."""
        good = [other for other in self.steps() if other not in self._bad]
        return [other for other in self.steps() if other not in good[-self.keep :] and other != step]

    def _newest_intact(self) -> int | None:
        steps = self.steps()
        for step in reversed(steps):
            damage = self._damage(step)
            if damage is None:
                return step
            log.warning("the snapshot of step %d is not used: %s", step, damage)
            self._bad.add(step)
        require(not steps, f"{self.folder}: none of its {len(steps)} snapshots is intact; restore one or start anew")
        return None


class RemoteSnapshots(Snapshots):
    """Snapshots in an object store. Those with a manifest, which is uploaded last and removed first, are complete.

    Every process writes its files to a folder of its own in $TMPDIR and uploads them, in the background. A process that
    loads fetches the files that it needs and checks them.
    """

    def steps(self) -> list[int]:
        """Return the steps of the published snapshots, newest last."""
        return sorted(step for step, names in self._found().items() if MANIFEST in names)

    def _found(self) -> dict[int, set[str]]:
        """Return the names of the files of every step, also of incomplete ones."""
        found: dict[int, set[str]] = {}
        for name in list_files(self.folder) if self.folder.is_dir() else ():
            if match := re.fullmatch(r"step-(\d{8,})/([^/]+)", name):
                found.setdefault(int(match[1]), set()).add(match[2])
        return found

    def _writer(self, step: int) -> FileSystemWriter:
        return _UploadingWriter(self._path(step), step, main=self.world.main)

    def _reader(self, step: int) -> FileSystemReader:
        reader = FileSystemReader(str(self._path(step)))
        reader.fs = _FetchedFiles(self._path(step))
        return reader

    def _tidy(self) -> None:
        for step, names in self._found().items():
            if MANIFEST not in names:
                remove_folder(self._path(step))

    def _publish(self, step: int) -> None:
        """Do nothing: the writer has uploaded the manifest."""

    def _remove(self, step: int) -> None:
        _remove_remote(self._path(step))

    def _damage(self, step: int) -> str | None:
        """Return what is wrong with the manifest or the metadata, or what a rank found in a file when it was loaded."""
        try:
            _FetchedFiles(self._path(step)).concat_path("", ".metadata")
        except _DamagedError as error:
            return str(error)
        return self._damaged.get(step)


class _DamagedError(Exception):
    """A file of a snapshot is not the one that was written."""


class _UploadingWriter(FileSystemWriter):
    """Writes the files of this process to a temporary folder and uploads them; rank 0 uploads the manifest last.

    All methods run inside torch.distributed.checkpoint, which tells every rank of a failure on any of them.
    """

    def __init__(self, target: RemotePath, step: int, *, main: bool) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="arpg-snapshot-")), overwrite=False)
        self.target, self.step, self.main = target, step, main

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Remove a damaged snapshot of the same step, on rank 0, before any rank writes."""
        _remove_remote(self.target)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write and upload this rank's files; their sizes and checksums are added to the results."""
        try:
            future = super().write_data(plan, planner)
            results: list[Any] = [*future.wait(), self._upload()]
        finally:
            if not self.main:  # rank 0 has more to write
                shutil.rmtree(self.path, ignore_errors=True)
        done: Any = type(future)()
        done.set_result(results)
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Upload the metadata and then the manifest of all ranks' files (on rank 0)."""
        files = {name: entry for *_, sums in results for name, entry in sums.items()}
        for path in Path(self.path).iterdir():  # uploaded already
            path.unlink()
        super().finish(metadata, [written for *written, _ in results])
        files |= self._upload()
        write_json(self.target / MANIFEST, {"step": self.step, "files": dict(sorted(files.items()))})

    def _upload(self) -> dict[str, list[int]]:
        sums = {}
        for path in sorted(Path(self.path).iterdir()):
            target = self.target / path.name
            target.upload(path).replace(target)
            sums[path.name] = [path.stat().st_size, _crc32(path)]
        return sums


class _FetchedFiles(FileSystem):
    """The files of a remote snapshot, fetched into the local cache when they are opened, and checked."""

    def __init__(self, snapshot: RemotePath) -> None:
        self.snapshot = snapshot

    @cached_property
    def files(self) -> dict[str, list[int]]:
        """Sizes and checksums by name."""
        return _manifest(self.snapshot)

    def concat_path(self, path: Any, suffix: str) -> Path:
        """Return the fetched copy of the file `suffix`."""
        where = self.snapshot / suffix
        try:
            size, checksum = self.files[suffix]
            fetched = fetch(where)
        except InputError:  # the store cannot be reached, which says nothing about the snapshot
            raise
        except FileNotFoundError:
            raise _DamagedError(f"{where} is missing") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _DamagedError(f"{self.snapshot / MANIFEST} is not a manifest of {suffix}") from None
        if damage := _file_damage(fetched, size, checksum, where):
            fetched.unlink(missing_ok=True)  # other processes share the cache
            raise _DamagedError(damage)
        return fetched


def _remove_remote(snapshot: RemotePath) -> None:
    """Remove a snapshot; without its manifest, which goes first, it does not count."""
    (snapshot / MANIFEST).unlink(missing_ok=True)
    remove_folder(snapshot)


def _manifest(snapshot: AnyPath) -> dict[str, list[int]]:
    files: dict[str, list[int]] = json.loads((snapshot / MANIFEST).read_text())["files"]
    return files


def _file_damage(path: Path, size: int, checksum: int, where: AnyPath) -> str | None:
    """Return how the file `where`, of which `path` is a copy or itself, differs from what was written."""
    if (found := path.stat().st_size) != size:
        return f"{where} has {found} bytes instead of {size}"
    if _crc32(path) != checksum:
        return f"{where} has changed since it was written (its checksum differs)"
    return None


def _damage(snapshot: Path) -> str | None:
    """Return what is wrong with a published snapshot, with the file; None where it is intact."""
    path = snapshot / MANIFEST
    try:
        for name, (size, checksum) in _manifest(snapshot).items():
            path = snapshot / name
            if damage := _file_damage(path, size, checksum, path):
                return damage
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
