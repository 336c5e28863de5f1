"""`garden-text` from nothing to its score: scenes, text states, detector, training, evaluation; and its settings.

    python -m experiments.garden text-model pack --data data --out runs/parts.zip
    python -m experiments.garden text-model run --parts runs/parts.zip --work runs/text --out runs/text/results
    python -m experiments.garden text-settings --detector runs/text/results/detector --out text-settings.json

`pack` collects what `run` needs on a machine where nothing can be installed: the frames that the composer takes, and
MiniLM in half precision with the words of the captions. Call `run` until it logs "done": it continues where it stopped.
`--stages` selects stages: the detector can be trained while scenes are composed, which leaves a GPU idle.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from arpg import Pipeline
from arpg.checkpoint import FolderConfig, installed_models, load_model, load_tokenizer, read_folder, write_folder
from arpg.config import TextConfig
from arpg.data.dataset import write_text_states
from arpg.data.tokens import open_tokens
from arpg.files import read_tensors, write_json, write_whole
from arpg.hub import resolve
from arpg.image import save, sheet
from arpg.quantization.storage import pack as pack_weights
from arpg.text_encoder import PromptCache, load_minilm, minilm_folder
from arpg.train.recipe import ModelRecipe, read_recipe
from experiments.garden.composer import SIZE, Composer
from experiments.garden.detector import Detector, train_and_save
from experiments.garden.geneval import TASKS, GenEvalPrompt, ceiling, generate, held_out_prompts, read_pixels, score
from experiments.garden.objects import KINDS
from experiments.garden.scene_sets import compose_tokens, num_processes
from experiments.garden.scene_spec import caption, sample_spec
from experiments.staged_run import Stage, StagedRun, add_run_options

log = logging.getLogger("garden")
WORDS = "embeddings.word_embeddings.weight"
STAGES = {
    "compose": Stage(),
    "embed": Stage(),
    "detector": Stage("detector/detector.json", 150.0),
    "train": Stage(),
    "score": Stage("uncurated.png", 120.0),
}
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Make garden-text."""
    parser = argparse.ArgumentParser(
        prog="experiments.garden text-model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    pack = verbs.add_parser("pack")
    pack.add_argument("--data", type=Path, default=Path("data"))
    pack.add_argument("--captions", type=int, default=40000, help="Captions whose words are kept.")
    pack.add_argument("--out", type=Path, required=True)
    run = verbs.add_parser("run")
    run.add_argument("--parts", type=Path, required=True)
    add_run_options(run, stages=STAGES, recipe="recipes/garden-text.toml")
    run.add_argument("--scenes", type=int, default=320_000)
    run.add_argument("--detector-scenes", type=int, default=60_000)
    run.add_argument("--detector-steps", type=int, default=5000)
    run.add_argument("--per-task", type=int, default=60)
    run.add_argument("--guidance", type=float, nargs="*", default=[2.0, 3.0, 4.0, 6.0])
    options = parser.parse_args(arguments)
    if options.verb == "pack":
        make_parts(options.data, options.out, options.captions)
    else:
        TextRun(options).run()


def make_parts(data: Path, target: Path, num_captions: int) -> None:
    """Write one zip with the composer's frames of both splits, the emoji and a small MiniLM."""
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
    """Return MiniLM in half precision, with zeros (which a zip compresses) for the words that no caption has."""
    rng = np.random.default_rng(0)
    texts = [caption(sample_spec(rng, extra=extra), rng) for _ in range(num_captions)]
    texts += [f"a {name}" for name in extra] + [q.prompt.text for q in held_out_prompts()] + list(SHOWN)
    ids = load_minilm(max_tokens=64).tokenizer(texts)["input_ids"]
    used = sorted({i for row in ids for i in row} | set(range(SPECIAL)))
    state = {
        key: t.half() if t.is_floating_point() else t for key, t in read_tensors(folder / "model.safetensors").items()
    }
    few = torch.zeros_like(state[WORDS])
    few[used] = state[WORDS][used]
    log.info("%d of %d words", len(used), len(few))
    return safetensors.torch.save({**state, WORDS: few})


class TextRun(StagedRun):
    """One call of the making of garden-text."""

    stages = STAGES

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        if not (self.work / "parts" / "minilm").exists():
            with zipfile.ZipFile(options.parts) as parts:
                parts.extractall(self.work / "parts")
        here = self.work / "parts"
        self.sets = {split: (f"{here}/fruits/{split}", f"{here}/emoji") for split in ("train", "test")}
        scenes = self.work / "scenes"
        own = [f"data.train={scenes}/train", f"data.validation={scenes}/test"]
        self.recipe = read_recipe(options.recipe, ModelRecipe, [*own, *options.set])
        assert self.recipe.model.text is not None
        self.text: TextConfig = self.recipe.model.text
        self.detector_folder = self.results / "detector"

    def compose(self) -> None:
        tokenizer = load_tokenizer(resolve(self.recipe.tokenizer or "garden"), device=self.device, dtype=torch.float32)
        few = max(64, min(4096, self.options.scenes // 100))
        for split, num, seed in (("train", self.options.scenes, 0), ("test", few, 10**9)):
            folder, processes = self.work / "scenes" / split, num_processes(num)
            compose_tokens(tokenizer, self.sets[split], folder, num=num, seed=seed, processes=processes)

    def embed(self) -> None:
        encoder = self._encoder()
        for split in ("train", "test"):
            write_text_states(open_tokens(self.work / "scenes" / split), self.text, encoder, batch_size=1024)

    def detector(self) -> None:
        train_and_save(
            self.sets["train"],
            self.detector_folder,
            num=self.options.detector_scenes,
            steps=self.options.detector_steps,
            batch_size=256 if self.device.type == "cuda" else 16,
            device=self.device,
            tokenizer=self.recipe.tokenizer or "garden",
            seed=5,
            processes=num_processes(self.options.detector_scenes),
        )

    def score(self) -> None:
        """Score the model in half precision, as it is distributed, at several guidance scales, and the ceiling."""
        folder = self.results / "garden-text"
        made = self.work / "train" / "model"
        described = read_folder(made)
        weights = pack_weights(read_tensors(made / "model.safetensors"), "float16")
        # The tokenizer of an installed model is shared; load_tokenizer then finds it.
        shared = self.recipe.tokenizer if self.recipe.tokenizer in installed_models() else None
        config = FolderConfig(
            model=described.model, sampling=described.sampling, license=described.license, tokenizer_of=shared
        )
        write_folder(folder, config, model=weights)
        tokenizer = load_tokenizer(made, device=self.device, dtype=torch.float32)
        network = load_model(folder, device=self.device, dtype=torch.float32)
        encoder = PromptCache(self.text, load=self._encoder)
        pipe = Pipeline(network, tokenizer, sampling=described.sampling, prompts=encoder)
        detector = Detector.load(self.detector_folder, device=self.device)
        held = held_out_prompts(self.options.per_task)
        prompts = [each.prompt for each in held]
        most = ceiling(held, Composer(*self.sets["test"]), detector)
        report: dict[str, Any] = {"ceiling": most, "guidance": {}}
        for guidance in self.options.guidance:
            images = self.work / "images" / f"guidance-{guidance:g}"
            paths = generate(pipe, prompts, images, batch_size=240, guidance=guidance)
            found = score(prompts, read_pixels(paths, SIZE), detector, images=4)
            report["guidance"][f"{guidance:g}"] = found
            share = found["overall"] / most["overall"] if most["overall"] else 0.0
            log.info("guidance %g: %s, of the ceiling %.3f", guidance, _short(found), share)
        write_json(self.results / "score.json", report)
        shown = pipe.generate(prompt=SHOWN, seed=0)
        save(sheet(shown, captions=SHOWN), self.results / "prompts.png")
        some = [p.text for p in prompts[:: max(1, len(prompts) // 36)]][:36]
        save(sheet(pipe.generate(prompt=some, seed=1), captions=some), self.results / "uncurated.png")

    def _encoder(self) -> Any:
        return load_minilm(max_tokens=self.text.max_tokens, device=self.device, folder=self.work / "parts" / "minilm")


def _short(report: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v if k == 'overall' else v['accuracy']:.3f}" for k, v in report.items())


IMAGES, BATCH = 2, 60
SETTINGS: dict[str, dict[str, Any]] = {
    "random, linear 6": {"order": "random", "guidance_schedule": "linear", "guidance": 6.0},
    "random, linear 10": {"order": "random", "guidance_schedule": "linear", "guidance": 10.0},
    "random, linear 6, 48 steps": {"order": "random", "guidance_schedule": "linear", "guidance": 6.0, "steps": 48},
    "random, constant 4": {"order": "random", "guidance_schedule": "constant", "guidance": 4.0},
    "halton, linear 6": {"order": "halton", "guidance_schedule": "linear", "guidance": 6.0},
    "halton, constant 3": {"order": "halton", "guidance_schedule": "constant", "guidance": 3.0},
    "halton, constant 4": {"order": "halton", "guidance_schedule": "constant", "guidance": 4.0},
    "halton, constant 5.5": {"order": "halton", "guidance_schedule": "constant", "guidance": 5.5},
}


def compare_settings(arguments: Sequence[str] | None = None) -> None:
    """Score garden-text under several sampling settings, on other prompts than those of `evaluate-text`.

    The prompts have held-out combinations, too, so that settings are not chosen on the prompts of the score.
    20 prompts of each task, two images each: differences below 0.05 mean little. Settings that --out has already
    are not measured again.
    """
    parser = argparse.ArgumentParser(prog="experiments.garden text-settings", description=compare_settings.__doc__)
    parser.add_argument("--model", default="garden-text")
    parser.add_argument("--detector", type=Path, required=True, help="The folder of `train-detector`.")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--per-task", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    pipe, detector = Pipeline.from_pretrained(options.model, device="cpu"), Detector.load(options.detector)
    prompts = other_prompts(options.per_task)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in (name for name in options.only if name not in found):
        found[name] = score_settings(pipe, detector, prompts, SETTINGS[name])
        log.info("%-28s %.3f  %s", name, found[name]["overall"], found[name])
        write_json(options.out, found)


def other_prompts(per_task: int) -> list[GenEvalPrompt]:
    """Return prompts with held-out combinations that are not those of the score."""
    scored = {held.prompt.text for held in held_out_prompts()}
    others = [held.prompt for held in held_out_prompts(60 + 2 * per_task)]
    return [p for tag in TASKS for p in [p for p in others if p.tag == tag and p.text not in scored][:per_task]]


def score_settings(
    pipe: Pipeline, detector: Detector, prompts: Sequence[GenEvalPrompt], settings: dict[str, Any]
) -> dict[str, float]:
    """Return the accuracy of each task and their mean under these settings."""
    texts = [prompt.text for prompt in prompts for _ in range(IMAGES)]
    pixels = [
        np.asarray(image)
        for start in range(0, len(texts), BATCH)
        for image in pipe.generate(
            prompt=texts[start : start + BATCH],
            seed=list(range(start, min(start + BATCH, len(texts)))),
            **{"steps": 24, **settings},
        )
    ]
    report = score(prompts, np.stack(pixels), detector, images=IMAGES)
    return {tag: round(report[tag]["accuracy"], 4) for tag in TASKS} | {"overall": round(report["overall"], 4)}
