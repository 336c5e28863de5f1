"""The seam of an edit for several widths of feathering: how much colours change across it, relative to outside it.

    python benchmarks/seam.py

Six images of `garden` get another class in their middle. Tokens do not depend on the feathering, so each edit is
sampled once and pasted with every width. 1 is no visible seam; above it, what is inside differs from what is outside.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from arpg import Pipeline
from arpg.tasks.stages import Canvas, box_mask

BOX = (24, 24, 72, 72)
EDITS = {
    "Apple Red 1": "Kiwi",
    "Orange": "Strawberry",
    "daisy": "sunflowers",
    "Lemon": "Walnut",
    "tulips": "roses",
    "Banana": "Corn",
}


def seam(image: Image.Image) -> tuple[float, float]:
    """Return the mean change of colour between neighbouring pixels: across the border of the box, and outside it."""
    x = np.asarray(image).astype(float)
    left, top, right, bottom = BOX

    def change(k: int) -> float:
        sides = (
            x[top:bottom, left - k] - x[top:bottom, left - k - 1],
            x[top:bottom, right + k] - x[top:bottom, right + k - 1],
            x[top - k, left:right] - x[top - k - 1, left:right],
            x[bottom + k, left:right] - x[bottom + k - 1, left:right],
        )
        return float(np.mean([np.abs(side).mean() for side in sides]))

    return change(0), float(np.mean([change(k) for k in (1, 2, 3)]))


def main() -> None:
    """Print a row for each width."""
    pipe = Pipeline.from_pretrained("garden", device="cpu")
    sources = pipe.generate(list(EDITS), num_images=1, steps=12, seed=3)
    pairs = zip(sources, EDITS.values(), strict=True)
    edited = [pipe.edit(image, BOX, name, steps=12, seed=1, feather=0)[0] for image, name in pairs]
    mask, grid = box_mask(pipe.image_size, BOX), pipe.model.config.grid
    print("feather  across  outside  ratio")
    for feather in (0, 2, 3, 4, 5, 6, 8):
        canvases = [Canvas.fit(image, mask, grid=grid, stride=pipe.tokenizer.config.stride) for image in sources]
        pasted = [canvas.paste(new, feather=feather) for canvas, new in zip(canvases, edited, strict=True)]
        across, outside = np.mean([seam(image) for image in pasted], 0)
        print(f"{feather:7d} {across:7.2f} {outside:8.2f} {across / outside:6.2f}")


if __name__ == "__main__":
    main()
