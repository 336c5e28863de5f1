"""`arpg finetune`: make a model, or a LoRA adapter, of a folder of images; settings follow from images and device.

It composes what the other verbs use: image sets, `tokenize`, text states, and the training of a recipe that is made
here. The same call continues after an interruption, with the settings that were chosen at first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arpg.checkpoint import MODEL, FolderConfig, load_tokenizer, read_folder
from arpg.classes import numbered_classes
from arpg.config import DEFAULT_MODEL, DEFAULT_TEXT_MODEL, ModelConfig, from_dict, to_dict
from arpg.data.dataset import write_text_states
from arpg.data.images import ImageSet, open_images
from arpg.data.tokenize import tokenize
from arpg.device import training_precision
from arpg.errors import present, require
from arpg.files import hash_file, read_json, read_metadata, write_json
from arpg.hub import resolve
from arpg.lora import AdapterConfig
from arpg.storage import AnyPath
from arpg.text_encoder import open_encoder
from arpg.train.cost import budget_bytes, training_bytes
from arpg.train.distributed import training_device
from arpg.train.loop import train
from arpg.train.model import ModelTraining
from arpg.train.recipe import ModelRecipe, make_recipe

HELD_OUT = 0.1  # share of the images that is only measured
MAX_BATCH = {"cuda": 32, "cpu": 8}  # images in a step
VIEWS = 4  # crops of each training image
EPOCHS, MORE_EPOCHS, FULL_EPOCHS_UP_TO = 16, 4, 1000  # passes over the first 1,000 images, and over those after them
MIN_STEPS = 40
VALIDATIONS = 12  # in a run that is not stopped early
STATE = "finetune.json"

log = logging.getLogger(__name__)


class Finetuning(ModelTraining):
    """The training of `arpg finetune`, which continues when it is called again."""

    resume_with = "run the same command again to continue"


@dataclass(frozen=True)
class Finetuned:
    """The result of a fine-tune."""

    path: AnyPath  # the model folder, or the file of the adapter
    loss: float  # the lowest validation loss
    step: int  # after which it was measured
    base_loss: float  # validation loss before the first step
    command: str  # that generates images


def finetune(
    folder: str | Path,
    output: Path,
    *,
    base: str | None = None,
    lora: int | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Finetuned:
    """Fine-tune `base` on a folder of images: of classes (sub-folders), or of captions with a base that takes prompts.

    `lora`: train an adapter of this rank instead of all weights. `overrides`: values of the recipe, as in `--set`.
    """
    on = training_device(device)
    images = open_images(folder)
    base = base or (DEFAULT_MODEL if images.captions is None else DEFAULT_TEXT_MODEL)
    base_folder = resolve(base)
    described = read_folder(base_folder)
    config = _check_base(base, described)
    train_images, validation_images = hold_out(_labelled(images, Path(folder), described, lora=lora is not None))
    asked = {"images": str(Path(folder).resolve()), "base": base, "lora": lora, "set": list(overrides)}
    asked["files"] = hashlib.sha256("\n".join((*images.names, *(images.captions or ()))).encode()).hexdigest()
    recipe = _continued(output, asked)
    if recipe is None:
        data = _recipe(train_images, output, base, base_folder, described, lora=lora, device=on)
        recipe = make_recipe(data, ModelRecipe, overrides, where="arpg finetune")
        write_json(output / STATE, {"asked": asked, "recipe": to_dict(recipe)})
    log.info("%d images to train on, %d held out for validation", len(train_images), len(validation_images))
    tokenizer = load_tokenizer(base_folder, config=described, device=on, dtype=torch.float32)
    size = config.grid[0] * tokenizer.config.stride
    for name, part, views in (("train", train_images, VIEWS), ("validation", validation_images, 1)):
        tokens = tokenize(tokenizer, part, output / "tokens" / name, size=size, views=views, progress=progress)
        if config.text is not None:
            write_text_states(tokens, config.text, open_encoder(config.text, device=on))
    path = train(partial(Finetuning, recipe, output), resume=(output / "snapshots").is_dir(), device=device)
    best = read_metadata(output / "best.safetensors")
    return Finetuned(
        path, float(best["loss"]), int(best["step"]), _base_loss(output), _command(path, train_images, lora=lora)
    )


def hold_out(images: ImageSet) -> tuple[ImageSet, ImageSet]:
    """Split off the images whose names have the smallest hashes: the same ones whatever the order of the files."""
    require(len(images) >= 2, f"{images.where} has {len(images)} image; expected 2 or more, since some are held out")
    order = sorted(range(len(images)), key=lambda i: hashlib.sha256(images.names[i].encode()).digest())
    count = max(1, round(HELD_OUT * len(images)))
    return images.only(sorted(order[count:])), images.only(sorted(order[:count]))


def _check_base(base: str, described: FolderConfig) -> ModelConfig:
    config = present(described.model, f"{base} has no model, only a tokenizer; name a folder with a model")
    require(
        config.control is None,
        f"{base} takes condition images, which a folder does not have; fine-tune another base, or use `arpg train`",
    )
    require(config.grid[0] == config.grid[1], f"{base} has a grid of {config.grid}; expected a square one")
    return config


def _labelled(images: ImageSet, folder: Path, base: FolderConfig, *, lora: bool) -> ImageSet:
    """Give images the classes of the model to train: those of the folder; for an adapter also those of its base."""
    assert base.model is not None
    if base.model.text is not None:
        require(
            images.captions is not None, f"{folder} has no captions, which the base takes; add NAME.txt to each image"
        )
        return replace(images, classes=(), labels=(0,) * len(images))
    images = replace(images, captions=None)
    if not images.classes:
        images = replace(images, classes=(folder.resolve().name.removesuffix(".zip"),))
    if not lora:
        return images
    known = base.classes or numbered_classes(base.model.num_classes)
    names, ids = list(known.lines), []
    for name in images.classes:
        found = known.match(name)
        ids.append(len(names) if found is None else found)
        names += [name] if found is None else []
    return replace(images, classes=tuple(names), labels=tuple(ids[label] for label in images.labels))


def _continued(output: Path, asked: dict[str, Any]) -> ModelRecipe | None:
    """Return the recipe of a run in this folder; one with other images or settings is an error."""
    if not (output / STATE).exists():
        require(
            not (output / "snapshots").exists() and not (output / "tokens").exists(),
            f"{output} holds another run; choose another --output",
        )
        return None
    found = read_json(output / STATE)
    other = [name for name in asked if found["asked"].get(name) != asked[name]]
    require(
        not other,
        f"{output} holds a run with other {', '.join(other)}; choose another --output, or delete it to start anew",
    )
    return from_dict(ModelRecipe, found["recipe"], where=str(output / STATE))


def _recipe(
    images: ImageSet,
    output: Path,
    base: str,
    folder: AnyPath,
    described: FolderConfig,
    *,
    lora: int | None,
    device: torch.device,
) -> dict[str, Any]:
    """Choose the settings of a run from the images, the base and the device."""
    assert described.model is not None
    model = replace(described.model, num_classes=len(images.classes))
    batch_size = choose_batch(model, len(images), device, adapter=lora is not None)
    steps = choose_steps(len(images), batch_size)
    every = max(1, steps // VALIDATIONS)
    used = sorted(set(images.labels)) if images.classes else []
    name = str(Path(base).resolve()) if Path(base).is_dir() else base
    adapter = lora and AdapterConfig(
        lora,
        alpha=float(lora),
        base=name,
        base_hash=hash_file(folder / MODEL),
        classes=tuple(images.classes[i] for i in used),
    )
    return {
        "model": to_dict(model),
        "data": {"train": str(output / "tokens" / "train"), "validation": str(output / "tokens" / "validation")},
        "optim": {
            "lr": 6e-3 if lora else 1e-4,
            "schedule": "constant",  # the end is not known
            "warmup": 0.05,
            "weight_decay": 0.0 if lora else 0.05,
            "ema": round(min(0.999, max(0.8, 1 - 5 / steps)), 4),
        },
        "run": {
            "steps": steps,
            "batch_size": batch_size,
            "compile": steps >= 1000,  # it takes a minute
            "log_every": max(1, steps // 20),
            "progress_s": 5.0,
            "validate_every": every,
            "sample_every": VALIDATIONS // 3 * every,
            "save_every": 2 * every,
            "keep": 1,
            "patience": 3,
        },
        "tokenizer": name,
        "init_from": name,
        "lora": None if not adapter else to_dict(adapter),
        "license": described.license,
        **({} if described.sampling is None else {"sampling": to_dict(described.sampling)}),
    }


def choose_batch(config: ModelConfig, num_images: int, device: torch.device, *, adapter: bool) -> int:
    """Return the largest power of two that the images fill and the memory of the device holds, up to `MAX_BATCH`."""
    budget, precision = budget_bytes(device), training_precision("auto", device)

    def fits(size: int) -> bool:
        needed = training_bytes(config, size, precision=precision, trained=0 if adapter else None)
        return size <= num_images and (budget is None or needed <= budget)

    size = MAX_BATCH[device.type]
    while size > 1 and not fits(size):
        size //= 2
    return size


def choose_steps(num_images: int, batch_size: int) -> int:
    """Return the steps of a run that is not stopped early."""
    samples = EPOCHS * min(num_images, FULL_EPOCHS_UP_TO) + MORE_EPOCHS * max(0, num_images - FULL_EPOCHS_UP_TO)
    return max(MIN_STEPS, math.ceil(samples / batch_size))


def _base_loss(output: Path) -> float:
    """Return the validation loss before the first step."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(next(entry["validation loss"] for entry in map(json.loads, lines) if entry["step"] == 0))


def _command(path: AnyPath, images: ImageSet, *, lora: int | None) -> str:
    """Return the command that generates images with the result."""
    model = ["--model", str(path)] if lora is None else ["--lora", str(path)]
    subject = ["--prompt", images.captions[0]] if images.captions else ["--class", images.classes[images.labels[0]]]
    return shlex.join(["arpg", "generate", *model, *subject, "-n", "4", "-o", "mine.png"])
