"""`garden-control` from nothing to its score: scenes with depth, tokens with edges, judges, training, storing small.

    python benchmarks/garden_control.py --data data --work runs/control --out runs/control/results --minutes 9

Run it until it says done: it goes on where it stopped, and training is stopped in time and resumed. `--stages` names
some stages, for calls that have only a part of the data: compose and depth-judge need fruits.zip, emoji.zip and the
tokenizer of `garden`, the others also flowers.zip and its network. The results: `garden-control` (differences from
`garden`), its validation losses as trained and as stored, the judges, the score, and sheets of what it draws.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from control_scoring import make_classifier, make_depth_judge, score
from PIL import Image
from resumable import go, train_until

from arpg import ARPG, ControlInput, Pipeline
from arpg.checkpoint import load_model, load_tokenizer, read_folder, write_difference
from arpg.data.compose import compose_tokens
from arpg.data.dataset import ControlMaps, Dataset, TokenBatches
from arpg.data.images import concatenate, open_images
from arpg.data.tokenize import tokenize
from arpg.data.tokens import NO_CLASS, open_tokens
from arpg.device import choose_device
from arpg.hub import resolve
from arpg.image import save, sheet
from arpg.train.objective import Objective
from arpg.train.recipe import ModelRecipe, read_recipe

log = logging.getLogger("garden-control")
PHOTOS = ("fruits", "flowers")
FORMS = ("int6", "int4")  # the first is the one that is shipped
OFTEN = 4  # times that the edges are drawn from for once of the scenes
SIZE = 96
STAGES = ("compose", "depth-judge", "tokenize", "classifier", "train", "finish", "score")
NEEDS = {"depth-judge": 120.0, "classifier": 90.0, "finish": 60.0, "score": 180.0}  # seconds on a GPU: not interrupted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = parser
    run.add_argument("--data", type=Path, default=Path("data"), help="fruits.zip, flowers.zip and emoji.zip.")
    run.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES)
    run.add_argument("--recipe", type=Path, default=Path("recipes/garden-control.toml"))
    run.add_argument("--set", action="append", default=[], help="Override a value of the recipe.")
    run.add_argument("--work", type=Path, required=True, help="Tokens and snapshots; kept between calls.")
    run.add_argument("--out", type=Path, required=True, help="The results: model, numbers, sheets.")
    run.add_argument("--ship", type=Path, help="Also the results as one zip, cut into pieces of 15 MB.")
    run.add_argument("--scenes", type=int, default=100_000)
    run.add_argument("--one-crop", action="store_true", help="One view of each picture instead of ten (a trial run).")
    run.add_argument("--judge-scenes", type=int, default=30_000)
    run.add_argument("--judge-steps", type=int, default=3000, help="Of the judge of depth.")
    run.add_argument("--classifier-steps", type=int, default=2500)
    run.add_argument("--num", type=int, default=500, help="Test images, and test scenes, of the score.")
    run.add_argument("--shown", type=int, default=24, help="Condition images on each sheet.")
    run.add_argument("--minutes", type=float, default=9.0, help="Of this call.")
    run.add_argument("--device", default="auto")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8.0f ms  %(message)s")
    Run(options).go()


class Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work, self.results = options, options.work, options.out
        self.deadline = time.monotonic() + 60 * options.minutes
        self.work.mkdir(parents=True, exist_ok=True)
        self.results.mkdir(parents=True, exist_ok=True)
        self.device = choose_device(options.device)
        self.processes = len(os.sched_getaffinity(0))
        folders = {split: [str(self.work / kind / split) for kind in ("canny", "depth")] for split in ("train", "test")}
        train = [folders["train"][0]] * OFTEN + folders["train"][1:]
        own = [f"data.train={json.dumps(train)}", f"data.validation={json.dumps(folders['test'])}"]
        self.recipe = read_recipe(options.recipe, ModelRecipe, [*own, *options.set])
        self.test = folders["test"]

    def go(self) -> None:
        steps = {name: getattr(self, name.replace("-", "_")) for name in STAGES if name in self.options.stages}
        go(steps, self.deadline, self.results, self.options.ship)

    def too_late(self, stage: str) -> bool:
        return time.monotonic() + NEEDS[stage] > self.deadline

    def photos(self, split: str) -> Any:
        """Fruits and flowers as one set."""
        return concatenate([open_images(f"{self.options.data}/{name}.zip/{name}/{split}") for name in PHOTOS])

    def sets(self, split: str) -> tuple[str, str]:
        """What scenes are composed of."""
        return f"{self.options.data}/fruits.zip/fruits/{split}", f"{self.options.data}/emoji.zip/emoji"

    def _tokenizer(self) -> Any:
        return load_tokenizer(resolve(self.recipe.tokenizer or "garden"), device=self.device, dtype=torch.float32)

    def tokenize(self) -> bool:
        """Ten views of each picture to learn from, one to test with; the edges of each view."""
        tokenizer = self._tokenizer()
        for split in ("train", "test"):
            images = self.photos(split)
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
        return True

    def compose(self) -> bool:
        """Scenes with their exact depth."""
        tokenizer, num = self._tokenizer(), self.options.scenes
        for split, count, seed in (("train", num, 0), ("test", max(32, min(2048, num // 40)), 10**9)):
            processes = self.processes if count > 2000 else 0
            compose_tokens(
                tokenizer,
                self.sets(split),
                self.work / "depth" / split,
                num=count,
                seed=seed,
                size=SIZE,
                processes=processes,
                shard_size=8192,
                depth=True,
            )
        return True

    def depth_judge(self) -> bool:
        options, folder = self.options, self.results / "depth-judge"
        if not (folder / "depth.json").exists():
            if self.too_late("depth-judge"):
                return False
            num, steps = options.judge_scenes, options.judge_steps
            sets, processes = self.sets("train"), self.processes if num > 4000 else 0
            make_depth_judge(sets, folder, num=num, steps=steps, processes=processes, device=self.device)
        return True

    def classifier(self) -> bool:
        folder = self.results / "classifier"
        if not (folder / "classifier.json").exists():
            if self.too_late("classifier"):
                return False
            names, steps = read_folder(resolve("garden")).classes, self.options.classifier_steps
            assert names is not None
            make_classifier(self.photos("train"), self.photos("test"), names, folder, steps=steps, device=self.device)
        return True

    def score(self) -> bool:
        """Edges, depth and classes, against all baselines but FID: that needs Inception, and the images are kept."""
        if (self.results / "control-score.json").exists():
            return True
        if self.too_late("score"):
            return False
        report = score(
            self.results / "garden-control",
            self.work / "score",
            images=(self.photos("test"), self.photos("train")),
            sets=(self.sets("test"), self.sets("train")),
            judges=(self.results / "classifier", self.results / "depth-judge"),
            num=self.options.num,
            processes=self.processes,
            device=self.device,
        )
        (self.results / "control-score.json").write_text(json.dumps(report, indent=1) + "\n")
        return True

    def train(self) -> bool:
        folder = self.work / "train"
        return train_until(self.deadline, self.recipe, folder, self.results, device=self.options.device)

    def finish(self) -> bool:
        """The model in every form: how large it is, and what it loses. The first form is kept."""
        if (self.results / "control.json").exists():
            return True
        if self.too_late("finish"):
            return False
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
        report["strength 0 is the model without control"] = self._strength_zero(pipe)
        for kind, folder in zip(("canny", "depth"), self.test, strict=True):
            save(self._sheet(pipe, folder, kind), self.results / f"{kind}.png")
        (self.results / "control.json").write_text(json.dumps(report, indent=1) + "\n")
        log.info("%s", json.dumps(report, indent=1))
        return True

    @torch.no_grad()
    def _losses(self, model: ARPG, batch_size: int = 256) -> dict[str, float]:
        """Teacher-forced, in random orders: with the condition image and without it. Scenes have no class."""
        model, found = model.float().eval(), {}
        for folder in self.test:
            tokens = open_tokens(folder)
            kind = tokens.controls[0].kind
            size = min(batch_size, len(tokens))
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

    def _strength_zero(self, pipe: Pipeline) -> bool:
        control = ControlInput(
            Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIZE, SIZE), np.uint8)), "depth", 0
        )
        plain, steered = (pipe.generate([0, 60, 135], control=c, seed=0) for c in (None, control))
        pairs = zip(plain, steered, strict=True)
        return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)

    def _sheet(self, pipe: Pipeline, folder: str, kind: str) -> Image.Image:
        """Condition images that were not trained on, each with two results."""
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


if __name__ == "__main__":
    main()
