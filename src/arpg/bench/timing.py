"""Clocks and memory counters of a device, and the small helpers that every benchmark uses."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its work; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def graph_microseconds(work: Callable[[], Any], *, repeats: int = 10) -> tuple[float, Any]:
    """Capture `work` in a CUDA graph; return the microseconds of one replay and the captured call's result."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * float(start.elapsed_time(end)) / repeats, made


def reset_peak(device: torch.device) -> None:
    """Start to count the peak memory anew; on a CPU that is possible on Linux only."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that CUDA's allocator, or on a CPU the process, has held since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    except (OSError, StopIteration, ValueError, IndexError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def significant(value: float, digits: int = 4) -> float:
    """Round `value` to this many significant digits."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, both norms in float32."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def error_line(error: Exception) -> str:
    """Return the type and the first line of `error`, for a report that goes on with the next measurement."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0][:200]}"
