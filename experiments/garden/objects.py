"""Objects of composed scenes: kinds, colours, and the combinations that training never sees."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

Colour = tuple[int, int, int]

# Colours that an object can be given.
TINTS: dict[str, Colour] = {
    "red": (208, 36, 38),
    "orange": (240, 134, 26),
    "yellow": (242, 206, 36),
    "green": (52, 152, 62),
    "blue": (44, 96, 214),
    "purple": (124, 62, 176),
    "pink": (240, 124, 176),
}
BACKGROUNDS: dict[str, Colour] = {
    "white": (250, 250, 250),
    "gray": (160, 163, 168),
    "red": (196, 66, 62),
    "orange": (236, 152, 76),
    "yellow": (244, 220, 112),
    "green": (122, 182, 110),
    "blue": (104, 152, 218),
    "purple": (146, 112, 192),
    "pink": (242, 180, 202),
}


@dataclass(frozen=True)
class Kind:
    """A noun and its images: class folders of fruits by colour ("": none is named), or the name of an emoji."""

    noun: str
    plural: str
    fruits: tuple[tuple[str, tuple[str, ...]], ...] = ()
    emoji: str = ""
    tintable: bool = False

    @property
    def natural(self) -> tuple[str, ...]:
        """Return the colours that the images have without a tint."""
        return tuple(colour for colour, _ in self.fruits if colour)


def _fruit(noun: str, *classes: tuple[str, tuple[str, ...]], plural: str = "", tintable: bool = False) -> Kind:
    return Kind(noun, plural or f"{noun}s", fruits=classes, tintable=tintable)


def _emoji(name: str, noun: str = "", plural: str = "", *, tintable: bool = False) -> Kind:
    noun = noun or name
    return Kind(noun, plural or f"{noun}s", emoji=name, tintable=tintable)


KINDS: dict[str, Kind] = {
    kind.noun: kind
    for kind in (
        _fruit(
            "apple",
            ("red", ("Apple Red 1", "Apple Red 3")),
            ("green", ("Apple Granny Smith",)),
            ("yellow", ("Apple Golden 1",)),
            tintable=True,
        ),
        _fruit(
            "pepper",
            ("red", ("Pepper Red",)),
            ("green", ("Pepper Green",)),
            ("orange", ("Pepper Orange",)),
            tintable=True,
        ),
        _fruit("pear", ("red", ("Pear Red",)), ("green", ("Pear",)), ("yellow", ("Pear Monster",)), tintable=True),
        _fruit("banana", ("", ("Banana",)), tintable=True),
        _fruit("lemon", ("", ("Lemon",))),
        _fruit("orange", ("", ("Orange",))),
        _fruit("strawberry", ("", ("Strawberry",)), plural="strawberries", tintable=True),
        _fruit("pineapple", ("", ("Pineapple Mini",)), tintable=True),
        _fruit("watermelon", ("", ("Watermelon",))),
        _fruit("kiwi", ("", ("Kiwi",))),
        _fruit("avocado", ("", ("Avocado",))),
        _fruit("eggplant", ("", ("Eggplant",)), tintable=True),
        _fruit("corn cob", ("", ("Corn",)), tintable=True),
        _fruit("cauliflower", ("", ("Cauliflower",)), tintable=True),
        _fruit("onion", ("", ("Onion White",))),
        _fruit("dragon fruit", ("", ("Pitahaya Red",)), plural="dragon fruits"),
        _emoji("cat face", "cat", tintable=True),
        _emoji("dog face", "dog", tintable=True),
        _emoji("panda"),
        _emoji("frog"),
        _emoji("fox", plural="foxes"),
        _emoji("penguin"),
        _emoji("owl"),
        _emoji("butterfly", plural="butterflies", tintable=True),
        _emoji("fish", plural="fish", tintable=True),
        _emoji("turtle", tintable=True),
        _emoji("teddy bear", tintable=True),
        _emoji("automobile", "car", tintable=True),
        _emoji("bus", plural="buses", tintable=True),
        _emoji("rocket", tintable=True),
        _emoji("airplane", tintable=True),
        _emoji("sailboat", "boat"),
        _emoji("bicycle"),
        _emoji("house", tintable=True),
        _emoji("deciduous tree", "tree"),
        _emoji("cactus", plural="cactuses"),
        _emoji("sunflower"),
        _emoji("tulip", tintable=True),
        _emoji("mushroom", tintable=True),
        _emoji("pizza"),
        _emoji("doughnut", tintable=True),
        _emoji("hamburger"),
        _emoji("cupcake"),
        _emoji("star", tintable=True),
        _emoji("red heart", "heart", tintable=True),
        _emoji("balloon", tintable=True),
        _emoji("umbrella", tintable=True),
        _emoji("guitar", tintable=True),
        _emoji("crown", tintable=True),
        _emoji("key", tintable=True),
        _emoji("bell", tintable=True),
        _emoji("top hat", "hat", tintable=True),
        _emoji("ghost", tintable=True),
        _emoji("robot", tintable=True),
        _emoji("closed book", "book", tintable=True),
    )
}
# One in so many combinations is held out. The names are part of the hash: "ground" is the background.
RARITY = {"pair": 8, "count": 4, "colour": 4, "ground": 8}


def held_out(what: str, *parts: str) -> bool:
    """Return whether training never sees this combination: two kinds, or a kind with a number, a tint or a background.

    It is a hash of the names, so it is the same everywhere.
    """
    text = "|".join((what, *sorted(parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") % RARITY[what] == 0
