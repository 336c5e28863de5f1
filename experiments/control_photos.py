r"""How far generated photographs follow a condition image, and how good they are: for each kind, with the class.

    python -m experiments.meadow control-score --model results/meadow-control --base results/model \
        --classifier results/classifier --inception weights/inception.safetensors --out results/control --minutes 9

Conditions are extracted from test photographs, and once more from what was generated: F1 of Canny's edges, SSIM of soft
edges, RMSE of depth (0 to 1). Depth is that of `--depth-model`, in both places: a depth model of transformers by name
where a hub can be reached; by default FastDepth, which was trained on indoor scenes. FID is the paper's column.
Each kind is written to control-score.json when it is measured; run it again to do what is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import numpy as np
import torch
from PIL import Image

from arpg import Pipeline
from arpg.errors import present, require
from arpg.evaluation.features import CHUNK, collect, from_array
from arpg.evaluation.metric_report import evaluate
from arpg.evaluation.reconstruction import ssim
from arpg.evaluation.sample import json_settings
from arpg.extractors import FASTDEPTH_FILE, extract
from arpg.image import Pixels
from arpg.settings import CONTROL_KINDS
from experiments.control_images import (
    BASE,
    CEILING,
    CONTROL,
    NEAREST,
    PLAIN,
    TOLERANCE,
    Generate,
    Grey,
    agreement,
    choose_evenly,
    nearest,
    nearest_by_depth,
    strength_zero_is_plain,
    with_control,
    without_control,
)
from experiments.garden.depth_net import rmse, to_depth
from experiments.photo_measures import INTERVAL, PhotoMeasures, Row, mean, measure_parser, measure_parts, share
from experiments.photos import Labels, evenly_spaced
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


class ControlScore(PhotoMeasures):
    """The kinds of condition images, each a part of the measurement."""

    def canny(self) -> Row:
        """Score Canny's edges."""
        return self.score("canny")

    def soft(self) -> Row:
        """Score soft edges."""
        return self.score("soft")

    def depth(self) -> Row:
        """Score depth."""
        return {"depth model": self.options.depth_model or FASTDEPTH} | self.score("depth")

    @cached_property
    def chosen(self) -> tuple[Pixels, Labels]:
        """`--num` test photographs, as many of each class as can be."""
        pixels, labels = self.test
        index = choose_evenly(labels.tolist(), min(self.options.num, len(labels)))
        return pixels[index], labels[index]

    def conditions(self, kind: str, pixels: Pixels) -> Grey:
        """Extract the condition of each image."""
        depth = self.options.depth_model

        def one(image: Pixels) -> Grey:
            return np.asarray(extract(kind, Image.fromarray(image), depth=depth))

        with ThreadPoolExecutor(8) as pool:
            return np.stack(list(pool.map(one, pixels)))

    def generate(self, generate: Generate, conditions: Grey, *, kind: str, strength: float) -> Pixels:
        """Generate an image of each condition and its class; image i has the seed `--seed` + i."""
        labels, parts = self.chosen[1], []
        for start in range(0, len(labels), self.batch):
            some = slice(start, min(start + self.batch, len(labels)))
            seeds = [self.options.seed + i for i in range(some.start, some.stop)]
            parts.append(generate(conditions[some], labels[some], kind=kind, seeds=seeds, strength=strength))
        return np.concatenate(parts)

    def score(self, kind: str) -> Row:
        """Return a row each for control, no control, the base model, the tokenizer, real and nearest photographs."""
        real, labels = self.chosen
        wanted = self.conditions(kind, real)
        ours, plain = with_control(self.pipe, {}), without_control(self.pipe, {})
        rows: dict[str, Callable[[], Pixels]] = {
            CONTROL: lambda: self.generate(ours, wanted, kind=kind, strength=1.0),
            PLAIN: lambda: self.generate(ours, wanted, kind=kind, strength=0.0),
        }
        for scale in self.options.guidance:
            guided = with_control(self.pipe, {"guidance": scale})
            rows[f"{CONTROL}, guidance {scale:g}"] = partial(self.generate, guided, wanted, kind=kind, strength=1.0)
        if self.options.base is not None:
            rows[BASE] = lambda: self.generate(self._base, wanted, kind=kind, strength=0.0)
        rows |= {CEILING: lambda: self.reconstruct(real), REAL: lambda: real}
        found: dict[str, Row] = {}
        shown = evenly_spaced(len(real), SHOWN)
        sheet_rows = [real[shown], np.repeat(wanted[shown, :, :, None], 3, -1)]
        for name, make in rows.items():
            began = time.perf_counter()
            made = make()
            seconds = time.perf_counter() - began
            row = follow(kind, wanted, self.conditions(kind, made))
            row |= share("recognised", predict(self.classifier, made) == labels)
            features = collect(self.inception, from_array(made, where=name).batches(CHUNK))
            for split, reference in self.references.items():
                fid = evaluate(features, reference, metrics=["fid"], device=self.pipe.model.device)["fid"]
                row |= {f"FID, {split}": fid["value"]}
                row |= {f"FID, {split}{INTERVAL}": fid["interval"]} if "interval" in fid else {}
            found[name] = row | {"seconds": seconds}
            log.info("%s, %s: %s", kind, name, found[name])
            if name != REAL:
                sheet_rows.append(made[shown])
        if self.options.nearest > 0:
            found[NEAREST] = self.nearest(kind, wanted)
        self.save_sheet(kind, sheet_rows)
        same = strength_zero_is_plain(ours, plain, size=self.size, kind=kind)
        settings = json_settings(self.pipe.sampling.settings())
        about = {"images": len(real), "measure": MEASURES[kind], "strength 0 is no control": same, "settings": settings}
        return about | {"rows": found}

    def nearest(self, kind: str, wanted: Grey) -> Row:
        """Return the row of the training photographs whose conditions are nearest to `--nearest` of the wanted ones."""
        index, (train, _) = evenly_spaced(len(wanted), self.options.nearest), self.train
        if kind == "canny":
            batches = (train[i : i + CHUNK] for i in range(0, len(train), CHUNK))
            found, _ = nearest(wanted[index] > 0, batches, device=self.pipe.model.device)
        else:
            found = nearest_by_depth(wanted[index], self.conditions(kind, train))
        row = follow(kind, wanted[index], self.conditions(kind, train[found]))
        seen = predict(self.classifier, train[found]) == self.chosen[1][index]
        return row | share("recognised", seen) | {"images": len(index)}

    @cached_property
    def _base(self) -> Generate:
        options = self.options
        base = Pipeline.from_pretrained(options.base, device=options.device, precision=options.precision)
        return without_control(base, {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Score edges, depth, classes and FID of photographs that follow a condition image."""
    began = time.monotonic()
    parser = measure_parser("control-score", main.__doc__, CONTROL_KINDS)
    parser.add_argument("--base", help="A model without control that generates the same classes.")
    parser.add_argument("--num", type=int, default=5000, help="Test photographs, and images of each row.")
    parser.add_argument(
        "--nearest", type=int, default=500, help="Of them, for the nearest training photograph; 0 leaves it out."
    )
    parser.add_argument(
        "--guidance", type=float, nargs="*", default=[], help="More rows of control, with these guidance scales."
    )
    parser.add_argument("--seed", type=int, default=2_000_000)
    parser.add_argument(
        "--depth-model", help="An .onnx file, or a depth model of transformers by name; default: FastDepth."
    )
    options = parser.parse_args(arguments)
    bench = ControlScore.open(options)
    takes = present(bench.pipe.model.config.control, f"{options.model} takes no condition images").kinds
    options.parts = [kind for kind in options.parts if kind in takes]
    require(bool(options.parts), f"{options.model} takes {', '.join(takes)}; choose one of them with --parts")
    measure_parts("control-score", bench, options, began)
