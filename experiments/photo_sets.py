"""The sets of photographs that the bundled models are trained on and measured against, by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arpg.data.images import ImageSet, concatenate, open_images
from arpg.errors import require


@dataclass(frozen=True)
class PhotoSet:
    """Zips of photographs, each a domain with a train and a test split, and the side at which a model sees them."""

    name: str
    domains: tuple[str, ...]
    archive: str  # path of a split below the data folder, with {domain} and {split}
    size: int  # pixels per side

    def path(self, data: Path, domain: str, split: str) -> str:
        """Return the path of one split of one domain, as `open_images` takes it."""
        return f"{data}/{self.archive.format(domain=domain, split=split)}"

    def open(self, data: Path, split: str) -> ImageSet:
        """Open a split ("train" or "test") of all domains as one set."""
        return concatenate([open_images(self.path(data, domain, split)) for domain in self.domains])


PHOTO_SETS = {
    each.name: each
    for each in (
        PhotoSet("garden", ("fruits", "flowers"), "{domain}.zip/{domain}/{split}", 96),
        PhotoSet("meadow", ("pets", "flowers", "birds", "things", "dogs"), "meadow-{domain}.zip/{split}", 128),
        PhotoSet("meadow-256", ("pets", "flowers", "birds", "things", "dogs"), "meadow-{domain}.zip/{split}", 256),
    )
}


def photo_set(name: str) -> PhotoSet:
    """Return a set by its name."""
    require(name in PHOTO_SETS, f"photo set is {name!r}; expected one of {', '.join(PHOTO_SETS)}")
    return PHOTO_SETS[name]
