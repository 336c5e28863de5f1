"""Class names: one line per class, synonyms separated by commas, found by name or id."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import SupportsIndex

from arpg.errors import InputError, require


@dataclass(frozen=True)
class ClassNames:
    """`lines[i]` names class i: the usual name first, synonyms after it."""

    lines: tuple[str, ...]
    _ids: dict[str, list[int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for class_id, line in enumerate(self.lines):
            names = [name.strip() for name in line.split(",")]
            require(all(names), f"class {class_id} is named {line!r}; expected a name, or names separated by commas")
            for name in [line, *names]:
                ids = self._ids.setdefault(_key(name), [])
                if class_id not in ids:
                    ids.append(class_id)

    def __len__(self) -> int:
        return len(self.lines)

    def name(self, class_id: int) -> str:
        """Return the usual name of a class."""
        return self.lines[class_id].split(",")[0].strip()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the usual names, in the order of the ids."""
        return (self.name(class_id) for class_id in range(len(self)))

    def __getitem__(self, class_id: SupportsIndex) -> str:
        """Return the usual name of a class."""
        return self.name(range(len(self))[class_id])

    def __contains__(self, name: object) -> bool:
        """Return whether a name, however it is spelled, is that of a class."""
        return isinstance(name, str) and _key(name) in self._ids

    def find(self, name_or_id: str | SupportsIndex) -> int:
        """Return the id of a class. Names ignore case, '_' and '-'; unknown or ambiguous ones raise an `InputError`."""
        whole = isinstance(name_or_id, str) or hasattr(name_or_id, "__index__")
        require(whole, f"class is {name_or_id!r}; expected a name or an id from 0 to {len(self) - 1}")
        text = name_or_id.strip() if isinstance(name_or_id, str) else str(name_or_id.__index__())
        if text.removeprefix("-").isdecimal() and len(text) < 20:
            class_id = int(text)
            require(
                0 <= class_id < len(self),
                f"class {class_id} does not exist; expected a name or an id from 0 to {len(self) - 1}",
            )
            return class_id
        ids = self._ids.get(_key(text), [])
        if len(ids) == 1:
            return ids[0]
        # "Cardigan" the dog and "cardigan" the garment, "partridge" and the grouse that is also called so:
        # the whole line decides, then the usual name, as it is spelled.
        for exact in ([i for i in ids if self.lines[i] == text], [i for i in ids if self.name(i) == text]):
            if len(exact) == 1:
                return exact[0]
        if ids:
            choices = "; ".join(f"{i} ({self.lines[i]})" for i in ids)
            raise InputError(f"class {text!r} is ambiguous: {choices}; give the id instead")
        raise InputError(f"class {text!r} is unknown; {self._suggestion(text)}")

    def match(self, line: str) -> int | None:
        """Return the id of the class with this line or, if that is unique, this name; None where there is none.

        Unlike `find`, this takes a number for a name.
        """
        ids = [i for i, own in enumerate(self.lines) if own == line] or self._ids.get(_key(line), [])
        return ids[0] if len(ids) == 1 else None

    def search(self, text: str) -> list[int]:
        """Return the ids of the classes that have `text` in their names."""
        return [i for i, line in enumerate(self.lines) if _key(text) in _key(line)]

    def nearest(self, text: str) -> list[int]:
        """Return up to five ids of classes whose names resemble or contain `text`."""
        close = difflib.get_close_matches(_key(text), list(self._ids), n=8, cutoff=0.6)
        return list(dict.fromkeys([i for key in close for i in self._ids[key]] + self.search(text)))[:5]

    def _suggestion(self, text: str) -> str:
        ids = self.nearest(text)
        if not ids:
            return (
                f"expected one of the {len(self)} class names or an id from 0 to {len(self) - 1} (see `arpg classes`)"
            )
        return "did you mean " + ", ".join(f"{self.name(i)!r} ({i})" for i in ids) + "?"


def _key(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())


def numbered_classes(num_classes: int) -> ClassNames:
    """Name the classes of a model without names "class 0", "class 1" and so on."""
    return ClassNames(tuple(f"class {i}" for i in range(num_classes)))


def parse_classes(text: str, *, where: str, num_classes: int) -> ClassNames:
    """Parse class names, one line per class; `where` they come from is named in errors."""
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    require(len(lines) == num_classes, f"{where} names {len(lines)} classes; the model has {num_classes}")
    return ClassNames(tuple(lines))


def imagenet_classes() -> ClassNames:
    """Return the names of the 1,000 ImageNet classes."""
    text = resources.files("arpg").joinpath("assets/imagenet_classes.txt").read_text(encoding="utf-8")
    return parse_classes(text, where="the built-in ImageNet list", num_classes=1000)
