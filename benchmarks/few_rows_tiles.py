"""Tiles for products of a handful of rows, on a GPU, in about half a minute: as ARPG-L has them.

    PYTHONPATH=src python benchmarks/few_rows_tiles.py

First each product with each table of tiles against float32. Then the network (24 layers, both passes) as one graph, by
the library and with each table; and the products of each table. Then, kind by kind, the tile with which the network is
fastest: these go into `arpg.kernels.few_rows.TILES`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from arpg.kernels.few_rows import Tile, linear
from few_rows import (
    AHEAD,
    HALF,
    LAYERS,
    OFF,
    compile_attention,
    distance,
    guarded,
    make_model,
    microseconds,
    network,
    say,
    switch,
)
from torch import Tensor
from torch.nn import functional as F

from arpg.kernels import few_rows
from arpg.model import ARPG

Table = dict[str, Tile]
TABLE: Table = dict(few_rows.TILES)
TABLES: dict[str, Table] = {
    "table": TABLE,
    "registers": {
        "plain": Tile(8, 3, 8, False, 2, 128),
        "swiglu": Tile(8, 3, 8, False, 2, 192),
        "sum": Tile(8, 1, 8, False, 6, 112),
    },
    "shared": {
        "plain": Tile(8, 3, 8, True, 2, 80),
        "swiglu": Tile(8, 3, 8, True, 2, 112),
        "sum": Tile(8, 1, 8, True, 4, 96),
    },
    "four warps": {
        "plain": Tile(8, 3, 4, True, 4, 168),
        "swiglu": Tile(8, 1, 4, True, 4, 128),
        "sum": Tile(8, 1, 4, True, 4, 128),
    },
}
OTHERS: dict[str, tuple[Tile, ...]] = {
    "plain": (Tile(8, 1, 4, False, 4, 168), Tile(8, 2, 8, True, 2, 96), Tile(8, 3, 4, True, 2, 128)),
    "swiglu": (Tile(8, 1, 4, False, 4, 168), Tile(8, 2, 8, True, 2, 112), Tile(8, 3, 4, True, 4, 168)),
    "sum": (Tile(8, 1, 8, True, 6, 128), Tile(8, 1, 4, False, 4, 168)),
}
SHAPES = {  # name: kind, inputs, lines of the weight
    "qkv": ("plain", 1024, 3072),
    "q": ("plain", 1024, 1024),
    "memory": ("plain", 1024, 2048),
    "head": ("plain", 1024, 16384),
    "gate, up": ("swiglu", 1024, 5632),
    "out": ("sum", 1024, 1024),
    "down": ("sum", 2816, 1024),
}
ROWS = (2, 10, 16, 24, 32)
_began = time.perf_counter()


def late(seconds: float) -> bool:
    return time.perf_counter() - _began > seconds


def one(name: str, rows: int, *, given: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A product as a layer calls it, and in float32."""
    kind, inputs, lines = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(seed)
    sample = partial(torch.randn, device="cuda", generator=generator)
    x, weight, norm = sample(rows, inputs).to(HALF), (sample(lines, inputs) / 32).to(HALF), sample(inputs).to(HALF)
    if kind == "sum":
        add = sample(rows, lines).to(HALF)
        sums = few_rows.empty_sums(x, weight)
        made = linear(x, weight, add=add, sums_PM=sums)
        exact = x.float() @ weight.float().t() + add.float()
        square = sums.sum(0)[:rows] - made.float().square().sum(-1)
        made = made + float(square.abs().max() > 1e-3 * lines)  # a wrong sum of squares shows as a large error
        return made, exact
    squares = None
    if given:  # as somebody who made these rows leaves them
        squares = few_rows.empty_sums(x, x.new_empty(inputs, 0))
        squares.zero_()
        squares[3, :rows] = x.float().square().sum(-1)
    made = linear(x, weight, norm_D=norm, eps=1e-5, swiglu=kind == "swiglu", squares_PM=squares)
    exact = (F.rms_norm(x.float(), (inputs,), eps=1e-5) * norm.float()) @ weight.float().t()
    if kind == "swiglu":
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    return made, exact


def correct(name: str, sizes: tuple[int, ...]) -> None:
    """The worst of all products."""
    errors = {}
    for shape, (kind, _, _) in SHAPES.items():
        for rows in sizes:
            for given in (False, True) if kind != "sum" else (True,):
                errors[shape, rows, given] = distance(*one(shape, rows, given=given, seed=rows))
    worst = max(errors, key=lambda case: errors[case])
    bad = [case for case, error in errors.items() if not error < 0.01]
    say(f"{name:20s} {'WRONG: ' + str(bad)[:200] if bad else 'right'}; worst off float32 by {errors[worst]:.4f}", worst)


def compile_one(kind: str, tile: Tile) -> None:
    """In a process of its own; what is compiled is found on disk by the next one."""
    switch(AHEAD)
    few_rows.TILES[kind] = tile
    for name, (is_kind, _, _) in SHAPES.items():
        if is_kind == kind:
            for given in (False, True):
                one(name, 16, given=given)


def candidates(kind: str) -> list[Tile]:
    return list(dict.fromkeys((*(table[kind] for table in TABLES.values()), *OTHERS[kind])))


def compile_all(workers: int) -> None:
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, kind, tile) for kind in TABLE for tile in candidates(kind)]
        jobs += [pool.submit(compile_attention, slots, to) for to in (AHEAD, OFF) for slots in (1, 8, 20)]
        for job in jobs:
            guarded("compiling", job.result)
    say(f"{len(jobs)} compiled")


def layer(model: ARPG, rows: int) -> float | None:
    """Microseconds."""
    took = guarded(f"{rows} rows", lambda: microseconds(network(model, rows, HALF), times=20))
    return None if took is None else took[0] / LAYERS


def compare(model: ARPG, exact: ARPG) -> None:
    for rows in ROWS:
        switch(OFF)
        true = network(exact, rows, torch.float32)()
        words = []
        for name in ("library", *TABLES):
            switch(OFF if name == "library" else AHEAD)
            few_rows.TILES.update(TABLES.get(name, TABLE))
            took = guarded(name, lambda rows=rows: microseconds(network(model, rows, HALF), times=20))
            if took is not None:
                words.append(f"{name} {took[0] / LAYERS:.2f} ({distance(took[1], true):.3f})")
        say(f"{rows:3d} rows, us a layer (off float32):", ", ".join(words))


def products(model: ARPG, name: str, rows: int) -> None:
    """Microseconds of each, in a row of products with other weights, more than a cache holds."""
    both = [*model.pass1, *model.pass2]
    weights = {
        "qkv": [block.attn.qkv.weight for block in model.pass1],
        "q": [block.attn.out.weight for block in both],
        "head": [model.head.weight.clone() for _ in range(4)],
        "gate, up": [block.ffn.gate_up.weight for block in both],
        "out": [block.attn.out.weight for block in both],
        "down": [block.ffn.down.weight for block in both],
    }
    words = []
    for shape, some in weights.items():
        kind, inputs, lines = SHAPES[shape]
        x = torch.randn(rows, inputs, device="cuda").to(HALF)
        options: dict[str, Any] = {"norm_D": torch.ones_like(x[0]), "eps": 1e-5, "swiglu": kind == "swiglu"}
        if kind == "sum":
            add = torch.zeros(rows, lines, device="cuda", dtype=HALF)
            options = {"add": add, "sums_PM": few_rows.empty_sums(x, some[0])}
        else:
            options["squares_PM"] = few_rows.empty_sums(x, x.new_empty(inputs, 0)).fill_(1.0)

        def call(some: list[Tensor] = some, x: Tensor = x, options: dict[str, Any] = options) -> Tensor:
            return [linear(x, weight, **options) for weight in some][-1]

        took = guarded(shape, partial(microseconds, call))
        words.append(f"{shape} {took[0] / len(some):.2f}" if took else f"{shape} failed")
    say(f"{rows:3d} rows, us a product: {name:12s}", ", ".join(words))


def search(model: ARPG, rows: int, seconds: float) -> Table:
    """Kind by kind, the rest as it is best so far."""
    best = dict(TABLE)
    for kind in ("swiglu", "sum", "plain"):
        found: dict[Tile, float] = {}
        for tile in candidates(kind):
            if late(seconds):
                break
            few_rows.TILES.update({**best, kind: tile})
            took = layer(model, rows)
            if took is not None:
                found[tile] = took
                say(f"{rows:3d} rows, us a layer: {took:.2f}  {kind} {tile}")
        if found:
            best[kind] = min(found, key=lambda tile: found[tile])
    return best


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=38, help="after which no more tiles are tried")
    given = parser.parse_args()
    guarded("compiling", lambda: compile_all(given.workers))
    exact = make_model()
    model = make_model().to(HALF)
    say(torch.cuda.get_device_name(), "torch", torch.__version__)
    switch(AHEAD)
    for name, table in TABLES.items():
        few_rows.TILES.update(table)
        guarded(name, lambda name=name: correct(name, ROWS if name == "table" else (2, 10, 16)))
    guarded("layers", lambda: compare(model, exact))
    switch(AHEAD)
    for name, table in TABLES.items():
        few_rows.TILES.update(table)
        guarded(name, lambda name=name: products(model, name, 12))
    for rows in (10, 16):
        say(f"best for {rows} rows:", guarded("search", lambda rows=rows: search(model, rows, given.seconds)))


if __name__ == "__main__":
    main()
