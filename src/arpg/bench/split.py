"""Where the time of a generation goes: Pass 1, Pass 2, head and sampling, pixels, and the rest.

The device is waited for at every border, which costs time of its own; so this is never the run whose speed is told.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from arpg.bench.case import Case
from arpg.decode import decode
from arpg.pipeline import Pipeline

PARTS = ("pass 1", "pass 2", "head, sampling", "pixels", "rest")

Clock = Callable[[], float]


def split_time(pipe: Pipeline, case: Case, *, seed: int, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Seconds of each part for one batch; their sum is the whole. The rest is planning, embedding and bookkeeping."""
    model, device = pipe.model, pipe.model.device

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    parts: dict[str, float] = defaultdict(float)
    ended: dict[str, float] = {}
    with torch.no_grad(), ExitStack() as stack:
        for method, name in (("encode", "pass 1"), ("predict", "pass 2")):
            stack.enter_context(_timed(model, method, name, parts, ended, now))
        head = _Head(parts, now)
        for handle in (model.head.register_forward_pre_hook(head.start), model.head.register_forward_hook(head.stop)):
            stack.callback(handle.remove)
        began = now()
        request, plan = case.request(model, seed)
        for step in decode(model, request, plan, case.settings):
            parts["head, sampling"] += now() - ended["pass 2"]
            ids_BN = step.ids_BN
        tokens = now()
        pipe.tokenizer.decode(ids_BN, case.grid)
        parts["pixels"] = now() - tokens
    whole = tokens - began + parts["pixels"]
    parts["rest"] = whole - sum(parts[name] for name in PARTS[:-1])
    return {name: parts[name] for name in PARTS}


class _Head:
    """The head is called in Pass 2, but counts with sampling: both grow with the vocabulary."""

    def __init__(self, parts: dict[str, float], now: Clock) -> None:
        self.parts, self.now = parts, now
        self.began = 0.0

    def start(self, *_: Any) -> None:
        self.began = self.now()

    def stop(self, *_: Any) -> None:
        took = self.now() - self.began
        self.parts["head, sampling"] += took
        self.parts["pass 2"] -= took  # the call around it counts it, too


@contextmanager
def _timed(
    module: torch.nn.Module, method: str, name: str, parts: dict[str, float], ended: dict[str, float], now: Clock
) -> Iterator[None]:
    """For a while a method of this one module is timed."""
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
