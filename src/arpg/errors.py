"""InputError, the one exception that is meant for users, and the checks that raise it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from arpg.storage import AnyPath

T = TypeVar("T")


class InputError(ValueError):
    """Bad input. The message names the value, what was expected and what to do about it."""


def require(condition: bool, message: str) -> None:
    """Raise `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


def present(value: T | None, message: str) -> T:
    """Return the value; None raises `InputError(message)`."""
    if value is None:
        raise InputError(message)
    return value


def require_package(name: str, advice: str) -> Any:
    """Import an optional package; where it is missing, raise an `InputError` with `advice`, which names its extra."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(advice) from None


def require_transformers(reason: str) -> Any:
    """Import transformers, which from then on reports errors alone; `reason` begins the error where it is missing."""
    transformers = require_package("transformers", f"{reason}: pip install 'arpg[text]'")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def require_positive(config: object, *names: str, prefix: str = "") -> None:
    """Raise an `InputError` unless these fields of a configuration are 1 or more; `prefix` is before their names."""
    for name in names:
        value = getattr(config, name)
        require(value >= 1, f"{prefix}{name} is {value}; expected 1 or more")


def one_of(name: str, value: str, choices: tuple[str, ...], more: str = "") -> None:
    """Raise an `InputError` unless `value` is one of the choices of `name`."""
    require(value in choices, f"{name} is {value!r}; expected one of {', '.join(choices)}{more}")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the known names that resemble it, or else all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6) or [each for each in names if name in each]
    return f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(names)}"


def require_file(path: AnyPath, expected: str, *, what: str = "") -> None:
    """Raise an `InputError` unless `path` is a file; `what` it is for comes before its name."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(f"{what} {path} {found}; expected {expected}".strip())


def describe_broken(path: AnyPath, expected: str, error: Exception, *, starts: tuple[bytes, ...] = ()) -> str:
    """Say why a file could not be read as `expected`: it is empty, text, something else, or cut short.

    A file that begins with one of `starts` is of the expected kind, so it can only be damaged.
    """
    with path.open("rb") as file:
        head = file.read(4096)
    if not head:
        return f"{path} is empty; expected {expected}"
    if head.startswith(b"version https://git-lfs"):
        return f"{path} is a Git LFS pointer, not {expected}; fetch the file itself with `git lfs pull`"
    if head.startswith(starts):
        return f"{path} is cut short or damaged ({first_line(error)}); fetch or make it again"
    if b"\0" not in head and not _undecodable(head):
        return f"{path} is a text file; expected {expected}"
    return f"{path} is not {expected} ({first_line(error)})"


def _undecodable(head: bytes) -> bool:
    """Return whether `head` cannot be the beginning of UTF-8 text; its last character may be cut."""
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start < len(head) - 3
    return False


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, short enough to be part of another one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:160]
