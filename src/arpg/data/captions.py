"""Captions: what an ask says in English, in many ways, all of them true."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arpg.data.asks import INVERSE, Ask, Group
from arpg.data.catalogue import KINDS

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


def caption(ask: Ask, rng: np.random.Generator) -> str:
    """One of many ways to say it. A white background is often left out, a coloured one seldom."""
    groups, relation = list(ask.groups), ask.relation
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
    if rng.random() < (0.75 if ask.ground == "white" else 0.12):
        return subject
    article = _article(ask.ground)
    ground = _one(
        rng,
        (f"on {article} background", f"on {article} background", f"against {article} background", f"on {ask.ground}"),
    )
    return f"{ground}, {subject}" if rng.random() < 0.08 else f"{subject} {ground}"


def plain_caption(ask: Ask) -> str:
    """The one way of GenEval: a photo of two cats, a photo of a red car and a blue key, a photo of a cat left of a key.

    The background is said where it is not white.
    """
    where = {"left": "left of", "right": "right of", "above": "above", "below": "below", "front": "in front of"}
    parts = [_said(group, number=NUMBERS[group.count], size=group.size) for group in ask.groups]
    subject = f"{parts[0]} {where[ask.relation]} {parts[1]}" if ask.relation else _listed(parts)
    ground = "" if ask.ground == "white" else f" on {_article(ask.ground)} background"
    return f"a photo of {subject}{ground}"


def _phrase(group: Group, rng: np.random.Generator) -> str:
    size = ""
    if group.size and rng.random() < 0.8:
        size = _one(rng, SMALL if group.size == "small" else LARGE)
    number = str(group.count) if group.count > 1 and rng.random() < 0.08 else NUMBERS[group.count]
    return _said(group, number=number, size=size, counted=rng.random() < 0.04)


def _said(group: Group, *, number: str, size: str = "", counted: bool = False) -> str:
    """`counted`: "one lemon" instead of "a lemon"."""
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
