"""Time the authors' code beside ours, in one run: same size, batch, steps, precision and guidance; tokens only.

    git clone https://github.com/hp-l33/ARPG published
    python -m benchmarks.published_speed published --model arpg-l arpg-xl arpg-xxl --batch 64 1 --out both.json

The checkout is only imported (`models/arpg.py`, which needs einops and transformers) and never changed. Weights are
random in both: speed does not depend on them. Their `torch.compile` wraps `forward`, which `generate` does not call, so
it is left out. Ours is measured as by `arpg bench`; a batch of theirs is timed from its labels to its tokens, and
images/s follow from the median. The record is one of `arpg bench`, whose rows have `code`: here or published.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from arpg.bench.case import Case, open_pipeline
from arpg.bench.record import environment, write_record
from arpg.bench.throughput import MeasureOptions, Row, latency_percentiles, measure
from arpg.config import ModelConfig
from arpg.device import choose_device, choose_dtype, peak_bytes, reset_peak, synchronize
from arpg.errors import InputError, require
from arpg.tables import markdown_table, significant

PUBLISHED = {"arpg-l": "ARPG-L", "arpg-xl": "ARPG-XL", "arpg-xxl": "ARPG-XXL"}
WARMUP = 3


def published_models(checkout: Path) -> dict[str, Any]:
    """Return the constructors of the published networks by name."""
    path = checkout / "models" / "arpg.py"
    require(path.is_file(), f"{path} does not exist; expected a checkout of https://github.com/hp-l33/ARPG")
    spec = importlib.util.spec_from_file_location("published_arpg", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"the published code imports {error.name}, which is not installed; install it") from None
    return dict(module.ARPG_models)


def published_commit(checkout: Path) -> str | None:
    """Return the commit of the checkout; None: it is not a repository of its own."""
    if not (checkout / ".git").exists():
        return None
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True)
    return run.stdout.strip() or None


def measure_ours(
    model: str, batch: int, options: argparse.Namespace, device: torch.device
) -> tuple[Row, Case, ModelConfig]:
    """Return the row of our code, its case and the sizes of the network."""
    pipe = open_pipeline(model, random=True, device=str(device), dtype=options.precision, engine="auto")
    same = {"steps": options.steps, "guidance": options.guidance, "guidance_schedule": "linear", "schedule": "arccos"}
    settings = pipe.sampling.settings(**same)
    case = Case(f"{model} (random)", batch, settings, pipe.model.config.grid)
    found = measure(
        pipe,
        case,
        MeasureOptions(repeats=options.repeats, warmup=WARMUP, pixels=False, split=False),
        limits=lambda dtype: None,
    )
    found["settings"]["code"] = "here"
    found["parameters"] = sum(weight.numel() for weight in pipe.model.state_dict().values())
    return found, case, pipe.model.config


def measure_published(
    network: torch.nn.Module, ours: Row, case: Case, *, num_classes: int, repeats: int, device: torch.device
) -> Row:
    """Return the row of the published code, with the settings of `ours`."""
    labels_B, settings, times = torch.arange(case.batch, device=device) % num_classes, case.settings, []
    for index in range(WARMUP + repeats):
        if index == WARMUP:
            reset_peak(device)
        synchronize(device)
        began = time.perf_counter()
        network.generate(  # type: ignore[operator]
            labels_B,
            guidance_scale=settings.guidance,
            cfg_schedule=settings.guidance_schedule,
            sample_schedule=settings.schedule,
            seq_len=case.tokens,
            num_iter=settings.steps,
        )
        synchronize(device)
        times.append(time.perf_counter() - began)
    speed = significant(case.batch / statistics.median(times[WARMUP:]))
    return {
        "settings": {**ours["settings"], "engine": "eager", "code": "published"},
        "images/s": speed,
        "token images/s": speed,
        "latency ms": latency_percentiles(times[WARMUP:]),
        "peak GiB": significant(peak_bytes(device) / 2**30),
        "batches timed": repeats,
        "pixels": False,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
    }


def table(rows: Sequence[Row]) -> str:
    """Return both codes beside each other, a line for each model and batch."""
    lines = []
    for here, there in zip(rows[::2], rows[1::2], strict=True):
        cells = [here["settings"]["model"], here["settings"]["batch"]]
        for name in ("token images/s", "peak GiB"):
            cells += [here[name], there[name]]
        cells += [here["latency ms"]["p50"], there["latency ms"]["p50"]]
        lines.append([str(cell) for cell in [*cells, significant(here["token images/s"] / there["token images/s"], 3)]])
    both = [f"{what}, {code}" for what in ("images/s", "GiB", "p50 ms") for code in ("here", "published")]
    return markdown_table(["model", "batch", *both, "times"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="A checkout of the published code.")
    parser.add_argument("--model", nargs="+", default=["arpg-l"], help="Presets, or PUBLISHED=FOLDER.")
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device, models = choose_device(options.device), published_models(options.checkout)
    about = {**environment(device), "published commit": published_commit(options.checkout)}
    rows: list[Row] = []
    for model in options.model:
        name, _, folder = model.rpartition("=")
        name = name or PUBLISHED.get(folder, folder)
        require(name in models, f"the published code has no model {name!r}; expected one of {', '.join(models)}")
        for batch in options.batch:
            here, case, config = measure_ours(folder, batch, options, device)
            _release(device)
            network = models[name](vocab_size=config.vocab_size, num_classes=config.num_classes)
            network.to(device=device, dtype=choose_dtype(options.precision, device)).eval()
            rows.append(here)
            rows.append(
                measure_published(
                    network, here, case, num_classes=config.num_classes, repeats=options.repeats, device=device
                )
            )
            del network
            _release(device)
            if options.out:
                write_record(options.out, about, rows)
    print(table(rows))


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
