"""Inpainting and editing: an image, a hole in it, the hole filled with and without the class, and two class edits.

Usage: python examples/editing.py OUT.png
"""

import sys

from PIL import Image

from arpg import Pipeline
from arpg.image import sheet

ROWS = (
    ("sunflower", 0, "gazania", "oxeye daisy"),
    ("siamese cat", 2, "persian cat", "pug"),
    ("water lily", 1, "lotus", "hibiscus"),
)
HOLE, MOST = (32, 32, 96, 96), (13, 13, 115, 115)


def main() -> None:
    pipe = Pipeline.from_pretrained("meadow", device="cpu")
    images = []
    for name, seed, *others in ROWS:
        (image,) = pipe.generate(name, seed=seed)
        mask = Image.new("L", image.size, 0)
        mask.paste(255, HOLE)
        hole = image.copy()
        hole.paste("grey", HOLE)
        images += [image, hole, *pipe.inpaint(image, mask, name, seed=1), *pipe.inpaint(image, mask, seed=1)]
        images += [made for other in others for made in pipe.edit(image, MOST, other, seed=1, feather=3)]
    sheet(images, columns=len(images) // len(ROWS)).save(sys.argv[1])


if __name__ == "__main__":
    main()
