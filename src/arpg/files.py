"""Files: written whole or not at all; weights that are read without running code, checked and hashed."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import pickle
import secrets
import struct
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from arpg.errors import InputError, describe_broken, require, require_file
from arpg.storage import AnyPath, RemotePath, fetch

State = dict[str, Tensor]
MAX_LISTED = 12  # keys that an error names
_STARTS = (b"PK", b"\x80\x02")  # of torch's files: a zip, formerly a pickle
# np.load parses a header as Python; in Python 3.11, parsing in two threads at once raises SystemError now and then.
_HEADER = threading.Lock()
# What torch.load raises for files that are cut short or no checkpoints at all.
_BROKEN = (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError, struct.error)


def write_whole(path: AnyPath, write: Callable[[Path], object]) -> None:
    """Write to a temporary file beside `path` and rename it, so that `path` is never half there."""
    write_together({path: write})


def write_together(writes: Mapping[AnyPath, Callable[[Path], object]]) -> None:
    """Write several files: all are complete under temporary names before the first gets its own, in the order given.

    Each function is given a local file to write, which is uploaded where its path is remote.
    """
    ready: list[tuple[Any, AnyPath]] = []  # temporary and final paths, both local or both remote
    created: list[Path] = []
    path: AnyPath = Path()
    try:
        for path, write in writes.items():
            if isinstance(path, RemotePath):
                with tempfile.TemporaryDirectory(prefix="arpg-upload-") as scratch:
                    local = Path(scratch) / path.name
                    write(local)
                    ready.append((path.upload(local), path))
                continue
            created += _make_folder(path.parent)
            local = path.parent / f".{path.name}.{secrets.token_hex(6)}"
            local.touch(exist_ok=False)
            ready.append((local, path))
            rights = local.stat().st_mode  # of a new file; safetensors replaces it by one that only its owner can read
            write(local)
            local.chmod(rights)
        for temporary, path in ready:
            temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}; choose another place") from None
    finally:
        for temporary, _ in ready:
            temporary.unlink(missing_ok=True)
        for folder in reversed(created):  # only what stayed empty goes again
            with contextlib.suppress(OSError):
                folder.rmdir()


def write_text(path: AnyPath, text: str) -> None:
    """Write `text` as UTF-8."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: AnyPath, data: Any) -> None:
    """Write `data` as indented JSON."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def read_json(path: AnyPath) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None


def write_array(path: AnyPath, array: NDArray[Any]) -> None:
    """Write `array` as a .npy file."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # np.save would append an ending to a path
            np.save(file, array)

    write_whole(path, write)


def read_array(path: AnyPath, *, advice: str, mmap: bool = True) -> NDArray[Any]:
    """Read a .npy file, mapped into memory unless `mmap` is false; `advice` says what to do about a damaged one."""
    require(path.is_file(), f"{path} does not exist; {advice}")
    try:
        local = fetch(path)
        with _HEADER:
            array: NDArray[Any] = np.load(local, mmap_mode="r" if mmap else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is not a whole .npy file ({error}); {advice}") from None
    return array


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; those that were not there before."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def read_tensors(path: AnyPath) -> State:
    """Read a safetensors file."""
    require_file(path, "a safetensors file; if it is part of a model folder, fetch or convert the folder again")
    try:
        return safetensors.torch.load_file(fetch(path))
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(describe_tensors(path, error)) from None


def describe_tensors(path: AnyPath, error: Exception) -> str:
    """Say why a safetensors file could not be read."""
    with path.open("rb") as file:
        head = file.read(9)
    return describe_broken(path, "a safetensors file", error, starts=(head,) if head[8:] == b"{" else ())


def read_pickle(path: Path) -> Any:
    """Read a torch file without running code."""
    require_file(path, "a published checkpoint (.pt)")
    try:
        # Training checkpoints carry their command line; nothing else may be constructed.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: what matters ends up in an error
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            is_checkpoint = file.read(4).startswith(_STARTS)
        if not is_checkpoint or "truncated" in str(error):
            raise InputError(describe_broken(path, "a published checkpoint (.pt)", error, starts=_STARTS)) from None
        first = str(error).splitlines()[0].rstrip(". ")
        raise InputError(f"{path} is refused by the safe loader: {first[:200]}; expected plain tensors") from None
    except _BROKEN as error:
        raise InputError(describe_broken(path, "a published checkpoint (.pt)", error, starts=_STARTS)) from None


def read_metadata(path: AnyPath) -> dict[str, str]:
    """Read the metadata of a safetensors file; empty where it has none."""
    require_file(path, "a safetensors file")
    try:
        with safetensors.safe_open(fetch(path), "pt") as file:
            return dict(file.metadata() or {})
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(describe_tensors(path, error)) from None


def write_tensors(state: State, path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file."""
    try:
        safetensors.torch.save_file(state, path, metadata)
    except safetensors.SafetensorError as error:  # a full disk, for one
        raise OSError(str(error)) from None


def check_state(state: Mapping[str, Tensor], module: nn.Module, *, where: str) -> None:
    """Raise an `InputError` that lists missing keys, unknown keys and wrong shapes, if there are any."""
    expected = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    found = {key: tuple(tensor.shape) for key, tensor in state.items()}
    check_keys(set(found), set(expected), where=where)
    wrong = [
        f"{key} is {list(found[key])}, not {list(shape)}" for key, shape in expected.items() if found[key] != shape
    ]
    require(not wrong, f"{where}: shapes do not fit the configuration: {_some(wrong)}")


def check_keys(found: set[str], expected: set[str], *, where: str) -> None:
    """Raise an `InputError` that lists missing and unknown keys, if there are any."""
    problems = []
    if missing := sorted(expected - found):
        problems.append(f"missing keys: {_some(missing)}")
    if unknown := sorted(found - expected):
        problems.append(f"unknown keys: {_some(unknown)}")
    require(not problems, f"{where}: {'; '.join(problems)}; is this another kind of checkpoint?")


def _some(items: list[str]) -> str:
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(items[:MAX_LISTED]) + more


def hash_file(path: AnyPath) -> str:
    """Return the sha256 of a file's bytes."""
    with fetch(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tensors(state: Mapping[str, Tensor], digest: hashlib._Hash | None = None, *, names_only: bool = False) -> str:
    """Return the sha256 of all names, dtypes, shapes and values, sorted by name; continues `digest` where given.

    `names_only` leaves dtypes and shapes out, as the fingerprints of token folders do.
    """
    digest = digest or hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode() if names_only else f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
