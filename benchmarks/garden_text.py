"""`garden-text` from nothing to its score: scenes, text states, judge, training, evaluation. Run it until it says done.

    python benchmarks/garden_text.py pack --data data --out runs/parts.zip
    python benchmarks/garden_text.py run --parts runs/parts.zip --work runs/text --out runs/text/results --minutes 9

`pack` gathers what `run` needs where nothing can be installed: the frames that the composer takes, and MiniLM in half
precision with the words that captions have. `run` goes on where it stopped; training is stopped in time and resumed.
`--stages` names some stages: the judge can learn beside the composing, which leaves a GPU idle.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from resumable import go, train_until

from arpg import Pipeline
from arpg.checkpoint import BUNDLED, FolderConfig, load_model, load_tokenizer, read_folder, write_folder
from arpg.config import TextConfig
from arpg.data.asks import draw_ask
from arpg.data.captions import caption
from arpg.data.catalogue import KINDS, TINTS
from arpg.data.compose import compose_tokens
from arpg.data.composer import SIZE, Composer
from arpg.data.dataset import write_text_states
from arpg.data.tokens import open_tokens
from arpg.evaluation.detector import Detector, DetectorConfig
from arpg.evaluation.detector_scenes import draw_scenes, through_tokenizer
from arpg.evaluation.detector_training import calibrate, train_detector
from arpg.evaluation.text_score import ceiling, generate, held_out_questions, judge, read_pixels
from arpg.files import read_tensors, write_whole
from arpg.hub import resolve
from arpg.image import save, sheet
from arpg.quantization.storage import pack as pack_weights
from arpg.text_encoder import PromptCache, load_minilm, minilm_folder
from arpg.train.recipe import ModelRecipe, read_recipe

log = logging.getLogger("garden-text")
WORDS = "embeddings.word_embeddings.weight"
STAGES = ("compose", "embed", "judge", "train", "score")
NEEDS = {"judge": 150.0, "score": 120.0}  # seconds on a GPU, of what cannot be interrupted
SPECIAL = 1000  # MiniLM's first ids: padding, special and unused tokens
SHOWN = (
    "a strawberry to the left of a green apple",
    "two bananas above a lemon on a blue background",
    "a smiling cat emoji",
    "three purple stars on a yellow background",
    "a red car and a blue key",
    "a pink elephant on a green background",
    "a large pineapple",
    "a rocket above a house on a purple background",
    "four hearts",
    "a blue banana",
    "a penguin with an umbrella on a gray background",
    "a small teddy bear on a red background",
    "an orange in front of a watermelon",
    "a yellow hat, a bell and a tulip",
    "🍓 and 🍋",
    "a crown under a ghost",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    pack = verbs.add_parser("pack")
    pack.add_argument("--data", type=Path, default=Path("data"))
    pack.add_argument("--captions", type=int, default=40000, help="To look for words in.")
    pack.add_argument("--out", type=Path, required=True)
    run = verbs.add_parser("run")
    run.add_argument("--parts", type=Path, required=True)
    run.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES)
    run.add_argument("--recipe", type=Path, default=Path("recipes/garden-text.toml"))
    run.add_argument("--set", action="append", default=[], help="Override a value of the recipe.")
    run.add_argument("--work", type=Path, required=True, help="Scenes, snapshots, images; kept between calls.")
    run.add_argument("--out", type=Path, required=True, help="The results: model, judge, numbers, sheets.")
    run.add_argument(
        "--ship", type=Path, help="Also the results as one zip, cut into pieces of 15 MB (cat joins them)."
    )
    run.add_argument("--scenes", type=int, default=320_000)
    run.add_argument("--judge-scenes", type=int, default=60_000)
    run.add_argument("--judge-steps", type=int, default=5000)
    run.add_argument("--per-task", type=int, default=60)
    run.add_argument("--guidance", type=float, nargs="*", default=[2.0, 3.0, 4.0, 6.0])
    run.add_argument("--minutes", type=float, default=9.0, help="Of this call.")
    run.add_argument("--device", default="auto")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8.0f ms  %(message)s")
    if options.verb == "pack":
        make_parts(options.data, options.out, options.captions)
    else:
        Run(options).go()


def make_parts(data: Path, target: Path, num_captions: int) -> None:
    """One zip with the composer's frames of both splits, the emoji and a small MiniLM."""
    classes = {name for kind in KINDS.values() for _, some in kind.fruits for name in some}
    with zipfile.ZipFile(data / "fruits.zip") as fruits, zipfile.ZipFile(data / "emoji.zip") as emoji:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as parts:
            for split in ("train", "test"):
                composer = Composer(f"{data}/fruits.zip/fruits/{split}", f"{data}/emoji.zip/emoji")
                for name, views in composer._views.items():
                    for index in sorted(set(views)) if name in classes else ():
                        inner = f"fruits/{split}/{composer._fruits.names[index]}"
                        parts.writestr(inner, fruits.read(inner))
            for name in emoji.namelist():
                parts.writestr(name, emoji.read(name))
            folder = minilm_folder()
            for name in (
                "config.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "special_tokens_map.json",
                "vocab.txt",
            ):
                parts.write(folder / name, f"minilm/{name}")
            parts.writestr("minilm/model.safetensors", _small_minilm(folder, composer.extra, num_captions))
    write_whole(target, lambda path: path.write_bytes(buffer.getvalue()))
    log.info("%s: %.1f MB", target, target.stat().st_size / 1e6)


def _small_minilm(folder: Path, extra: tuple[str, ...], num_captions: int) -> bytes:
    """Half precision, and zeros (which take no room in a zip) for the words that no caption has."""
    rng = np.random.default_rng(0)
    texts = [caption(draw_ask(rng, extra=extra), rng) for _ in range(num_captions)]
    texts += [f"a {name}" for name in extra] + [q.task.prompt for q in held_out_questions()] + list(SHOWN)
    ids = load_minilm(max_tokens=64).tokenizer(texts)["input_ids"]
    used = sorted({i for row in ids for i in row} | set(range(SPECIAL)))
    state = {
        key: t.half() if t.is_floating_point() else t for key, t in read_tensors(folder / "model.safetensors").items()
    }
    few = torch.zeros_like(state[WORDS])
    few[used] = state[WORDS][used]
    log.info("%d of %d words", len(used), len(few))
    return safetensors.torch.save({**state, WORDS: few})


class Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work, self.results = options, options.work, options.out
        self.deadline = time.monotonic() + 60 * options.minutes
        self.work.mkdir(parents=True, exist_ok=True)
        self.results.mkdir(parents=True, exist_ok=True)
        if not (self.work / "parts" / "minilm").exists():
            with zipfile.ZipFile(options.parts) as parts:
                parts.extractall(self.work / "parts")
        here = self.work / "parts"
        self.sets = {split: (f"{here}/fruits/{split}", f"{here}/emoji") for split in ("train", "test")}
        found = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(found if options.device == "auto" else options.device)
        scenes = self.work / "scenes"
        own = [f"data.train={scenes}/train", f"data.validation={scenes}/test"]
        self.recipe = read_recipe(options.recipe, ModelRecipe, [*own, *options.set])
        assert self.recipe.model.text is not None
        self.text: TextConfig = self.recipe.model.text
        self.judge_folder = self.results / "judge"
        self.processes = 0 if options.scenes < 2000 else len(os.sched_getaffinity(0))

    def go(self) -> None:
        steps = {name: getattr(self, name) for name in STAGES if name in self.options.stages}
        go(steps, self.deadline, self.results, self.options.ship)

    def compose(self) -> bool:
        tokenizer = load_tokenizer(resolve(self.recipe.tokenizer or "garden"), device=self.device, dtype=torch.float32)
        few = max(64, min(4096, self.options.scenes // 100))
        for split, num, seed in (("train", self.options.scenes, 0), ("test", few, 10**9)):
            count = self.processes if num > 2000 else 0
            compose_tokens(
                tokenizer, self.sets[split], self.work / "scenes" / split, num=num, seed=seed, processes=count
            )
        return True

    def embed(self) -> bool:
        encoder = self._encoder()
        for split in ("train", "test"):
            write_text_states(open_tokens(self.work / "scenes" / split), self.text, encoder, batch_size=1024)
        return True

    def judge(self) -> bool:
        if (self.judge_folder / "detector.json").exists():
            return True
        if time.monotonic() + NEEDS["judge"] > self.deadline:
            return False
        options = self.options
        config = DetectorConfig(tuple(KINDS), tuple(TINTS))
        scenes = draw_scenes(self.sets["train"], config, num=options.judge_scenes, seed=5, processes=self.processes)
        scenes = through_tokenizer(scenes, self.recipe.tokenizer or "garden", device=self.device)
        batch = 256 if self.device.type == "cuda" else 16
        detector = train_detector(
            scenes, config, steps=options.judge_steps, batch_size=batch, device=self.device, progress=_tell
        )
        fresh = draw_scenes(self.sets["train"], config, num=max(8, options.judge_scenes // 60), seed=6)
        detector = calibrate(detector, fresh)
        most = ceiling(held_out_questions(options.per_task), Composer(*self.sets["test"]), detector)
        log.info("the judge on unseen real scenes, threshold %.2f: %s", detector.config.threshold, _short(most))
        (self.results / "ceiling.json").write_text(json.dumps(most, indent=1) + "\n")
        detector.save(self.judge_folder)
        return True

    def train(self) -> bool:
        return train_until(self.deadline, self.recipe, self.work / "train", self.results, device=self.options.device)

    def score(self) -> bool:
        """The model in half precision, as it is shipped, over a few guidance scales, and what can be reached."""
        if (self.results / "uncurated.png").exists():
            return True
        if time.monotonic() + NEEDS["score"] > self.deadline:
            return False
        folder = self.results / "garden-text"
        made = self.work / "train" / "model"
        described = read_folder(made)
        weights = pack_weights(read_tensors(made / "model.safetensors"), "float16")
        # The tokenizer is shared where it is that of a model in the box; load_tokenizer then finds it.
        shared = self.recipe.tokenizer if self.recipe.tokenizer in BUNDLED else None
        config = FolderConfig(
            model=described.model, sampling=described.sampling, license=described.license, tokenizer_of=shared
        )
        write_folder(folder, config, model=weights)
        tokenizer = load_tokenizer(made, device=self.device, dtype=torch.float32)
        network = load_model(folder, device=self.device, dtype=torch.float32)
        prompts = PromptCache(self.text, load=self._encoder)
        pipe = Pipeline(network, tokenizer, sampling=described.sampling, prompts=prompts)
        detector = Detector.load(self.judge_folder, device=self.device)
        questions = held_out_questions(self.options.per_task)
        tasks = [q.task for q in questions]
        most = ceiling(questions, Composer(*self.sets["test"]), detector)
        report: dict[str, Any] = {"ceiling": most, "guidance": {}}
        for guidance in self.options.guidance:
            images = self.work / "images" / f"guidance-{guidance:g}"
            paths = generate(pipe, tasks, images, batch_size=240, guidance=guidance)
            found = judge(tasks, read_pixels(paths, SIZE), detector, images=4)
            report["guidance"][f"{guidance:g}"] = found
            share = found["overall"] / most["overall"] if most["overall"] else 0.0
            log.info("guidance %g: %s, of the ceiling %.3f", guidance, _short(found), share)
        (self.results / "score.json").write_text(json.dumps(report, indent=1) + "\n")
        drawn = pipe.generate(prompt=SHOWN, seed=0)
        save(sheet(drawn, captions=SHOWN), self.results / "prompts.png")
        some = [q.task.prompt for q in questions[:: max(1, len(questions) // 36)]][:36]
        save(sheet(pipe.generate(prompt=some, seed=1), captions=some), self.results / "uncurated.png")
        return True

    def _encoder(self) -> Any:
        return load_minilm(max_tokens=self.text.max_tokens, device=self.device, folder=self.work / "parts" / "minilm")


def _short(report: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v if k == 'overall' else v['accuracy']:.3f}" for k, v in report.items())


def _tell(step: int, loss: float) -> None:
    if step % 500 == 0:
        log.info("judge: step %d, loss %.3f", step, loss)


if __name__ == "__main__":
    main()
