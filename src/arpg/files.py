"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from arpg.errors import InputError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file beside `path` and rename it, so that `path` is never half there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}; choose another place") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
