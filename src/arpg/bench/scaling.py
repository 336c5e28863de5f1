"""How cost grows with the number of tokens and with the batch: rows of growing size, and the exponent they follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from arpg.bench.case import Case
from arpg.bench.throughput import Row
from arpg.errors import require

TOKENS = (64, 256, 1024, 4096)
BATCHES = (1, 4, 16, 64, 256)


def fit_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log(seconds) over log(size), by least squares: 1 is linear, 2 quadratic."""
    require(len(set(sizes)) >= 2, f"sizes are {list(sizes)}; an exponent needs two different ones or more")
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - x_mean) ** 2 for a in x)


def grow(
    cases: Sequence[Case],
    measure: Callable[[Case], Row],
    *,
    size: Callable[[Case], int],
    most: float,
    batches: int,
) -> tuple[list[Row], list[Case]]:
    """Rows of cases of growing size, and the cases that were left out.

    A case is left out, with all larger ones, where its `batches` batches would take more than `most` seconds if cost
    grew in proportion.
    """
    rows: list[Row] = []
    for i, case in enumerate(cases):
        if rows and batches * batch_seconds(rows[-1]) * size(case) / size(cases[i - 1]) > most:
            return rows, list(cases[i:])
        rows.append(measure(case))
    return rows, []


def batch_seconds(row: Row) -> float:
    """Seconds that the tokens of a batch took."""
    return float(row["settings"]["batch"] / row["token images/s"])


def summary(over: str, rows: Sequence[Row]) -> Row:
    """What is written down about a series: sizes, seconds per batch, the exponent of all and of the last two."""
    sizes = [row["settings"][over] for row in rows]
    seconds = [batch_seconds(row) for row in rows]
    found: Row = {"over": over, "sizes": sizes, "seconds per batch": [float(f"{value:.4g}") for value in seconds]}
    if len(rows) >= 2:
        found["exponent"] = round(fit_exponent(sizes, seconds), 3)
        found["last exponent"] = round(fit_exponent(sizes[-2:], seconds[-2:]), 3)
    return found
