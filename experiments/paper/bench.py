"""What the measurements of the paper's tables share: trained rows, samples and their FID, speed and memory."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg import tasks
from arpg.bench.throughput import idle_graph_bytes
from arpg.checkpoint import load_model, load_tokenizer, read_folder
from arpg.data.tokens import open_tokens
from arpg.decode.likelihood import make_orders, token_bits
from arpg.device import choose_device, peak_bytes, reset_peak, synchronize
from arpg.errors import present, require
from arpg.evaluation.classifier import Classifier
from arpg.evaluation.features import Features
from arpg.evaluation.inception import Inception
from arpg.evaluation.metrics import bootstrap, frechet_distance, frechet_influence, wilson
from arpg.evaluation.sample import json_settings, labels_like
from arpg.evaluation.sweep import collect_classified
from arpg.files import write_json
from arpg.hub import resolve
from arpg.image import to_uint8
from arpg.model import TokenDecoder, class_condition
from arpg.settings import SamplingSettings
from arpg.storage import AnyPath
from arpg.tokenizer import VQTokenizer
from arpg.train.recipe import ModelRecipe, OptimRecipe, RunRecipe, TokenData
from experiments.paper.engine import RowEngine, plan_from_nothing
from experiments.paper.lines import OutOfTimeError, Queue
from experiments.paper.orders import write_orders
from experiments.paper.rows import BASE, Row, designs, load_row, store_row, train_row
from experiments.photos import class_ids, photo_set
from experiments.settings_search import halving
from experiments.staged_run import train_until

log = logging.getLogger("experiments")

LINES, WEIGHTS, TRAIN = "lines", "weights", "train"  # folders of the results
METRICS = "metrics.jsonl"
TRAINING = "training.json"  # the options that a row was trained with
SCALES = (2.0, 3.0, 4.5, 6.5, 9.5, 13.5, 19.0)  # of the guidance that is searched; the paper's are 4.3 to 9.3
GUIDANCE_RANGE = (1.0, 20.0)  # of the guidance that is distilled
TRAINED_WITH = ("steps", "batch_size", "lr")  # options that all rows share; width and layers are in their names
# Options that all lines of a folder share, as the precision is: rows of other photographs, trainings and numbers of
# samples do not compare. Those of training do not apply to `--model`.
SHARED = ("set", "num", "limit", "large")
SHARED_BY_ROWS = ("width", "layers", *TRAINED_WITH)

Sampler = tuple[RowEngine, SamplingSettings]


class Bench:
    """What the measurements need; everything is opened when it is first used."""

    def __init__(self, options: argparse.Namespace, table: str) -> None:
        self.options, self.table = options, table
        self.device = choose_device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.deadline = time.monotonic() + 60 * options.minutes
        precision = str(self.dtype).removeprefix("torch.")
        names = SHARED if options.model else (*SHARED, *SHARED_BY_ROWS)
        shared = {name: getattr(options, name) for name in names} | {"precision": precision}
        self.queue = Queue(options.out / LINES, shared, deadline=self.deadline)
        self._engine: tuple[Any, RowEngine] | None = None  # that was loaded last

    @cached_property
    def base(self) -> Any:
        """The configuration that rows vary, of the tokens' vocabulary, classes and grid, or that of `--model`.

        Speed and `--model` need no tokens.
        """
        o = self.options
        if o.model is not None:
            return read_folder(resolve(o.model)).model
        config = dataclasses.replace(
            BASE,
            width=o.width,
            num_heads=max(1, o.width // 64),
            pass1_layers=o.layers // 2,
            pass2_layers=o.layers - o.layers // 2,
        )
        if o.only == "speed":
            return config
        tokens = open_tokens(o.tokens)
        return dataclasses.replace(
            config, vocab_size=tokens.vocab_size, num_classes=tokens.num_classes, grid=tokens.grid
        )

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(resolve(self.options.tokenizer), device=self.device, dtype=torch.float32)

    @cached_property
    def inception(self) -> Inception:
        return Inception.load(self.options.inception, device=self.device)

    @cached_property
    def classifier(self) -> Classifier | None:
        folder = self.options.classifier
        return None if folder is None else Classifier.load(folder, device=self.device)

    @cached_property
    def reference(self) -> Features:
        """The statistics of the training photographs, computed once for each Inception and `--limit`."""
        o = self.options
        path = o.out / f"reference-{o.set if o.limit is None else f'{o.set}-{o.limit}'}.npz"
        if path.exists() and (kept := Features.load(path)).network == self.inception.identity:
            return kept
        found = photo_set(o.set).features(o.data, "train", self.inception, limit=o.limit, folder=o.features)
        found = dataclasses.replace(found, spatial=None, pool_MF=None, gain_M=None)
        found.save(path)
        return found

    @cached_property
    def counts(self) -> Any:
        """The number of training images of each class, `[classes]`."""
        o = self.options
        if o.model is None:
            labels: NDArray[np.integer[Any]] = open_tokens(o.tokens).labels
        else:
            classes = present(read_folder(resolve(o.model)).classes, f"{o.model} has no classes; it takes prompts")
            labels = class_ids(photo_set(o.set).open(o.data, "train"), classes)
        return np.bincount(labels, minlength=self.base.num_classes)

    def key(self, row: str, **more: Any) -> dict[str, Any]:
        return {"table": self.table, "row": row, **more}

    def chosen(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that `--rows` names; all without it."""
        names = self.options.rows
        known = [row.name for row in rows]
        for name in names or ():
            require(name in known, f"row {name!r} does not exist; {self.table} has {'; '.join(known)}")
        return [row for row in rows if names is None or row.name in names]

    # Training

    def recipe(self, row: Row, *, seed: int) -> ModelRecipe:
        """Return the recipe of a row: all rows have the same data, optimizer, batch and number of steps.

        A fine-tune has a quarter of the steps and of the learning rate.
        """
        o = self.options
        data: dict[str, Any] = {}
        more: dict[str, Any] = {}
        steps, lr = o.steps, o.lr
        if row.tuned is not None:
            start, steps, lr = self.weights(row.untuned(), seed=seed), max(1, steps // 4), lr / 4
            more["init_from"] = str(start)
        if row.tuned == "guidance":
            more |= {"label_drop": 0.0, "guidance_scales": GUIDANCE_RANGE}
        elif row.tuned == "orders":
            path = o.work / f"orders-{start.name}.npy"
            if not path.exists():
                engine = self.trained(row.untuned(), seed=seed)
                write_orders(engine, open_tokens(o.tokens), path, batch_size=o.sample_batch)
            data["orders"] = str(path)
        return ModelRecipe(
            model=row.model,
            data=TokenData(str(o.tokens), None if o.validation is None else str(o.validation), **data),
            optim=OptimRecipe(lr, warmup=0.05, ema=max(0.0, 1 - 6 / steps)),  # over a sixth of the run
            run=RunRecipe(
                steps=steps,
                batch_size=o.batch_size,
                log_every=max(1, steps // 50),
                validate_every=max(1, steps // 10),
                sample_every=10**9,
                save_every=max(1, steps // 4),
            ),
            seed=seed,
            **more,
        )

    def weights(self, row: Row, *, seed: int = 0) -> Path:
        """Return the folder of a row's weights, in 8 bits; train the row where there is none."""
        o, name = self.options, f"{row.trained_as}-seed{seed}"
        target: Path = o.out / WEIGHTS / name
        work: Path = o.work / name
        for folder in (target, work):
            self._check_training(folder)
        if target.exists():
            return target
        recipe = self.recipe(row, seed=seed)
        write_json(work / TRAINING, {name: getattr(o, name) for name in TRAINED_WITH})

        def run(recipe: ModelRecipe, folder: Path, *, resume: bool, device: str) -> AnyPath:
            return train_row(row, recipe, folder, resume=resume, device=device)

        if not train_until(self.deadline, recipe, work, o.out / TRAIN / name, device=o.device, train=run):
            raise OutOfTimeError
        part = target.with_name(f".{name}")
        store_row(row, work / "model", part)
        for file in (METRICS, TRAINING):
            shutil.copyfile(work / file, part / file)
        part.rename(target)
        return target

    def _check_training(self, folder: Path) -> None:
        """Raise an `InputError` where a row was trained, or its training begun, with other options."""
        if not folder.exists():
            return
        path = folder / TRAINING
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        wanted = {name: getattr(self.options, name) for name in TRAINED_WITH}
        other = [f"{name} {found.get(name)}, not {value}" for name, value in wanted.items() if found.get(name) != value]
        require(not other, f"{folder} was trained with other options ({'; '.join(other)}); use those, or delete it")

    def trained(self, row: Row, *, seed: int = 0) -> RowEngine:
        """Return the engine of a trained row; raise `OutOfTimeError` where the call ends before its training."""

        def load() -> RowEngine:
            network = load_row(row, self.weights(row, seed=seed), device=self.device, dtype=self.dtype)
            return RowEngine(network, confidence=row.confidence)

        return self._loaded((row.trained_as, row.confidence, seed), load)

    def _loaded(self, key: Any, load: Callable[[], RowEngine]) -> RowEngine:
        """Return the engine of `key`; the last one stays loaded."""
        if self._engine is None or self._engine[0] != key:
            self._engine = None
            self._engine = key, load()
        return self._engine[1]

    @property
    def subject_name(self) -> str:
        """The name of the model that is sampled in several ways: `--model`, or the even split of `designs`."""
        return str(self.options.model or designs(self.base)[0].name)

    def subject(self, seed: int = 0) -> RowEngine:
        """Return the engine of that model; `seed`: of the training of a row."""
        name = self.options.model
        if name is None:
            return self.trained(designs(self.base)[0], seed=seed)
        return self._loaded(name, lambda: RowEngine(load_model(resolve(name), device=self.device, dtype=self.dtype)))

    def curve(self, row: Row) -> dict[str, Any]:
        """Return the losses of a finished run by the number of samples."""
        path = self.weights(row, seed=0) / METRICS
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        size = self.options.batch_size
        return {
            name: [[e["step"] * size, round(e[name], 4)] for e in entries if name in e]
            for name in ("loss", "validation loss")
        }

    # Quality

    @torch.no_grad()
    def pixels(self, engine: RowEngine, labels: Any, settings: SamplingSettings, *, seed: int) -> Iterator[Tensor]:
        """Yield sampled images, uint8 `[B, H, W, 3]`; image i has label i and seed `seed` + i."""
        size = self.options.sample_batch
        for start in range(0, len(labels), size):
            part = labels[start : start + size].tolist()
            ids_BN = engine.generate(part, range(seed + start, seed + start + len(part)), settings)
            yield to_uint8(self.tokenizer.decode(ids_BN, engine.model.config.grid))

    @torch.no_grad()
    def inpainted(self, engine: RowEngine, labels: Any, settings: SamplingSettings) -> Iterator[Tensor]:
        """Yield test images, uint8 `[B, H, W, 3]`, whose middle (three quarters of each side) is sampled again."""
        tokens, size, (height, width) = open_tokens(self.options.validation), self.options.sample_batch, self.base.grid
        known_hw = torch.ones(height, width, dtype=torch.bool)
        known_hw[height // 8 : height - height // 8, width // 8 : width - width // 8] = False
        for start in range(0, len(labels), size):
            index = np.arange(start, min(start + size, len(labels)))
            ids_BN = torch.from_numpy(tokens.gather(index, np.zeros_like(index)))
            part = labels[index].tolist()
            request = tasks.fill(engine.model, part, index.tolist(), ids_N=ids_BN, known_N=known_hw.flatten())
            yield to_uint8(self.tokenizer.decode(engine.fill(request, settings), engine.model.config.grid))

    def test_images(self, num: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield ids `[B, N]`, random orders `[B, N]` and labels `[B]` of the first `num` test images."""
        tokens = open_tokens(self.options.validation)
        for index in np.split(np.arange(min(num, len(tokens))), range(batch_size, min(num, len(tokens)), batch_size)):
            ids_BN = torch.from_numpy(tokens.gather(index, np.zeros_like(index)))
            order_BN = make_orders("random", tokens.grid, index.tolist())
            yield ids_BN, order_BN, torch.from_numpy(tokens.labels[index].astype(np.int64))

    @torch.no_grad()
    def random_order_bits(self, engine: RowEngine, num: int) -> float:
        """Return the mean bits of a token of test images in random orders, teacher-forced."""
        parts = [
            token_bits(engine.model, ids_BN, class_condition(engine.model, labels_B), order_BN).mean(1)
            for ids_BN, order_BN, labels_B in self.test_images(num, 32)
        ]
        return float(torch.cat(parts).double().mean())

    def features(
        self, engine: RowEngine, settings: SamplingSettings, num: int, *, seed: int
    ) -> tuple[Features, dict[str, Any]]:
        """Return the features of `num` samples, and their class accuracy where there is a classifier."""
        labels = labels_like(self.counts, num)
        return self.features_of(self.pixels(engine, labels, settings, seed=seed), labels)

    def features_of(self, batches: Iterator[Tensor], labels: Any) -> tuple[Features, dict[str, Any]]:
        """Return the features of images with these labels, and their class accuracy where there is a classifier."""
        found, accuracy = collect_classified(self.inception, self.classifier, batches, labels)
        if accuracy is None:
            return found, {}
        interval = wilson(round(accuracy * len(labels)), len(labels))
        return found, {"accuracy": accuracy, "accuracy interval": list(interval)}

    def fid(self, features: Features) -> tuple[float, Any]:
        """Return FID against the training split, and how much each sample moves it."""
        ours, theirs = features.pool.to(self.device), self.reference.pool.to(self.device)
        assert features.pool_MF is not None
        return frechet_distance(ours, theirs), frechet_influence(ours, theirs, features.pool_MF).cpu().numpy()

    def fid_line(self, features: Features, more: dict[str, Any]) -> dict[str, Any]:
        """Return FID with its interval."""
        value, influence = self.fid(features)
        return {"fid": round(value, 4), "fid interval": [round(end, 4) for end in bootstrap(value, influence)], **more}

    def quality(self, engine: RowEngine, settings: SamplingSettings, num: int, *, seed: int) -> dict[str, Any]:
        """Return FID with its interval, class accuracy, and the settings."""
        line = self.fid_line(*self.features(engine, settings, num, seed=seed))
        return {**line, "settings": sampler_settings(engine, settings)}

    def search(self, row: str, samplers: Sequence[Sampler], *, share: float = 1 / 10, **where: Any) -> list[Sampler]:
        """Search by halves, with other seeds than those of the measurements; return the best first.

        Every measurement is a line of its own, of the row `row` and with the values `where`, so that a search goes on
        in the next call. The first of two rounds has `share` of `--num` samples: 1,000 are two batches of 500, the
        one shape that graphs are captured for.
        """

        def measure(each: Sampler, num: int) -> float:
            def fid() -> dict[str, Any]:
                features, _ = self.features(*each, num, seed=10**6)
                value = frechet_distance(features.pool.to(self.device), self.reference.pool.to(self.device))
                return {"fid": round(value, 4)}

            key = self.key(row, **where, samples=num, settings=sampler_settings(*each), measure="search")
            line = self.queue.line(key, fid)
            log.info("%-24s %d samples  FID %.2f  %.1f s", row, num, line["fid"], line["seconds"])
            return float(line["fid"])

        first = max(2, round(share * self.options.num))
        return [each for each, _, _ in halving(samplers, measure, first=first, last=2 * first)]

    def best_guidance(self, row: str, engine: RowEngine, settings: SamplingSettings, **where: Any) -> SamplingSettings:
        """Search the guidance scale; `where`: as in `search`."""
        options = [(engine, dataclasses.replace(settings, guidance=scale)) for scale in SCALES]
        return self.search(row, options, steps=settings.steps, **where)[0][1]

    # Speed

    @torch.no_grad()
    def speed(
        self, engine: RowEngine, settings: SamplingSettings, batch: int, *, tokenizer: VQTokenizer | None = None
    ) -> dict[str, Any]:
        """Time batches of tokens after a warm-up; return images per second, latency and peak memory.

        `tokenizer`: images are made as well. Peak memory is that of the allocator and what only graphs can use.
        """
        config = engine.model.config
        engine.graphs.clear()
        gc.collect()
        if self.device.type == "cuda":  # memory of other rows is not counted
            torch.cuda.empty_cache()
        labels = [i % config.num_classes for i in range(batch)]

        def generate(first: int) -> None:
            ids_BN = engine.generate(labels, range(first, first + batch), settings)
            if tokenizer is not None:
                tokenizer.decode(ids_BN, config.grid)

        for i in range(3):  # eagerly, captured, replayed
            generate(i)
        plan_from_nothing.cache_clear()  # every timed batch is planned, whatever rows were measured before
        reset_peak(self.device)
        times = []
        for i in range(self.options.repeats):
            synchronize(self.device)
            began = time.perf_counter()
            generate(100 * i)
            synchronize(self.device)
            times.append(time.perf_counter() - began)
        middle = sorted(times)[len(times) // 2]
        found = {"batch": batch, "images/s": batch / middle, "range": [batch / max(times), batch / min(times)]}
        peak = peak_bytes(self.device) + sum(map(idle_graph_bytes, engine.graphs.captured.values()))
        found |= {"seconds per batch": middle, "GiB": peak / 2**30, "engine": engine.mode}
        if self.device.type == "cuda":
            found["GiB reserved"] = torch.cuda.max_memory_reserved(self.device) / 2**30
        return found | {"device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"}

    def random_engine(self, row: Row, config: Any) -> RowEngine:
        """Return an engine with random weights, made on the device: on a CPU, 1.3 billion of them take long."""

        def load() -> RowEngine:
            with self.device:
                network: TokenDecoder = row.build(config).to(self.dtype).eval().requires_grad_(False)
            for parameter in network.parameters():
                parameter.normal_(std=0.02) if parameter.dim() >= 2 else parameter.fill_(1.0)
            return RowEngine(network, confidence=row.confidence)

        return self._loaded(("random", row.peer, config, row.confidence), load)


def sampler_settings(engine: RowEngine, settings: SamplingSettings) -> dict[str, Any]:
    """Return settings as JSON values, with the confidence of the engine where it has one."""
    found = json_settings(settings)
    return found if engine.confidence is None else {**found, "order": f"confident, noise {engine.confidence:g}"}


def row_settings(row: Row, steps: int) -> SamplingSettings:
    """Return the sampling settings of a row, before the guidance is chosen."""
    return SamplingSettings(steps=steps, order=row.order, guidance=3.0)
