"""Asks: what a scene shall show (kinds, colours, numbers, where, on what), as data, before any picture is made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from arpg.data.catalogue import GROUNDS, KINDS, TINTS, held_out
from arpg.errors import require

RELATIONS = ("left", "right", "above", "below", "front")
INVERSE = {"left": "right", "right": "left", "above": "below", "below": "above"}
SIZES = ("", "small", "large")
MOST = 4


@dataclass(frozen=True)
class Group:
    """So many objects of one kind in one colour. The colour is a tint, or one in which the kind comes by itself."""

    kind: str
    count: int = 1
    colour: str = ""
    size: str = ""

    def __post_init__(self) -> None:
        require(1 <= self.count <= MOST, f"count is {self.count}; expected 1 to {MOST} {self.kind}s")
        require(self.size in SIZES, f"size is {self.size!r}; expected small, large or nothing")

    @property
    def tinted(self) -> bool:
        return bool(self.colour) and self.colour not in (KINDS[self.kind].natural if self.kind in KINDS else ())


@dataclass(frozen=True)
class Ask:
    """Groups, where the first stands in relation to the second, and the colour of the background."""

    groups: tuple[Group, ...]
    relation: str = ""
    ground: str = "white"

    def __post_init__(self) -> None:
        require(1 <= self.total <= MOST, f"the scene has {self.total} objects; expected 1 to {MOST}")
        kinds = [group.kind for group in self.groups]
        require(len(set(kinds)) == len(kinds), f"the groups are of {', '.join(kinds)}; expected different kinds")
        require(self.ground in GROUNDS, f"ground is {self.ground!r}; expected one of {', '.join(GROUNDS)}")
        if self.relation:
            require(self.relation in RELATIONS, f"relation is {self.relation!r}; expected {', '.join(RELATIONS)}")
            require(len(self.groups) == 2, f"a relation needs two groups; there are {len(self.groups)}")

    @property
    def total(self) -> int:
        return sum(group.count for group in self.groups)

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """What is put together here, as `held_out` takes it."""
        for a, b in itertools.combinations(self.groups, 2):
            yield ("pair", a.kind, b.kind)
        for group in self.groups:
            yield ("ground", group.kind, self.ground)
            if group.count > 1:
                yield ("count", group.kind, str(group.count))
            if group.tinted:
                yield ("colour", group.kind, group.colour)

    def is_held_out(self) -> bool:
        return any(held_out(*parts) for parts in self.combinations())

    def visible(self) -> bool:
        """No object has the colour of the background."""
        return all(group.colour != self.ground for group in self.groups)


def draw_ask(rng: np.random.Generator, *, extra: Sequence[str] = (), everything: bool = False) -> Ask:
    """An ask for a training scene: a combination that is held out only where `everything` is wanted.

    `extra`: kinds that only stand alone.
    """
    while True:
        ask = _draw(rng, extra)
        if ask.visible() and (everything or not ask.is_held_out()):
            return ask


def _draw(rng: np.random.Generator, extra: Sequence[str]) -> Ask:
    kind = rng.choice(("extra", "single", "count", "two", "three"), p=(0.08, 0.24, 0.2, 0.4, 0.08))
    ground = "white" if rng.random() < 0.25 else str(rng.choice(list(GROUNDS)))
    if kind == "extra" and len(extra):
        return Ask((Group(str(rng.choice(extra))),), ground=ground)
    nouns = [str(noun) for noun in rng.choice(list(KINDS), 3, replace=False)]
    if kind == "count":
        return Ask((_group(rng, nouns[0], int(rng.integers(2, MOST + 1))),), ground=ground)
    if kind == "two":
        counts = (1, 1) if rng.random() < 0.75 else [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2)][rng.integers(5)]
        relation = ""
        if rng.random() < 0.65:
            relation = str(rng.choice(RELATIONS, p=(0.24, 0.24, 0.22, 0.22, 0.08)))
        if relation == "front":
            counts = (1, 1)
        return Ask(tuple(_group(rng, n, c) for n, c in zip(nouns, counts, strict=False)), relation, ground)
    if kind == "three":
        return Ask(tuple(_group(rng, noun, 1) for noun in nouns), ground=ground)
    return Ask((_group(rng, nouns[0], 1, size=str(rng.choice(SIZES, p=(0.7, 0.15, 0.15)))),), ground=ground)


def _group(rng: np.random.Generator, noun: str, count: int, *, size: str = "") -> Group:
    kind, colour = KINDS[noun], ""
    if kind.natural and rng.random() < 0.75:
        colour = str(rng.choice(kind.natural))
    if kind.tintable and rng.random() < 0.45:
        colour = str(rng.choice(list(TINTS)))
    return Group(noun, count, colour, size)
