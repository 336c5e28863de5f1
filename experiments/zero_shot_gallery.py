"""Zero-shot tasks as pictures: inpainting, class edits, outpainting, expansion; and edges and depth that are followed.

    python -m experiments.meadow gallery --model meadow --control meadow-control --out runs/gallery

Classes and seeds follow from `--seed`, and nothing is selected. The images to start from are the model's own: the
terms of its photographs do not allow to show them everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from arpg import ControlInput, Pipeline
from arpg.errors import require
from arpg.image import sheet
from arpg.settings import EXPAND_METHODS
from arpg.tasks.stages import box_image
from experiments.zero_shot import middle

STRENGTHS = (0.0, 0.5, 1.0)

Captioned = list[tuple[Image.Image, str]]  # images with their captions


class Gallery:
    """A model, its classes by lot, and an image of each of them."""

    def __init__(self, pipe: Pipeline, *, rows: int, seed: int) -> None:
        require(2 <= rows <= len(pipe.classes), f"rows is {rows}; expected 2 to {len(pipe.classes)}, one per class")
        self.pipe, self.seed = pipe, seed
        ids = np.random.default_rng(seed).choice(len(pipe.classes), rows, replace=False)
        self.names = [pipe.classes.name(int(i)) for i in ids]
        self.images = pipe.generate([int(i) for i in ids], seed=seed)
        self.side = self.images[0].width

    def others(self, row: int, count: int) -> list[str]:
        """Return the classes of the next rows."""
        return [self.names[(row + 1 + i) % len(self.names)] for i in range(min(count, len(self.names) - 1))]

    def inpaint(self) -> Image.Image:
        """Return rows of an image, the hole in its middle, two fills with its class and one without."""
        mask, shown = box_image((self.side, self.side), middle(self.side, 0.5)), []
        for name, image in zip(self.names, self.images, strict=True):
            hole = Image.composite(Image.new("RGB", image.size, "grey"), image, mask)
            shown += [(image, name), (hole, "half the side is missing")]
            fills = self.pipe.inpaint(image, mask, name, num_images=2, seed=self.seed)
            shown += [(made, f"filled as {name}") for made in fills]
            shown += [(self.pipe.inpaint(image, mask, seed=self.seed)[0], "filled without a class")]
        return captioned(shown, columns=5)

    def edit(self) -> Image.Image:
        """Return rows of an image and of edits of its middle (80% of the side) to the classes of the next rows."""
        box, shown = middle(self.side, 0.8), []
        for row, (name, image) in enumerate(zip(self.names, self.images, strict=True)):
            shown += [(image, name)]
            shown += [(self.pipe.edit(image, box, other, seed=self.seed)[0], other) for other in self.others(row, 3)]
        return captioned(shown, columns=1 + len(self.others(0, 3)))

    def outpaint(self) -> Image.Image:
        """Return images with half their width added on both sides."""
        half, shown = self.side // 2, []
        for name, image in zip(self.names, self.images, strict=True):
            shown += [(self.pipe.outpaint(image, name, left=half, right=half, seed=self.seed)[0], name)]
        return captioned(shown, columns=2)

    def expand(self) -> Image.Image:
        """Return rows of an image enlarged by interpolation, and expanded to twice its side by every method."""
        size, shown = (2 * self.side, 2 * self.side), []
        for name, image in zip(self.names, self.images, strict=True):
            shown += [(image.resize(size, Image.Resampling.BICUBIC), f"{name}, bicubic")]
            for method in EXPAND_METHODS:
                (made,) = self.pipe.expand(image, name, size=size, method=method, seed=self.seed)
                shown += [(made, method)]
        return captioned(shown, columns=1 + len(EXPAND_METHODS))

    def follow(self, control: Pipeline, kind: str) -> Image.Image:
        """Return rows of an image, its condition, its class at three strengths, and the class of the next row."""
        shown: Captioned = []
        for row, (name, image) in enumerate(zip(self.names, self.images, strict=True)):
            condition = control.extract_control(image, kind)
            shown += [(image, name), (condition.image, kind)]
            for strength in STRENGTHS:
                given = ControlInput(condition.image, kind, strength)
                shown += [(control.generate(name, control=given, seed=self.seed)[0], f"{name}, strength {strength:g}")]
            (other,) = self.others(row, 1)
            shown += [(control.generate(other, control=condition, seed=self.seed)[0], other)]
        return captioned(shown, columns=3 + len(STRENGTHS))


def captioned(shown: Captioned, *, columns: int) -> Image.Image:
    """Return a sheet of images with their captions."""
    return sheet([image for image, _ in shown], columns=columns, captions=[text for _, text in shown])


def save_all(made: Iterable[tuple[str, Image.Image]], folder: Path, *, quality: int = 85) -> list[Path]:
    """Write named images as WebP, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, image in made:
        written.append(folder / f"{name}.webp")
        image.save(written[-1], quality=quality, method=6)
    return written


def write_gallery(pipe: Pipeline, folder: Path, *, rows: int, seed: int, control: Pipeline | None = None) -> list[Path]:
    """Write all pictures as WebP, and return their paths."""
    gallery = Gallery(pipe, rows=rows, seed=seed)
    written = save_all(((name, getattr(gallery, name)()) for name in ("inpaint", "edit", "outpaint", "expand")), folder)
    if control is not None and control.model.config.control is not None:
        kinds = control.model.config.control.kinds
        written += save_all(((kind, gallery.follow(control, kind)) for kind in kinds), folder)
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    """Write pictures of the zero-shot tasks, and of control where such a model is given."""
    parser = argparse.ArgumentParser(prog="experiments gallery", description=main.__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--control", help="A model that takes condition images, of the same classes.")
    parser.add_argument("--rows", type=int, default=6, help="Classes, chosen by lot.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    pipe = Pipeline.from_pretrained(options.model, device=options.device)
    control = None if options.control is None else Pipeline.from_pretrained(options.control, device=options.device)
    write_gallery(pipe, options.out, rows=options.rows, seed=options.seed, control=control)
