"""Check and time the decoding attention on a GPU for different tiles; prints tables, in about a minute.

    python -m benchmarks.attention_tiles
    python -m benchmarks.attention_tiles --one-image
    python -m benchmarks.attention_tiles --running-batch
    python -m benchmarks.attention_tiles --kv-cache-dtype fp8

The column that decides is that of a whole generation: every launch of 32 arccos steps, with their queries and slots, in
one CUDA graph. Every layer has its own cache, also in Pass 2, so that none of it stays in the L2 cache.

`--one-image` times attention between the small products of one image's layers, all launched early, with slots read
before or after the dependency barrier. `--running-batch` times a step of a continuous batch, whose samples are at all
steps of their plans and whose tokens are packed. `--kv-cache-dtype fp8` times each with a float8 cache; errors are then
against the cache as it is stored.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.bench.record import error_line
from arpg.config import KV_CACHE_DTYPES, MODELS, ModelConfig
from arpg.decode.plan import step_sizes
from arpg.kernels import attention, small_gemm
from arpg.kernels.dispatch import FLOAT8
from arpg.kernels.ops import Packing, Rope, apply_rope
from arpg.model.rope import grid_positions, make_rope
from benchmarks.measures import graph_microseconds, relative_error

DEVICE, DTYPE, GRID, STEPS = "cuda", torch.bfloat16, (16, 16), 32
DEFAULT = attention.tiles
Way = tuple[int, int, int, int, int | None]  # queries, slots, warps, stages, registers of a thread
FEW = [(16, 16, 1, 3, 128), (16, 16, 1, 3, None), (16, 16, 1, 4, 128), (16, 16, 1, 3, 96), (16, 32, 1, 2, 128),
       (16, 32, 1, 3, 128), (16, 32, 1, 3, 160), (16, 32, 2, 3, None), (16, 64, 4, 2, None)]  # fmt: skip
ALONE = [(16, 128, 8, 2, None), (16, 64, 4, 2, None), (16, 256, 8, 2, None), (16, 32, 1, 2, 128)]
MANY = [(64, 32, 4, 3, None), (16, 16, 1, 3, 128), (32, 32, 2, 3, None), (64, 64, 4, 2, None), (64, 16, 4, 3, 128)]
EARLY = [(128, 8), (256, 8), (128, 4), (256, 4), (256, 16)]  # slots, warps
Launch = tuple[bool, int, int]  # new keys and values or not, queries, slots before


class Layers:
    """Caches of some layers of one size, and inputs for any number of queries."""

    def __init__(self, rows: int, heads: int, cache_dtype: torch.dtype, *, count: int = 12, spare: int = 0) -> None:
        self.rows, self.heads, slots = rows, heads, GRID[0] * GRID[1] + 1 + spare
        self.caches = [tuple(self.random(slots, heads).to(cache_dtype) for _ in range(2)) for _ in range(count)]
        self.inputs: dict[int, tuple[Tensor, Rope]] = {}

    def random(self, slots: int, *shape: int) -> Tensor:
        return torch.randn((self.rows, slots, *shape, 64), device=DEVICE).to(DTYPE)

    def queries(self, count: int) -> tuple[Tensor, Rope]:
        if count not in self.inputs:
            positions = grid_positions(*GRID, device=DEVICE)[:count].expand(self.rows, -1, -1).contiguous()
            self.inputs[count] = self.random(count, 3, self.heads), make_rope(positions, 64)
        return self.inputs[count]

    def run(self, launch: Launch, layer: int) -> Tensor:
        new, queries, slots = launch
        (qkv, rope), (key, value) = self.queries(queries), self.caches[layer % len(self.caches)]
        if new:
            return attention.attend_and_store(qkv, (key, value), None, rope, slots)
        return attention.attend(qkv[:, :, 0], key[:, :slots], value[:, :slots], None, rope)

    def error(self, launch: Launch) -> float:
        """Return the error against the plain twin in float32, of the result and of what is stored."""
        new, queries, slots = launch
        (qkv, rope), cache = self.queries(queries), self.caches[0]
        q, k, v = qkv.unbind(2)
        out, k = self.run(launch, 0), apply_rope(k, rope)
        k, v = (x.to(cache[0].dtype).to(DTYPE) for x in (k, v))
        kept = [x[:, :slots].to(DTYPE) for x in cache]
        key, value = (torch.cat(x, 1) for x in zip(kept, (k, v), strict=True)) if new else kept
        q, key, value = (x.float().transpose(1, 2) for x in (apply_rope(q, rope), key, value))
        worst = relative_error(out, F.scaled_dot_product_attention(q, key, value).transpose(1, 2))
        for x, y in zip(cache, (k, v), strict=True) if new else ():
            worst = max(worst, relative_error(x[:, slots : slots + queries], y))
        return worst


def generation(layers: int) -> list[tuple[Launch, int]]:
    """Return every launch of a generation and its layer."""
    sizes = step_sizes("arccos", GRID[0] * GRID[1], STEPS)
    ends = [1 + sum(sizes[:i]) for i in range(STEPS)]
    steps = [((True, a, b - a), (False, c, b)) for a, b, c in zip((1, *sizes), ends, sizes, strict=False)]
    return [(launch, layer) for step in steps for launch in step for layer in range(layers)]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=55, help="start no variant after this")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--one-image", action="store_true", help="time attention between the products of one image")
    parser.add_argument("--running-batch", action="store_true", help="time packed tokens of samples at all steps")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    options = parser.parse_args()
    dtype = FLOAT8 if options.kv_cache_dtype == "fp8" else DTYPE
    stop = time.perf_counter() + options.seconds
    if options.one_image:
        return one_image(stop, dtype)
    if options.running_batch:
        return running_batch(stop, options.rows // 2, dtype)
    _say(f"{torch.cuda.get_device_name()}; us a launch; queries slots warps stages registers; N: stores, C: does not")

    def table(title: str, layers: Layers, ways: list[Way], cases: list[Launch], depth: int) -> None:
        names = [f"{'N' if new else 'C'} {queries}/{slots}" for new, queries, slots in cases]
        _say(f"{title}\n  {'':22}{'error':>8}" + "".join(f"{x:>10}" for x in names) + ("  whole, ms" if depth else ""))
        few = cases[0][1] <= 16
        for way in ways:
            if time.perf_counter() > stop:
                return _say("  out of time")
            attention.tiles = _instead(way, few=few)
            name = " ".join(str(x) for x in way)
            try:
                error = max(layers.error(case) for case in cases)
                times = [_time([(case, i) for i in range(24)], layers.run) / 24 for case in cases]
                line = f"  {name:22}{error:8.4f}" + "".join(f"{x:10.2f}" for x in times)
                whole = f"{_time(generation(depth), layers.run, 4) / 1000:11.2f}" if depth else ""
                _say(line + whole + ("" if error < 0.02 else "  WRONG"))
            except Exception as error:  # the other variants are still timed
                _say(f"  {name:22}{error_line(error)}")
        return None

    large, config = Layers(options.rows, MODELS["arpg-l"].num_heads, dtype), MODELS["arpg-l"]
    some = [(True, 8, 93), (False, 8, 93), (True, 1, 1), (False, 4, 30), (True, 16, 200), (False, 16, 200)]
    table(f"ARPG-L, {large.rows} rows, up to 16 queries", large, FEW, some, config.pass1_layers)
    some = [(True, 26, 93), (False, 26, 200), (False, 40, 200)]
    table(f"ARPG-L, {large.rows} rows, more queries", large, MANY, some, config.pass1_layers)
    one, some = Layers(2, config.num_heads, dtype), [(True, 8, 93), (False, 8, 93), (False, 8, 200), (True, 1, 1)]
    table("ARPG-L, 2 rows", one, ALONE, some, config.pass1_layers)
    del large
    config = MODELS["arpg-xl"]
    large, some = Layers(options.rows, config.num_heads, dtype), [(True, 8, 93), (False, 8, 93)]
    table(f"ARPG-XL, {large.rows} rows", large, [FEW[0], FEW[3], FEW[4]], some, config.pass1_layers)
    return None


class Chain(Layers):
    """The layers of one guided image: projection, attention and output added to the residual stream, launched early.

    Earlier steps have written all slots; in Pass 2 all but the newest, which this step would have written.
    """

    def __init__(self, config: ModelConfig, cache_dtype: torch.dtype) -> None:
        super().__init__(2, config.num_heads, cache_dtype, count=24, spare=16)
        shapes, width = ((3 * config.width, config.width), (config.width, config.width)), config.width
        self.weights = [[torch.randn(x, device=DEVICE).to(DTYPE) * 0.02 for x in shapes] for _ in range(24)]
        self.streams = {n: torch.randn((2, n, width), device=DEVICE).to(DTYPE) for n in range(1, 65)}
        self.attends = True

    def run(self, launch: Launch, layer: int) -> Tensor:
        """Run only the attention, for its error."""
        qkv, rope = self.queries(launch[1])
        return self.attend(launch, layer, qkv, rope)

    def attend(self, launch: Launch, layer: int, qkv: Tensor, rope: Rope) -> Tensor:
        new, queries, slots = launch
        key, value = self.caches[layer % len(self.caches)]
        if new:
            return attention.attend_and_store(qkv, (key, value), None, rope, slots, settled=slots)
        settled = max(0, slots - queries)
        return attention.attend(qkv[:, :, 0], key[:, :slots], value[:, :slots], None, rope, settled=settled)

    def layer(self, launch: Launch, layer: int) -> None:
        new, queries, _ = launch
        x, (projection, out) = self.streams[queries], self.weights[layer % len(self.weights)]
        made = small_gemm.linear(x, projection if new else projection[: len(projection) // 3])
        if self.attends:
            qkv = made.view(2, queries, 3 if new else 1, self.heads, 64)
            made = self.attend(launch, layer, qkv, self.queries(queries)[1]).flatten(2)
        small_gemm.linear(made[..., : x.shape[-1]], out, add=x)


def one_image(stop: float, cache_dtype: torch.dtype) -> None:
    """Print the microseconds of a layer's projection, attention and output, and of the two products alone."""
    config = MODELS["arpg-l"]
    chain = Chain(config, cache_dtype)
    _say(f"{torch.cuda.get_device_name()}; us of projection, attention and output; 24 layers in a graph, 2 rows")
    present, own = attention.Tiles(16, 128, 8, 2), DEFAULT
    ways: list[tuple[str, Callable[..., attention.Tiles] | None]] = [
        ("no attention", None),
        (
            "128 8, after the barrier",
            lambda queries, *a, **sizes: present if queries <= 16 else own(queries, *a, new=sizes["new"]),
        ),
        ("its own tiles", own),
        *((f"{way[0]} {way[1]}, before it", _early(*way)) for way in EARLY),
    ]
    for new in (True, False):
        cases = [(new, queries, slots) for queries in (1, 4, 8) for slots in (20, 93, 200, 256 if new else 257)]
        names = "".join(f"{f'{queries}/{slots}':>9}" for _, queries, slots in cases)
        _say(f"{'Pass 1' if new else 'Pass 2'}, queries/slots\n  {'':24}{'error':>8}{names}")
        for name, tiles in ways:
            if time.perf_counter() > stop:
                return _say("  out of time")
            chain.attends = tiles is not None
            attention.tiles = tiles or own
            try:
                error = max(chain.error(case) for case in cases) if chain.attends else 0.0
                times = [_time([(case, i) for i in range(24)], chain.layer) / 24 for case in cases]
                line = f"  {name:24}{error:8.4f}" + "".join(f"{x:9.2f}" for x in times)
                _say(line + ("" if error < 0.02 else "  WRONG"))
            except Exception as error:  # the other variants are still timed
                _say(f"  {name:24}{error_line(error)}")
    _say("all 768 of a generation, ms")
    for name, tiles in ways[:3]:
        if time.perf_counter() > stop:
            return _say("  out of time")
        chain.attends = tiles is not None
        attention.tiles = tiles or own
        try:
            whole = _time(generation(config.pass1_layers), chain.layer, 4)
            _say(f"  {name:24}{whole / 1000:8.3f}")
        except Exception as error:
            _say(f"  {name:24}{error_line(error)}")
    return None


class RunningBatch(Layers):
    """The attention of a step of a continuous batch: guided samples at all steps of their plans, packed tokens."""

    def __init__(self, samples: int, heads: int, cache_dtype: torch.dtype) -> None:
        super().__init__(2 * samples, heads, cache_dtype, spare=64)
        sizes = torch.tensor([0, 1, *step_sizes("arccos", GRID[0] * GRID[1], STEPS)])
        step_S, ends = torch.arange(samples) * STEPS // samples, sizes.cumsum(0)
        self.length_R1, self.limit_R1 = (
            ends[step_S + i].repeat_interleave(2)[:, None].to(DEVICE) for i in (0, 1)
        )  # of the cache, before and after Pass 1
        self.passes = [self.packed(sizes[step_S + 1], heads), self.packed(sizes[step_S + 2], heads)]

    def packed(self, count_S: Tensor, heads: int) -> tuple[Packing, Tensor, Rope]:
        """Return random packed tokens, both copies."""
        num = int(count_S.sum())
        start_R = ((count_S.cumsum(0) - count_S)[:, None] + torch.tensor([0, num])).flatten().to(DEVICE)
        packing = Packing(start_R, count_S.repeat_interleave(2).to(DEVICE), int(count_S.max()), (2, num))
        qkv_CT3HK = torch.randn((2, num, 3, heads, 64), device=DEVICE).to(DTYPE)
        return packing, qkv_CT3HK, make_rope(16 * torch.rand((2, num, 2), device=DEVICE), 64)

    def run_pass(self, number: int, layer: int) -> Tensor:
        """Run one layer of Pass 1 or 2."""
        (key, value), (packing, qkv, rope) = self.caches[layer % len(self.caches)], self.passes[number - 1]
        if number == 1:
            first_R = self.length_R1[:, 0]
            return attention.attend_and_store(qkv, (key, value), self.limit_R1, rope, first_R, packing=packing)
        return attention.attend(qkv[:, :, 0], key, value, self.limit_R1, rope, packing=packing)


def running_batch(stop: float, samples: int, cache_dtype: torch.dtype) -> None:
    """Print the microseconds of attention for packed tokens: short tiles, and one program for each row."""
    layers, few = RunningBatch(samples, MODELS["arpg-l"].num_heads, cache_dtype), attention._FEW_QUERIES
    widths = [packing.width for packing, *_ in layers.passes]
    _say(f"{torch.cuda.get_device_name()}; us of a layer; {samples} samples, rows of up to {widths} tokens")
    expected = [layers.run_pass(number, 0).float() for number in (1, 2)]
    for way in [*FEW, *(way for way in MANY if way[0] == attention._MAX_QUERIES)]:
        if time.perf_counter() > stop:
            return _say("  out of time")
        attention.tiles, attention._FEW_QUERIES = _always(way), way[0]
        line = f"  {' '.join(str(x) for x in way):22}"
        for number in (1, 2):
            launches = [functools.partial(layers.run_pass, number, i) for i in range(12)]
            error = relative_error(launches[0](), expected[number - 1])
            taken = min(graph_microseconds(functools.partial(_run, launches))[0] for _ in range(3)) / len(launches)
            line += f"  Pass {number}: {taken:7.2f} (error {error:.4f})"
        _say(line)
    attention.tiles, attention._FEW_QUERIES = DEFAULT, few
    return None


def _run(launches: list[functools.partial[Tensor]]) -> None:
    for launch in launches:
        launch()


def _always(way: Way) -> Callable[..., attention.Tiles]:
    return lambda *_, **sizes: attention.Tiles(*way)


def _early(slots: int, warps: int) -> Callable[..., attention.Tiles]:
    """Return these tiles where the settled slots fit, and the default elsewhere."""

    def tiles(queries: int, pairs: int, **sizes: Any) -> attention.Tiles:
        cut = DEFAULT(queries, pairs, **sizes)
        return cut._replace(slots=slots, warps=warps) if cut.prefetch and sizes["settled"] <= slots else cut

    return tiles


def _instead(way: Way | None, *, few: bool) -> Callable[..., attention.Tiles]:
    """Return these tiles for up to 16 queries (`few`), or for more; and the default for the others."""

    def tiles(queries: int, pairs: int, *, new: bool, float8: bool, **_: int) -> attention.Tiles:
        if way is not None and few == (queries <= 16) and (queries <= way[0] or not new):
            return attention.Tiles(*way)
        return DEFAULT(queries, pairs, new=new, float8=float8)

    return tiles


def _time(launches: list[tuple[Launch, int]], run: Callable[[Launch, int], object], repeats: int = 10) -> float:
    """Return the microseconds of all launches, replayed from a graph: the best of three."""
    for launch in {launch for launch, _ in launches}:
        run(launch, 0)  # compiles, and makes inputs
    return min(graph_microseconds(lambda: [run(*each) for each in launches], repeats=repeats)[0] for _ in range(3))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
