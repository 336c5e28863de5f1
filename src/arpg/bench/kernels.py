"""Where the time of the tokens goes on a GPU, kernel by kernel: one generation, as the GPU itself tells it.

Hooks (`split.py`) see nothing of a replayed graph, and eagerly they would time the launches. So the GPU's own activity
is recorded, with nothing of the CPU's, which would slow it down.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from arpg.bench.case import Case
from arpg.pipeline import Pipeline

Event = dict[str, Any]  # of a trace in Chrome's format: name, cat, ts and dur in microseconds

# A kernel belongs to the first group whose pattern is found in its name. Ours are named like their functions.
GROUPS = {
    "attention": r"^_?attend|flash|fmha|sdpa|attention",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|^_int8_product|^few_rows_product",
    "norms": r"^_residual_norm|^_norm|rms_?norm|layer_?norm|rsqrt",
    "SwiGLU": r"^_swiglu|silu",
    "rotation": r"^_turn_kernel|^_angles|_cos_.*sin|sin.*_cos",
    "draw": r"^_draw|argmax|topk|sort|softmax|philox",
}
REST, GAPS = "copies, small", "gaps"
PARTS = (*GROUPS, REST, GAPS)
_PATTERNS = {group: re.compile(pattern, re.IGNORECASE) for group, pattern in GROUPS.items()}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@torch.no_grad()
def profile_tokens(pipe: Pipeline, case: Case, *, seed: int) -> dict[str, Any]:
    """`summary` of one batch's tokens. The engine should have done the like before: nothing is warmed up here."""
    from torch.profiler import ProfilerActivity, profile

    request, plan = case.request(pipe.model, seed)
    torch.cuda.synchronize(pipe.model.device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in pipe.engine.decode(request, plan, case.settings):
            pass
        torch.cuda.synchronize(pipe.model.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    return summary(trace["traceEvents"])


def summary(events: Iterable[Event]) -> dict[str, Any]:
    """`kernels`: how many; `kernels ms`: of each group, and gaps, in which nothing ran; `top kernels`: by name.

    Where kernels overlap, the sum of the groups may be more than the time from the first to the last.
    """
    found = [event for event in events if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE]
    groups: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in found:
        groups[group_of(event["name"])] += event["dur"] / 1000
        by_name[event["name"]].append(event["dur"] / 1000)
    groups[GAPS] = _gaps([(event["ts"], event["ts"] + event["dur"]) for event in found]) / 1000
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    top = [
        {"ms": float(f"{sum(times):.4g}"), "launches": len(times), "group": group_of(name), "kernel": name[:120]}
        for name, times in ranked[:20]
    ]
    return {
        "kernels": len(found),
        "kernels ms": {name: float(f"{ms:.4g}") for name, ms in groups.items()},
        "top kernels": top,
    }


def group_of(name: str) -> str:
    return next((group for group, pattern in _PATTERNS.items() if pattern.search(name)), REST)


def _gaps(spans: list[tuple[float, float]]) -> float:
    """The time between the first start and the last end in which there is nothing."""
    gaps, end = 0.0, None
    for start, stop in sorted(spans):
        if end is not None:
            gaps += max(0.0, start - end)
        end = stop if end is None else max(end, stop)
    return gaps
