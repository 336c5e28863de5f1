"""Make the sprite of class thumbnails that the page shows: one small image per class, in rows.

Usage: python examples/thumbnails.py [MODEL]    (default: the default model; some minutes on two CPU cores)
"""

import math
import sys

from PIL import Image

from arpg import Pipeline
from arpg.config import DEFAULT_MODEL
from arpg.hub import resolve

SIZE, COLUMNS = 48, 17


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL
    pipe = Pipeline.from_pretrained(model, device="cpu")
    names = [pipe.classes.name(label) for label in range(pipe.model.config.num_classes)]
    images = [pipe.generate(name, seed=label)[0] for label, name in enumerate(names)]
    sprite = Image.new("RGB", (COLUMNS * SIZE, math.ceil(len(images) / COLUMNS) * SIZE), "white")
    for i, image in enumerate(images):
        small = image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
        sprite.paste(small, (i % COLUMNS * SIZE, i // COLUMNS * SIZE))
    sprite.save(resolve(model) / "thumbnails.webp", quality=85, method=6)


if __name__ == "__main__":
    main()
