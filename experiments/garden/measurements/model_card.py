r"""The numbers of garden's model card: tokenizer, class accuracy, diversity, nearest training images; and a sheet.

    python -m experiments.garden model-card --model runs/garden/model --data data \
        --lpips weights/lpips_vgg16.safetensors --classifier runs/classifier --out runs/card

The classifier is trained on the real training split if its folder does not exist yet.
Shapes: B pairs in a batch, Q queries, R references, K candidates.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from arpg import Pipeline
from arpg.data.crops import center_crops
from arpg.data.images import ImageSet, open_images
from arpg.errors import require
from arpg.evaluation.reconstruction import reconstruction_report
from arpg.image import Pixels, check_pixels, sheet, to_images
from arpg.tokenizer.losses import LPIPS
from experiments.garden.photos import DOMAINS, SIZE, load_or_train_classifier, open_photos
from experiments.garden.scorer_training import accuracy

Labels = NDArray[np.int64]
Index = NDArray[np.int64]

THUMBNAIL = 16

log = logging.getLogger("garden")


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
    distance = _distances(lpips, pixels, np.concatenate(firsts), pixels, np.concatenate(seconds), batch_size)
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
    distance = _distances(lpips, queries, first, references, np.concatenate(seconds), batch_size)
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
def _distances(
    lpips: LPIPS, a: Pixels, index_a: Index, b: Pixels, index_b: Index, batch_size: int
) -> NDArray[np.float64]:
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    parts: list[Tensor] = []
    for start in range(0, len(index_a), batch_size):
        part = slice(start, start + batch_size)
        parts.append(lpips(to_images(a[index_a[part]], lpips.device), to_images(b[index_b[part]], lpips.device)))
    return torch.cat(parts).double().cpu().numpy()


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the numbers of garden's model card."""
    parser = argparse.ArgumentParser(prog="experiments.garden model-card", description=main.__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--lpips", type=Path, default=Path("weights/lpips_vgg16.safetensors"))
    parser.add_argument("--classifier", type=Path, required=True)
    parser.add_argument("--classifier-steps", type=int, default=2500)
    parser.add_argument(
        "--guidance", type=float, nargs="*", default=[], help="Scales to compare; default: that of the model."
    )
    parser.add_argument("--num", type=int, default=10, help="Samples per class.")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="Only the samples: what a CPU does in ten minutes.")
    parser.add_argument("--limit", type=int, help="Only the first images of each split (a trial run).")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    pipe = Pipeline.from_pretrained(options.model, dtype="float32")
    device = pipe.model.device
    lpips = LPIPS.load(options.lpips).to(device)
    train, test = (_first(open_photos(options.data, split), options.limit) for split in ("train", "test"))

    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU"}
    for domain in DOMAINS if not options.quick else ():
        images = open_images(f"{options.data}/{domain}.zip/{domain}/test")
        report = reconstruction_report(pipe.tokenizer, center_crops(images, SIZE, options.limit), lpips, batch_size=128)
        result[f"tokenizer {domain}"] = {k: round(float(v), 4) for k, v in report.items()}
        log.info("tokenizer %s: %s", domain, result[f"tokenizer {domain}"])

    classifier = load_or_train_classifier(
        options.classifier, lambda: train, num_classes=len(pipe.classes), steps=options.classifier_steps, device=device
    )
    real = accuracy(classifier, *test)
    result["classifier on real test images"] = round(float(real["top1"]), 4)
    labels = np.repeat(np.arange(len(pipe.classes)), options.num)
    if not options.quick:
        real_pairs = mean_pairwise_lpips(*train, lpips, pairs_per_class=45, seed=0)["mean"]
        result["pairwise LPIPS of real training images"] = round(real_pairs, 4)
    for scale in options.guidance or [None]:
        began = time.perf_counter()
        made = pipe.generate(
            list(range(len(pipe.classes))), num_images=options.num, steps=options.steps, guidance=scale, batch_size=340
        )
        seconds = time.perf_counter() - began
        samples = np.stack([np.asarray(image) for image in made])
        seen = accuracy(classifier, samples, labels)
        per_class = np.asarray(seen["per_class"])
        entry = {
            "accuracy": round(float(seen["top1"]), 4),
            "accuracy of flowers": round(float(per_class[-5:].mean()), 4),
            "classes under 50%": [pipe.classes.name(int(i)) for i in np.flatnonzero(per_class < 0.5)],
            "images/s": round(len(made) / seconds, 1),
        }
        if not options.quick:
            pairs = mean_pairwise_lpips(samples, labels, lpips, pairs_per_class=45, seed=0)["mean"]
            entry |= {"pairwise LPIPS": round(pairs, 4), "share of real": round(pairs / real_pairs, 4)}
        result[f"samples, guidance {'default' if scale is None else scale}"] = entry
        log.info("guidance %s: %s", scale, entry)
    # Nearest training images are measured for the last guidance only.
    for name, queries in (("samples", (samples, labels)), ("real test images", test)) if not options.quick else ():
        distance = nearest_lpips(queries[0], train[0], lpips, labels_q=queries[1], labels_r=train[1])
        flowers = queries[1] >= len(pipe.classes) - 5
        result[f"LPIPS to the nearest training image, {name}"] = {
            "fruits": round(float(distance[~flowers].mean()), 4),
            "flowers": round(float(distance[flowers].mean()), 4),
            "closest 1%": round(float(np.quantile(distance, 0.01)), 4),
        }
    (options.out / "garden.json").write_text(json.dumps(result, indent=1) + "\n")
    sheet(made, columns=4 * options.num).save(options.out / "samples.webp", quality=75)
    log.info("%s", json.dumps(result, indent=1))


def _first(images: ImageSet, limit: int | None) -> tuple[Pixels, Labels]:
    return center_crops(images, SIZE, limit), np.asarray(images.labels[: limit or len(images)])
