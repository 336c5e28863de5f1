"""Everything the model card of `garden` says: tokenizer, class accuracy, diversity, nearest training images, sheets.

    python benchmarks/garden.py --model runs/garden/model --data data --lpips weights/lpips_vgg16.safetensors \
        --classifier runs/classifier --out benchmarks/results/garden

The classifier is trained on the real training split if its folder does not exist yet.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arpg import Pipeline
from arpg.data.crops import center_crops
from arpg.data.images import ImageSet, concatenate, open_images
from arpg.evaluation.classifier import Classifier, accuracy, train_classifier
from arpg.evaluation.diversity import mean_pairwise_lpips, nearest_lpips
from arpg.evaluation.reconstruction import reconstruction_report
from arpg.image import sheet
from arpg.tokenizer.losses import LPIPS

log = logging.getLogger("garden")
DOMAINS = ("fruits", "flowers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--lpips", type=Path, default=Path("weights/lpips_vgg16.safetensors"))
    parser.add_argument("--classifier", type=Path, required=True)
    parser.add_argument("--classifier-steps", type=int, default=2500)
    parser.add_argument("--guidance", type=float, nargs="*", default=[], help="Guidance scales to compare; first none.")
    parser.add_argument("--num", type=int, default=10, help="Samples of each class.")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="Only the samples: what a CPU does in ten minutes.")
    parser.add_argument("--limit", type=int, help="Only the first images of each split (a trial run).")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options.out.mkdir(parents=True, exist_ok=True)
    pipe = Pipeline.from_pretrained(options.model, dtype="float32")
    device = pipe.model.device
    lpips = LPIPS.load(options.lpips).to(device)
    sets = {split: [open_images(f"{options.data}/{d}.zip/{d}/{split}") for d in DOMAINS] for split in ("train", "test")}
    train, test = (_pixels(concatenate(sets[split]), options.limit) for split in ("train", "test"))

    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU"}
    for domain, images in zip(DOMAINS, sets["test"], strict=True) if not options.quick else ():
        report = reconstruction_report(pipe.tokenizer, center_crops(images, 96, options.limit), lpips, batch_size=128)
        result[f"tokenizer {domain}"] = {k: round(float(v), 4) for k, v in report.items()}
        log.info("tokenizer %s: %s", domain, result[f"tokenizer {domain}"])

    classifier = _classifier(options, train, len(pipe.classes), device)
    real = accuracy(classifier, *test)
    result["classifier on real test images"] = round(float(real["top1"]), 4)
    labels = np.repeat(np.arange(len(pipe.classes)), options.num)
    if not options.quick:
        real_pairs = mean_pairwise_lpips(*train, lpips, pairs_per_class=45, seed=0)["mean"]
        result["pairwise LPIPS of real training images"] = round(real_pairs, 4)
    for scale in options.guidance or [None]:
        began = time.perf_counter()
        images = pipe.generate(
            list(range(len(pipe.classes))), num_images=options.num, steps=options.steps, guidance=scale, batch_size=340
        )
        seconds = time.perf_counter() - began
        samples = np.stack([np.asarray(image) for image in images])
        seen = accuracy(classifier, samples, labels)
        per_class = np.asarray(seen["per_class"])
        entry = {
            "accuracy": round(float(seen["top1"]), 4),
            "accuracy of flowers": round(float(per_class[-5:].mean()), 4),
            "classes under 50%": [pipe.classes.name(int(i)) for i in np.flatnonzero(per_class < 0.5)],
            "images/s": round(len(images) / seconds, 1),
        }
        if not options.quick:
            pairs = mean_pairwise_lpips(samples, labels, lpips, pairs_per_class=45, seed=0)["mean"]
            entry |= {"pairwise LPIPS": round(pairs, 4), "share of real": round(pairs / real_pairs, 4)}
        result[f"samples, guidance {'default' if scale is None else scale}"] = entry
        log.info("guidance %s: %s", scale, entry)
    # The last guidance is the one that is looked at closely.
    for name, queries in (("samples", (samples, labels)), ("real test images", test)) if not options.quick else ():
        distance = nearest_lpips(queries[0], train[0], lpips, labels_q=queries[1], labels_r=train[1])
        flowers = queries[1] >= len(pipe.classes) - 5
        result[f"LPIPS to the nearest training image, {name}"] = {
            "fruits": round(float(distance[~flowers].mean()), 4),
            "flowers": round(float(distance[flowers].mean()), 4),
            "closest 1%": round(float(np.quantile(distance, 0.01)), 4),
        }
    (options.out / "garden.json").write_text(json.dumps(result, indent=1) + "\n")
    sheet(images, columns=4 * options.num).save(options.out / "samples.webp", quality=75)
    log.info("%s", json.dumps(result, indent=1))


def _pixels(images: ImageSet, limit: int | None) -> tuple[Any, Any]:
    count = limit or len(images)
    return center_crops(images, 96, limit), np.asarray(images.labels[:count])


def _classifier(
    options: argparse.Namespace, train: tuple[Any, Any], num_classes: int, device: torch.device
) -> Classifier:
    if options.classifier.is_dir():
        return Classifier.load(options.classifier, device=device)
    pixels, labels = train
    counts = np.bincount(labels, minlength=num_classes)
    began = time.perf_counter()
    classifier = train_classifier(
        pixels,
        labels,
        num_classes=num_classes,
        steps=options.classifier_steps,
        device=device,
        weights=1.0 / np.sqrt(counts[labels]),
    )
    log.info("classifier trained in %.0f s", time.perf_counter() - began)
    classifier.save(options.classifier)
    return classifier


if __name__ == "__main__":
    main()
