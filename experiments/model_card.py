r"""The numbers of a model card: tokenizer, FID, class accuracy, diversity, nearest training images; and a sheet.

    python -m experiments.meadow model-card --model runs/meadow/model --inception weights/inception.safetensors \
        --classifier runs/meadow-classifier --out results/card

Every part is written to OUT/card.json when it is measured; run it again to continue. The classifier is trained on the
real training split if its folder does not exist yet.
Shapes: B pairs in a batch, Q queries, R references, K candidates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from arpg.data.crops import center_crops
from arpg.errors import require
from arpg.evaluation.metric_report import evaluate
from arpg.evaluation.metrics import wilson
from arpg.evaluation.reconstruction import reconstruction_report
from arpg.evaluation.sample import PixelBatches, count_classes, json_settings, labels_like
from arpg.evaluation.sweep import Scorers, generate_features
from arpg.image import Pixels, check_pixels, save, sheet, to_images
from arpg.tokenizer import VQTokenizer
from arpg.tokenizer.losses import LPIPS
from experiments.photo_measures import Index, PhotoMeasures, measure_parser, measure_parts, pair_distances
from experiments.scorer_training import accuracy

Labels = NDArray[np.int64]

THUMBNAIL = 16

log = logging.getLogger("experiments")


def mean_pairwise_lpips(
    pixels: Pixels, labels: Labels, lpips: LPIPS, *, pairs_per_class: int, seed: int, batch_size: int = 64
) -> dict[str, Any]:
    """Return `mean` over classes and `per_class` (class -> mean LPIPS of its pairs); 0 where all images are alike.

    All pairs of a class, or `pairs_per_class` different ones. A class with one image has no pair and does not count.
    """
    check_pixels(pixels)
    _check_labels(labels, len(pixels), what="labels")
    require(pairs_per_class >= 1, f"pairs_per_class is {pairs_per_class}; expected 1 or more")
    owners, firsts, seconds = [], [], []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        # Sampled per class, so that the pairs of one class do not depend on which others there are.
        a, b = _pairs(len(members), pairs_per_class, np.random.default_rng([seed, int(label)]))
        owners.append(np.full(len(a), label))
        firsts.append(members[a])
        seconds.append(members[b])
    owner = np.concatenate(owners)
    require(len(owner) > 0, "no class has two images, so there is no pair to compare; give more images per class")
    distance = pair_distances(lpips, pixels, np.concatenate(firsts), pixels, np.concatenate(seconds), batch_size)
    per_class = {int(label): float(distance[owner == label].mean()) for label in np.unique(owner)}
    return {"mean": float(np.mean(list(per_class.values()))), "per_class": per_class}


def nearest_lpips(
    queries: Pixels,
    references: Pixels,
    lpips: LPIPS,
    *,
    labels_q: Labels,
    labels_r: Labels,
    candidates: int = 16,
    batch_size: int = 64,
) -> NDArray[np.float64]:
    """For each query, the LPIPS to the nearest reference of its class.

    LPIPS is computed for the `candidates` that are nearest as 16x16 thumbnails only.
    """
    check_pixels(queries, what="queries")
    check_pixels(references, what="references")
    require(
        queries.shape[1:] == references.shape[1:],
        f"queries are {list(queries.shape[1:])} and references {list(references.shape[1:])}; resize them to one size",
    )
    _check_labels(labels_q, len(queries), what="labels_q")
    _check_labels(labels_r, len(references), what="labels_r")
    require(candidates >= 1, f"candidates is {candidates}; expected 1 or more")
    alone = sorted({int(label) for label in labels_q} - {int(label) for label in labels_r})
    require(not alone, f"no reference image has class {', '.join(map(str, alone[:12]))}; give references for it")

    small_Q, small_R = (_thumbnails(array, lpips.device, batch_size) for array in (queries, references))
    firsts, seconds = [], []
    for label in np.unique(labels_q):
        q, r = np.flatnonzero(labels_q == label), np.flatnonzero(labels_r == label)
        here = torch.from_numpy(q).to(lpips.device), torch.from_numpy(r).to(lpips.device)
        apart_QR = torch.cdist(small_Q[here[0]], small_R[here[1]], compute_mode="donot_use_mm_for_euclid_dist")
        near_QK = apart_QR.topk(min(candidates, len(r)), largest=False).indices.cpu().numpy()
        firsts.append(np.repeat(q, near_QK.shape[1]))
        seconds.append(r[near_QK].reshape(-1))
    first = np.concatenate(firsts)
    distance = pair_distances(lpips, queries, first, references, np.concatenate(seconds), batch_size)
    nearest = np.full(len(queries), np.inf)
    np.minimum.at(nearest, first, distance)
    return nearest


def _pairs(n: int, most: int, rng: np.random.Generator) -> tuple[Index, Index]:
    """Different pairs (a, b), a < b < n: all of them, or `most`."""
    total = n * (n - 1) // 2
    chosen = np.sort(rng.choice(total, most, replace=False)) if total > most else np.arange(total)
    # Pairs in the order (0,1), (0,2), (1,2), (0,3), ...: those with a second member below b number b (b - 1) / 2.
    starts = np.arange(n + 1) * (np.arange(n + 1) - 1) // 2
    b = np.searchsorted(starts, chosen, side="right") - 1
    return (chosen - starts[b]).astype(np.int64), b.astype(np.int64)


@torch.no_grad()
def _thumbnails(pixels: Pixels, device: torch.device, batch_size: int) -> Tensor:
    parts = []
    for start in range(0, len(pixels), batch_size):
        image_B3HW = to_images(pixels[start : start + batch_size], device)
        parts.append(F.adaptive_avg_pool2d(image_B3HW, THUMBNAIL).flatten(1))
    return torch.cat(parts)


def _check_labels(labels: Labels, n: int, *, what: str) -> None:
    whole = np.issubdtype(labels.dtype, np.integer)
    require(
        labels.shape == (n,) and whole and bool((labels >= 0).all()),
        f"{what} are {labels.dtype} {list(labels.shape)}; expected one whole number of 0 or more per image, [{n}]",
    )


PARTS = ("tokenizer", "classes", "accuracy", "diversity", "nearest", "fid")


class Card(PhotoMeasures):
    """The parts of a card."""

    def generate(self, labels: Labels, seeds: range) -> Pixels:
        """Generate an image of each class in `labels`, at the model's defaults."""
        settings, batch_size = self.pipe.sampling.settings(), self.options.batch_size
        batches = PixelBatches(self.pipe, labels, settings, seeds=seeds, batch_size=batch_size)
        return np.concatenate([part.cpu().numpy() for part in batches])

    @cached_property
    def samples(self) -> tuple[Pixels, Labels]:
        """`--num` samples of every class."""
        labels = np.repeat(np.arange(len(self.pipe.classes)), self.options.num)
        return self.generate(labels, range(len(labels))), labels

    def classes(self) -> dict[str, Any]:
        """Write the first of the samples of every class to OUT/classes.png."""
        labels = np.arange(len(self.pipe.classes))
        pixels = self.generate(labels, range(0, len(labels) * self.options.num, self.options.num))
        save(sheet([Image.fromarray(image) for image in pixels], columns=25), self.options.out / "classes.png")
        return {"file": "classes.png", "settings": json_settings(self.pipe.sampling.settings())}

    def tokenizer(self) -> dict[str, Any]:
        """Return reconstruction metrics of the test images, by domain, and rFID of all of them."""
        found, tokenizer = {}, self.pipe.tokenizer
        assert isinstance(tokenizer, VQTokenizer)
        for domain in self.photos.domains:
            images = self.photos.open_domain(self.data, domain, "test")
            pixels = center_crops(images, self.size, self.options.limit)
            found[domain] = reconstruction_report(tokenizer, pixels, self.lpips, batch_size=128)
        whole = reconstruction_report(tokenizer, self.test[0], None, batch_size=128, inception=self.inception)
        return found | {"rfid, test images": whole["rfid"], "images": whole["n"]}

    def accuracy(self) -> dict[str, Any]:
        """Return the share of samples that the classifier takes for their class, beside real test images."""
        seen, real = accuracy(self.classifier, *self.samples), accuracy(self.classifier, *self.test)
        per_class = np.asarray(seen["per_class"])
        low = np.flatnonzero(per_class < 0.5)
        return {
            "real test images": float(real["top1"]),
            "samples": float(seen["top1"]),
            "share of real": float(seen["top1"]) / max(float(real["top1"]), 1e-9),
            "interval": list(wilson(round(float(seen["top1"]) * len(self.samples[1])), len(self.samples[1]))),
            "samples per class": self.options.num,
            "classes never recognised": [self.pipe.classes.name(int(i)) for i in np.flatnonzero(per_class == 0)],
            "classes under 50%": {self.pipe.classes.name(int(i)): float(per_class[i]) for i in low},
        }

    def diversity(self) -> dict[str, Any]:
        """Return the mean LPIPS of pairs of one class, of samples and of real training images."""
        made, real = (
            mean_pairwise_lpips(*images, self.lpips, pairs_per_class=45, seed=0)["mean"]
            for images in (self.samples, self.train)
        )
        return {"samples": made, "real training images": real, "share of real": made / real}

    def nearest(self) -> dict[str, Any]:
        """Return the LPIPS to the nearest training image of the class, of samples and of real test images."""
        found = {}
        for name, (pixels, labels) in (("samples", self.samples), ("real test images", self.test)):
            distance = nearest_lpips(pixels, self.train[0], self.lpips, labels_q=labels, labels_r=self.train[1])
            found[name] = {"mean": float(distance.mean()), "closest 1%": float(np.quantile(distance, 0.01))}
        return found

    def fid(self) -> dict[str, Any]:
        """Return all metrics of `--fid-num` samples against the training and the test split, with intervals.

        Measured for each of `--fid-steps`, at the model's settings for that number of steps. Classes are as frequent as
        in the training split.
        """
        counts = count_classes(self.images("train"), self.pipe.classes)
        scorers = Scorers(self.inception, self.references["train"])
        found: dict[str, Any] = {}
        for steps in self.options.fid_steps or [self.pipe.sampling.steps]:
            settings = self.pipe.sampling.settings(steps=steps)
            sampled = generate_features(
                self.pipe,
                settings,
                scorers,
                labels=labels_like(counts, self.options.fid_num),
                seed=self.options.seed,
                batch_size=self.options.batch_size,
            )
            reports = {
                split: evaluate(sampled.features, each, device=self.pipe.model.device)
                for split, each in self.references.items()
            }
            found[f"{steps} steps"] = {"settings": json_settings(settings), "images/s": sampled.rate} | reports
            log.info("%d steps: FID %.3f", steps, reports["train"]["fid"]["value"])
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the numbers of a model card."""
    began = time.monotonic()
    parser = measure_parser("model-card", main.__doc__, PARTS)
    parser.add_argument("--num", type=int, default=20, help="Samples per class.")
    parser.add_argument("--fid-num", type=int, default=10_000)
    parser.add_argument("--fid-steps", type=int, nargs="+", help="Numbers of steps; default: the model's.")
    parser.add_argument("--seed", type=int, default=1_000_000, help="Of the samples of FID; settings use others.")
    options = parser.parse_args(arguments)
    measure_parts("card", Card.open(options), options, began)
