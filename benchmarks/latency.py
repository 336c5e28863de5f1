"""How long one image takes, tokens and pixels, after loading: the median of several, in a fresh process.

python benchmarks/latency.py --model garden --device cpu --out benchmarks/results/latency-cpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from arpg import Pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="garden")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    pipe = Pipeline.from_pretrained(options.model, device=options.device)
    loading = time.perf_counter() - began
    times = []
    for seed in range(options.repeats + 1):
        began = time.perf_counter()
        pipe.generate(seed % len(pipe.classes), seed=seed)
        times.append(time.perf_counter() - began)
    cuda = pipe.model.device.type == "cuda"
    result = {
        "benchmark": "latency",
        "model": options.model,
        "loading s": round(loading, 2),
        "first image s": round(times[0], 3),
        "median s": round(statistics.median(times[1:]), 3),
        "worst s": round(max(times[1:]), 3),
        "steps": pipe.sampling.steps,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps(result, indent=1)
    print(text)  # noqa: T201
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
