"""Compare precisions with float32 and engines with eager: error of the logits, equal samples, speed.

    python -m benchmarks.precision --model garden --device cpu --batch 8 --out precision-garden-cpu.json
    python -m benchmarks.precision --model garden --batch 136 --classifier runs/classifier --out precision-garden.json
    python -m benchmarks.precision --model arpg-l --batch 16 --steps 32 --out precision-arpg-l.json
    python -m benchmarks.precision --model arpg-l --batch 64 --steps 32 --products
    python -m benchmarks.precision --model meadow --device cpu --batch 4 --rounds 0 --precisions bfloat16 \
        "float32, fp8 cache" "bfloat16, fp8 cache"

Both computations are teacher-forced: they continue from the same tokens after every step. A preset has random weights.
With a classifier (a folder), each precision also generates images, and their class accuracy is reported. Engines (on a
GPU) are compared by the samples on the same context and by the tokens of free runs; if one differs in float32, the exit
code is 1. What the device cannot run is left out, with the reason. "head in full": the head stays in 16 (on a CPU, 32)
bits; "fp8 cache": the key-value cache is float8. --products times the matrix products of one generation on a GPU
instead, in bf16 and in float8 with a scale for each row or one for all; every call takes other weights, so that they
come from memory as in a generation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.bench.case import Case, open_pipeline
from arpg.bench.record import environment, error_line
from arpg.checkpoint import prepare
from arpg.config import DEFAULT_MODEL, MODELS
from arpg.decode import Engine
from arpg.device import choose_device
from arpg.errors import InputError, require
from arpg.files import write_json
from arpg.image import to_uint8
from arpg.kernels.ops import to_float8
from arpg.pipeline import Pipeline
from arpg.quantization.precision import to_precision
from arpg.tokenizer import VQTokenizer
from benchmarks.measures import (
    agreement,
    equal_share,
    graph_microseconds,
    on_context,
    sampled_on_context,
    tokens_of,
)

Rows = dict[str, dict[str, Any]]
Calls = list[Callable[[], Tensor]]
Product = tuple[int, int]  # outputs, inputs

KINDS = ("float32", "bfloat16", "float16", "fp8", "int8")
PRODUCT_ROWS = (128, 512, 1024, 2048)  # that are printed
PRODUCT_BYTES = 128 * 2**20  # of different weights: more than a cache holds


def open_in(name: str, kind: str, device: torch.device) -> Pipeline:
    """Open a model in a precision; `fp8, head in full` leaves the head as it is, `fp8, fp8 cache` has such a cache."""
    precision, *rest = (part.strip() for part in kind.split(","))
    require(
        set(rest) <= {"head in full", "fp8 cache"}, f"precision is {kind!r}; expected 'head in full' or 'fp8 cache'"
    )
    pipe = open_pipeline(name, random=name in MODELS, device=str(device), dtype="float32")
    if kind != "float32":
        kv_cache_dtype = "fp8" if "fp8 cache" in rest else "auto"
        to_precision(pipe.model, precision, device, head="head in full" not in rest, kv_cache_dtype=kv_cache_dtype)
        assert isinstance(pipe.tokenizer, VQTokenizer)
        prepare(pipe.model, pipe.tokenizer)
        pipe.tokenizer.decode_in(torch.float32)  # the accuracy shows the effect on the tokens alone
    return pipe


@torch.no_grad()
def class_accuracy(pipe: Pipeline, case: Case, ids_BN: Tensor, folder: Path) -> float:
    """Return the share of images whose class the classifier recognises."""
    from arpg.evaluation.classifier import Classifier
    from experiments.scorer_training import accuracy

    classifier = Classifier.load(folder, device=pipe.model.device)
    labels = torch.arange(case.batch) % pipe.model.config.num_classes
    pixels = torch.cat([to_uint8(pipe.tokenizer.decode(part, case.grid)) for part in ids_BN.split(64)])
    return round(float(accuracy(classifier, pixels.cpu().numpy(), labels.numpy())["top1"]), 4)


def engine_rows(name: str, case: Case, kinds: Sequence[str], engines: Sequence[str], device: torch.device) -> Rows:
    """Return the shares of samples (same context) and tokens (free run) that equal eager's, by precision and engine."""
    rows: Rows = {}
    for kind in kinds:
        try:
            eager = open_in(name, kind, device)
        except (InputError, RuntimeError) as error:
            rows[kind] = {"left out": error_line(error)}
            continue
        free = tokens_of(Engine(eager.model, "eager"), case)
        expected = [sampled.cpu() for _, sampled in on_context(eager.model, case, free)]
        for engine in sorted(engines, key=lambda engine: engine == "compiled"):  # which changes the model, last
            label = f"{kind}, {engine}"
            try:
                other = Engine(eager.model, engine)
                tokens = equal_share([tokens_of(other, case).cpu()], [free.cpu()])
                found = [sampled.cpu() for sampled in sampled_on_context(other, case, free)]
                rows[label] = {"equal samples": equal_share(found, expected), "equal tokens": tokens}
            except Exception as error:  # a compiler fails in many ways; the others are still compared
                rows[label] = {"left out": error_line(error)}
    return rows


def differs(rows: Rows) -> list[str]:
    """Return the engines that do not sample in float32 what eager samples."""
    shares_of = {label: set(row.values()) for label, row in rows.items() if "left out" not in row}
    return [label for label, shares in shares_of.items() if label.startswith("float32") and shares != {1.0}]


def seconds(pipe: Pipeline, case: Case, rounds: int) -> float:
    """Return the median seconds of a batch's tokens."""
    before = 2 if pipe.engine.mode == "graph" else 1  # the second run captures the graph
    times = []
    for _ in range(rounds + before):
        began = time.perf_counter()
        tokens_of(pipe.engine, case).cpu()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times[before:]), 4)


@torch.no_grad()
def count_products(pipe: Pipeline, case: Case) -> Counter[tuple[Product, int]]:
    """Return how often a generation has each product with each number of rows."""
    found: Counter[tuple[Product, int]] = Counter()

    def count(layer: Any, args: tuple[Any, ...]) -> None:
        found[(layer.out_features, layer.in_features), args[0].numel() // layer.in_features] += 1

    layers = [layer for layer in pipe.model.modules() if hasattr(layer, "in_features")]
    handles = [layer.register_forward_pre_hook(count) for layer in layers]
    tokens_of(Engine(pipe.model, "eager"), case)
    for handle in handles:
        handle.remove()
    return found


def product_calls(product: Product, precision: str, x: Tensor) -> Calls:
    """Return calls of one product in bf16, or in float8 with a scale for each row or one for all."""
    size = 2 if precision == "bf16" else 1
    count = max(2, min(64, PRODUCT_BYTES // (size * product[0] * product[1])))
    weights = [0.02 * torch.randn(product, device=x.device, dtype=torch.bfloat16) for _ in range(count)]
    if precision == "bf16":
        return [lambda w=w: F.linear(x, w) for w in weights]  # type: ignore[misc]
    x8, weights8 = to_float8(x), [to_float8(weight / weight.abs().max() * 448) for weight in weights]
    ones = torch.ones(max(len(x), product[0]), device=x.device)
    scale_x, scale_w = (ones[: len(x), None], ones[None, : product[0]]) if "rows" in precision else (ones[0], ones[0])
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return [lambda w=w: torch._scaled_mm(x8, w.t(), scale_a=scale_x, scale_b=scale_w, **options) for w in weights8]  # type: ignore[misc]


def time_products(model: str, batch: int, steps: int | None) -> None:
    """Print the microseconds of each product by precision and rows, and the milliseconds of all in a generation."""
    pipe = open_pipeline(model, random=True, device="cuda", dtype="bfloat16", engine="eager")
    case = Case(model, batch, pipe.sampling.settings(steps=steps), pipe.model.config.grid)
    counts, whole = count_products(pipe, case), defaultdict[str, float](float)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us by rows", *PRODUCT_ROWS, flush=True)
    for product in sorted({product for product, _ in counts}):
        all_rows = sorted({*PRODUCT_ROWS, *(rows for each, rows in counts if each == product)})
        for precision in ("bf16", "fp8, rows", "fp8"):
            times: dict[int, float] = {}
            for rows in all_rows:
                x = torch.randn(rows, product[1], device="cuda", dtype=torch.bfloat16)
                try:
                    calls = product_calls(product, precision, x)
                    work = partial(lambda calls: [call() for call in calls], calls)
                    times[rows] = graph_microseconds(work, repeats=3)[0] / len(calls)
                except Exception as error:  # the other sizes are still timed
                    print(f"  {precision}, {rows} rows: {error_line(error)}", flush=True)
            spent = sum(counts[product, rows] * took for rows, took in times.items()) / 1000
            whole[precision] += spent
            cells = (f"{times.get(rows, float('nan')):8.2f}" for rows in PRODUCT_ROWS)
            print(f"  {product[0]:5} x {product[1]:4} {precision:10}", *cells, f"  all {spent:7.2f} ms", flush=True)
    for precision, spent in whole.items():
        print(f"  {sum(counts.values())} products of a generation, {precision}: {spent:.2f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="an installed name, a folder, or a preset (random weights)."
    )
    parser.add_argument("--device", default="auto")
    variants = ["fp8, head in full", "int8, head in full", "bfloat16, fp8 cache", "fp8, fp8 cache"]
    parser.add_argument("--precisions", nargs="+", default=[*KINDS[1:], *variants])
    parser.add_argument("--engines", nargs="*", help="Engines to compare with eager; default on a GPU: all.")
    parser.add_argument("--engine-precisions", nargs="*", default=["float32", "bfloat16", "fp8", "fp8, fp8 cache"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=3, help="Batches that are timed; 0 for none.")
    parser.add_argument("--classifier", type=Path, help="A folder; adds the class accuracy.")
    parser.add_argument("--products", action="store_true", help="Time the matrix products instead (GPU).")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = choose_device(options.device)
    if options.products:
        return time_products(options.model, options.batch, options.steps)
    exact = open_in(options.model, "float32", device)
    case = Case(options.model, options.batch, exact.sampling.settings(steps=options.steps), exact.model.config.grid)
    ids = tokens_of(Engine(exact.model, "eager"), case)
    expected = [(logits.cpu(), sampled.cpu()) for logits, sampled in on_context(exact.model, case, ids)]
    del exact
    rows: Rows = {}
    settings = {"model": options.model, "batch": options.batch, "steps": case.settings.steps}
    result = {"benchmark": "precision", **settings, "against float32": rows, "where": environment(device)}

    def keep() -> None:  # what comes later may fail, or be cut off
        if options.out:
            write_json(options.out, result)

    for kind in ["float32", *options.precisions]:
        try:
            pipe = open_in(options.model, kind, device)
            found = [(logits.cpu(), sampled.cpu()) for logits, sampled in on_context(pipe.model, case, ids)]
            row = dict(agreement(found, expected))
            if options.rounds:
                row["s of a batch"] = seconds(pipe, case, options.rounds)
            if options.classifier:
                row["class accuracy"] = class_accuracy(
                    pipe, case, tokens_of(Engine(pipe.model, "eager"), case), options.classifier
                )
            rows[kind] = row
        except (InputError, RuntimeError) as error:
            rows[kind] = {"left out": error_line(error)}
        keep()
    engines = options.engines
    if engines is None:
        engines = ["graph", "compiled"] if device.type == "cuda" else []
    if engines:
        result["against eager"] = engine_rows(options.model, case, options.engine_precisions, engines, device)
        keep()
    print(json.dumps(result, indent=1))
    if wrong := differs(result.get("against eager", {})):
        raise SystemExit(f"not the tokens of eager: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
