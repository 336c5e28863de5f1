"""Where the time of a generation goes: by part of the network on any device, by kernel on a GPU.

`split_time` waits for the device at every boundary, which takes time of its own, so it never runs together with a
measurement of speed. `profile_tokens` records the GPU's own activity: a replayed graph has no boundaries to wait at.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from arpg.bench.case import Case
from arpg.decode import decode
from arpg.device import synchronize
from arpg.pipeline import Pipeline
from arpg.tables import significant

Clock = Callable[[], float]
Event = dict[str, Any]  # of a trace in Chrome's format: name, cat, ts and dur in microseconds

SPLIT_PARTS = ("pass 1", "pass 2", "head, sampling", "pixels", "rest")

# A kernel belongs to the first group whose pattern is found in its name. Ours are named like their functions.
KERNEL_GROUPS = {
    "attention": r"^_attend|flash|fmha|sdpa|attention",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk",
    "norms": r"^_residual_norm|rms_?norm|layer_?norm|rsqrt",
    "SwiGLU": r"^_swiglu|silu",
    "rotation": r"^_rope|_cos_.*sin|sin.*_cos",
    "sampling": r"^_sample|argmax|topk|sort|softmax|philox",
}
REST, GAPS = "copies, small", "gaps"
KERNEL_PARTS = (*KERNEL_GROUPS, REST, GAPS)
_PATTERNS = {group: re.compile(pattern, re.IGNORECASE) for group, pattern in KERNEL_GROUPS.items()}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def split_time(pipe: Pipeline, case: Case, *, seed: int, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Return the seconds of each of `SPLIT_PARTS` for one batch; their sum is the whole.

    The rest is planning, embedding and bookkeeping.
    """
    model, device = pipe.model, pipe.model.device

    def now() -> float:
        synchronize(device)
        return clock()

    parts: dict[str, float] = defaultdict(float)
    ended: dict[str, float] = {}
    with torch.no_grad(), ExitStack() as stack:
        for module, method, name in (
            (model, "encode", "pass 1"),
            (model, "predict", "pass 2"),
            (model.head, "forward", "head"),
        ):
            stack.enter_context(_timed(module, method, name, parts, ended, now))
        began = now()
        request, plan = case.request(model, seed)
        for step in decode(model, request, plan, case.settings):
            parts["head, sampling"] += now() - ended["pass 2"]
            ids_BN = step.ids_BN
        tokens = now()
        pipe.tokenizer.decode(ids_BN, case.grid)
        parts["pixels"] = now() - tokens
    # The head runs inside Pass 2 but counts with sampling: both grow with the vocabulary.
    parts["pass 2"] -= parts["head"]
    parts["head, sampling"] += parts["head"]
    whole = tokens - began + parts["pixels"]
    parts["rest"] = whole - sum(parts[name] for name in SPLIT_PARTS[:-1])
    return {name: parts[name] for name in SPLIT_PARTS}


@contextmanager
def _timed(
    module: torch.nn.Module, method: str, name: str, parts: dict[str, float], ended: dict[str, float], now: Clock
) -> Iterator[None]:
    """Time every call of a method of this one module."""
    plain = getattr(module, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = now()
        out = plain(*args, **kwargs)
        ended[name] = now()
        parts[name] += ended[name] - began
        return out

    module.__dict__[method] = timed
    try:
        yield
    finally:
        del module.__dict__[method]


@torch.no_grad()
def profile_tokens(pipe: Pipeline, case: Case, *, seed: int) -> dict[str, Any]:
    """Return `summarize_kernels` of one batch's tokens. Nothing is warmed up: the engine should have run before."""
    request, plan = case.request(pipe.model, seed)

    def run() -> None:
        for _ in pipe.engine.decode(request, plan, case.settings, every_step=False):  # the graph that was timed
            pass

    return profile_kernels(run)


def profile_kernels(run: Callable[[], object]) -> dict[str, Any]:
    """Return `summarize_kernels` of what `run` launches on a GPU."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    return summarize_kernels(trace["traceEvents"])


def summarize_kernels(events: Iterable[Event]) -> dict[str, Any]:
    """Return `kernels` (how many), `kernels ms` (by group, and gaps without any kernel) and `top kernels` (by name).

    Where kernels overlap, the sum of the groups may exceed the time from the first to the last.
    """
    found = [event for event in events if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE]
    groups: dict[str, float] = dict.fromkeys(KERNEL_PARTS, 0.0)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in found:
        groups[kernel_group(event["name"])] += event["dur"] / 1000
        by_name[event["name"]].append(event["dur"] / 1000)
    groups[GAPS] = _gaps([(event["ts"], event["ts"] + event["dur"]) for event in found]) / 1000
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    top = [
        {"ms": significant(sum(times)), "launches": len(times), "group": kernel_group(name), "kernel": name[:120]}
        for name, times in ranked[:20]
    ]
    return {
        "kernels": len(found),
        "kernels ms": {name: significant(ms) for name, ms in groups.items()},
        "top kernels": top,
    }


def kernel_group(name: str) -> str:
    """Return the group of `KERNEL_GROUPS` that a kernel belongs to, or `REST`."""
    return next((group for group, pattern in _PATTERNS.items() if pattern.search(name)), REST)


def _gaps(spans: list[tuple[float, float]]) -> float:
    """Return the time between the first start and the last end that no span covers."""
    gaps, end = 0.0, None
    for start, stop in sorted(spans):
        if end is not None:
            gaps += max(0.0, start - end)
        end = stop if end is None else max(end, stop)
    return gaps
