"""`garden-control` from nothing to its score: scenes with depth, tokens with edges, scorers, training, storage.

    python -m experiments.garden control-model --data data --work runs/control --out runs/control/results

Call it until it logs "done": it continues where it stopped, and training is stopped in time and resumed. `--stages`
selects stages, for machines that have only a part of the data: compose and depth-net need fruits.zip, emoji.zip and the
tokenizer of `garden`, the others also flowers.zip and its network. The results: `garden-control` (differences from
`garden`), its validation losses as trained and as stored, the scorers, the score, and sheets of generated images.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from arpg import ARPG, Pipeline
from arpg.checkpoint import load_model, load_tokenizer, read_folder, write_difference
from arpg.data.crops import center_crops
from arpg.data.dataset import ControlMaps, Dataset, TokenBatches
from arpg.data.tokenize import tokenize
from arpg.data.tokens import NO_CLASS, open_tokens
from arpg.files import write_json
from arpg.hub import resolve
from arpg.image import save, sheet
from arpg.train.objective import Objective
from arpg.train.recipe import ModelRecipe, read_recipe
from experiments.control_images import generate_pixels, strength_zero_is_plain
from experiments.garden.control_score import main as evaluate_control
from experiments.garden.control_score import scene_sources
from experiments.garden.depth_net import train_and_save
from experiments.garden.scene_sets import compose_tokens, num_processes
from experiments.photos import GARDEN, class_ids, load_or_train_classifier
from experiments.staged_run import Stage, StagedRun, add_run_options

log = logging.getLogger("garden")
SIZE = GARDEN.size
FORMS = ("int6", "int4")  # the first is the distributed one
EDGE_WEIGHT = 4  # how much more often training samples photographs with edges than scenes with depth
TRAINING_SCENES = 5000  # among which the nearest is looked for, as `evaluate-control` does
STAGES = {
    "compose": Stage(),
    "depth-net": Stage("depth-net/depth.json", 120.0),
    "tokenize": Stage(),
    "classifier": Stage("classifier/classifier.json", 90.0),
    "train": Stage(),
    "finish": Stage("control.json", 60.0),
    "score": Stage(seconds=180.0),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make garden-control."""
    formatter = argparse.RawDescriptionHelpFormatter
    run = argparse.ArgumentParser(
        prog="experiments.garden control-model", description=__doc__, formatter_class=formatter
    )
    run.add_argument("--data", type=Path, default=Path("data"), help="fruits.zip, flowers.zip and emoji.zip.")
    add_run_options(run, stages=STAGES, recipe="recipes/garden-control.toml")
    run.add_argument("--scenes", type=int, default=100_000)
    run.add_argument("--one-crop", action="store_true", help="One view of each photograph, not ten (a trial run).")
    run.add_argument("--depth-scenes", type=int, default=30_000, help="Training scenes of the depth network.")
    run.add_argument("--depth-steps", type=int, default=3000, help="Training steps of the depth network.")
    run.add_argument("--classifier-steps", type=int, default=2500)
    run.add_argument("--num", type=int, default=500, help="Test images, and test scenes, of the score.")
    run.add_argument("--shown", type=int, default=24, help="Condition images on each sheet.")
    ControlRun(run.parse_args(arguments)).run()


class ControlRun(StagedRun):
    """One call of the making of garden-control."""

    stages = STAGES

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        folders = {split: [str(self.work / kind / split) for kind in ("canny", "depth")] for split in ("train", "test")}
        train = [folders["train"][0]] * EDGE_WEIGHT + folders["train"][1:]
        own = [f"data.train={json.dumps(train)}", f"data.validation={json.dumps(folders['test'])}"]
        self.recipe = read_recipe(options.recipe, ModelRecipe, [*own, *options.set])
        self.test = folders["test"]

    def _tokenizer(self) -> Any:
        return load_tokenizer(resolve(self.recipe.tokenizer or "garden"), device=self.device, dtype=torch.float32)

    def tokenize(self) -> None:
        """Encode ten views of each training photograph and one of each test photograph, with the edges of each view."""
        tokenizer = self._tokenizer()
        for split in ("train", "test"):
            images = GARDEN.open(self.options.data, split)
            ten = split == "train" and not self.options.one_crop
            folder = self.work / "canny" / split
            tokenize(
                tokenizer,
                images,
                folder,
                size=SIZE,
                ten_crops=ten,
                batch_size=1280 if self.device.type == "cuda" else 40,
                shard_size=8192,
                control="canny",
            )

    def compose(self) -> None:
        """Encode composed scenes with their exact depth."""
        tokenizer, num = self._tokenizer(), self.options.scenes
        for split, count, seed in (("train", num, 0), ("test", max(32, min(2048, num // 40)), 10**9)):
            compose_tokens(
                tokenizer,
                scene_sources(self.options.data, split),
                self.work / "depth" / split,
                num=count,
                seed=seed,
                size=SIZE,
                processes=num_processes(count),
                shard_size=8192,
                depth=True,
            )

    def depth_net(self) -> None:
        options = self.options
        train_and_save(
            scene_sources(options.data, "train"),
            self.results / "depth-net",
            num=options.depth_scenes,
            steps=options.depth_steps,
            device=self.device,
            fresh=max(8, min(1000, options.depth_scenes // 30)),
            batch_size=self.batch_size(256),
            processes=num_processes(options.depth_scenes),
        )

    def classifier(self) -> None:
        names = read_folder(resolve("garden")).classes
        assert names is not None
        train, test = (GARDEN.open(self.options.data, split) for split in ("train", "test"))
        load_or_train_classifier(
            self.results / "classifier",
            lambda: (center_crops(train, SIZE), class_ids(train, names)),
            num_classes=len(names),
            steps=self.options.classifier_steps,
            device=self.device,
            batch_size=self.batch_size(256),
            test=(center_crops(test, SIZE), class_ids(test, names)),
        )

    def batch_size(self, on_gpu: int) -> int:
        return on_gpu if self.device.type == "cuda" else 8

    def score(self) -> None:
        """Score edges, depth and classes against all baselines; FID needs Inception, and the images are kept for it."""
        num = self.options.num
        folders = {"model": "garden-control", "classifier": "classifier", "depth-net": "depth-net"}
        options = {name: self.results / folder for name, folder in folders.items()}
        options |= {"out": self.results, "images": self.work / "score", "base": "garden", "data": self.options.data}
        options |= {"num": num, "train-scenes": TRAINING_SCENES if num >= 500 else 10 * num}
        options |= {"batch-size": self.batch_size(250), "device": self.options.device}
        evaluate_control(["--no-fid", *(f"--{name}={value}" for name, value in options.items())])

    def finish(self) -> None:
        """Store the model in every form, and measure size and loss of each. The first form is kept."""
        made = self.work / "train" / "model"
        report: dict[str, Any] = {"as trained": {"validation loss": self._losses(load_model(made, device=self.device))}}
        for form in reversed(FORMS):
            folder = (self.results if form == FORMS[0] else self.work) / "garden-control"
            write_difference(made, folder, base="garden", form=form)
            size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
            losses = self._losses(load_model(folder, device=self.device))
            report[form] = {"MB": round(size, 2), "validation loss": losses}
        garden = load_model(resolve("garden"), device=self.device, dtype=torch.float32)
        report["garden"] = {"validation loss": self._losses(garden)}
        pipe = Pipeline.from_pretrained(self.results / "garden-control", device=self.device, dtype="float32")
        same = strength_zero_is_plain(partial(generate_pixels, pipe), size=SIZE, kind="depth")
        report["strength 0 is the model without control"] = same
        for kind, folder in zip(("canny", "depth"), self.test, strict=True):
            save(self._sheet(pipe, folder, kind), self.results / f"{kind}.png")
        write_json(self.results / "control.json", report)
        log.info("%s", json.dumps(report, indent=1))

    @torch.no_grad()
    def _losses(self, model: ARPG) -> dict[str, float]:
        """Return teacher-forced losses in random orders, with and without the condition image; scenes have no class."""
        model, found = model.float().eval(), {}
        for folder in self.test:
            tokens = open_tokens(folder)
            kind = tokens.controls[0].kind
            size = min(256, len(tokens))
            for name in ("with", "without") if model.control is not None else ("without",):
                control = None
                if name == "with":
                    assert model.config.control is not None
                    control = ControlMaps(tokens.controls, model.config.control.kinds, self.device)
                num_classes = model.config.num_classes
                batches = TokenBatches(
                    Dataset(tokens, control=control),
                    batch_size=size,
                    parts=1,
                    num_classes=num_classes,
                    label_drop=0.0,
                    seed=1,
                    device=self.device,
                )
                objective = Objective(model, tokens.grid)
                losses = []
                for i in range(len(tokens) // size):
                    batch = batches.batch(i, 0)
                    if not tokens.classes:
                        batch.labels_B.fill_(num_classes)
                    losses.append(objective(batch))
                found[f"{kind}, {name} the image"] = round(float(torch.stack(losses).mean()), 4)
        return found

    def _sheet(self, pipe: Pipeline, folder: str, kind: str) -> Image.Image:
        """Return test condition images, each with two results."""
        tokens = open_tokens(folder)
        maps = ControlMaps(tokens.controls, (kind,), torch.device("cpu"))
        index = np.arange(self.options.shown) * len(tokens) // self.options.shown
        pixels_BHW, _ = maps.gather(index, np.zeros_like(index))
        shown = [Image.fromarray(pixels) for pixels in pixels_BHW.numpy()]
        rows: list[Image.Image] = []
        for i, image in zip(index, shown, strict=True):
            label = int(tokens.labels[i]) if tokens.classes else NO_CLASS
            made = pipe.control(image, None if label == NO_CLASS else label, kind=kind, num_images=2, seed=int(i))
            rows.append(sheet([image, *made], columns=3))
        return sheet(rows, columns=4)
