"""Measure the full training step (forward, backward, clip, AdamW, moving average) on random tokens.

python benchmarks/train_speed.py --model arpg-l --batch-size 256 --steps 20 --out benchmarks/results/train.json

`--no-ema` leaves out the moving average. `--ablate NAME ...` turns optimisations off, to measure what each of them
brings. `--profile` prints the kernels of a step.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from arpg.config import MODELS
from arpg.data.tokens import TokenWriter
from arpg.device import gpu_spec
from arpg.kernels import ops, residual_norm
from arpg.train import model as training_module
from arpg.train.distributed import start, stop
from arpg.train.model import ModelTraining
from arpg.train.recipe import ModelRecipe, OptimRecipe, RunRecipe, TokenData

ABLATIONS = {
    "graph": "gradients are computed, not replayed",
    "keys": "dropout keys layer by layer",
    "copies": "gradients of the shared memory are added two by two",
    "once": "the first query is made for every slot",
    "clip": "clip_grad_norm_ before AdamW",
    "stages": "no rows are fetched ahead in the backward pass of residual and norm",
}


def ablate(names: list[str]) -> None:
    """Replace the named optimisations by their plain twins."""
    if "keys" in names:
        ops.fold_keys = lambda key, count: tuple(ops.fold_key(key, number) for number in range(count))
    if "copies" in names:
        ops.grad_fanout = lambda x, count: (x,) * count
    if "once" in names:
        ops._expanded_once = lambda function, x: function(x)
    if "clip" in names:

        def clip(optimizer: torch.optim.Optimizer, most: float) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, most)

        training_module.clip_gradients = clip
    if "stages" in names:
        residual_norm._STAGES, residual_norm._PROGRAMS = 1, 1024


def profile(training: ModelTraining, step: int, most: int = 40) -> None:
    """Print the kernels of one step: milliseconds, launches, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        training.step(step)
        torch.cuda.synchronize()
    kernels = [kernel for kernel in profiler.key_averages() if not kernel.is_user_annotation]
    kernels = sorted(kernels, key=lambda kernel: -kernel.self_device_time_total)
    total = sum(kernel.self_device_time_total for kernel in kernels)
    print(f"{total / 1000:9.3f} ms in all")
    for kernel in kernels[:most]:
        print(f"{kernel.self_device_time_total / 1000:9.3f} ms {kernel.count:5d}x  {kernel.key[:120]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="arpg-l", choices=sorted(MODELS))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ablate", nargs="*", default=[], choices=ABLATIONS, metavar="NAME", help=f"{ABLATIONS}")
    parser.add_argument("--no-ema", action="store_true", help="without the moving average of the weights")
    parser.add_argument("--one-pass", action="store_true", help="AdamW and the average in one kernel")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of a step")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ablate(options.ablate)
    config = MODELS[options.model]
    world = start("auto")
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        writer = TokenWriter(tokens, grid=config.grid, vocab_size=config.vocab_size, classes=(), views=1)
        rng = np.random.default_rng(0)
        num_tokens = config.grid[0] * config.grid[1]
        writer.add(rng.integers(config.vocab_size, size=(2048, 1, num_tokens)).astype(np.uint16), np.zeros(2048, int))
        writer.close()
        recipe = ModelRecipe(
            model=config,
            data=TokenData(train=str(tokens)),
            optim=OptimRecipe(lr=1e-4, one_pass=options.one_pass, **({"ema": 0.0} if options.no_ema else {})),
            run=RunRecipe(
                steps=10_000,
                batch_size=options.batch_size,
                accumulate=options.accumulate,
                graph="graph" not in options.ablate,
            ),
        )
        training = ModelTraining(recipe, Path(folder) / "run", world)
        began = time.perf_counter()
        for step in range(5):
            loss = training.step(step)["loss"]
        float(loss)
        compiled = time.perf_counter() - began
        torch.cuda.synchronize()
        began = time.perf_counter()
        for step in range(5, 5 + options.steps):
            loss = training.step(step)["loss"]
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / options.steps
        if options.profile:
            profile(training, 5 + options.steps)
    name = torch.cuda.get_device_name()
    spec = gpu_spec(name)
    result = {
        "benchmark": "train_speed",
        "model": options.model,
        "batch_size": options.batch_size,
        "precision": recipe.run.precision,
        "moving average": recipe.optim.ema > 0,
        "one pass": recipe.optim.one_pass,
        "without": options.ablate,
        "images/s": round(options.batch_size / seconds, 1),
        "ms/step": round(1000 * seconds, 2),
        "mfu": round(training.flops_per_step() / seconds / (spec.bf16_flops if spec else float("nan")), 4),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first 5 steps s": round(compiled, 1),
        "loss": round(float(loss), 4),
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    stop()
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
