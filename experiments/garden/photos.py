"""The photographs that `garden` was trained on: fruits and flowers."""

from __future__ import annotations

from pathlib import Path

from arpg.data.images import ImageSet
from experiments.photos import PHOTO_SETS

SIZE = PHOTO_SETS["garden"].size  # pixels per side


def open_photos(data: Path, split: str) -> ImageSet:
    """Open a split ("train" or "test") of fruits and flowers as one set."""
    return PHOTO_SETS["garden"].open(data, split)
