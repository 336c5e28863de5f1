"""The gallery's pictures of control: what follows edges and depth, a drawing edited by hand, strengths, inpainting.

Usage: python examples/control_gallery.py [MODEL] [--data data] [--out docs/images/control]

All seeds are 0 and counted on, nothing is chosen. `data` has fruits.zip and emoji.zip. Fruits are test images; flowers
are drawn by `garden`: those who took the photographs that it learned from would have to be named here.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from arpg import ControlInput, Pipeline
from arpg.data.images import ImageSet, open_images
from arpg.evaluation.control_images import choose_evenly
from arpg.evaluation.depth_training import draw_depth_scenes
from arpg.image import adm_crop, sheet

LINE = 256  # pixels of a drawing's side, before the model's size
NAMES = ("Apple Red 1", "Lemon", "Tomato 1")  # what an outline of a round fruit can be
FLOWERS = ("daisy", "roses", "sunflowers")
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
TASTE = 2026  # the first seed of the scenes, as in the score

Shown = list[tuple[Image.Image, str]]  # pictures with what is written below them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="garden-control")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/control"))
    parser.add_argument("--num", type=int, default=5, help="Test images; one more scenes.")
    options = parser.parse_args()
    pipe, garden = (Pipeline.from_pretrained(name, device="cpu") for name in (options.model, "garden"))
    sets = (f"{options.data}/fruits.zip/fruits/test", f"{options.data}/emoji.zip/emoji")
    sources = [*fruits(open_images(sets[0]), options.num, side(pipe)), *flowers(garden)]
    write(pipe, sources, sets, options.out, num=options.num + 1)


def write(pipe: Pipeline, sources: Shown, sets: tuple[str, str], folder: Path, *, num: int) -> list[Path]:
    """All pictures, as WebP; their paths. `sources`: pictures to take edges of, with their classes."""
    made = {
        "edges": edges(pipe, sources),
        "depth": depth(pipe, sets, num),
        "drawing": by_hand(pipe),
        "strength": strengths(pipe, [sources[0], sources[-1]]),
        "inpaint": inpainted(pipe),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in made.items():
        picture.save(folder / f"{name}.webp", quality=80, method=6)
    return [folder / f"{name}.webp" for name in made]


def fruits(tests: ImageSet, num: int, size: int) -> Shown:
    """The middle image of each of `num` classes at even distances."""
    classes = np.linspace(0, len(tests.classes) - 1, min(num, len(tests.classes))).round().astype(int)
    one_each = choose_evenly(tests.labels, len(tests.classes))
    return [(adm_crop(tests.read(int(one_each[i])), size), tests.classes[i]) for i in classes]


def flowers(garden: Pipeline) -> Shown:
    """The most likely of eight of each."""
    return list(zip(garden.generate(list(FLOWERS), seed=0, best_of=8), FLOWERS, strict=True))


def edges(pipe: Pipeline, sources: Shown) -> Image.Image:
    """Picture, its edges, two results of its class, and one of the class of the next row: along the same edges."""
    shown: Shown = []
    for row, (picture, name) in enumerate(sources):
        other = sources[(row + 1) % len(sources)][1]
        condition = pipe.extract_control(picture, "canny")
        shown += [(picture, "picture"), (condition.image, "edges")]
        shown += [(image, name) for image in pipe.generate(name, control=condition, num_images=2, seed=0)]
        shown += [(pipe.generate(other, control=condition, seed=0)[0], other)]
    return captioned(shown, columns=5)


def depth(pipe: Pipeline, sets: tuple[str, str], num: int) -> Image.Image:
    """Composed scene, its depth, two results without a class, one with each of two classes."""
    scenes = draw_depth_scenes(sets, num=num, seed=TASTE, size=max(32, side(pipe)))
    shown: Shown = []
    for pixels, near in zip(scenes.pixels_nHW3, scenes.near_nHW, strict=True):
        control = ControlInput(Image.fromarray(near), "depth")
        size = (side(pipe), side(pipe))
        shown += [(Image.fromarray(pixels).resize(size), "composed scene"), (control.fit(size), "its depth")]
        shown += [(image, "no class") for image in pipe.generate(control=control, num_images=2, seed=0)]
        shown += [(pipe.generate(name, control=control, seed=0)[0], str(name)) for name in known(pipe)[:2]]
    return captioned(shown, columns=6)


def by_hand(pipe: Pipeline) -> Image.Image:
    """A drawing, the same with a leaf, the same with a second fruit; three classes of each."""
    shown: Shown = []
    for title, drawing in drawings().items():
        control = ControlInput(drawing, "canny")
        shown += [(control.fit((side(pipe), side(pipe))), title)]
        shown += [(pipe.generate(name, control=control, seed=0)[0], str(name)) for name in known(pipe)]
    return captioned(shown, columns=1 + len(known(pipe)))


def strengths(pipe: Pipeline, sources: Shown) -> Image.Image:
    """The same seed with more and more of the edges."""
    shown: Shown = []
    for picture, name in sources:
        condition = pipe.extract_control(picture, "canny")
        shown += [(condition.image, f"{name}: edges")]
        for strength in STRENGTHS:
            control = ControlInput(condition.image, "canny", strength)
            shown += [(pipe.generate(name, control=control, seed=0)[0], f"strength {strength:g}")]
    return captioned(shown, columns=1 + len(STRENGTHS))


def inpainted(pipe: Pipeline) -> Image.Image:
    """A fruit along a drawing, its right half drawn anew: as it comes, along the edited drawing, as another class."""
    (name, other), half = known(pipe)[:2], side(pipe) // 2
    outlines = [ControlInput(drawing, "canny") for drawing in drawings().values()][:2]
    (picture,) = pipe.generate(name, control=outlines[0], seed=0)
    mask, hole = Image.new("L", picture.size), picture.copy()
    for image, colour in ((mask, "white"), (hole, "grey")):
        image.paste(colour, (half, 0, 2 * half, 2 * half))
    asked = ((name, None), (name, outlines[1]), (other, outlines[1]))
    free, led, changed = (pipe.inpaint(picture, mask, what, control=c, seed=0)[0] for what, c in asked)
    shown = [(picture, str(name)), (hole, "half is to be filled"), (free, "filled")]
    shown += [(outlines[1].fit(picture.size), "a leaf is added"), (led, "filled along it"), (changed, str(other))]
    return captioned(shown, columns=6)


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


def captioned(shown: Sequence[tuple[Image.Image, str]], *, columns: int) -> Image.Image:
    return sheet([image for image, _ in shown], columns=columns, captions=[text for _, text in shown])


if __name__ == "__main__":
    main()
