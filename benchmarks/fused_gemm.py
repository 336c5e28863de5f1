"""Time the fused GEMMs of ARPG-L on a GPU, and search their tiles.

    python -m benchmarks.fused_gemm                # a layer by number of rows: library and each fused GEMM
    python -m benchmarks.fused_gemm --products     # each product of small batches, checked against float32
    python -m benchmarks.fused_gemm --tiles        # the fastest tile of each kind of product of small batches
    python -m benchmarks.fused_gemm --large-tiles  # each tile of large_gemm, and which one it takes

The network (24 layers and the head, both passes, 93 tokens known) runs as one CUDA graph; its logits are compared with
float32. The first table shows for how many rows each of the fused GEMMs pays (`SMALL_BATCH_ROWS`, `WGMMA_ROWS` and
`LARGE_GEMM_ROWS` of `arpg.kernels.dispatch`); the tile searches find `TILES` of `arpg.kernels.small_gemm` and
`large_gemm`. All of it needs compute capability 9.0 or later; `wgmma_gemm` and `large_gemm` need 9.0, the last one
QuACK. The latency of a whole image is a row of `benchmarks/engine.py`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.bench.record import environment, error_line
from arpg.config import MODELS
from arpg.files import write_json
from arpg.kernels import dispatch, small_gemm, wgmma_gemm
from arpg.kernels.dispatch import KernelPolicy, kernel_policy
from arpg.kernels.small_gemm import Tile
from arpg.model import ARPG
from benchmarks.measures import graph_microseconds, relative_error

HALF, KNOWN, LAYERS = torch.bfloat16, 93, 24
ROWS = (2, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 640, 768, 1024, 2176)
PROCESSORS = 132
FEW, LARGE_ROWS = 128, (256, 640, 768, 1024, 2176, 5120)
GEMMS = {"small_gemm": small_gemm, "wgmma_gemm": wgmma_gemm}


class Mode(NamedTuple):
    """How a layer is timed."""

    policy: KernelPolicy
    kernel: str = ""  # of all numbers of rows
    rows: range = range(1 << 30)  # for which it is tried


MODES = {
    "library": Mode(KernelPolicy(small_gemm=False, large_gemm=False, pdl=False)),
    "small_gemm, not prefetched": Mode(KernelPolicy(pdl=False), "small_gemm", range(FEW + 1)),
    "small_gemm": Mode(KernelPolicy(), "small_gemm", range(FEW + 1)),
    "wgmma_gemm, not prefetched": Mode(KernelPolicy(pdl=False), "wgmma_gemm", range(FEW + 1)),
    "wgmma_gemm": Mode(KernelPolicy(), "wgmma_gemm", range(FEW + 1)),
    "large_gemm, not prefetched": Mode(KernelPolicy(pdl=False), "large_gemm", range(16, 1 << 30)),
    "large_gemm": Mode(KernelPolicy(), "large_gemm", range(16, 1 << 30)),
}
SHAPES = {  # name: kind of product, inputs, outputs
    "qkv": ("plain", 1024, 3072),
    "q": ("plain", 1024, 1024),
    "memory": ("plain", 1024, 2048),
    "head": ("plain", 1024, 16384),
    "gate, up": ("swiglu", 1024, 5632),
    "out": ("sum", 1024, 1024),
    "down": ("sum", 2816, 1024),
}
CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "plain": (
        Tile(8, 3, 8, False, 2, 128),
        Tile(8, 3, 8, True, 2, 80),
        Tile(8, 3, 4, True, 4, 168),
        Tile(8, 1, 4, False, 4, 168),
        Tile(8, 2, 8, True, 2, 96),
        Tile(8, 3, 4, True, 2, 128),
    ),
    "swiglu": (
        Tile(8, 3, 8, False, 2, 192),
        Tile(8, 3, 8, True, 2, 112),
        Tile(8, 1, 4, True, 4, 128),
        Tile(8, 1, 4, False, 4, 168),
        Tile(8, 2, 8, True, 2, 112),
        Tile(8, 3, 4, True, 4, 168),
    ),
    "sum": (
        Tile(8, 1, 8, False, 6, 112),
        Tile(8, 1, 8, True, 4, 96),
        Tile(8, 1, 4, True, 4, 128),
        Tile(8, 1, 8, True, 6, 128),
        Tile(8, 1, 4, False, 4, 168),
    ),
}


def attempt(name: str, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or print the error and return None: the rest is still measured."""
    try:
        return work()
    except Exception as error:
        print(f"{name}: {error_line(error)}", flush=True)
        return None


def make_model() -> ARPG:
    """Make ARPG-L with random weights and random norms, so that a missing norm shows as a large error."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = ARPG(MODELS["arpg-l"])
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1 if parameter.dim() == 1 else 0.02)
    return model.eval()


def one_step(model: ARPG, rows: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a function that runs Pass 1 and Pass 2 of one step of a guided image with `rows` rows in all."""
    generator = torch.Generator("cuda").manual_seed(rows)
    slots = rows // 2
    x = torch.randn(2, slots, model.config.width, device="cuda", generator=generator).to(dtype)
    positions = torch.randint(16, (2, slots, 2), device="cuda", generator=generator).float()
    cache = model.allocate_cache(2, KNOWN + max(slots, 207))
    for part in (cache.key_LBTHK, cache.value_LBTHK):
        part.copy_(torch.randn(part.shape, device="cuda", generator=generator))

    def call() -> Tensor:
        cache.end = KNOWN
        cache.settle()  # as between two steps
        model.encode(x, positions, cache, causal=False)
        return model.predict(positions, None, cache)

    return call


def time_layers(model: ARPG, exact: ARPG, rows: int) -> list[dict[str, Any]]:
    """Print and return the microseconds of a layer by mode, and the error of the logits."""
    expected, record = one_step(exact, rows, torch.float32)(), []
    found: dict[str, Tensor] = {}
    for name, mode in MODES.items():
        if rows not in mode.rows:
            continue
        limits: dict[str, Any] = {
            "SMALL_BATCH_ROWS": FEW if mode.kernel == "small_gemm" else 0,
            "WGMMA_ROWS": range(FEW + 1 if mode.kernel == "wgmma_gemm" else 0),
            "LARGE_GEMM_ROWS": 1 if mode.kernel == "large_gemm" else 1 << 30,
        }
        with kernel_policy(mode.policy), mock.patch.multiple(dispatch, **limits):
            result = attempt(name, partial(graph_microseconds, one_step(model, rows, HALF), repeats=20))
        if result is not None:
            took, found[name] = result[0] / LAYERS, result[1].clone()
            error = relative_error(found[name], expected)
            print(f"{rows:4d} rows  {name:26s} {took:6.2f} us a layer, error {error:.4f}", flush=True)
            record.append({"rows": rows, "mode": name, "us": took, "error": error})
    for name in (*GEMMS, "large_gemm"):  # a kernel that does not wait for the one before would show here
        early, late = found.get(name), found.get(f"{name}, not prefetched")
        if early is not None and late is not None and not torch.equal(early, late):
            print(f"{rows:4d} rows  {name}: prefetching CHANGES the logits", flush=True)
    return record


def product_options(kind: str, x: Tensor, weight: Tensor, gemm: ModuleType) -> dict[str, Any]:
    """Return the arguments with which a layer calls a product of this kind."""
    squares = gemm.empty_sums(x, weight if kind == "sum" else x.new_empty(x.shape[1], 0))
    squares.untyped_storage().fill_(0)  # with the counters behind the sums
    if kind == "sum":
        add = torch.randn(len(x), len(weight), device="cuda").to(HALF)
        return {"add": add, "squares_PM": squares, "sums_PM": gemm.empty_sums(x, weight)}
    squares[0, : len(x)] = x.float().square().sum(-1)
    norm = torch.randn(x.shape[1], device="cuda").to(HALF)
    return {"norm_D": norm, "eps": 1e-5, "swiglu": kind == "swiglu", "squares_PM": squares}


def exact_product(kind: str, x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the same product in float32."""
    if kind == "sum":
        made: Tensor = x.float() @ weight.float().t() + options["add"].float()
        return made
    made = (F.rms_norm(x.float(), x.shape[1:], eps=1e-5) * options["norm_D"].float()) @ weight.float().t()
    if kind == "swiglu":
        gate, up = made.chunk(2, -1)
        made = F.silu(gate) * up
    return made


def time_products(rows: int) -> list[dict[str, Any]]:
    """Print and return the microseconds and the error of each product; each call takes other weights."""
    record = []
    for name, (kind, inputs, outputs) in SHAPES.items():
        weights = [
            (torch.randn(outputs, inputs, device="cuda") / 32).to(HALF) for _ in range(4 if name == "head" else LAYERS)
        ]  # more than a cache holds
        x = torch.randn(rows, inputs, device="cuda").to(HALF)
        for label, gemm in GEMMS.items():
            options = attempt(label, partial(product_options, kind, x, weights[0], gemm))
            if options is None:
                continue
            call, exact = partial(gemm.linear, x, **options), exact_product(kind, x, weights[0], options)

            def run(call: Any = call, weights: list[Tensor] = weights, exact: Tensor = exact) -> tuple[float, float]:
                error = relative_error(call(weights[0]), exact)
                took, _ = graph_microseconds(lambda: [call(weight) for weight in weights])
                return took / len(weights), error

            result = attempt(f"{name}, {label}", run)
            if result is not None:
                took, error = result
                verdict = "" if error < 0.01 else "  WRONG"
                print(f"{rows:4d} rows  {name:9s} {label:11s} {took:6.2f} us, error {error:.4f}{verdict}", flush=True)
                record.append({"rows": rows, "product": name, "gemm": label, "us": took, "error": error})
    return record


def search_tiles(model: ARPG, rows: int, deadline: float) -> dict[str, Tile]:
    """Return the fastest tile of each kind, one kind after the other."""
    best = dict(small_gemm.TILES)
    for kind in ("swiglu", "sum", "plain"):
        found: dict[Tile, float] = {}
        for tile in dict.fromkeys((best[kind], *CANDIDATES[kind])):
            if time.monotonic() > deadline:
                print("no time left for more tiles", flush=True)
                return best
            small_gemm.TILES.update({**best, kind: tile})
            result = attempt(str(tile), lambda: graph_microseconds(one_step(model, rows, HALF), repeats=20))
            if result is not None:
                found[tile] = result[0] / LAYERS
                print(f"{rows:4d} rows  {found[tile]:6.2f} us a layer  {kind} {tile}", flush=True)
        if found:
            best[kind] = min(found, key=lambda tile: found[tile])
    return best


def more_large_tiles() -> list[Any]:
    """Return tiles that `large_gemm` does not choose from: of other sizes, in clusters, and with shared inputs."""
    from arpg.kernels.large_gemm import Tile

    sizes = [Tile(64, 192), Tile(64, 256), Tile(128, 64), Tile(192, 128, pingpong=False)]
    sizes += [Tile(256, 128, pingpong=False), Tile(128, 256, pingpong=False)]
    pairs = [(64, 128), (128, 96), (128, 128), (128, 160), (128, 192), (192, 96)]
    clusters = [Tile(*size, cluster=2) for size in pairs]
    clusters += [Tile(*size, pingpong=False, cluster=2) for size in ((64, 64), (256, 128), (128, 256), (192, 128))]
    splits = [Tile(64, 64, pingpong=False, split=split) for split in (2, 4)]
    return [*sizes, *clusters, *splits, Tile(64, 128, split=2), Tile(128, 128, pingpong=False, split=2)]


def time_large_tiles(rows: int, deadline: float) -> list[dict[str, Any]]:
    """Print and return the microseconds of each product of a layer by tile of `large_gemm`, the fastest first.

    Each tile is held to float32. One that shares inputs takes a counter, which is made in every call, and none for
    SwiGLU. The library computes the product alone.
    """
    from arpg.kernels import large_gemm

    record: list[dict[str, Any]] = []
    for name in ("qkv", "q", "gate, up", "out", "down"):
        kind, inputs, outputs = SHAPES[name]
        weights = [(torch.randn(outputs, inputs, device="cuda") / 32).to(HALF) for _ in range(LAYERS)]
        x, add = (torch.randn(rows, width, device="cuda").to(HALF) for width in (inputs, outputs))
        sums = (x.float().square().sum(-1, keepdim=True) / 8).expand(-1, 8).contiguous().t()
        if kind == "sum":
            product: Any = partial(large_gemm.add_linear, x, add=add, norm_D=torch.ones_like(add[0]))
        else:
            product = partial(large_gemm.linear, x, eps=1e-5, squares_PM=sums, swiglu=kind == "swiglu")
        exact = exact_product(kind, x, weights[0], {"add": add, "norm_D": x.new_ones(inputs)})
        chosen, times = large_gemm.best_tile(rows, outputs, PROCESSORS), {}
        for tile in [*large_gemm.TILES, *more_large_tiles()]:
            if time.monotonic() > deadline:
                print("no time left for more tiles", flush=True)
                return record
            if kind == "swiglu" and tile.split > 1:
                continue

            def run(weights: list[Tensor] = weights, product: Any = product, exact: Tensor = exact) -> float:
                made = product(weights[0])
                if (error := relative_error(made[0] if isinstance(made, tuple) else made, exact)) > 0.01:
                    raise ValueError(f"error {error:.3f}")
                return graph_microseconds(lambda: [product(weight) for weight in weights])[0]

            with mock.patch.object(large_gemm, "best_tile", lambda *_, tile=tile: tile):
                result = attempt(f"{rows} rows, {name}, {tile}", run)
            if result is not None:
                times[tile] = result / LAYERS
        order = sorted(times, key=lambda tile: times[tile])
        library = partial(lambda x, weights: [F.linear(x, weight) for weight in weights], x, weights)
        plain = graph_microseconds(library)[0] / LAYERS
        parts = [f"{label(tile)} {times[tile]:.2f}{' *' if tile == chosen else ''}" for tile in order]
        print(f"{rows:4d} rows  {name:9s} us, * chosen: {', '.join(parts)}; library {plain:.2f}", flush=True)
        common = {"rows": rows, "product": name, "library us": plain}
        record += [{**common, "tile": tile._asdict(), "us": times[tile]} for tile in order]
    return record


def fit_tile_costs(record: list[dict[str, Any]], *, most: int = 10, gain: float = 0.005) -> dict[Any, float]:
    """Return `TILES` for measured times: at most so many tiles, added as long as one saves this share of all time.

    The cost of a tile is the median over products and rows of its time per output of full waves, as `best_tile` counts
    them, relative to that of the cheapest.
    """
    from arpg.kernels.large_gemm import Tile, cheapest_tile, wave_outputs

    times: dict[tuple[int, int, str], dict[Any, float]] = {}
    for row in record:
        shape = (row["rows"], SHAPES[row["product"]][2], row["product"])
        times.setdefault(shape, {})[Tile(**row["tile"])] = row["us"]
    costs = {
        tile: statistics.median(
            found[tile] / SHAPES[name][1] / wave_outputs(tile, rows, outputs, PROCESSORS)
            for (rows, outputs, name), found in times.items()
            if tile in found
        )
        for tile in {tile for found in times.values() for tile in found}
    }

    def total(tiles: dict[Any, float]) -> float:
        """Return the time of all products, each with the tile that is chosen of those that it has."""
        chosen = 0.0
        for (rows, outputs, _), found in times.items():
            usable = {tile: cost for tile, cost in tiles.items() if tile in found}
            chosen += found[cheapest_tile(usable, rows, outputs, PROCESSORS)] if usable else float("inf")
        return chosen

    kept: dict[Any, float] = {}
    best = float("inf")
    while len(kept) < most:
        tile = min(costs.keys() - kept.keys(), key=lambda tile: total({**kept, tile: costs[tile]}), default=None)
        if tile is None or (reached := total({**kept, tile: costs[tile]})) > (1 - gain) * best:
            break
        kept[tile], best = costs[tile], reached
    least, fastest = min(kept.values()), sum(min(found.values()) for found in times.values())
    library = sum({(row["rows"], row["product"]): row["library us"] for row in record}.values())
    print(f"all products, us: {best:.0f} with these, {fastest:.0f} with the fastest of each, library {library:.0f}")
    return {tile: round(cost / least, 2) for tile, cost in kept.items()}


def label(tile: Any) -> str:
    """Return the size of a tile of `large_gemm`, with c for its cluster, s for its split."""
    more = [f"{letter}{count}" for letter, count in (("c", tile.cluster), ("s", tile.split)) if count > 1]
    return " ".join([f"{tile.rows} x {tile.outputs}", *more])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", action="store_true", help="time each product instead of whole layers")
    parser.add_argument("--tiles", action="store_true", help="search the fastest tiles instead")
    parser.add_argument("--large-tiles", action="store_true", help="time the tiles of large_gemm instead")
    parser.add_argument("--rows", type=int, nargs="+", help="by default as many as the search is for")
    parser.add_argument("--minutes", type=float, default=5.0, help="try no more tiles after this")
    parser.add_argument("--out", type=Path, help="JSON of layers or products, written after each number of rows")
    options = parser.parse_args()
    about = environment(torch.device("cuda"))
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}", flush=True)
    model, deadline = make_model().to(HALF), time.monotonic() + 60 * options.minutes
    if options.tiles:
        for rows in options.rows or (10, 16):
            print(f"{rows:4d} rows  best:", search_tiles(model, rows, deadline), flush=True)
        return
    exact, record = make_model(), []
    what = "products" if options.products else "tiles" if options.large_tiles else "layers"
    for rows in options.rows or (LARGE_ROWS if options.large_tiles else ROWS):
        if options.large_tiles:
            record += time_large_tiles(rows, deadline)
        elif not options.products:
            record += time_layers(model, exact, rows)
        elif rows <= FEW:
            record += time_products(rows)
        if options.out is not None:
            write_json(options.out, {"about": about, what: record})
    if options.large_tiles and record:
        for tile, cost in fit_tile_costs(record).items():
            print(f"    {tile}: {cost},", flush=True)


if __name__ == "__main__":
    main()
