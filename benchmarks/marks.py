"""Tables in a page: each stands between <!-- NAME: begin --> and <!-- NAME: end -->, and is put there by a command."""

from __future__ import annotations

import re


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with each part between its marks."""
    for name, text in parts.items():
        pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
        page, times = re.subn(pattern, lambda m, text=text: f"{m[1]}{text}{m[2]}", page, flags=re.S)  # type: ignore[misc]
        assert times == 1, f"{name} has no place in the page"
    return page
