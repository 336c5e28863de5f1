"""Checks and times the decode attention for ways to cut it into tiles; prints tables, in about a minute.

What decides is the column of a whole generation: every launch of 32 arccos steps, with the queries and slots that they
have, in one CUDA graph. Every layer has its own cache, also in Pass 2, so that nothing of it is left in the L2.

python benchmarks/attention_tiles.py
git show HEAD~1:src/arpg/kernels/attention.py > before.py && python benchmarks/attention_tiles.py --against before.py
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.config import MODELS
from arpg.decode.schedule import step_sizes
from arpg.kernels import attention
from arpg.model.rope import Rotation, grid_places, rotate, rotation

DEVICE, DTYPE, GRID, STEPS = "cuda", torch.bfloat16, (16, 16), 32
DEFAULT = attention.tiles
# queries, slots, warps, stages, registers of a thread
FEW = [(16, 16, 1, 3, 128), (16, 16, 1, 3, None), (16, 16, 1, 4, 128), (16, 16, 1, 3, 96), (16, 32, 1, 2, 128),
       (16, 32, 2, 3, None), (16, 64, 4, 2, None)]  # fmt: skip
ALONE = [(16, 128, 8, 2, None), (16, 64, 4, 2, None), (16, 256, 8, 2, None), (16, 32, 1, 2, 128)]
MANY = [(64, 32, 4, 3, None), (16, 16, 1, 3, 128), (32, 32, 2, 3, None), (64, 64, 4, 2, None), (64, 16, 4, 3, 128)]
Launch = tuple[bool, int, int]  # new keys and values or not, queries, slots before


class Layers:
    """Caches of some layers of one size, and inputs for any number of queries."""

    def __init__(self, rows: int, heads: int, count: int = 12) -> None:
        self.rows, self.heads, slots = rows, heads, GRID[0] * GRID[1] + 1
        self.caches = [tuple(self.random(slots, heads) for _ in range(2)) for _ in range(count)]
        self.inputs: dict[int, tuple[Tensor, Rotation]] = {}

    def random(self, slots: int, *shape: int) -> Tensor:
        return torch.randn((self.rows, slots, *shape, 64), device=DEVICE).to(DTYPE)

    def queries(self, count: int) -> tuple[Tensor, Rotation]:
        if count not in self.inputs:
            place = grid_places(*GRID, device=DEVICE)[:count].expand(self.rows, -1, -1).contiguous()
            self.inputs[count] = self.random(count, 3, self.heads), rotation(place, 64)
        return self.inputs[count]

    def run(self, module: ModuleType, launch: Launch, layer: int) -> Tensor:
        new, queries, slots = launch
        (qkv, by), (key, value) = self.queries(queries), self.caches[layer % len(self.caches)]
        if new:
            return module.attend_and_store(qkv, (key, value), None, by, slots)
        return module.attend(qkv[:, :, 0], key[:, :slots], value[:, :slots], None, by)

    def error(self, module: ModuleType, launch: Launch) -> float:
        """Against the plain twin, in float32: of the result, and of what is stored."""
        new, queries, slots = launch
        (qkv, by), cache = self.queries(queries), self.caches[0]
        q, k, v = qkv.unbind(2)
        out, k = self.run(module, launch, 0), rotate(k, by)
        kept = [x[:, :slots] for x in cache]
        key, value = (torch.cat(x, 1) for x in zip(kept, (k, v), strict=True)) if new else kept
        heads = (x.float().transpose(1, 2) for x in (rotate(q, by), key, value))
        worst = _far(out, F.scaled_dot_product_attention(*heads).transpose(1, 2))
        for x, y in zip(cache, (k, v), strict=True) if new else ():
            worst = max(worst, _far(x[:, slots : slots + queries], y))
        return worst


def generation(layers: int) -> list[tuple[Launch, int]]:
    """Every launch of a generation, and its layer."""
    sizes = step_sizes("arccos", GRID[0] * GRID[1], STEPS)
    ends = [1 + sum(sizes[:i]) for i in range(STEPS)]
    steps = [((True, a, b - a), (False, c, b)) for a, b, c in zip((1, *sizes), ends, sizes, strict=False)]
    return [(launch, layer) for step in steps for launch in step for layer in range(layers)]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", help="another version of kernels/attention.py")
    parser.add_argument("--seconds", type=float, default=55, help="start no variant after that")
    parser.add_argument("--rows", type=int, default=128)
    options = parser.parse_args()
    stop, before = time.perf_counter() + options.seconds, _module(options.against)
    _say(f"{torch.cuda.get_device_name()}; us a launch; queries slots warps stages registers; N: stores, C: does not")

    def table(title: str, layers: Layers, ways: list[tuple[int, ...]], cases: list[Launch], depth: int) -> None:
        names = [f"{'N' if new else 'C'} {queries}/{slots}" for new, queries, slots in cases]
        _say(f"{title}\n  {'':22}{'error':>8}" + "".join(f"{x:>10}" for x in names) + ("  whole, ms" if depth else ""))
        few = cases[0][1] <= 16
        for way in [None, *ways] if before else ways:
            if time.perf_counter() > stop:
                return _say("  out of time")
            module = attention if way else before
            attention.tiles = _instead(way, few=few)
            name = " ".join(str(x) for x in way) if way else "the other version"
            try:
                error = max(layers.error(module, case) for case in cases)
                times = [_time([(case, i) for i in range(24)], layers, module) / 24 for case in cases]
                line = f"  {name:22}{error:8.4f}" + "".join(f"{x:10.2f}" for x in times)
                whole = f"{_time(generation(depth), layers, module, 4) / 1000:11.2f}" if depth else ""
                _say(line + whole + ("" if error < 0.02 else "  WRONG"))
            except Exception as problem:  # one variant less
                _say(f"  {name:22}{type(problem).__name__}: {str(problem).splitlines()[:1]}")
        return None

    large, config = Layers(options.rows, MODELS["arpg-l"].num_heads), MODELS["arpg-l"]
    some = [(True, 8, 93), (False, 8, 93), (True, 1, 1), (False, 4, 30), (True, 16, 200), (False, 16, 200)]
    table(f"ARPG-L, {large.rows} rows, up to 16 queries", large, FEW, some, config.pass1_layers)
    some = [(True, 26, 93), (False, 26, 200), (False, 40, 200)]
    table(f"ARPG-L, {large.rows} rows, more queries", large, MANY, some, config.pass1_layers)
    one, some = Layers(2, config.num_heads), [(True, 8, 93), (False, 8, 93), (False, 8, 200), (True, 1, 1)]
    table("ARPG-L, 2 rows", one, ALONE, some, config.pass1_layers)
    del large
    config = MODELS["arpg-xl"]
    large, some = Layers(options.rows, config.num_heads), [(True, 8, 93), (False, 8, 93)]
    table(f"ARPG-XL, {large.rows} rows", large, [FEW[0], FEW[3], FEW[4]], some, config.pass1_layers)


def _instead(way: tuple[int, ...] | None, *, few: bool) -> Callable[..., attention.Tiles]:
    """These tiles for up to 16 queries, or for more; where they cannot be, and for the others, what it takes itself."""

    def tiles(queries: int, pairs: int, *, new: bool) -> attention.Tiles:
        fits = way is not None and (queries <= way[0] or not new)
        return attention.Tiles(*way) if fits and few == (queries <= 16) else DEFAULT(queries, pairs, new=new)

    return tiles


def _time(launches: list[tuple[Launch, int]], layers: Layers, module: ModuleType, replays: int = 10) -> float:
    """Microseconds of all of them, replayed from a graph."""

    def run() -> None:
        for launch, layer in launches:
            layers.run(module, launch, layer)

    for launch in {launch for launch, _ in launches}:
        layers.run(module, launch, 0)  # compiles, and makes inputs
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return min(_replayed(graph.replay, replays) for _ in range(3))


def _replayed(replay: Callable[[], None], times: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    start.record()
    for _ in itertools.repeat(None, times):
        replay()
    stop.record()
    stop.synchronize()
    return 1000 * start.elapsed_time(stop) / times


def _far(x: Tensor, y: Tensor) -> float:
    return float((x.float() - y.float()).norm() / y.float().norm())


def _module(path: str | None) -> ModuleType | None:
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("before", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
