"""What all verbs share: where they print, progress, and how arguments are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from arpg.config import ENGINES, PRECISIONS
from arpg.errors import InputError, present, require
from arpg.settings import SCHEDULES

T = TypeVar("T")

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

GridOption = Annotated[str, typer.Option(metavar="HxW", help="Token grid, like 16x16.")]
ScheduleOption = Annotated[
    str | None, typer.Option(help=f"{', '.join(SCHEDULES)}, or the tokens of each step: 16,48,80.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")]
PrecisionOption = Annotated[str, typer.Option("--precision", "--dtype", help=f"One of {', '.join(PRECISIONS)}.")]
EngineOption = Annotated[str, typer.Option(help=f"How the loop is executed: {', '.join(ENGINES)}.")]


@contextmanager
def progress_bar() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield progress


def parse_grid(text: str) -> tuple[int, int]:
    match = present(
        re.fullmatch(r"(\d+)x(\d+)", text), f"grid is {text!r}; expected HEIGHTxWIDTH in tokens, like 16x16"
    )
    height, width = int(match[1]), int(match[2])
    require(1 <= height <= 1024 and 1 <= width <= 1024, f"grid is {text}; expected sides from 1 to 1024")
    return height, width


def parse_schedule(text: str | None) -> str | tuple[int, ...] | None:
    if text is None or not re.fullmatch(r"\d+(,\d+)*", text):
        return text
    return tuple(int(size) for size in text.split(","))


def parse_values(name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """Several values of an option, with commas between them."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{name} is {text!r}; expected {expected} with commas, like 8,12,24") from None
