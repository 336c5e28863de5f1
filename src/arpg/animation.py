"""Animation: previews of a drawing, step by step, as a GIF that holds its last frame and begins again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from arpg.files import write_whole
from arpg.image import sheet

PACE, HOLD = 120, 2000  # milliseconds of a frame, and of the last one


class Frames:
    """The previews of every candidate, in the order in which they were drawn."""

    def __init__(self) -> None:
        self._previews: dict[int, list[Image.Image]] = {}

    def add(self, rows: range, previews: Sequence[Image.Image]) -> None:
        """The candidates `rows` after a step."""
        for row, image in zip(rows, previews, strict=True):
            self._previews.setdefault(row, []).append(image)

    def sheets(self, kept: Sequence[int], *, columns: int | None = None) -> list[Image.Image]:
        """One frame per step: the candidates that were kept, side by side, all at the size of the finished ones."""
        shown = [self._previews[row] for row in kept]
        size = shown[0][-1].size
        frames = []
        for k in range(max(map(len, shown))):
            images = [previews[min(k, len(previews) - 1)] for previews in shown]
            images = [image if image.size == size else image.resize(size) for image in images]
            frames.append(images[0] if len(images) == 1 else sheet(images, columns=columns))
        return frames


def save_gif(frames: Sequence[Image.Image], path: Path) -> None:
    """Whole or not at all; it loops, and the last frame stays for a while."""
    durations = [PACE] * (len(frames) - 1) + [HOLD]
    # A palette for each frame; dithering would flicker.
    few = [frame.quantize(256, dither=Image.Dither.NONE) for frame in frames]

    def write(temporary: Path) -> None:
        few[0].save(temporary, format="GIF", save_all=True, append_images=few[1:], duration=durations, loop=0)

    write_whole(path, write)
