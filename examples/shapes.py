"""Make a small image set: three kinds of coloured shapes on plain grounds, one folder each.

python examples/shapes.py shapes            20 images of each kind
arpg finetune shapes -o mine --lora 8
"""

from __future__ import annotations

import argparse
import colorsys
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

SIDE, FINE = 128, 4  # pixels of an image; drawn this much larger, then reduced


def corners(kind: str, x: float, y: float, radius: float, angle: float) -> list[tuple[float, float]]:
    """Return the corners of a shape around (x, y)."""
    count, inner = {"triangle": (3, 1.0), "star": (10, 0.45), "disc": (72, 1.0)}[kind]
    radii = [radius * (inner if i % 2 else 1.0) for i in range(count)]
    turns = [angle + 2 * math.pi * i / count for i in range(count)]
    return [(x + r * math.sin(t), y - r * math.cos(t)) for r, t in zip(radii, turns, strict=True)]


def draw(kind: str, rng: random.Random) -> Image.Image:
    """Draw one shape of a saturated colour on a pale ground."""
    side = SIDE * FINE
    hue = rng.random()
    pale, strong = ((rng.random(), 0.12, 0.97), (hue, 0.85, 0.85))
    ground, colour = (tuple(round(255 * c) for c in colorsys.hsv_to_rgb(*hsv)) for hsv in (pale, strong))
    image = Image.new("RGB", (side, side), ground)
    radius = side * rng.uniform(0.26, 0.38)
    x, y = (side / 2 + side * rng.uniform(-0.08, 0.08) for _ in range(2))
    ImageDraw.Draw(image).polygon(corners(kind, x, y, radius, rng.uniform(-0.3, 0.3)), fill=colour)
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def write_shapes(folder: Path, *, count: int = 20, captions: bool = False, seed: int = 0) -> None:
    """Write `count` images of each kind; with `captions`, all in one folder with a text file beside each image."""
    rng = random.Random(seed)
    for kind in ("disc", "star", "triangle"):
        where = folder if captions else folder / kind
        where.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            draw(kind, rng).save(where / f"{kind}-{i:03d}.png")
            if captions:
                (where / f"{kind}-{i:03d}.txt").write_text(f"a {kind}\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", type=int, default=20, help="images of each kind")
    parser.add_argument("--captions", action="store_true", help="captions in text files instead of folders")
    options = parser.parse_args()
    write_shapes(options.folder, count=options.n, captions=options.captions)
