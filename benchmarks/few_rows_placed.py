"""Products of a handful of rows in Triton and in Gluon, on a GPU, in less than a minute: one image of ARPG-L.

    PYTHONPATH=src python benchmarks/few_rows_placed.py

First each product of the tables against float32. Then the network (24 layers, both passes) as one graph: by the
library, by Triton, and by Gluon as in the table, with weights in registers, and with weights in shared memory. Then,
kind by kind, the tile with which the network is fastest, and one image with these. Then again with all kernels asking
for as much shared memory as there is: a processor that has to divide its memory anew may wait until it is empty.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import few_rows as base
import torch
from few_rows import AHEAD, HALF, LAYERS, OFF, distance, guarded, image, make_model, microseconds, network, say, switch
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.jit import JITFunction

from arpg import kernels
from arpg.kernels import attention, draw, few_rows, few_rows_gluon, lookup, rotary
from arpg.kernels.few_rows import Placed, linear
from arpg.model import ARPG

Table = dict[str, dict[int, Placed]]
REGISTERS: Table = {
    "plain": {16: Placed(8, 3, 8, False, 2, 128)},
    "swiglu": {16: Placed(8, 3, 8, False, 2, 192)},
    "sum": {16: Placed(8, 1, 8, False, 6, 112)},
}
SHARED: Table = {
    "plain": {16: Placed(8, 3, 8, True, 2, 80)},
    "swiglu": {16: Placed(8, 3, 8, True, 2, 112)},
    "sum": {16: Placed(8, 1, 8, True, 4, 96)},
}
FOUR: Table = {
    "plain": {16: Placed(8, 3, 4, True, 4, 168)},
    "swiglu": {16: Placed(8, 1, 4, True, 4, 128)},
    "sum": {16: Placed(8, 1, 4, True, 4, 128)},
}
OTHERS: dict[str, tuple[Placed, ...]] = {
    "plain": (Placed(8, 1, 4, False, 4, 168), Placed(8, 2, 8, True, 2, 96)),
    "swiglu": (Placed(8, 1, 4, False, 4, 168), Placed(8, 2, 8, True, 2, 112)),
    "sum": (Placed(8, 1, 8, True, 6, 128), Placed(8, 1, 4, False, 4, 168)),
}
TABLE = {kind: dict(sizes) for kind, sizes in few_rows.PLACED.items()}
SHAPES = {  # name: kind, inputs, lines of the weight
    "qkv": ("plain", 1024, 3072),
    "q": ("plain", 1024, 1024),
    "memory": ("plain", 1024, 2048),
    "head": ("plain", 1024, 16384),
    "gate, up": ("swiglu", 1024, 5632),
    "out": ("sum", 1024, 1024),
    "down": ("sum", 2816, 1024),
}
ROWS = (2, 8, 10, 12, 16, 24, 32)
_began = time.perf_counter()


def late(seconds: float) -> bool:
    return time.perf_counter() - _began > seconds


def take(table: Table | None) -> None:
    """None: Triton."""
    few_rows.GLUON = table is not None
    few_rows.PLACED.update({kind: {**TABLE[kind], **(table or {}).get(kind, {})} for kind in TABLE})


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


def compile_one(kind: str, most: int, place: Placed | None) -> None:
    """In a process of its own; what is compiled is found on disk by the next one."""
    switch(AHEAD)
    few_rows.GLUON = place is not None
    if place is not None:
        few_rows.PLACED.update({name: {most: place if name == kind else TABLE[name][most]} for name in TABLE})
    for name, (is_kind, _, _) in SHAPES.items():
        if is_kind == kind:
            for given in (False, True):
                one(name, most, given=given)


def candidates(kind: str, most: int) -> list[Placed]:
    if most == 32:
        return [TABLE[kind][32]]
    some = [TABLE[kind][16], *(table[kind][16] for table in (REGISTERS, SHARED, FOUR)), *OTHERS[kind]]
    return list(dict.fromkeys(some))


def compile_all(workers: int) -> None:
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(compile_one, kind, most, p)
            for most in (16, 32)
            for kind in TABLE
            for p in candidates(kind, most)
        ]
        jobs += [pool.submit(compile_one, kind, most, None) for kind in TABLE for most in few_rows.TILES[kind]]
        jobs += [pool.submit(base.compile_attention, slots, to) for to in (AHEAD, OFF) for slots in (1, 8, 20, 40)]
        jobs.append(pool.submit(base.compile_small))
        for job in jobs:
            guarded("compiling", job.result)
    say(f"{len(jobs)} compiled")


def compiled() -> Iterator[Any]:
    """Every kernel of one image that was loaded."""
    for module in (attention, draw, few_rows, few_rows_gluon, lookup, rotary):
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                for caches in value.device_caches.values():
                    yield from (kernel for kernel in caches[0].values() if kernel.function)


def divide(share: int) -> None:
    """Ask for a share (percent) of a processor's memory as shared memory; -1: as the driver likes."""
    preferred = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    set_attribute = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute
    answers = [set_attribute(ctypes.c_void_p(kernel.function), preferred, share) for kernel in compiled()]
    say(f"shared memory {share}%: asked for by {len(answers)} kernels, {sum(map(bool, answers))} refused")


def layer(model: ARPG, rows: int) -> float | None:
    """Microseconds."""
    took = guarded(f"{rows} rows", lambda: microseconds(network(model, rows, HALF), times=20))
    return None if took is None else took[0] / LAYERS


def compare(model: ARPG, exact: ARPG, ways: dict[str, Callable[[], None]], sizes: tuple[int, ...]) -> None:
    kernels.MOST_ROWS = 32
    for rows in sizes:
        switch(OFF)
        true = network(exact, rows, torch.float32)()
        words = []
        for name, way in ways.items():
            way()
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
    best: Table = {kind: {16: TABLE[kind][16]} for kind in TABLE}
    for kind in ("swiglu", "sum", "plain"):
        found: dict[Placed, float] = {}
        for place in candidates(kind, 16):
            if late(seconds):
                break
            take({**best, kind: {16: place}})
            took = layer(model, rows)
            if took is not None:
                found[place] = took
                say(f"{rows:3d} rows, us a layer: {took:.2f}  {kind} {place}")
        if found:
            best[kind] = {16: min(found, key=lambda place: found[place])}
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
    tables: dict[str, Table | None] = {
        "table": {},
        "registers": REGISTERS,
        "shared": SHARED,
        "four warps": FOUR,
        "triton": None,
    }

    def way(table: Table | None) -> None:
        switch(AHEAD)
        take(table)

    def blocks() -> None:
        way({})
        few_rows.PLACED.update({kind: {16: TABLE[kind][16]} for kind in TABLE})

    for name, table in tables.items():
        way(table)
        guarded(name, lambda name=name: correct(name, ROWS if name == "table" else (2, 10, 16)))
    ways: dict[str, Callable[[], None]] = {name: partial(way, table) for name, table in tables.items()}
    ways["library"] = lambda: switch(OFF)
    ways["blocks of 16"] = blocks
    guarded("layers", lambda: compare(model, exact, ways, ROWS))
    for name, table in tables.items():
        way(table)
        guarded(name, lambda name=name: products(model, name, 12))
    switch(AHEAD)
    best = guarded("search", lambda: search(model, 12, given.seconds)) or {}
    say("best:", best)
    take(best)
    kernels.MOST_ROWS = 16
    guarded("one image", partial(image, model, AHEAD, "gluon, 16 rows"))
    kernels.MOST_ROWS = 32
    guarded("one image", partial(image, model, AHEAD, "gluon, 32 rows"))
    guarded("divide", partial(divide, 100))
    say("us a layer so:", {rows: layer(model, rows) for rows in (2, 12, 16, 24)})
    if not late(52):
        guarded("one image", partial(image, model, AHEAD, "gluon, 32, divided"))
    if not late(54):
        guarded("divide", partial(divide, -1))
        take(None)
        kernels.MOST_ROWS = 16
        guarded("one image", partial(image, model, AHEAD, "triton"))


if __name__ == "__main__":
    main()
