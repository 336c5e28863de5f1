"""Figures on grey."""

import numpy as np
from PIL import Image, ImageDraw


def shapes(n, seed=0, size=32):
    """A figure on grey for each number, no two alike."""
    rng = np.random.default_rng(seed)
    pictures = []
    for _ in range(n):
        picture = Image.new("RGB", (size, size), "grey")
        left, top = rng.integers(2, size // 2, 2)
        box = (left, top, left + rng.integers(6, size // 2 - 2), top + rng.integers(6, size // 2 - 2))
        drawing = ImageDraw.Draw(picture)
        (drawing.ellipse if rng.random() < 0.5 else drawing.rectangle)(list(map(float, box)), fill="white")
        pictures.append(np.asarray(picture))
    return np.stack(pictures)
