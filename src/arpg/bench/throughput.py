"""The run whose speed is told: batches from labels to pixels, nothing else going on.

Latency is that of one batch at a time. Throughput on a GPU is that of batches one after the other, as
`arpg.decode.pipelined` has them: nothing waits for the device in between. On a CPU it follows from the latency:
nothing overlaps there.
Peak memory is what CUDA's allocator held at most and what only the recorded graphs can use, or on a CPU the most that
the process held.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arpg.bench.case import Case
from arpg.bench.kernels import profile_tokens
from arpg.bench.roofline import Limits, pixel_work, token_floor
from arpg.bench.split import split_time
from arpg.config import to_dict
from arpg.decode.graphs import CapturedGraphs
from arpg.decode.pipelined import pipelined_decode
from arpg.errors import require
from arpg.pipeline import Pipeline
from arpg.quantization.precision import precision_of

PERCENTILES = (50, 95, 99)

Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    repeats: int = 10
    warmup: int = 2
    pixels: bool = True
    split: bool = True
    top: bool = False  # also the most expensive kernels, on a GPU

    def __post_init__(self) -> None:
        require(self.repeats >= 1, f"repeats is {self.repeats}; expected 1 or more")
        require(self.warmup >= 0, f"warmup is {self.warmup}; expected 0 or more")


def measure(pipe: Pipeline, case: Case, effort: Effort, *, limits: Callable[[torch.dtype], Limits | None]) -> Row:
    """One row: settings, speed, latency percentiles, peak memory, where the time goes, share of the roofline."""
    on_gpu = pipe.model.device.type == "cuda"
    pipe.engine.graphs.clear()  # what other rows have recorded is not this one's memory
    warmup = max(effort.warmup, 2) if pipe.engine.mode == "graph" else effort.warmup  # the second one may record
    for i in range(warmup):
        generate(pipe, case, seed=i * case.batch, pixels=effort.pixels)
    _reset_peak(pipe.model.device)
    times = [generate(pipe, case, seed=(warmup + i) * case.batch, pixels=effort.pixels) for i in range(effort.repeats)]
    seconds = [sum(tokens for tokens, _ in times), sum(tokens + pixels for tokens, pixels in times)]
    if on_gpu:
        seconds = [steadily(pipe, case, effort.repeats, pixels=False)] * 2
        if effort.pixels:
            seconds[1] = steadily(pipe, case, effort.repeats, pixels=True)
    peak = _peak_bytes(pipe.model.device) + sum(
        held_idle(recording) for recording in pipe.engine.graphs.captured.values()
    )
    row: Row = {
        "settings": describe(pipe, case),
        "images/s": _digits(case.batch * len(times) / seconds[1]),
        "token images/s": _digits(case.batch * len(times) / seconds[0]),
        "latency ms": latencies([tokens + pixels for tokens, pixels in times]),
        "peak GiB": _digits(peak / 2**30),
        "batches timed": len(times),
        "pixels": effort.pixels,
    }
    row |= _roofline(pipe, case, limits, speed=row["token images/s"])
    if on_gpu:
        row["reserved GiB"] = _digits(torch.cuda.max_memory_reserved(pipe.model.device) / 2**30)
    if pipe.engine.graphs.captured:
        newest = next(reversed(pipe.engine.graphs.captured.values()))
        row["recording"] = {"s": _digits(newest.seconds), "GiB": _digits(newest.bytes / 2**30)}
    if on_gpu and (effort.split or effort.top):
        found = profile_tokens(pipe, case, seed=0)
        row |= {name: value for name, value in found.items() if effort.top or name != "top kernels"}
    elif effort.split:
        parts = split_time(pipe, case, seed=0)
        row["split ms"] = {name: _digits(1000 * seconds) for name, seconds in parts.items()}
    return row


def _roofline(
    pipe: Pipeline, case: Case, limits: Callable[[torch.dtype], Limits | None], *, speed: float
) -> dict[str, float]:
    """Images per second that the hardware allows, and the share of it that the tokens have reached."""
    found: dict[str, float] = {}
    weights = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(precision_of(pipe.model), pipe.model.dtype)
    # Weight-only int8 multiplies in the model's own type.
    if (of_tokens := limits(weights if weights.is_floating_point else pipe.model.dtype)) is not None:
        floor = token_floor(pipe.model.config, case, pipe.model.dtype, of_tokens, weight_size=weights.itemsize)
        found |= {"roofline token images/s": _digits(case.batch / floor), "roofline share": speed * floor / case.batch}
        found["roofline share"] = _digits(found["roofline share"], 3)
    # A GPU could make pixels in 16 bits, whatever it does.
    own = pipe.tokenizer.pixel_dtype or pipe.tokenizer.dtype
    dtype = torch.bfloat16 if pipe.tokenizer.device.type == "cuda" else own
    if (of_pixels := limits(dtype)) is not None:
        work = pixel_work(pipe.tokenizer.config, case.grid, case.batch, dtype.itemsize)
        found["roofline pixel images/s"] = _digits(case.batch / of_pixels.seconds(work))
    return found


@torch.no_grad()
def generate(pipe: Pipeline, case: Case, *, seed: int, pixels: bool = True) -> tuple[float, float]:
    """Seconds until the tokens of a batch are there, and from then on to its pixels."""
    wait = _waiter(pipe.model.device)
    began = time.perf_counter()
    request, plan = case.request(pipe.model, seed)
    for step in pipe.engine.decode(request, plan, case.settings, every_step=False):
        ids_BN = step.ids_BN
    wait()
    middle = time.perf_counter()
    if not pixels:
        return middle - began, 0.0
    pipe.tokenizer.decode(ids_BN, case.grid)
    wait()
    return middle - began, time.perf_counter() - middle


def steadily(pipe: Pipeline, case: Case, batches: int, *, pixels: bool) -> float:
    """Seconds of so many batches one after the other. One before them, which does not count, fills the pipe."""
    plans = (case.request(pipe.model, i * case.batch) for i in range(batches + 1))
    finish = pipe.tokenizer.decode if pixels else lambda ids_BN, grid: ids_BN
    made = pipelined_decode(pipe.engine, plans, case.settings, finish)
    next(made)
    began = time.perf_counter()
    for _ in made:
        pass
    return time.perf_counter() - began


def held_idle(recording: CapturedGraphs) -> int:
    """Bytes that a recording keeps from all others, though nothing is in them between two replays."""
    return max(0, recording.bytes - recording.live_bytes)


def describe(pipe: Pipeline, case: Case) -> dict[str, Any]:
    """The settings that a row stands for; rows of two records belong together where these are the same."""
    settings = to_dict(case.settings)
    names = ["steps", "guidance", "order", "schedule", "attention", "decode"]
    if case.settings.decode != "steps":
        names.append("draft")
    own = {"model": case.model, "batch": case.batch, "tokens": case.tokens, "dtype": precision_of(pipe.model)}
    own["engine"] = pipe.engine.mode
    return {**own, **{name: settings[name] for name in names}}


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds, interpolated."""
    return {f"p{p}": _digits(1000 * float(np.percentile(np.asarray(seconds), p))) for p in PERCENTILES}


def _waiter(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the highest mark of this process starts anew


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    except (OSError, StopIteration, ValueError, IndexError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _digits(value: float, digits: int = 4) -> float:
    """Rounded to so many digits that count."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))
