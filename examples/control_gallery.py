"""The gallery's pictures of control: what follows edges and depth, a drawing edited by hand, strengths, inpainting.

Usage: python examples/control_gallery.py MODEL [--data data] [--out docs/images/gallery]

All seeds are 0 and counted on, nothing is chosen. `data` has fruits.zip, flowers.zip and emoji.zip.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from arpg import Control, Pipeline
from arpg.data.images import ImageSet, concatenate, open_images
from arpg.evaluation.control_images import choose_evenly
from arpg.evaluation.depth_training import draw_depth_scenes
from arpg.image import adm_crop, sheet

LINE = 256  # pixels of a drawing's side, before the model's size
NAMES = ("Apple Red 1", "Lemon", "Tomato 1")  # what an outline of a round fruit can be
STRENGTHS = (0.0, 0.5, 1.0)
TASTE = 2026  # the first seed of the scenes, as in the score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/gallery"))
    parser.add_argument("--num", type=int, default=8, help="Test images and scenes.")
    options = parser.parse_args()
    pipe = Pipeline.from_pretrained(options.model, device="cpu")
    tests = concatenate([open_images(f"{options.data}/{name}.zip/{name}/test") for name in ("fruits", "flowers")])
    sets = (f"{options.data}/fruits.zip/fruits/test", f"{options.data}/emoji.zip/emoji")
    write(pipe, tests, sets, options.out, num=options.num)


def write(pipe: Pipeline, tests: ImageSet, sets: tuple[str, str], folder: Path, *, num: int = 8) -> list[Path]:
    """All pictures, as WebP; their paths."""
    chosen = spread(tests, num)
    made = {
        "control-edges": edges(pipe, tests, chosen),
        "control-depth": depth(pipe, sets, num),
        "control-drawing": by_hand(pipe),
        "control-strength": strengths(pipe, tests, chosen),
        "control-inpaint": inpainted(pipe),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in made.items():
        picture.save(folder / f"{name}.webp", quality=85, method=6)
    return [folder / f"{name}.webp" for name in made]


def spread(tests: ImageSet, num: int) -> list[int]:
    """One image of each of `num` classes at even distances, the last one (a flower) among them."""
    classes = np.linspace(0, len(tests.classes) - 1, min(num, len(tests.classes))).round().astype(int)
    one_each = choose_evenly(tests.labels, len(tests.classes))
    return [int(one_each[i]) for i in classes]


def edges(pipe: Pipeline, tests: ImageSet, chosen: Sequence[int]) -> Image.Image:
    """Test image, its edges, two results of its class; and one of the class in the next row: the same edges."""
    names = [tests.classes[tests.labels[i]] for i in chosen]
    shown: list[tuple[Image.Image, str]] = []
    for row, (number, name) in enumerate(zip(chosen, names, strict=True)):
        picture, other = tests.read(number), names[(row + 1) % len(names)]
        condition = pipe.condition_of(picture, "canny")
        ours = pipe.generate(name, control=condition, num_images=2, seed=0)
        shown += [(adm_crop(picture, side(pipe)), "test image"), (condition.image, "edges")]
        shown += [(image, name) for image in ours]
        shown += [(pipe.generate(other, control=condition, seed=0)[0], other)]
    return captioned(shown, columns=5)


def depth(pipe: Pipeline, sets: tuple[str, str], num: int) -> Image.Image:
    """Composed scene, its depth, two results without a class."""
    scenes = draw_depth_scenes(sets, num=num, seed=TASTE, size=max(32, side(pipe)))
    shown: list[tuple[Image.Image, str]] = []
    for pixels, near in zip(scenes.pixels_nHW3, scenes.near_nHW, strict=True):
        control = Control(Image.fromarray(near), "depth")
        size = (side(pipe), side(pipe))
        shown += [(Image.fromarray(pixels).resize(size), "composed scene"), (control.fit(size), "its depth")]
        shown += [(image, "result") for image in pipe.generate(control=control, num_images=2, seed=0)]
    return captioned(shown, columns=8 if num > 1 else 4)


def by_hand(pipe: Pipeline) -> Image.Image:
    """A drawing, the same with a leaf, the same with a second fruit; three classes of each."""
    shown: list[tuple[Image.Image, str]] = []
    for title, drawing in drawings().items():
        control = Control(drawing, "canny")
        shown += [(control.fit((side(pipe), side(pipe))), title)]
        shown += [(pipe.generate(name, control=control, seed=0)[0], name) for name in known(pipe)]
    return captioned(shown, columns=1 + len(known(pipe)))


def strengths(pipe: Pipeline, tests: ImageSet, chosen: Sequence[int]) -> Image.Image:
    """The same seed with more and more of the edges."""
    shown: list[tuple[Image.Image, str]] = []
    for number in (chosen[0], chosen[-1]):
        name, condition = tests.classes[tests.labels[number]], pipe.condition_of(tests.read(number), "canny")
        shown += [(condition.image, f"{name}: edges")]
        for strength in STRENGTHS:
            control = Control(condition.image, "canny", strength)
            shown += [(pipe.generate(name, control=control, seed=0)[0], f"strength {strength:g}")]
    return captioned(shown, columns=1 + len(STRENGTHS))


def inpainted(pipe: Pipeline) -> Image.Image:
    """A fruit, its right half drawn anew: without a condition, and along a drawn outline."""
    name, length = known(pipe)[0], side(pipe)
    (picture,) = pipe.generate(name, seed=4)
    mask = Image.new("L", picture.size)
    mask.paste(255, (length // 2, 0, length, length))
    hole = picture.copy()
    hole.paste("grey", (length // 2, 0, length, length))
    control = Control(drawings()["a leaf is added"], "canny")
    free, led = (pipe.inpaint(picture, mask, name, control=c, seed=1)[0] for c in (None, control))
    shown = [(picture, name), (hole, "half is to be filled"), (free, "filled")]
    shown += [(control.fit(picture.size), "an outline"), (led, "filled along it")]
    return captioned(shown, columns=5)


def drawings() -> dict[str, Image.Image]:
    """Line drawings as a hand makes them, white on black: a round fruit; with a leaf; with another beside it."""
    plain, leaf, two = (Image.new("L", (LINE, LINE)) for _ in range(3))
    for picture in (plain, leaf):
        pen(picture, circle(124, 150, 100), seed=1)  # a fruit fills its picture, as in training
        pen(picture, lambda t: (126 + 12 * t, 66 - 48 * t), seed=2)
    pen(leaf, lambda t: (134 + 72 * t, 40 - 30 * math.sin(math.pi * t)), seed=3)
    pen(leaf, lambda t: (134 + 72 * t, 40 + 16 * math.sin(math.pi * t)), seed=4)
    pen(two, circle(76, 140, 70), seed=5)
    pen(two, circle(194, 156, 54), seed=6)
    return {"a drawing": plain, "a leaf is added": leaf, "two instead": two}


def circle(x: float, y: float, radius: float) -> Callable[[float], tuple[float, float]]:
    return lambda t: (x + radius * math.cos(2 * math.pi * t), y + 0.94 * radius * math.sin(2 * math.pi * t))


def pen(picture: Image.Image, path: Callable[[float], tuple[float, float]], *, seed: int, points: int = 48) -> None:
    """A line along a path from 0 to 1, with the slow wobble of a hand."""
    rng = np.random.default_rng(seed)
    wobble = np.cumsum(rng.normal(0, 0.5, (points + 1, 2)), axis=0)
    wobble -= np.linspace(0, 1, points + 1)[:, None] * wobble[-1]  # a closed path stays closed
    line = [(x + dx, y + dy) for (x, y), (dx, dy) in zip(map(path, np.linspace(0, 1, points + 1)), wobble, strict=True)]
    ImageDraw.Draw(picture).line(line, fill=255, width=2, joint="curve")


def known(pipe: Pipeline) -> list[str | int]:
    """The classes of round fruits, or the first three of another model."""
    names = [pipe.classes.name(i) for i in range(len(pipe.classes))]
    return list(NAMES) if set(NAMES) <= set(names) else list(range(min(3, len(names))))


def side(pipe: Pipeline) -> int:
    return pipe.model.config.grid[0] * pipe.tokenizer.config.stride


def captioned(shown: Sequence[tuple[Image.Image, str | int]], *, columns: int) -> Image.Image:
    return sheet([image for image, _ in shown], columns=columns, captions=[str(text) for _, text in shown])


if __name__ == "__main__":
    main()
