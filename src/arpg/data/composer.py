"""The composer: scenes from cut-outs, with everything that is true about them. A scene is a function of its seed.

Shapes: H W pixels of the scene.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from arpg.data.asks import Ask, Group, draw_ask
from arpg.data.captions import caption
from arpg.data.catalogue import GROUNDS, KINDS, TINTS
from arpg.data.cutouts import cut_out, tint
from arpg.data.images import ImageSet, open_images
from arpg.data.layout import Spot, lay_out
from arpg.errors import InputError, require

SIZE = 96
FAR = 1.0  # the depth of the background
VIEWS = 24  # of each class of fruit, evenly spaced over its frames


@dataclass(frozen=True)
class Placed:
    """One object of a scene."""

    kind: str
    colour: str  # as the ask has it; "" where none is said
    box: tuple[int, int, int, int]  # left, top, right, bottom; also of what others hide
    order: int  # 0 was drawn first
    depth: float  # 0 is nearest


@dataclass(frozen=True, eq=False)
class Scene:
    pixels_HW3: NDArray[np.uint8]
    depth_HW: NDArray[np.float32]
    caption: str
    ask: Ask
    objects: tuple[Placed, ...]  # in the order of the ask's groups

    @property
    def image(self) -> Image.Image:
        return Image.fromarray(self.pixels_HW3)


class Composer:
    """Draws scenes. `fruits` and `emoji` are image sets; of emoji, those outside the catalogue stand alone."""

    def __init__(self, fruits: str | Path, emoji: str | Path, *, size: int = SIZE) -> None:
        require(size >= 32, f"size is {size}; expected 32 or more pixels")
        self.size = size
        self._fruits, self._emoji = open_images(fruits), open_images(emoji)
        names = _captions(self._emoji)
        self._emoji_index = {name: i for i, name in enumerate(names)}
        self._views = _views(self._fruits)
        for kind in KINDS.values():
            missing = [c for _, classes in kind.fruits for c in classes if c not in self._views]
            missing += [kind.emoji] if kind.emoji and kind.emoji not in self._emoji_index else []
            require(not missing, f"{fruits} and {emoji} have no {', '.join(missing)}; expected the sets of garden")
        used = {kind.emoji for kind in KINDS.values()}
        self.extra = tuple(f"{name} emoji" for name in names if name not in used)
        self._cut = lru_cache(maxsize=None)(self._cut_out)

    def scene(self, seed: int) -> Scene:
        """A training scene: nothing in it is held out."""
        rng = np.random.default_rng([seed, 0])
        return self.compose(draw_ask(rng, extra=self.extra), rng)

    def compose(self, ask: Ask, rng: np.random.Generator) -> Scene:
        """A scene of what is asked."""
        groups = [group for group in ask.groups for _ in range(group.count)]
        shapes = [self._dressed(group, rng) for group in groups]
        spots = lay_out(ask, [shape.width / shape.height for shape in shapes], self.size, rng)
        canvas = _ground(GROUNDS[ask.ground], self.size, rng)
        depth = np.full((self.size, self.size), FAR, np.float32)
        drop = rng.random() < 0.35  # shadows fall behind the objects, or below them
        placed: dict[int, Placed] = {}
        for order, i in enumerate(sorted(range(len(spots)), key=lambda i: spots[i].depth, reverse=True)):
            spot = spots[i]
            object_ = shapes[i].resize((spot.width, spot.height), Image.Resampling.LANCZOS)
            _shade(canvas, object_, spot, drop=drop)
            canvas.paste(object_, (spot.left, spot.top), object_)
            _write_depth(depth, object_, spot)
            placed[i] = Placed(groups[i].kind, groups[i].colour, spot.box, order, spot.depth)
        objects = tuple(placed[i] for i in range(len(spots)))
        return Scene(np.asarray(canvas), depth, caption(ask, rng), ask, objects)

    def _dressed(self, group: Group, rng: np.random.Generator) -> Image.Image:
        """A cut-out of the group's kind in its colour, turned a little."""
        kind, tinted = KINDS.get(group.kind), group.tinted
        if kind is None or kind.emoji:
            name = group.kind.removesuffix(" emoji") if kind is None else kind.emoji
            index = self._emoji_index.get(name)
            if index is None:
                raise InputError(f"kind {group.kind!r} is neither in the catalogue nor an emoji")
            cut = self._cut(self._emoji, index)
        else:
            classes = [c for colour, some in kind.fruits for c in some if tinted or group.colour in ("", colour)]
            views = self._views[classes[int(rng.integers(len(classes)))]]
            cut = self._cut(self._fruits, views[int(rng.integers(len(views)))])
        if tinted:
            jitter = rng.integers(-10, 11, 3)
            red, green, blue = (int(c) for c in np.clip(np.array(TINTS[group.colour]) + jitter, 0, 255))
            cut = tint(cut, (red, green, blue))
        if rng.random() < 0.5:
            cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        turned = cut.rotate(float(rng.normal(0, 6)), Image.Resampling.BICUBIC, expand=True)
        return turned.crop(turned.getchannel("A").point(lambda a: 255 * (a > 127)).getbbox())

    def _cut_out(self, images: ImageSet, index: int) -> Image.Image:
        return cut_out(images.read(index))


def _captions(emoji: ImageSet) -> tuple[str, ...]:
    if emoji.captions is None:
        raise InputError(f"{emoji.where} has no captions.json; expected the emoji set of garden")
    return emoji.captions


def _views(fruits: ImageSet) -> dict[str, list[int]]:
    """Evenly spaced frames of each class."""
    require(bool(fruits.classes), f"{fruits.where} has no class folders; expected the fruit set of garden")
    frames: dict[str, list[int]] = {name: [] for name in fruits.classes}
    for index, label in enumerate(fruits.labels):
        frames[fruits.classes[label]].append(index)
    return {name: [all_[i * len(all_) // VIEWS] for i in range(VIEWS)] for name, all_ in frames.items()}


def _ground(colour: Sequence[int], size: int, rng: np.random.Generator) -> Image.Image:
    """The background: flat, lighter in the middle, or a wall and a floor, all in one colour."""
    spread = 3 if min(colour) > 240 else 9
    base = np.clip(np.array(colour) + rng.integers(-spread, spread + 1, 3), 0, 255).astype(np.float32)
    style, row = rng.random(), np.linspace(0, 1, size, dtype=np.float32)
    light = np.ones((size, size), np.float32)
    if style < 0.35:
        away = np.hypot(*np.meshgrid(row - 0.5, row - 0.4))
        light = (1.06 - 0.22 * away**1.5).astype(np.float32)
    elif style < 0.6:
        horizon = rng.uniform(0.5, 0.7)
        floor = 1 / (1 + np.exp(-(row - horizon) * 60))
        light = np.repeat((1.02 - 0.1 * floor + 0.08 * floor * (row - horizon))[:, None], size, 1).astype(np.float32)
    return Image.fromarray(np.clip(base * light[..., None], 0, 255).astype(np.uint8))


def _shade(canvas: Image.Image, object_: Image.Image, spot: Spot, *, drop: bool) -> None:
    """A soft shadow: of the whole shape, a little to the right and below, or a flat one under the object."""
    alpha = object_.getchannel("A")
    blur = max(1.0, 0.05 * max(object_.size))
    shadow = Image.new("L", canvas.size)
    if drop:
        away = max(1, round(0.06 * max(object_.size)))
        shadow.paste(alpha.point(lambda a: a * 0.4), (spot.left + away, spot.top + away))
    else:
        flat = alpha.resize((spot.width, max(2, round(0.22 * spot.height))), Image.Resampling.BOX)
        shadow.paste(flat.point(lambda a: a * 0.5), (spot.left, spot.top + spot.height - round(0.62 * flat.height)))
    canvas.paste((30, 28, 36), (0, 0), shadow.filter(ImageFilter.GaussianBlur(blur)))


def _write_depth(depth_HW: NDArray[np.float32], object_: Image.Image, spot: Spot) -> None:
    inside = np.asarray(object_.getchannel("A")) >= 128
    part = depth_HW[spot.top : spot.top + spot.height, spot.left : spot.left + spot.width]
    part[inside] = spot.depth
