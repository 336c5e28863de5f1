"""Layout: where the objects of a scene stand, so that what is asked of their places is true and all can be seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arpg.data.asks import Ask

SIDES = {1: (0.42, 0.84), 2: (0.34, 0.5), 3: (0.28, 0.4), 4: (0.26, 0.36)}  # of the longer side, by number of objects
SINGLE = {"": (0.5, 0.8), "small": (0.26, 0.36), "large": (0.84, 0.95)}
OVERLAP = 0.12  # of the smaller box, at most
TRIES, SHRINK = 40, 0.94


@dataclass(frozen=True)
class Spot:
    left: int
    top: int
    width: int
    height: int
    depth: float  # 0 nearest, 1 farthest

    @property
    def box(self) -> tuple[int, int, int, int]:
        return self.left, self.top, self.left + self.width, self.top + self.height

    @property
    def centre(self) -> tuple[float, float]:
        return self.left + self.width / 2, self.top + self.height / 2


def lay_out(ask: Ask, shapes: Sequence[float], size: int, rng: np.random.Generator) -> list[Spot]:
    """A spot for each object, in the order of the ask; `shapes`: width by height. Tries at random, and makes the
    objects smaller where that does not work out.
    """
    first = ask.groups[0].count
    scale = 1.0
    while True:
        for _ in range(TRIES):
            spots = _throw(ask, shapes, size, rng, scale)
            a, b = spots[:first], spots[first:]
            if not _clear(spots, front=ask.relation == "front"):
                continue
            if not ask.relation or all(stands(ask.relation, x, y) for x in a for y in b):
                return spots
        scale *= SHRINK


def stands(relation: str, a: Spot, b: Spot) -> bool:
    """Whether `a` stands so to `b`: by their centres, clearly, and more in this direction than across it."""
    dx, dy = (x - y for x, y in zip(a.centre, b.centre, strict=True))
    if relation == "front":
        return a.depth < b.depth and 0.15 <= overlap(a, b) <= 0.4
    along, across, sizes = (
        (dx, dy, (a.width + b.width)) if relation in ("left", "right") else (dy, dx, a.height + b.height)
    )
    if relation in ("left", "above"):
        along = -along
    return along >= 0.3 * sizes and along >= abs(across)


def overlap(a: Spot, b: Spot) -> float:
    """The share of the smaller box that both have."""
    wide = min(a.left + a.width, b.left + b.width) - max(a.left, b.left)
    high = min(a.top + a.height, b.top + b.height) - max(a.top, b.top)
    return max(0, wide) * max(0, high) / min(a.width * a.height, b.width * b.height)


def _throw(ask: Ask, shapes: Sequence[float], size: int, rng: np.random.Generator, scale: float) -> list[Spot]:
    low, high = SINGLE[ask.groups[0].size] if len(shapes) == 1 else SIDES[len(shapes)]
    spots = []
    sides = {group.kind: rng.uniform(low, high) for group in ask.groups}  # objects of a group are alike
    kinds = [group.kind for group in ask.groups for _ in range(group.count)]
    for kind, shape in zip(kinds, shapes, strict=True):
        side = scale * size * sides[kind] * rng.uniform(0.93, 1.0)
        width, height = (max(4, round(side * min(1.0, x))) for x in (shape, 1 / shape))
        margin = 2
        # The middle is a little more likely than the edges.
        left = margin + (size - width - 2 * margin) * float(rng.beta(1.4, 1.4))
        top = margin + (size - height - 2 * margin) * float(rng.beta(1.6, 1.4))
        # Who stands lower is nearer; the rest keeps depths apart.
        depth = 0.95 - 0.85 * (top + height) / size + float(rng.uniform(-0.02, 0.02))
        spots.append(Spot(round(left), round(top), width, height, round(depth, 6)))
    if ask.relation == "front" and spots[0].depth >= spots[1].depth:
        a, b = spots
        spots = [Spot(*a.box[:2], a.width, a.height, b.depth), Spot(*b.box[:2], b.width, b.height, a.depth)]
    return spots


def _clear(spots: Sequence[Spot], *, front: bool) -> bool:
    pairs = list(itertools.combinations(spots, 2))
    return len({s.depth for s in spots}) == len(spots) and (front or all(overlap(a, b) <= OVERLAP for a, b in pairs))
