"""Small stand-ins for the fruit and emoji sets: a shape on white for every picture that the catalogue needs."""

import colorsys
import json
import zlib

from PIL import Image, ImageDraw

from experiments.garden.objects import KINDS

EXTRA = ("smiling cat", "1st place medal", "umbrella on ground")


def shape(name, side=40):
    """A polygon whose corners, colour and eye follow from the name."""
    seed = zlib.crc32(name.encode())
    image = Image.new("RGB", (4 * side, 4 * side), "white")
    draw = ImageDraw.Draw(image)
    colour = tuple(round(255 * c) for c in colorsys.hsv_to_rgb((seed % 97) / 97, 0.8, 0.75))
    radius, middle = 1.8 * side, 2 * side
    draw.regular_polygon((middle, middle, radius), n_sides=3 + seed % 5, rotation=seed % 90, fill=colour)
    draw.ellipse((middle - 9, middle - 9, middle + 9, middle + 9), fill="white")
    return image.resize((side, side), Image.Resampling.BOX)


def write_sets(folder):
    """The paths of both sets."""
    fruits, emoji = folder / "fruits", folder / "emoji"
    for kind in KINDS.values():
        for _, classes in kind.fruits:
            for name in classes:
                (fruits / name).mkdir(parents=True)
                for view in range(2):
                    shape(f"{name}{view}").save(fruits / name / f"{view}.png")
    emoji.mkdir()
    names = [kind.emoji for kind in KINDS.values() if kind.emoji] + list(EXTRA)
    captions = {}
    for i, name in enumerate(names):
        shape(name).save(emoji / f"{i:04d}.png")
        captions[f"{i:04d}.png"] = {"name": name, "keywords": [name]}
    (emoji / "captions.json").write_text(json.dumps(captions))
    return fruits, emoji
