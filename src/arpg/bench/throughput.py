"""Speed: latency, throughput and peak memory of batches, how they grow with size, and the start of a fresh process.

Latency is that of one batch at a time. On a GPU, throughput is that of batches one after the other through
`pipelined_decode`, where nothing waits for the device in between; on a CPU nothing overlaps, and throughput follows
from the latency. Peak memory is the most that CUDA's allocator held plus what only captured graphs can use, or on a CPU
the most that the process held.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from arpg.bench.case import Case, open_pipeline
from arpg.bench.profile import profile_tokens, split_time
from arpg.bench.roofline import Limits, pixel_work, token_floor
from arpg.config import to_dict
from arpg.decode.engine import pipelined_decode
from arpg.decode.graphs import CapturedGraphs
from arpg.device import peak_bytes, reset_peak, set_threads, synchronize
from arpg.errors import InputError, require
from arpg.pipeline import Pipeline
from arpg.quantization.precision import kv_cache_dtype_of, precision_of
from arpg.tables import significant
from arpg.tokenizer import VQTokenizer

PERCENTILES = (50, 95, 99)
SCALING_TOKENS = (64, 256, 1024, 4096)
SCALING_BATCHES = (1, 4, 16, 64, 256)

Row = dict[str, Any]


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured, and for how long."""

    repeats: int = 10  # batches that are timed
    warmup: int = 2
    pixels: bool = True
    split: bool = True  # where the time goes, in a run of its own
    top_kernels: bool = False  # the most expensive kernels, on a GPU

    def __post_init__(self) -> None:
        require(self.repeats >= 1, f"repeats is {self.repeats}; expected 1 or more")
        require(self.warmup >= 0, f"warmup is {self.warmup}; expected 0 or more")


def measure(
    pipe: Pipeline, case: Case, options: MeasureOptions, *, limits: Callable[[torch.dtype], Limits | None]
) -> Row:
    """Return one row: settings, speed, latency percentiles, peak memory, time split and share of the roofline."""
    device = pipe.model.device
    on_gpu = device.type == "cuda"
    pipe.engine.graphs.clear()  # graphs of other rows are not this one's memory
    if on_gpu:
        torch.cuda.empty_cache()
    # The graph engine captures its graph in the second run at the earliest.
    warmup = max(options.warmup, 2) if pipe.engine.mode == "graph" else options.warmup
    for i in range(warmup):
        time_batch(pipe, case, seed=i * case.batch, pixels=options.pixels)
    reset_peak(device)
    seeds = [(warmup + i) * case.batch for i in range(options.repeats)]
    times = [time_batch(pipe, case, seed=seed, pixels=options.pixels) for seed in seeds]
    seconds = [sum(tokens for tokens, _ in times), sum(tokens + pixels for tokens, pixels in times)]
    if on_gpu:
        seconds = [time_pipelined(pipe, case, options.repeats, pixels=False)] * 2
        if options.pixels:
            seconds[1] = time_pipelined(pipe, case, options.repeats, pixels=True)
    peak = peak_bytes(device) + sum(idle_graph_bytes(graphs) for graphs in pipe.engine.graphs.captured.values())
    row: Row = {
        "settings": row_settings(pipe, case),
        "images/s": significant(case.batch * len(times) / seconds[1]),
        "token images/s": significant(case.batch * len(times) / seconds[0]),
        "latency ms": latency_percentiles([tokens + pixels for tokens, pixels in times]),
        "peak GiB": significant(peak / 2**30),
        "batches timed": len(times),
        "pixels": options.pixels,
    }
    row |= _roofline(pipe, case, limits, speed=row["token images/s"])
    if on_gpu:
        row["reserved GiB"] = significant(torch.cuda.max_memory_reserved(device) / 2**30)
    if pipe.engine.graphs.captured:
        newest = next(reversed(pipe.engine.graphs.captured.values()))
        row["capture"] = {"s": significant(newest.seconds), "GiB": significant(newest.bytes / 2**30)}
    if on_gpu and (options.split or options.top_kernels):
        found = profile_tokens(pipe, case, seed=0)
        row |= {name: value for name, value in found.items() if options.top_kernels or name != "top kernels"}
    elif options.split:
        parts = split_time(pipe, case, seed=0)
        row["split ms"] = {name: significant(1000 * seconds) for name, seconds in parts.items()}
    return row


def _roofline(
    pipe: Pipeline, case: Case, limits: Callable[[torch.dtype], Limits | None], *, speed: float
) -> dict[str, float]:
    """Return the images per second that the hardware allows, and the share of it that the tokens reach."""
    found: dict[str, float] = {}
    weights = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(precision_of(pipe.model), pipe.model.dtype)
    # Weight-only int8 multiplies in the model's own type.
    if (of_tokens := limits(weights if weights.is_floating_point else pipe.model.dtype)) is not None:
        sizes = {
            "weight_size": weights.itemsize,
            "cache_size": (pipe.model.kv_cache_dtype or pipe.model.dtype).itemsize,
        }
        floor = token_floor(pipe.model.config, case, pipe.model.dtype, of_tokens, **sizes)
        found["roofline token images/s"] = significant(case.batch / floor)
        found["roofline share"] = significant(speed * floor / case.batch, 3)
    assert isinstance(pipe.tokenizer, VQTokenizer)
    # A GPU could make pixels in 16 bits, whatever it does.
    own = pipe.tokenizer.pixel_dtype or pipe.tokenizer.dtype
    dtype = torch.bfloat16 if pipe.tokenizer.device.type == "cuda" else own
    if (of_pixels := limits(dtype)) is not None:
        work = pixel_work(pipe.tokenizer.config, case.grid, case.batch, dtype.itemsize)
        found["roofline pixel images/s"] = significant(case.batch / of_pixels.seconds(work))
    return found


@torch.no_grad()
def time_batch(pipe: Pipeline, case: Case, *, seed: int, pixels: bool = True) -> tuple[float, float]:
    """Return the seconds that the tokens of one batch take, and after them its pixels."""
    began = time.perf_counter()
    request, plan = case.request(pipe.model, seed)
    for step in pipe.engine.decode(request, plan, case.settings, every_step=False):
        ids_BN = step.ids_BN
    synchronize(pipe.model.device)
    middle = time.perf_counter()
    if not pixels:
        return middle - began, 0.0
    pipe.graphed_tokenizer.decode(ids_BN, case.grid)
    synchronize(pipe.model.device)
    return middle - began, time.perf_counter() - middle


def time_pipelined(pipe: Pipeline, case: Case, batches: int, *, pixels: bool) -> float:
    """Return the seconds of `batches` batches one after the other; one more before them is not timed."""
    plans = (case.request(pipe.model, i * case.batch) for i in range(batches + 1))
    finish = pipe.graphed_tokenizer.decode if pixels else lambda ids_BN, grid: ids_BN
    made = pipelined_decode(pipe.engine, plans, case.settings, finish)
    next(made)
    began = time.perf_counter()
    for _ in made:
        pass
    return time.perf_counter() - began


def idle_graph_bytes(graphs: CapturedGraphs) -> int:
    """Return the bytes that captured graphs reserve although nothing is in them between two replays."""
    return max(0, graphs.bytes - graphs.live_bytes)


def row_settings(pipe: Pipeline, case: Case) -> dict[str, Any]:
    """Return the settings of a row; rows of two records are compared where these are equal."""
    settings = to_dict(case.settings)
    names = ["steps", "guidance", "order", "schedule", "attention", "decode"]
    if case.settings.decode != "steps":
        names.append("draft")
    own = {"model": case.model, "batch": case.batch, "tokens": case.tokens, "dtype": precision_of(pipe.model)}
    own["engine"] = pipe.engine.mode
    if (cached := kv_cache_dtype_of(pipe.model)) != "auto":  # records from before there was a choice have none
        own["kv_cache_dtype"] = cached
    return {**own, **{name: settings[name] for name in names}}


def latency_percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of `PERCENTILES` in milliseconds, interpolated."""
    return {f"p{p}": significant(1000 * float(np.percentile(np.asarray(seconds), p))) for p in PERCENTILES}


# How cost grows with the number of tokens or with the batch


def measure_growing(
    cases: Sequence[Case],
    measure: Callable[[Case], Row],
    *,
    size: Callable[[Case], int],
    max_seconds: float,
    batches: int,
) -> tuple[list[Row], list[Case]]:
    """Measure cases of growing size; return the rows and the cases that were left out.

    A case is left out, with all larger ones, where its `batches` batches would take more than `max_seconds` if cost
    grew in proportion.
    """
    rows: list[Row] = []
    for i, case in enumerate(cases):
        if rows and batches * _batch_seconds(rows[-1]) * size(case) / size(cases[i - 1]) > max_seconds:
            return rows, list(cases[i:])
        rows.append(measure(case))
    return rows, []


def summarize_scaling(over: str, rows: Sequence[Row]) -> Row:
    """Return sizes, seconds per batch, and the exponent of all rows and of the last two; `over`: tokens or batch."""
    sizes = [row["settings"][over] for row in rows]
    seconds = [_batch_seconds(row) for row in rows]
    found: Row = {"over": over, "sizes": sizes, "seconds per batch": [significant(value) for value in seconds]}
    if len(rows) >= 2:
        found["exponent"] = round(fit_exponent(sizes, seconds), 3)
        found["last exponent"] = round(fit_exponent(sizes[-2:], seconds[-2:]), 3)
    return found


def fit_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of log(seconds) over log(size) by least squares: 1 is linear, 2 quadratic."""
    require(len(set(sizes)) >= 2, f"sizes are {list(sizes)}; an exponent needs two different ones or more")
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def _batch_seconds(row: Row) -> float:
    return float(row["settings"]["batch"] / row["token images/s"])


# The start of a fresh process


def measure_cold_start(
    name: str,
    *,
    random: bool,
    device: str,
    dtype: str,
    threads: int,
    steps: int | None,
    engine: str = "auto",
    kv_cache_dtype: str = "auto",
) -> dict[str, Any]:
    """Return the seconds of a fresh process with batch 1: import, load, first image, next image.

    `capture s`, where a graph was captured, is part of the image that captured it.
    """
    options = {"name": name, "random": random, "device": device, "dtype": dtype, "engine": engine}
    options |= {"threads": threads, "steps": steps, "kv_cache_dtype": kv_cache_dtype}
    code = "from arpg.bench.throughput import print_cold_start; print_cold_start()"
    began = time.time()
    run = subprocess.run([sys.executable, "-c", code, json.dumps(options), repr(began)], capture_output=True, text=True)
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        raise InputError(f"the fresh process failed: {last}")
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def print_cold_start() -> None:
    """Print the times of this process as one line of JSON; `measure_cold_start` runs this in a process of its own."""
    imported = time.time()
    options, began = json.loads(sys.argv[1]), float(sys.argv[2])
    set_threads(options.pop("threads"))
    steps = options.pop("steps")
    pipe = open_pipeline(options.pop("name"), **options)
    times = [time.time()]
    for seed in (0, 1):
        pipe.generate(0, seed=seed, steps=steps)
        times.append(time.time())
    parts = {
        "import s": imported - began,
        "load s": times[0] - imported,
        "first image s": times[1] - times[0],
        "next image s": times[2] - times[1],
        "to the first image s": times[1] - began,
    }
    if pipe.engine.graphs.captured:
        parts["capture s"] = sum(graphs.seconds for graphs in pipe.engine.graphs.captured.values())
    sys.stdout.write(json.dumps({name: round(seconds, 3) for name, seconds in parts.items()}) + "\n")
