"""Scene specifications: which objects a scene has, in which colours, numbers, relation and background; and captions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from arpg.errors import require
from experiments.garden.objects import BACKGROUNDS, KINDS, TINTS, held_out

RELATIONS = ("left", "right", "above", "below", "front")
INVERSE = {"left": "right", "right": "left", "above": "below", "below": "above"}
SIZES = ("", "small", "large")
MAX_OBJECTS = 4


@dataclass(frozen=True)
class Group:
    """`count` objects of one kind in one colour: a tint, or a colour that images of the kind have."""

    kind: str
    count: int = 1
    colour: str = ""
    size: str = ""

    def __post_init__(self) -> None:
        require(1 <= self.count <= MAX_OBJECTS, f"count is {self.count}; expected 1 to {MAX_OBJECTS} {self.kind}s")
        require(self.size in SIZES, f"size is {self.size!r}; expected small, large or nothing")

    @property
    def tinted(self) -> bool:
        return bool(self.colour) and self.colour not in (KINDS[self.kind].natural if self.kind in KINDS else ())


@dataclass(frozen=True)
class SceneSpec:
    """Groups of objects, the relation of the first to the second, and the colour of the background."""

    groups: tuple[Group, ...]
    relation: str = ""
    background: str = "white"

    def __post_init__(self) -> None:
        require(1 <= self.total <= MAX_OBJECTS, f"the scene has {self.total} objects; expected 1 to {MAX_OBJECTS}")
        kinds = [group.kind for group in self.groups]
        require(len(set(kinds)) == len(kinds), f"the groups are of {', '.join(kinds)}; expected different kinds")
        require(self.background in BACKGROUNDS, f"background is {self.background!r}; expected {', '.join(BACKGROUNDS)}")
        if self.relation:
            require(self.relation in RELATIONS, f"relation is {self.relation!r}; expected {', '.join(RELATIONS)}")
            require(len(self.groups) == 2, f"a relation needs two groups; there are {len(self.groups)}")

    @property
    def total(self) -> int:
        return sum(group.count for group in self.groups)

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """Yield what the scene combines, as arguments of `held_out`."""
        for a, b in itertools.combinations(self.groups, 2):
            yield ("pair", a.kind, b.kind)
        for group in self.groups:
            yield ("ground", group.kind, self.background)
            if group.count > 1:
                yield ("count", group.kind, str(group.count))
            if group.tinted:
                yield ("colour", group.kind, group.colour)

    def is_held_out(self) -> bool:
        return any(held_out(*parts) for parts in self.combinations())

    def visible(self) -> bool:
        """Return whether no object has the colour of the background."""
        return all(group.colour != self.background for group in self.groups)


def sample_spec(rng: np.random.Generator, *, extra: Sequence[str] = (), everything: bool = False) -> SceneSpec:
    """Sample the spec of a training scene; with `everything` it may combine what is held out.

    `extra`: kinds that only appear alone.
    """
    while True:
        spec = _sample(rng, extra)
        if spec.visible() and (everything or not spec.is_held_out()):
            return spec


def _sample(rng: np.random.Generator, extra: Sequence[str]) -> SceneSpec:
    kind = rng.choice(("extra", "single", "count", "two", "three"), p=(0.08, 0.24, 0.2, 0.4, 0.08))
    background = "white" if rng.random() < 0.25 else str(rng.choice(list(BACKGROUNDS)))
    if kind == "extra" and len(extra):
        return SceneSpec((Group(str(rng.choice(extra))),), background=background)
    nouns = [str(noun) for noun in rng.choice(list(KINDS), 3, replace=False)]
    if kind == "count":
        return SceneSpec((_group(rng, nouns[0], int(rng.integers(2, MAX_OBJECTS + 1))),), background=background)
    if kind == "two":
        counts = (1, 1) if rng.random() < 0.75 else [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2)][rng.integers(5)]
        relation = ""
        if rng.random() < 0.65:
            relation = str(rng.choice(RELATIONS, p=(0.24, 0.24, 0.22, 0.22, 0.08)))
        if relation == "front":
            counts = (1, 1)
        return SceneSpec(tuple(_group(rng, n, c) for n, c in zip(nouns, counts, strict=False)), relation, background)
    if kind == "three":
        return SceneSpec(tuple(_group(rng, noun, 1) for noun in nouns), background=background)
    return SceneSpec(
        (_group(rng, nouns[0], 1, size=str(rng.choice(SIZES, p=(0.7, 0.15, 0.15)))),), background=background
    )


def _group(rng: np.random.Generator, noun: str, count: int, *, size: str = "") -> Group:
    kind, colour = KINDS[noun], ""
    if kind.natural and rng.random() < 0.75:
        colour = str(rng.choice(kind.natural))
    if kind.tintable and rng.random() < 0.45:
        colour = str(rng.choice(list(TINTS)))
    return Group(noun, count, colour, size)


NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}
WHERE = {
    "left": ("to the left of", "left of", "on the left of"),
    "right": ("to the right of", "right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under", "beneath"),
    "front": ("in front of", "partly covering"),
}
OPENINGS = ("", "", "", "a photo of ", "a picture of ", "an image of ")
SMALL, LARGE = ("small", "little", "tiny"), ("large", "big", "huge")


def caption(spec: SceneSpec, rng: np.random.Generator) -> str:
    """Return one of many captions. A white background is often left out, a coloured one seldom."""
    groups, relation = list(spec.groups), spec.relation
    if relation in INVERSE and rng.random() < 0.3:
        groups, relation = groups[::-1], INVERSE[relation]
    elif not relation and len(groups) > 1:
        rng.shuffle(groups)
    parts = [_phrase(group, rng) for group in groups]
    if relation:
        subject = f"{parts[0]} {_one(rng, WHERE[relation])} {parts[1]}"
    elif len(parts) == 2:
        subject = f"{parts[0]} {_one(rng, ('and', 'and', 'and', 'with'))} {parts[1]}"
    else:
        subject = _listed(parts)
    subject = _one(rng, OPENINGS) + subject
    if rng.random() < (0.75 if spec.background == "white" else 0.12):
        return subject
    article = _article(spec.background)
    background = _one(
        rng,
        (
            f"on {article} background",
            f"on {article} background",
            f"against {article} background",
            f"on {spec.background}",
        ),
    )
    return f"{background}, {subject}" if rng.random() < 0.08 else f"{subject} {background}"


def plain_caption(spec: SceneSpec) -> str:
    """Return the caption in GenEval's form, like "a photo of a red car and a blue key", without a white background."""
    where = {"left": "left of", "right": "right of", "above": "above", "below": "below", "front": "in front of"}
    parts = [_words(group, number=NUMBERS[group.count], size=group.size) for group in spec.groups]
    subject = f"{parts[0]} {where[spec.relation]} {parts[1]}" if spec.relation else _listed(parts)
    background = "" if spec.background == "white" else f" on {_article(spec.background)} background"
    return f"a photo of {subject}{background}"


def _phrase(group: Group, rng: np.random.Generator) -> str:
    size = ""
    if group.size and rng.random() < 0.8:
        size = _one(rng, SMALL if group.size == "small" else LARGE)
    number = str(group.count) if group.count > 1 and rng.random() < 0.08 else NUMBERS[group.count]
    return _words(group, number=number, size=size, counted=rng.random() < 0.04)


def _words(group: Group, *, number: str, size: str = "", counted: bool = False) -> str:
    """Return a group as words; with `counted`, "one lemon" instead of "a lemon"."""
    kind = KINDS.get(group.kind)
    noun = group.kind if kind is None else (kind.noun if group.count == 1 else kind.plural)
    words = " ".join(word for word in (size, group.colour, noun) if word)
    return _article(words) if group.count == 1 and not counted else f"{number} {words}"


def _article(words: str) -> str:
    vowel = words[0].lower() in "aeio" or words.startswith("umbrella")
    return f"{'an' if vowel and not words.startswith(('one-', 'eu')) else 'a'} {words}"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _one(rng: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(rng.integers(len(choices)))]
