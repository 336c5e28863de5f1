"""The lines that the ablations left: what is measured, in which order, and how lines are found.

FOLDER/
  about.json, results.jsonl, results-1.jsonl, ...     quality (arpg.evaluation.results)
  baselines.json                                      what is possible
  speed.json                                          images per second
  order-bits.json                                     what each order costs the model
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpg.evaluation.sweep import Line, read_about, read_lines

BASELINES, SPEED, BITS = "baselines.json", "speed.json", "order-bits.json"
FINAL, SEARCH = 5000, 2000  # images of a measurement, and of one in the search for the guidance
STEPS = (24, 12, 8, 144, 16, 32, 64)  # in the order in which they are measured
ORDER_STEPS = (24, 12, 144)
FEW_STEPS = (24, 12)
SPEED_STEPS = 24  # at which the speed of orders, schedules and guidance is measured
PLAIN = {"attention": "block", "order": "random", "schedule": "arccos", "guidance_schedule": "linear"}


@dataclass(frozen=True)
class Measured:
    """What a folder of results holds."""

    lines: list[Line] = field(default_factory=list)  # quality
    baselines: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # of the lines
    speed: dict[str, Any] = field(default_factory=lambda: {"about": {}, "lines": []})
    bits: dict[str, Any] = field(default_factory=dict)  # of each order

    def rate(self, settings: dict[str, Any]) -> float | None:
        """Images per second with these settings; the scale of the guidance makes no difference."""
        names = ("steps", *PLAIN)
        for line in self.speed["lines"]:
            if all(line["settings"][name] == settings[name] for name in names):
                return float(line["images/s"])
        return None


def read(folder: Path) -> Measured:
    about = read_about(folder) if (folder / "about.json").exists() else {}
    return Measured(read_lines(folder), _json(folder / BASELINES), about, read_speed(folder), _json(folder / BITS))


def read_speed(folder: Path) -> dict[str, Any]:
    return {"about": {}, "lines": [], **_json(folder / SPEED)}


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def matching(lines: Sequence[Line], num: int, **settings: Any) -> list[Line]:
    """The lines of so many images with these settings; of what is not given, the model's own."""
    wanted = {**PLAIN, **settings}
    return [
        line
        for line in lines
        if line["num"] == num and all(line["settings"][name] == value for name, value in wanted.items())
    ]


def lowest(lines: Sequence[Line]) -> Line:
    return min(lines, key=lambda line: float(line["fid"]))


def final(lines: Sequence[Line], **settings: Any) -> Line | None:
    """The final measurement at the guidance that the search found."""
    searched = matching(lines, SEARCH, **settings)
    if not searched:
        return None
    guidance = lowest(searched)["settings"]["guidance"]
    return next(iter(matching(lines, FINAL, guidance=guidance, **settings)), None)


def of_order(lines: Sequence[Line], order: str, steps: int) -> Line | None:
    """Orders share the guidance that is best for the random one."""
    searched = matching(lines, SEARCH, steps=steps)
    if not searched:
        return None
    guidance = lowest(searched)["settings"]["guidance"]
    return next(iter(matching(lines, FINAL, order=order, steps=steps, guidance=guidance)), None)


def comparable(lines: Sequence[Line]) -> bool:
    """Whether block-wise and causal attention can be compared over steps: both are there for two numbers of steps."""
    both = [all(final(lines, steps=steps, attention=a) for a in ("block", "causal")) for steps in STEPS]
    return sum(both) >= 2


def unguided(lines: Sequence[Line], steps: int) -> Line | None:
    return next(iter(matching(lines, FINAL, steps=steps, guidance_schedule="none")), None)


def noise(a: Line, b: Line) -> float:
    """Half the width of the interval of a difference of FIDs."""
    halves = [(line["fid interval"][1] - line["fid interval"][0]) / 2 for line in (a, b) if "fid interval" in line]
    return math.hypot(*halves)
