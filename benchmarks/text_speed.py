"""Text-to-image throughput in the paper's setting: ARPG-XL, 32 x 32 tokens, 64 steps, guidance 8, top-k 900, batch 64.

    python benchmarks/text_speed.py --out benchmarks/results/text-xl.json

Weights and text states are random: speed does not depend on them. Only the tokens are counted, as in the paper.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch

from arpg import ARPG, Request, SamplingSettings, make_plan
from arpg.bench.throughput import idle_graph_bytes
from arpg.config import ENGINES, MODELS, TextConfig
from arpg.decode import Engine
from arpg.device import peak_bytes, reset_peak
from arpg.files import write_json
from arpg.model import text_condition


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="arpg-xl", choices=list(MODELS))
    parser.add_argument("--side", type=int, default=32, help="Of the token grid.")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=120, help="Of every prompt.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", default="auto", choices=ENGINES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    text = TextConfig("flan-t5-xl", 2048, 120)
    grid = (options.side, options.side)
    config = dataclasses.replace(MODELS[options.model], grid=grid, num_classes=0, text=text)
    with torch.device(device):
        model = ARPG(config).to(dtype).eval()
    for parameter in model.state_dict().values():
        torch.nn.init.normal_(parameter, std=0.02)
    states = [torch.randn(options.tokens, text.width, device=device) for _ in range(options.batch_size)]
    settings = SamplingSettings(steps=options.steps, guidance=8.0, top_k=900)
    engine, warmup, times = Engine(model, options.engine), 2, []  # the second may be recorded
    for repeat in range(warmup + options.repeats):
        if repeat == warmup:
            reset_peak(model.device)
        seeds = tuple(range(repeat * options.batch_size, (repeat + 1) * options.batch_size))
        with torch.no_grad():
            request = Request.from_nothing(text_condition(model, states), grid, seeds)
        plan = make_plan(grid, request.known_BN, request.seeds, settings)
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        *_, last = engine.decode(request, plan, settings)
        last.ids_BN.sum().item()  # waits
        times.append(time.perf_counter() - began)
    median = statistics.median(times[warmup:])
    peak = peak_bytes(model.device) + sum(map(idle_graph_bytes, engine.graphs.captured.values()))
    result = {
        "benchmark": "text_speed",
        "model": options.model,
        "grid": list(grid),
        "steps": options.steps,
        "batch size": options.batch_size,
        "prompt tokens": options.tokens,
        "engine": engine.mode,
        "images/s": round(options.batch_size / median, 2),
        "worst images/s": round(options.batch_size / max(times[warmup:]), 2),
        "peak GiB": round(peak / 2**30, 2) if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=1))
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
