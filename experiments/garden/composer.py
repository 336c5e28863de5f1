"""The scene composer: cut-outs of objects, their layout, and scenes of them with captions, boxes and exact depth.

A scene is a function of its seed. Shapes: H W pixels of the scene, h w of a cut-out (4 channels: RGB and alpha).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from arpg.data.images import ImageSet, open_images
from arpg.errors import InputError, require
from experiments.garden.objects import BACKGROUNDS, KINDS, TINTS
from experiments.garden.scene_spec import Group, SceneSpec, caption, sample_spec

Pixels = NDArray[np.uint8]
WHITE = 255.0
TOLERANCE = 24  # how far from white the background may be, summed over the channels


def cut_out(image: Image.Image) -> Image.Image:
    """Return the object as RGBA, cropped: what is nearly white and connected with the border becomes transparent.

    White inside an object stays. The white that is mixed into edge colours is removed.
    """
    rgb = image.convert("RGB")
    framed = Image.new("RGB", (rgb.width + 2, rgb.height + 2), "white")
    framed.paste(rgb, (1, 1))
    pixels = np.asarray(framed, np.float32)
    outside_hw = _connected_with_border((WHITE - pixels).sum(-1) <= TOLERANCE)
    require(not outside_hw.all(), "the image is white all over; expected an object on a white background")
    # Near the border an edge pixel is partly white: its alpha is how far it is from white, compared with the inside.
    inside = Image.fromarray((~outside_hw).astype(np.uint8) * 255)
    core_hw = np.asarray(inside.filter(ImageFilter.MinFilter(3))) > 0
    rim_hw = ~outside_hw & ~core_hw
    darkness = WHITE - pixels.min(-1)
    expected = np.maximum(255 * _blurred(darkness * core_hw) / np.maximum(_blurred(255.0 * core_hw), 1.0), 1.0)
    alpha = np.where(core_hw, 1.0, np.where(rim_hw, np.clip(darkness / expected, 0.0, 1.0), 0.0))
    freed = WHITE - (WHITE - pixels) / np.maximum(alpha, 0.25)[..., None]
    rgba = np.concatenate((np.where(rim_hw[..., None], freed, pixels), 255 * alpha[..., None]), -1)
    rows, columns = (np.flatnonzero(alpha.max(axis) > 0.5) for axis in (1, 0))
    require(len(rows) > 0, "the image has no object that stands out from its white background")
    box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    return Image.fromarray(np.clip(rgba, 0, 255).astype(np.uint8)).crop(box)


def tint(cutout: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    """Return the object in another colour, with its light and shade."""
    rgba = np.asarray(cutout, np.float32)
    alpha = rgba[..., 3:] / 255
    light = rgba[..., :3] @ np.array([0.299, 0.587, 0.114], np.float32)
    inside = light[alpha[..., 0] > 0.5]
    low, middle, high = np.percentile(inside, (2, 50, 98)) if inside.size else (0.0, 128.0, 255.0)
    # Shade below the middle leads to a dark version of the colour, light above it towards white.
    down = np.clip((light - low) / max(middle - low, 16.0), 0, 1)[..., None]
    up = np.clip((light - middle) / max(high - middle, 16.0), 0, 1)[..., None]
    base = np.array(colour, np.float32)
    shaded = base * (0.45 + 0.55 * down)
    out = shaded + (255 - shaded) * 0.55 * up
    return Image.fromarray(np.concatenate((np.clip(out, 0, 255), 255 * alpha), -1).astype(np.uint8))


def _connected_with_border(free_hw: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the free pixels that are connected with the border: sweeps until nothing changes."""
    reached = np.zeros_like(free_hw)
    reached[0], reached[-1], reached[:, 0], reached[:, -1] = True, True, True, True
    count = -1
    while count != reached.sum():
        count = int(reached.sum())
        for turns in range(4):
            # Along each line: reached where the last reached pixel is nearer than the last blocked one.
            free, known = np.rot90(free_hw, turns), np.rot90(reached, turns)
            index = np.arange(1, free.shape[1] + 1)
            last_known = np.maximum.accumulate(np.where(known, index, 0), axis=1)
            last_blocked = np.maximum.accumulate(np.where(free, 0, index), axis=1)
            reached = np.rot90(free & (last_known > last_blocked), -turns) | reached
    return reached


def _blurred(values_hw: NDArray[np.floating]) -> NDArray[np.float32]:
    return np.asarray(Image.fromarray(values_hw.astype(np.uint8)).filter(ImageFilter.GaussianBlur(2)), np.float32)


SIDES = {1: (0.42, 0.84), 2: (0.34, 0.5), 3: (0.28, 0.4), 4: (0.26, 0.36)}  # of the longer side, by number of objects
SINGLE = {"": (0.5, 0.8), "small": (0.26, 0.36), "large": (0.84, 0.95)}
OVERLAP = 0.12  # of the smaller box, at most
TRIES, SHRINK = 40, 0.94


@dataclass(frozen=True)
class Placement:
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


def lay_out(spec: SceneSpec, shapes: Sequence[float], size: int, rng: np.random.Generator) -> list[Placement]:
    """Return a placement for each object, in the order of the spec; `shapes`: width by height.

    Placements are sampled at random; objects become smaller where none fits.
    """
    first = spec.groups[0].count
    scale = 1.0
    while True:
        for _ in range(TRIES):
            places = _random_placements(spec, shapes, size, rng, scale)
            a, b = places[:first], places[first:]
            if not _are_clear(places, front=spec.relation == "front"):
                continue
            if not spec.relation or all(relation_holds(spec.relation, x, y) for x in a for y in b):
                return places
        scale *= SHRINK


def relation_holds(relation: str, a: Placement, b: Placement) -> bool:
    """Return whether `a` is clearly `relation` of `b`, by their centres: more in this direction than across it."""
    dx, dy = (x - y for x, y in zip(a.centre, b.centre, strict=True))
    if relation == "front":
        return a.depth < b.depth and 0.15 <= overlap(a, b) <= 0.4
    along, across, sizes = (
        (dx, dy, (a.width + b.width)) if relation in ("left", "right") else (dy, dx, a.height + b.height)
    )
    if relation in ("left", "above"):
        along = -along
    return along >= 0.3 * sizes and along >= abs(across)


def overlap(a: Placement, b: Placement) -> float:
    """Return the share of the smaller box that lies in both."""
    wide = min(a.left + a.width, b.left + b.width) - max(a.left, b.left)
    high = min(a.top + a.height, b.top + b.height) - max(a.top, b.top)
    return max(0, wide) * max(0, high) / min(a.width * a.height, b.width * b.height)


def _random_placements(
    spec: SceneSpec, shapes: Sequence[float], size: int, rng: np.random.Generator, scale: float
) -> list[Placement]:
    low, high = SINGLE[spec.groups[0].size] if len(shapes) == 1 else SIDES[len(shapes)]
    places = []
    sides = {group.kind: rng.uniform(low, high) for group in spec.groups}  # objects of a group are alike
    kinds = [group.kind for group in spec.groups for _ in range(group.count)]
    for kind, shape in zip(kinds, shapes, strict=True):
        side = scale * size * sides[kind] * rng.uniform(0.93, 1.0)
        width, height = (max(4, round(side * min(1.0, x))) for x in (shape, 1 / shape))
        margin = 2
        # The middle is a little more likely than the edges.
        left = margin + (size - width - 2 * margin) * float(rng.beta(1.4, 1.4))
        top = margin + (size - height - 2 * margin) * float(rng.beta(1.6, 1.4))
        # Lower objects are nearer; the noise keeps depths distinct.
        depth = 0.95 - 0.85 * (top + height) / size + float(rng.uniform(-0.02, 0.02))
        places.append(Placement(round(left), round(top), width, height, round(depth, 6)))
    if spec.relation == "front" and places[0].depth >= places[1].depth:
        a, b = places
        places = [Placement(*a.box[:2], a.width, a.height, b.depth), Placement(*b.box[:2], b.width, b.height, a.depth)]
    return places


def _are_clear(places: Sequence[Placement], *, front: bool) -> bool:
    pairs = list(itertools.combinations(places, 2))
    return len({s.depth for s in places}) == len(places) and (front or all(overlap(a, b) <= OVERLAP for a, b in pairs))


SIZE = 96
FAR = 1.0  # the depth of the background
VIEWS = 24  # of each class of fruit, evenly spaced over its frames


@dataclass(frozen=True)
class SceneObject:
    """One object of a scene."""

    kind: str
    colour: str  # as in the spec; "" where none is named
    box: tuple[int, int, int, int]  # left, top, right, bottom; also of what others hide
    order: int  # 0 was pasted first
    depth: float  # 0 is nearest


@dataclass(frozen=True, eq=False)
class Scene:
    pixels_HW3: NDArray[np.uint8]
    depth_HW: NDArray[np.float32]
    caption: str
    spec: SceneSpec
    objects: tuple[SceneObject, ...]  # in the order of the spec's groups

    @property
    def image(self) -> Image.Image:
        return Image.fromarray(self.pixels_HW3)


class Composer:
    """Composes scenes of the image sets `fruits` and `emoji`; emoji that are no kind of `KINDS` only appear alone."""

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
        """Compose the training scene of a seed; nothing in it is held out."""
        rng = np.random.default_rng([seed, 0])
        return self.compose(sample_spec(rng, extra=self.extra), rng)

    def compose(self, spec: SceneSpec, rng: np.random.Generator) -> Scene:
        """Compose a scene of `spec`."""
        groups = [group for group in spec.groups for _ in range(group.count)]
        shapes = [self._object(group, rng) for group in groups]
        places = lay_out(spec, [shape.width / shape.height for shape in shapes], self.size, rng)
        canvas = _background(BACKGROUNDS[spec.background], self.size, rng)
        depth = np.full((self.size, self.size), FAR, np.float32)
        drop = rng.random() < 0.35  # shadows fall behind the objects, or below them
        placed: dict[int, SceneObject] = {}
        for order, i in enumerate(sorted(range(len(places)), key=lambda i: places[i].depth, reverse=True)):
            place = places[i]
            object_ = shapes[i].resize((place.width, place.height), Image.Resampling.LANCZOS)
            _add_shadow(canvas, object_, place, drop=drop)
            canvas.paste(object_, (place.left, place.top), object_)
            _write_depth(depth, object_, place)
            placed[i] = SceneObject(groups[i].kind, groups[i].colour, place.box, order, place.depth)
        objects = tuple(placed[i] for i in range(len(places)))
        return Scene(np.asarray(canvas), depth, caption(spec, rng), spec, objects)

    def _object(self, group: Group, rng: np.random.Generator) -> Image.Image:
        """Return a cut-out of the group's kind in its colour, rotated a little."""
        kind, tinted = KINDS.get(group.kind), group.tinted
        if kind is None or kind.emoji:
            name = group.kind.removesuffix(" emoji") if kind is None else kind.emoji
            index = self._emoji_index.get(name)
            if index is None:
                raise InputError(f"kind {group.kind!r} is neither in KINDS nor an emoji")
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
        rotated = cut.rotate(float(rng.normal(0, 6)), Image.Resampling.BICUBIC, expand=True)
        return rotated.crop(rotated.getchannel("A").point(lambda a: 255 * (a > 127)).getbbox())

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


def _background(colour: Sequence[int], size: int, rng: np.random.Generator) -> Image.Image:
    """Return a background in one colour: flat, lighter in the middle, or a wall and a floor."""
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


def _add_shadow(canvas: Image.Image, object_: Image.Image, place: Placement, *, drop: bool) -> None:
    """Add a soft shadow: of the whole shape, offset to the right and below, or a flat one under the object."""
    alpha = object_.getchannel("A")
    blur = max(1.0, 0.05 * max(object_.size))
    shadow = Image.new("L", canvas.size)
    if drop:
        away = max(1, round(0.06 * max(object_.size)))
        shadow.paste(alpha.point(lambda a: a * 0.4), (place.left + away, place.top + away))
    else:
        flat = alpha.resize((place.width, max(2, round(0.22 * place.height))), Image.Resampling.BOX)
        shadow.paste(flat.point(lambda a: a * 0.5), (place.left, place.top + place.height - round(0.62 * flat.height)))
    canvas.paste((30, 28, 36), (0, 0), shadow.filter(ImageFilter.GaussianBlur(blur)))


def _write_depth(depth_HW: NDArray[np.float32], object_: Image.Image, place: Placement) -> None:
    inside = np.asarray(object_.getchannel("A")) >= 128
    part = depth_HW[place.top : place.top + place.height, place.left : place.left + place.width]
    part[inside] = place.depth
