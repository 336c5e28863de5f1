"""Tables: plain text for the terminal, Markdown, and Markdown between the marks of a page; rounded numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any


def text_table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, align: str = "lr") -> str:
    """Return aligned columns, two spaces apart. None is "-".

    `align` has l (left) or r (right) for each column; its last letter stands for all further columns.
    """
    cells = [list(header), *(["-" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    align = align.ljust(len(header), align[-1])
    lines = []
    for row in cells:
        columns = zip(row, widths, align, strict=False)
        lines.append("  ".join(c.ljust(w) if side == "l" else c.rjust(w) for c, w, side in columns).rstrip())
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table: the first column to the left, the others to the right. None is an empty cell."""
    titles = "|".join(f" {title} " if title else " " for title in header)
    lines = [f"|{titles}|", "|" + "---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def fill_page(page: str, parts: Mapping[str, str]) -> str:
    """Return `page` with each part between its marks, `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    for name, text in parts.items():
        pattern = rf"(<!-- {re.escape(name)}: begin -->\n).*?(<!-- {re.escape(name)}: end -->)"
        page, count = re.subn(pattern, lambda m, text=text: f"{m[1]}{text}{m[2]}", page, flags=re.S)  # type: ignore[misc]
        assert count == 1, f"the page has {count} places for {name}; expected one"
    return page


def significant(value: float, digits: int = 4) -> float:
    """Round `value` to this many significant digits."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))
