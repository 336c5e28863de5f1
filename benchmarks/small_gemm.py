"""Time the fused small-batch layers (up to 48 rows) of ARPG-L on a GPU, and search their tiles.

    python -m benchmarks.small_gemm             # a layer by number of rows: library, fused, weights prefetched
    python -m benchmarks.small_gemm --products  # each matrix product, checked against float32
    python -m benchmarks.small_gemm --tiles     # the fastest tile of each kind of product

The network (24 layers and the head, both passes, 93 tokens known) runs as one CUDA graph; its logits are compared with
float32. The first table shows up to how many rows the fused kernels pay (`SMALL_BATCH_ROWS` of
`arpg.kernels.dispatch`); the tile search finds the entries of `arpg.kernels.small_gemm.TILES`. All of it needs compute
capability 9.0 or later. The latency of a whole image is a row of `benchmarks/engine.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.bench.record import error_line
from arpg.config import MODELS
from arpg.kernels import small_gemm
from arpg.kernels.dispatch import KernelPolicy, kernel_policy
from arpg.kernels.small_gemm import Tile, linear
from arpg.model import ARPG
from benchmarks.measures import graph_microseconds, relative_error

HALF, KNOWN, LAYERS = torch.bfloat16, 93, 24
MODES = {
    "library": KernelPolicy(small_gemm=False, pdl=False),
    "fused": KernelPolicy(pdl=False),
    "fused, weights prefetched": KernelPolicy(),
}
ROWS = (2, 8, 10, 12, 16, 24, 32)
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
    cache = model.allocate_cache(2, 300)
    for part in (cache.key_LBTHK, cache.value_LBTHK):
        part.copy_(torch.randn(part.shape, device="cuda", generator=generator))

    def call() -> Tensor:
        cache.end = KNOWN
        cache.settle()  # as between two steps
        model.encode(x, positions, cache, causal=False)
        return model.predict(positions, None, cache)

    return call


def time_layers(model: ARPG, exact: ARPG) -> None:
    """Print the microseconds of a layer by number of rows and mode, and the error of the logits."""
    for rows in ROWS:
        expected = one_step(exact, rows, torch.float32)()
        found: dict[str, Tensor] = {}
        for mode, policy in MODES.items():
            with kernel_policy(policy):
                result = attempt(mode, partial(graph_microseconds, one_step(model, rows, HALF), repeats=20))
            if result is not None:
                took, found[mode] = result[0], result[1].clone()
                error = relative_error(found[mode], expected)
                print(f"{rows:3d} rows  {mode:26s} {took / LAYERS:6.2f} us a layer, error {error:.4f}", flush=True)
        if len(found) == 3:  # a kernel that does not wait for the one before would show here
            same = torch.equal(*list(found.values())[1:])
            print(f"{rows:3d} rows  prefetching {'changes nothing' if same else 'CHANGES the logits'}", flush=True)


def product_options(kind: str, x: Tensor, outputs: int, weight: Tensor) -> dict[str, Any]:
    """Return the arguments with which a layer calls a product of this kind."""
    if kind == "sum":
        add = torch.randn(len(x), outputs, device="cuda").to(HALF)
        return {"add": add, "sums_PM": small_gemm.empty_sums(x, weight)}
    squares = small_gemm.empty_sums(x, x.new_empty(x.shape[1], 0)).zero_()
    squares[0, : len(x)] = x.float().square().sum(-1)
    norm = torch.randn(x.shape[1], device="cuda").to(HALF)
    return {"norm_D": norm, "eps": 1e-5, "swiglu": kind == "swiglu", "squares_PM": squares}


def exact_product(kind: str, x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the same product in float32."""
    if kind == "sum":
        return x.float() @ weight.float().t() + options["add"].float()
    made = (F.rms_norm(x.float(), x.shape[1:], eps=1e-5) * options["norm_D"].float()) @ weight.float().t()
    if kind == "swiglu":
        gate, up = made.chunk(2, -1)
        made = F.silu(gate) * up
    return made


def time_products(rows: int) -> None:
    """Print the microseconds and the error of each product; each call takes other weights, more than a cache holds."""
    for name, (kind, inputs, outputs) in SHAPES.items():
        weights = [
            (torch.randn(outputs, inputs, device="cuda") / 32).to(HALF) for _ in range(4 if name == "head" else 24)
        ]
        x = torch.randn(rows, inputs, device="cuda").to(HALF)
        options = product_options(kind, x, outputs, weights[0])

        def run(kind: str = kind, x: Tensor = x, weights: list[Tensor] = weights, options: Any = options) -> Any:
            error = relative_error(linear(x, weights[0], **options), exact_product(kind, x, weights[0], options))
            took, _ = graph_microseconds(lambda: [linear(x, weight, **options) for weight in weights])
            return took / len(weights), error

        result = attempt(name, run)
        if result is not None:
            verdict = "" if result[1] < 0.01 else "  WRONG"
            print(
                f"{rows:3d} rows  {name:9s} {result[0]:6.2f} us a product, error {result[1]:.4f}{verdict}", flush=True
            )


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
                print(f"{rows:3d} rows  {found[tile]:6.2f} us a layer  {kind} {tile}", flush=True)
        if found:
            best[kind] = min(found, key=lambda tile: found[tile])
    return best


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", action="store_true", help="time each product instead of whole layers")
    parser.add_argument("--tiles", action="store_true", help="search the fastest tiles instead")
    parser.add_argument("--rows", type=int, nargs="+", default=[10, 16], help="rows of --products and --tiles")
    parser.add_argument("--minutes", type=float, default=5.0, help="try no more tiles after this")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if options.products:
        for rows in options.rows:
            time_products(rows)
        return
    model = make_model().to(HALF)
    if options.tiles:
        deadline = time.monotonic() + 60 * options.minutes
        for rows in options.rows:
            print(f"{rows:3d} rows  best:", search_tiles(model, rows, deadline), flush=True)
    else:
        time_layers(model, make_model())


if __name__ == "__main__":
    main()
