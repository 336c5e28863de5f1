"""The photographs that `garden` was trained on (fruits and flowers), and the classifier that recognises its classes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from arpg.classes import ClassNames
from arpg.data.crops import center_crops
from arpg.data.images import ImageSet, concatenate, open_images
from arpg.evaluation.classifier import Classifier
from arpg.files import write_json
from arpg.image import Pixels, adm_crop
from experiments.garden.scorer_training import accuracy, train_classifier

DOMAINS = ("fruits", "flowers")
SIZE = 96  # pixels per side

Labels = NDArray[np.int64]

log = logging.getLogger("garden")


def open_photos(data: Path, split: str) -> ImageSet:
    """Open a split ("train" or "test") of fruits and flowers as one set."""
    return concatenate([open_images(f"{data}/{domain}.zip/{domain}/{split}") for domain in DOMAINS])


def read_photos(images: ImageSet, num: int | None = None, *, size: int = SIZE) -> tuple[Pixels, Labels]:
    """Read the centre crops of a set and their labels; at most `num` of them, evenly spread over the classes."""
    labels = np.asarray(images.labels)
    if num is None or num >= len(images):
        return center_crops(images, size), labels
    chosen = evenly_spaced(len(images), num).tolist()
    return np.stack([np.asarray(adm_crop(images.read(i), size)) for i in chosen]), labels[chosen]


def evenly_spaced(count: int, num: int) -> Labels:
    """Return at most `num` indices of a set of `count`, at even distances."""
    return np.linspace(0, count - 1, min(num, count)).astype(np.int64)


def class_ids(images: ImageSet, names: ClassNames) -> Labels:
    """Return the model's class of each image; the folders of the set are named like the classes."""
    ids = np.array([names.find(name) for name in images.classes])
    labels: Labels = ids[np.asarray(images.labels)]
    return labels


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
    if folder.is_dir():
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
