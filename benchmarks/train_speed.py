"""Measure the full training step (forward, backward, clip, AdamW, moving average) on random tokens.

python benchmarks/train_speed.py --model arpg-l --batch-size 256 --steps 20 --out benchmarks/results/train-arpg-l.json
python benchmarks/train_speed.py --model arpg-l --batch-size 256 --ablate graph keys

`--no-ema` leaves out the moving average. `--ablate NAME ...` leaves out optimisations, to see what each is worth.
`--profile` prints the most expensive kernels of a step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from arpg.bench.profile import profile_kernels
from arpg.config import MODELS
from arpg.data.tokens import TokenWriter
from arpg.device import gpu_spec
from arpg.files import write_json
from arpg.kernels import ops, residual_norm
from arpg.train import model as training_module
from arpg.train.distributed import init_distributed, shutdown_distributed
from arpg.train.model import ModelTraining
from arpg.train.recipe import ModelRecipe, OptimRecipe, RunRecipe, TokenData

ABLATIONS = {
    "graph": "compute the gradients without a CUDA graph",
    "keys": "make the dropout keys layer by layer",
    "copies": "add the gradients of the shared memory two by two",
    "once": "make the first query for every slot",
    "clip": "run clip_grad_norm_ before AdamW",
    "stages": "fetch no rows ahead in the backward pass of residual and norm",
}


def ablate(names: list[str]) -> None:
    """Replace optimisations by their plain counterparts."""
    unknown = [name for name in names if name not in ABLATIONS]
    if unknown:
        sys.exit(f"train_speed.py: --ablate {' '.join(unknown)} does not exist; expected one of {', '.join(ABLATIONS)}")
    if "keys" in names:
        _replace(ops, fold_keys=lambda key, count: tuple(ops.fold_key(key, number) for number in range(count)))
    if "copies" in names:
        _replace(ops, grad_fanout=lambda x, count: (x,) * count)
    if "once" in names:
        _replace(ops, _expanded_once=lambda function, x: function(x))
    if "clip" in names:

        def clip(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)

        _replace(training_module, clip_gradients=clip)
    if "stages" in names:
        _replace(residual_norm, _STAGES=1, _PROGRAMS=1024)


def _replace(module: ModuleType, **values: object) -> None:
    """Set attributes of a module; one that the code no longer has would leave the speed as it is, unnoticed."""
    for name, value in values.items():
        if not hasattr(module, name):
            sys.exit(f"train_speed.py: {module.__name__} has no {name} any more; this --ablate has to follow the code")
        setattr(module, name, value)


def measure(training: ModelTraining, first: int, steps: int) -> float:
    """Return the seconds of a step, over `steps` steps."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in range(first, first + steps):
        training.step(step)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="arpg-l", choices=sorted(MODELS))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    listed = "; ".join(f"{name}: {text}" for name, text in ABLATIONS.items())
    parser.add_argument("--ablate", nargs="*", default=[], metavar="NAME", help=listed)
    parser.add_argument("--no-ema", action="store_true", help="without the moving average of the weights")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of --steps steps; the median counts")
    parser.add_argument("--profile", action="store_true", help="also print the most expensive kernels of a step")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ablate(options.ablate)
    if not torch.cuda.is_available():
        sys.exit("train_speed.py: torch sees no GPU; the full step is measured on one")
    config = MODELS[options.model]
    world = init_distributed("auto")
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
            optim=OptimRecipe(lr=1e-4, ema=0.0 if options.no_ema else OptimRecipe.ema),
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
        next_step = 5 + options.rounds * options.steps
        times = [measure(training, first, options.steps) for first in range(5, next_step, options.steps)]
        loss = training.step(next_step)["loss"]
        if options.profile:
            for kernel in profile_kernels(lambda: training.step(next_step + 1))["top kernels"]:
                print(f"{kernel['ms']:9.3f} ms {kernel['launches']:5d}x  {kernel['kernel']}")
    name = torch.cuda.get_device_name()
    spec, per_step = gpu_spec(name), statistics.median(times)
    result = {
        "benchmark": "train_speed",
        "model": options.model,
        "batch_size": options.batch_size,
        "precision": recipe.run.precision,
        "moving average": recipe.optim.ema > 0,
        "without": options.ablate,
        "images/s": round(options.batch_size / per_step, 1),
        "ms/step": round(1000 * per_step, 2),
        "ms/step of each round": [round(1000 * each, 2) for each in times],
        "mfu": round(training.flops_per_step() / per_step / (spec.bf16_flops if spec else float("nan")), 4),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first 5 steps s": round(compiled, 1),
        "loss": round(float(loss), 4),
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    shutdown_distributed()
    print(json.dumps(result, indent=1))
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
