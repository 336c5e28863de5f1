"""What lower precision does to the tokens: each against float32 on the same context, step by step; and to the images.
And what another engine does to them: graph and compiled against eager, in float32 all the same.

    python benchmarks/precision.py --device cpu --batch 8 --out precision-garden-cpu.json
    python benchmarks/precision.py --batch 136 --classifier runs/classifier --out precision-garden.json
    python benchmarks/precision.py --model arpg-l --batch 16 --steps 32 --out precision-arpg-l.json

A preset has random weights and a head that is not zero. With a classifier (a folder), each precision also draws images
of its own, whose classes it judges. Engines (on a GPU) are told apart by their draws on the same context and, run
freely, by their tokens; if one differs in float32, the exit code is 1. What the device cannot do is left out, with the
reason. "head in full": the same, but for the head, which stays in 16 (on a CPU, 32) bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arpg.bench.agreement import agreement, equal_share, generate, on_context, sampled_on_context, tokens_of
from arpg.bench.case import Case, open_pipeline
from arpg.bench.record import environment
from arpg.config import MODELS
from arpg.decode import Engine
from arpg.device import choose_device
from arpg.errors import InputError
from arpg.files import write_whole
from arpg.image import to_uint8
from arpg.pipeline import Pipeline, prepare
from arpg.quantization.precision import to_precision

Rows = dict[str, dict[str, Any]]
KINDS = ("float32", "bfloat16", "float16", "fp8", "int8")


def open_in(name: str, kind: str, device: torch.device) -> Pipeline:
    """`fp8, head in full` leaves the head as it is."""
    precision, _, rest = kind.partition(",")
    pipe = open_pipeline(name, random=name in MODELS, device=str(device), dtype="float32")
    if precision != "float32":
        to_precision(pipe.model, precision, device, head=not rest)
        prepare(pipe.model, pipe.tokenizer)
        pipe.tokenizer.decode_in(torch.float32)  # the judge sees the tokens, not the pixels' precision
    return pipe


@torch.no_grad()
def class_accuracy(pipe: Pipeline, case: Case, ids_BN: Tensor, folder: Path) -> float:
    from arpg.evaluation.classifier import Classifier, accuracy

    judge = Classifier.load(folder, device=pipe.model.device)
    labels = torch.arange(case.batch) % pipe.model.config.num_classes
    pixels = torch.cat([to_uint8(pipe.tokenizer.decode(part, case.grid)) for part in ids_BN.split(64)])
    return round(float(accuracy(judge, pixels.cpu().numpy(), labels.numpy())["top1"]), 4)


def engine_rows(name: str, case: Case, kinds: Sequence[str], engines: Sequence[str], device: torch.device) -> Rows:
    """Each engine against eager, in each precision: shares of equal draws (same context) and tokens (run freely)."""
    rows: Rows = {}
    for kind in kinds:
        try:
            eager = open_in(name, kind, device)
        except (InputError, RuntimeError) as error:
            rows[kind] = {"left out": _first_line(error)}
            continue
        free = generate(eager.model, case)
        drawn = [draws.cpu() for _, draws in on_context(eager.model, case, free)]
        for engine in sorted(engines, key=lambda engine: engine == "compiled"):  # which changes the model: comes last
            label = f"{kind}, {engine}"
            try:
                way = Engine(eager.model, engine)
                tokens = equal_share([tokens_of(way, case).cpu()], [free.cpu()])
                found = [draws.cpu() for draws in sampled_on_context(way, case, free)]
                rows[label] = {"equal draws": equal_share(found, drawn), "equal tokens": tokens}
            except Exception as error:  # a compiler has many ways to fail; the others still count
                rows[label] = {"left out": _first_line(error)}
    return rows


def differs(rows: Rows) -> list[str]:
    """Engines that do not draw in float32 what eager draws."""
    drawn = {label: set(row.values()) for label, row in rows.items() if "left out" not in row}
    return [label for label, shares in drawn.items() if label.startswith("float32") and shares != {1.0}]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['nothing said'])[0][:200]}"


def seconds(pipe: Pipeline, case: Case, rounds: int) -> float:
    """Of a batch's tokens, the median."""
    before = 2 if pipe.engine.mode == "graph" else 1  # the second one is recorded
    times = []
    for _ in range(rounds + before):
        began = time.perf_counter()
        tokens_of(pipe.engine, case).cpu()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times[before:]), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="garden", help="garden, a folder, or a preset (random weights).")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precisions", nargs="+", default=[*KINDS[1:], "fp8, head in full", "int8, head in full"])
    parser.add_argument("--engines", nargs="*", help="Against eager; on a GPU, unless told otherwise, all.")
    parser.add_argument("--engine-precisions", nargs="*", default=["float32", "bfloat16", "fp8"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=3, help="Batches that are timed; 0: none.")
    parser.add_argument("--classifier", type=Path, help="A folder; without it there is no accuracy.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = choose_device(options.device)
    exact = open_in(options.model, "float32", device)
    case = Case(options.model, options.batch, exact.sampling.settings(steps=options.steps), exact.model.config.grid)
    ids = generate(exact.model, case)
    expected = [(logits.cpu(), drawn.cpu()) for logits, drawn in on_context(exact.model, case, ids)]
    del exact
    rows: dict[str, dict[str, Any]] = {}
    for kind in ["float32", *options.precisions]:
        try:
            pipe = open_in(options.model, kind, device)
            found = [(logits.cpu(), drawn.cpu()) for logits, drawn in on_context(pipe.model, case, ids)]
        except (InputError, RuntimeError) as error:
            rows[kind] = {"left out": _first_line(error)}
            continue
        rows[kind] = dict(agreement(found, expected))
        if options.rounds:
            rows[kind]["s of a batch"] = seconds(pipe, case, options.rounds)
        if options.classifier:
            rows[kind]["class accuracy"] = class_accuracy(pipe, case, generate(pipe.model, case), options.classifier)
    settings = {"model": options.model, "batch": options.batch, "steps": case.settings.steps}
    result = {"benchmark": "precision", **settings, "against float32": rows, "where": environment(device)}
    engines = options.engines
    if engines is None:
        engines = ["graph", "compiled"] if device.type == "cuda" else []
    if engines:
        result["against eager"] = engine_rows(options.model, case, options.engine_precisions, engines, device)
    text = json.dumps(result, indent=1)
    print(text)  # noqa: T201
    if options.out:
        write_whole(options.out, lambda path: path.write_text(text + "\n"))
    if wrong := differs(result.get("against eager", {})):
        raise SystemExit(f"not the tokens of eager: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
