"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from arpg.errors import InputError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file beside `path` and rename it, so that `path` is never half there."""
    write_together({path: write})


def write_together(writes: dict[Path, Callable[[Path], object]]) -> None:
    """Write several files: all are complete under temporary names before the first gets its own, in the order given."""
    ready: list[tuple[Path, Path]] = []
    created: list[Path] = []
    path = Path()
    try:
        for path, write in writes.items():
            created += _make_folder(path.parent)
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            os.close(handle)
            ready.append((Path(name), path))
            write(Path(name))
            os.chmod(name, 0o666 & ~_umask())
        for temporary, path in ready:
            os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}; choose another place") from None
    finally:
        for temporary, _ in ready:
            temporary.unlink(missing_ok=True)
        for folder in reversed(created):  # only what stayed empty goes again
            with contextlib.suppress(OSError):
                folder.rmdir()


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; those that were not there before."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
