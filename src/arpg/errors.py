"""The one exception that is meant for the user: a single clear line."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class InputError(ValueError):
    """Bad input. The message names the value, what was expected and what to do about it."""


def require(condition: bool, message: str) -> None:
    """Raise `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


def present(value: T | None, message: str) -> T:
    """The value, or `InputError(message)` where there is none."""
    if value is None:
        raise InputError(message)
    return value


def one_of(name: str, value: str, choices: tuple[str, ...], more: str = "") -> None:
    """Raise an `InputError` unless `value` is one of the choices of `name`."""
    require(value in choices, f"{name} is {value!r}; expected one of {', '.join(choices)}{more}")
