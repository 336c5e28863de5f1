r"""How far generated images follow a condition image, and how good they are: for each kind of condition.

    python -m experiments.meadow control-score --model results/meadow-control --base results/model \
        --classifier experiments/meadow/classifier --inception weights/inception.safetensors --out results/control

Conditions are extracted from test photographs, and once more from what was generated with them and their classes: F1 of
Canny's edges, SSIM of soft edges, RMSE of depth (0 to 1). Depth is that of `--depth-model`, in both places: a depth
model of transformers by name where a hub can be reached; by default FastDepth, which was trained on indoor scenes. FID
is the paper's column. Each kind is written to control-score.json when it is measured; run it again to do what is
missing. With `--images` the generated images are kept as KIND/ROW/0000.png, and are not generated again.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from arpg import Pipeline
from arpg.data.crops import center_crops
from arpg.errors import present, require
from arpg.evaluation.features import CHUNK, Features, collect, from_array, from_images, reference_features
from arpg.evaluation.metric_report import evaluate
from arpg.evaluation.reconstruction import ssim
from arpg.evaluation.sample import fingerprint, json_settings
from arpg.evaluation.sweep import claim_folder
from arpg.extractors import FASTDEPTH_FILE, extract
from arpg.image import Pixels
from arpg.settings import CONTROL_KINDS
from experiments.control_images import (
    BASE,
    CEILING,
    CONTROL,
    NEAREST,
    NO_CLASS,
    PLAIN,
    TOLERANCE,
    Generate,
    Grey,
    agreement,
    choose_evenly,
    generate_missing,
    generate_pixels,
    nearest,
    nearest_by_depth,
    rmse,
    strength_zero_is_plain,
    to_depth,
)
from experiments.photo_measures import INTERVAL, PhotoMeasures, Row, mean, measure_parser, measure_parts, share
from experiments.photos import Labels, class_ids, evenly_spaced
from experiments.scorer_training import predict

log = logging.getLogger("experiments")
REAL = "real photographs"
FASTDEPTH = f"FastDepth ({FASTDEPTH_FILE}), trained on indoor scenes"
SHOWN = 8  # examples on a sheet
MEASURES = {  # what the numbers of a kind are
    "canny": f"F1 of Canny's edges, within {TOLERANCE} pixels",
    "soft": "SSIM of soft edges",
    "depth": "RMSE of depth, 0 to 1",
}


def follow(kind: str, wanted_nHW: Grey, found_nHW: Grey) -> Row:
    """Return how far the conditions of images agree with those they were made from, with intervals."""
    if kind == "canny":
        found = agreement(wanted_nHW > 0, found_nHW > 0)
        values = {"F1": found.f1_n, "precision": found.precision_n, "recall": found.recall_n}
    elif kind == "soft":
        maps = (torch.from_numpy(each)[..., None].expand(-1, -1, -1, 3) for each in (wanted_nHW, found_nHW))
        values = {"SSIM": ssim(*maps).double().numpy()}
    else:
        values = {"RMSE": rmse(to_depth(wanted_nHW), to_depth(found_nHW))}
    return {key: value for name, each in values.items() for key, value in mean(name, each).items()}


@dataclass(frozen=True, eq=False)
class Conditions:
    """Condition images of one kind, what they were taken from, and how far other images follow them.

    `labels_n` None: images are generated without a class, and neither their class nor their FID is measured.
    `follow(images, index)`: of the conditions with these indices. `nearest(conditions)`: images of training.
    """

    kind: str
    wanted_nHW: Grey
    real_nHW3: Pixels
    labels_n: Labels | None
    follow: Callable[[Pixels, Labels], Row]
    nearest: Callable[[Grey], Pixels]
    real: str = REAL  # the name of their row


class ControlScore(PhotoMeasures):
    """The kinds of condition images, each a part of the measurement."""

    def canny(self) -> Row:
        """Score Canny's edges."""
        return self.score(self.conditions_of_photos("canny"))

    def soft(self) -> Row:
        """Score soft edges."""
        return self.score(self.conditions_of_photos("soft"))

    def depth(self) -> Row:
        """Score depth."""
        model = self.options.depth_model or FASTDEPTH
        return {"depth model": model} | self.score(self.conditions_of_photos("depth"))

    @cached_property
    def chosen(self) -> tuple[Pixels, Labels]:
        """`--num` test photographs, as many of each class as can be."""
        images = self.images("test")
        labels = class_ids(images, self.pipe.classes)
        index = choose_evenly(labels.tolist(), min(self.options.num, len(labels)))
        return center_crops(images.only(index.tolist()), self.size), labels[index]

    def conditions(self, kind: str, pixels: Pixels) -> Grey:
        """Extract the condition of each image."""
        depth = self.options.depth_model

        def one(image: Pixels) -> Grey:
            return np.asarray(extract(kind, Image.fromarray(image), depth=depth))

        with ThreadPoolExecutor(8) as pool:
            return np.stack(list(pool.map(one, pixels)))

    def conditions_of_photos(self, kind: str) -> Conditions:
        """Return the conditions of the chosen photographs."""
        real, labels = self.chosen
        wanted = self.conditions(kind, real)

        def follows(made: Pixels, index: Labels) -> Row:
            return follow(kind, wanted[index], self.conditions(kind, made))

        return Conditions(kind, wanted, real, labels, follows, partial(self.nearest_photos, kind))

    def nearest_photos(self, kind: str, wanted: Grey) -> Pixels:
        """Return the training photographs whose conditions are nearest."""
        if kind == "canny":
            images = self.images("train")
            batches = from_images(images, size=self.size).batches(CHUNK)
            index, _ = nearest(wanted > 0, batches, device=self.pipe.model.device)
            return center_crops(images.only(index.tolist()), self.size)
        train, _ = self.train
        return train[nearest_by_depth(wanted, self.conditions(kind, train))]

    @cached_property
    def fid_references(self) -> dict[str, Features]:
        """What FID is against: both splits, or `--reference` training photographs, as many of each class as can be."""
        number, folder = self.options.reference, self.options.features or self.options.out
        if number is None:
            return self.references
        images = self.images("train")
        some = images.only(choose_evenly(images.labels, min(number, len(images))).tolist())
        return {"train": reference_features(self.inception, some, self.size, keep=folder)}

    def generate(self, generate: Generate, strength: float | None, tests: Conditions, name: str) -> Pixels:
        """Generate an image of each condition and its class; image i has the seed `--seed` + i."""
        options, labels = self.options, tests.labels_n
        return generate_missing(
            generate,
            tests.wanted_nHW,
            np.full(len(tests.wanted_nHW), NO_CLASS, np.int64) if labels is None else labels,
            None if options.images is None else options.images / tests.kind / name,
            kind=tests.kind,
            strength=strength,
            seed=options.seed,
            batch_size=self.batch,
        )

    def score(self, tests: Conditions) -> Row:
        """Return a row each for control, no control, the base model, the tokenizer, the real and the nearest images."""
        real, wanted, options = tests.real_nHW3, tests.wanted_nHW, self.options
        ours = partial(generate_pixels, self.pipe)
        generators: dict[str, tuple[Generate, float | None]] = {CONTROL: (ours, 1.0), PLAIN: (ours, 0.0)}
        for scale in options.guidance:
            generators[f"{CONTROL}, guidance {scale:g}"] = (partial(ours, guidance=scale), 1.0)
        if options.base is not None and tests.labels_n is not None:
            generators[BASE] = (self._base, None)
        rows: dict[str, Callable[[], Pixels]] = {
            name: partial(self.generate, *generator, tests, name) for name, generator in generators.items()
        }
        rows |= {CEILING: lambda: self.reconstruct(real), tests.real: lambda: real}
        found: dict[str, Row] = {}
        shown = evenly_spaced(len(real), SHOWN)
        sheet_rows = [real[shown], np.repeat(wanted[shown, :, :, None], 3, -1)]
        for name, make in rows.items():
            began = time.perf_counter()
            made = make()
            seconds = time.perf_counter() - began
            found[name] = self.measure(made, tests, np.arange(len(real))) | {"seconds": seconds}
            log.info("%s, %s: %s", tests.kind, name, found[name])
            if name != tests.real:
                sheet_rows.append(made[shown])
        if options.nearest > 0:
            index = evenly_spaced(len(wanted), options.nearest)
            row = self.measure(tests.nearest(wanted[index]), tests, index)
            found[NEAREST] = row | {"images": len(index)}
        self.save_sheet(tests.kind, sheet_rows)
        same = strength_zero_is_plain(ours, size=self.size, kind=tests.kind)
        settings = json_settings(self.pipe.sampling.settings())
        about = {"images": len(real), "measure": MEASURES[tests.kind], "seed": options.seed}
        return about | {"strength 0 is no control": same, "settings": settings, "rows": found}

    def measure(self, made: Pixels, tests: Conditions, index: Labels) -> Row:
        """Return how far images follow the conditions with these indices, their classes, and FID if it is of all."""
        row = tests.follow(made, index)
        if tests.labels_n is None:
            return row
        row |= share("recognised", predict(self.classifier, made) == tests.labels_n[index])
        if self.options.fid and len(index) == len(tests.labels_n):
            features = collect(self.inception, from_array(made).batches(CHUNK))
            for split, reference in self.fid_references.items():
                fid = evaluate(features, reference, metrics=["fid"], device=self.pipe.model.device)["fid"]
                row |= {f"FID, {split}": fid["value"]}
                row |= {f"FID, {split}{INTERVAL}": fid["interval"]} if "interval" in fid else {}
        return row

    @cached_property
    def _base(self) -> Generate:
        options = self.options
        base = Pipeline.from_pretrained(options.base, device=options.device, precision=options.precision)
        return partial(generate_pixels, base)


def control_parser(verb: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that the scores of control share."""
    parser = measure_parser(verb, about, CONTROL_KINDS)
    parser.add_argument("--base", help="A model without control that generates the same classes.")
    parser.add_argument("--num", type=int, default=5000, help="Test photographs, and images of each row.")
    parser.add_argument("--nearest", type=int, default=500, help="Of them, for the nearest image of training; 0: none.")
    parser.add_argument(
        "--guidance", type=float, nargs="*", default=[], help="More rows of control, with these guidance scales."
    )
    parser.add_argument("--seed", type=int, default=2_000_000)
    parser.add_argument("--fid", action=argparse.BooleanOptionalAction, default=True, help="Needs Inception weights.")
    parser.add_argument("--reference", type=int, help="FID is against so many training photographs, not both splits.")
    parser.add_argument("--images", type=Path, help="Keep the generated images here; those that exist are not made.")
    return parser


def score_control(kind: type[ControlScore], options: argparse.Namespace) -> None:
    """Score the kinds of condition images that the model takes."""
    began, bench = time.monotonic(), kind.open(options)
    takes = present(bench.pipe.model.config.control, f"{options.model} takes no condition images").kinds
    options.parts = [part for part in options.parts if part in takes]
    require(bool(options.parts), f"{options.model} takes {', '.join(takes)}; choose one of them with --parts")
    if options.images is not None:
        about = {name: getattr(options, name) for name in ("set", "num", "seed", "base", "precision", "limit")}
        claim_folder(options.images, {"model": fingerprint(bench.pipe), **about})
    measure_parts("control-score", bench, options, began)


def main(arguments: Sequence[str] | None = None) -> None:
    """Score edges, depth, classes and FID of photographs that follow a condition image."""
    parser = control_parser("control-score", main.__doc__)
    parser.add_argument(
        "--depth-model", help="An .onnx file, or a depth model of transformers by name; default: FastDepth."
    )
    score_control(ControlScore, parser.parse_args(arguments))
