"""Make the sprite of class thumbnails that the page shows: one small image per class, in rows.

Usage: python examples/thumbnails.py [OUT.webp]    (about two minutes on two CPU cores)
"""

import math
import sys
from pathlib import Path

from PIL import Image

from arpg import Pipeline
from arpg.config import DEFAULT_MODEL

SIZE, COLUMNS = 48, 17
SPRITE = Path(__file__).parent.parent / "src/arpg/assets" / DEFAULT_MODEL / "thumbnails.webp"


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else SPRITE
    pipe = Pipeline.from_pretrained(DEFAULT_MODEL, device="cpu")
    names = [pipe.classes.name(label) for label in range(pipe.model.config.num_classes)]
    images = [pipe.generate(name, seed=label)[0] for label, name in enumerate(names)]
    sprite = Image.new("RGB", (COLUMNS * SIZE, math.ceil(len(images) / COLUMNS) * SIZE), "white")
    for i, image in enumerate(images):
        small = image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
        sprite.paste(small, (i % COLUMNS * SIZE, i // COLUMNS * SIZE))
    sprite.save(target, quality=85, method=6)


if __name__ == "__main__":
    main()
