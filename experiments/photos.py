"""The sets of photographs that models are trained on and measured against, and the classifier of their classes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from arpg.classes import ClassNames
from arpg.data.crops import center_crops
from arpg.data.images import ImageSet, concatenate, open_images
from arpg.errors import require
from arpg.evaluation.classifier import Classifier
from arpg.evaluation.features import CHUNK, Features, collect, from_array
from arpg.evaluation.inception import Inception
from arpg.files import write_json
from arpg.image import Pixels, to_images, to_uint8
from arpg.tokenizer import Tokenizer
from experiments.scorer_training import accuracy, train_classifier

Labels = NDArray[np.int64]

log = logging.getLogger("experiments")


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

    def open_domain(self, data: Path, domain: str, split: str) -> ImageSet:
        """Open a split ("train" or "test") of one domain."""
        return open_images(self.path(data, domain, split))

    def open(self, data: Path, split: str, limit: int | None = None) -> ImageSet:
        """Open a split of all domains as one set; with `limit` so many images of it, at even distances."""
        images = concatenate([self.open_domain(data, domain, split) for domain in self.domains])
        return images if limit is None else images.only(evenly_spaced(len(images), limit).tolist())

    def features(
        self, data: Path, split: str, inception: Inception, *, limit: int | None = None, folder: Path | None = None
    ) -> Features:
        """Return Inception's features of a split; with `folder`, kept there for the next measurement.

        Features of other Inception weights are computed again.
        """
        images = self.open(data, split, limit)
        path = None if folder is None else folder / f"{self.name}-{split}-{len(images)}.npz"
        if path is not None and path.exists() and (kept := Features.load(path)).network == inception.identity:
            return kept
        pixels = center_crops(images, self.size)
        found = collect(inception, from_array(pixels, where=split).batches(CHUNK))
        if path is not None:
            found.save(path)
        return found


PHOTO_SETS = {
    each.name: each
    for each in (
        PhotoSet("garden", ("fruits", "flowers"), "{domain}.zip/{domain}/{split}", 96),
        PhotoSet("meadow", ("pets", "flowers", "birds", "things", "dogs"), "meadow-{domain}.zip/{split}", 128),
        PhotoSet("meadow-256", ("pets", "flowers", "birds", "things", "dogs"), "meadow-{domain}.zip/{split}", 256),
    )
}


GARDEN = PHOTO_SETS["garden"]


def photo_set(name: str) -> PhotoSet:
    """Return a set by its name."""
    require(name in PHOTO_SETS, f"photo set is {name!r}; expected one of {', '.join(PHOTO_SETS)}")
    return PHOTO_SETS[name]


def evenly_spaced(count: int, num: int) -> Labels:
    """Return at most `num` indices of a set of `count`, at even distances."""
    return np.linspace(0, count - 1, min(num, count)).astype(np.int64)


def class_ids(images: ImageSet, names: ClassNames) -> Labels:
    """Return the model's class of each image; the folders of the set are named like the classes."""
    ids = np.array([names.find(name) for name in images.classes])
    labels: Labels = ids[np.asarray(images.labels)]
    return labels


@torch.inference_mode()
def reconstruct(pixels_nHW3: Pixels, tokenizer: Tokenizer, *, batch_size: int = 256) -> Pixels:
    """Return images as the tokenizer reconstructs them."""
    again, stride = np.empty_like(pixels_nHW3), tokenizer.config.stride
    for start in range(0, len(again), batch_size):
        image = to_images(pixels_nHW3[start : start + batch_size], tokenizer.device)
        grid = (image.shape[2] // stride, image.shape[3] // stride)
        again[start : start + batch_size] = to_uint8(tokenizer.decode(tokenizer.encode(image), grid)).cpu().numpy()
    return again


def load_or_train_classifier(
    folder: Path,
    read: Callable[[], tuple[Pixels, Labels]],
    *,
    num_classes: int,
    steps: int,
    device: torch.device,
    batch_size: int = 256,
    test: tuple[Pixels, Labels] | None = None,
) -> Classifier:
    """Load the classifier of `folder`, or train one on the images of `read` and write it there.

    Rare classes are sampled more often. With `test`, the accuracy on real test images is written beside it.
    """
    if (folder / "classifier.json").is_file():  # written last: training may have been cut off before
        return Classifier.load(folder, device=device)
    pixels, labels = read()
    counts = np.bincount(labels, minlength=num_classes)
    began = time.monotonic()
    classifier = train_classifier(
        pixels,
        labels,
        num_classes=num_classes,
        steps=steps,
        device=device,
        batch_size=batch_size,
        weights=1.0 / np.sqrt(counts[labels]),
    )
    log.info("classifier trained in %.0f s", time.monotonic() - began)
    classifier.save(folder)
    if test is not None:
        found: dict[str, Any] = {"real test images": float(accuracy(classifier, *test)["top1"])}
        log.info("the classifier recognises %.4f of the real test images", found["real test images"])
        write_json(folder / "accuracy.json", found)
    return classifier
