"""InputError, the one exception that is meant for users, and the checks that raise it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar

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


def one_of(name: str, value: str, choices: tuple[str, ...], more: str = "") -> None:
    """Raise an `InputError` unless `value` is one of the choices of `name`."""
    require(value in choices, f"{name} is {value!r}; expected one of {', '.join(choices)}{more}")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the known names that resemble it, or else all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6) or [each for each in names if name in each]
    return f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(names)}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, short enough to be part of another one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:160]
