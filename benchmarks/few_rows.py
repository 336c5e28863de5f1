"""What five kernels a layer bring where rows are few: one image of ARPG-L on a GPU, in about a minute.

    PYTHONPATH=src python benchmarks/few_rows.py

First the network (24 layers, head; both passes, 93 tokens known) as one graph: by the library, in five kernels a layer,
and in five that fetch their weights ahead (compute capability 9.0 and later); with the error of the logits against
float32; also for more rows than these kernels are taken for. Then one image, replayed. Then tiles, product by product,
and the image again with the best of them.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg import SamplingSettings, kernels
from arpg.bench.case import Case
from arpg.config import MODELS
from arpg.decode.execution import Engine
from arpg.kernels import few_rows
from arpg.kernels.attention import attend, attend_and_store
from arpg.kernels.few_rows import Tile, linear
from arpg.model import ARPG

HALF, KNOWN, LAYERS = torch.bfloat16, 93, 24
OFF, PLAIN, AHEAD = (False, False), (True, False), (True, True)  # kernels.FEW_ROWS, kernels.AHEAD
NAMES = {OFF: "library", PLAIN: "five kernels", AHEAD: "five, weights ahead"}
CANDIDATES = {  # beside those in the table
    "plain": (Tile(16, 4, 256, 168), Tile(16, 8, 128, 160), Tile(8, 4, 256, 128), Tile(32, 8, 128, 128)),
    "swiglu": (Tile(16, 8, 128, 255), Tile(8, 4, 256, 168), Tile(8, 8, 128, 80), Tile(8, 8, 128, 128)),
    "sum": (Tile(8, 4, 256, 168), Tile(16, 8, 128, 128), Tile(8, 8, 64, 80), Tile(8, 8, 128, 255)),
}
ROWS = {4: 2, 16: 16}  # what a size of the table is tried with
MOST_ROWS = 64  # of the network, in five kernels
_began = time.perf_counter()


def say(*words: object) -> None:
    print(f"{time.perf_counter() - _began:5.1f} s ", *words, flush=True)  # noqa: T201


def switch(to: tuple[bool, bool]) -> None:
    kernels.FEW_ROWS, kernels.AHEAD = to
    kernels.early = lambda x: True  # an older GPU is asked for PLAIN, too, which it would not take by itself


def ways() -> tuple[tuple[bool, bool], ...]:
    """The last one is the best that this GPU can."""
    return (OFF, PLAIN, AHEAD) if torch.cuda.get_device_capability() >= (9, 0) else (OFF, PLAIN)


def guarded(name: str, work: Callable[[], Any]) -> Any:
    """One line where something fails: the rest is measured all the same."""
    try:
        return work()
    except Exception as error:
        say(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160])
        return None


def microseconds(work: Callable[[], Any], *, times: int = 10) -> tuple[float, Any]:
    """Of one call, replayed from a graph, and what the last replay made."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / times * 1e3, made.clone()


def make_model() -> ARPG:
    """Random weights, norms among them, so that a norm that is forgotten shows."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = ARPG(MODELS["arpg-l"])
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1 if parameter.dim() == 1 else 0.02)
    return model.eval()


def network(model: ARPG, rows: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Pass 1 and Pass 2 of a step of one image."""
    generator = torch.Generator("cuda").manual_seed(rows)
    slots = rows // 2
    x = torch.randn(2, slots, model.config.width, device="cuda", generator=generator).to(dtype)
    place = torch.randint(16, (2, slots, 2), device="cuda", generator=generator).float()
    cache = model.allocate_cache(2, 300)
    for part in (cache.key_LBTHK, cache.value_LBTHK):
        part.copy_(torch.randn(part.shape, device="cuda", generator=generator))

    def call() -> Tensor:
        cache.end = KNOWN
        model.encode(x, place, cache, causal=False)
        return model.predict(place, None, cache)

    return call


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def layers(model: ARPG, exact: ARPG) -> None:
    for rows in (2, 10, 16, 32, 64):
        switch(OFF)
        true = network(exact, rows, torch.float32)()
        call = network(model, rows, HALF)
        made: dict[tuple[bool, bool], Tensor] = {}
        for to in ways():
            switch(to)
            result = guarded(NAMES[to], partial(microseconds, call))
            if result is None:
                continue
            took, made[to] = result
            say(
                f"{rows:3d} rows  {NAMES[to]:20s} {took:7.1f} us a call, {took / LAYERS:5.1f} us a layer;"
                f" off float32 by {distance(made[to], true):.4f}"
            )
        if PLAIN in made and AHEAD in made:  # a kernel that does not wait long enough would show here
            apart = distance(made[AHEAD], made[PLAIN])
            say(f"{rows:3d} rows  ahead or not: {'bit for bit the same' if apart == 0 else f'apart by {apart:.2g}'}")


def image(model: ARPG, to: tuple[bool, bool], name: str) -> Tensor:
    """One image: the median of what a caller waits, and the replay of the graphs alone."""
    switch(to)
    case = Case("arpg-l", 1, SamplingSettings(steps=32, guidance=4.0), (16, 16))
    engine = Engine(model, "graph")
    tokens, waits = [], []
    for seed in range(9):
        torch.cuda.synchronize()
        began = time.perf_counter()
        *_, step = engine.decode(*case.request(model, seed), case.settings)
        torch.cuda.synchronize()
        waits.append(1e3 * (time.perf_counter() - began))
        tokens.append(step.ids_BN)
    recording = next(iter(engine.recordings.values()))
    began = time.perf_counter()
    for _ in range(5):
        for graph, _, _ in recording.steps:
            graph.replay()
    torch.cuda.synchronize()
    replay = 1e3 * (time.perf_counter() - began) / 5
    say(f"one image  {name:20s} latency {statistics.median(waits[1:]):.2f} ms, replay {replay:.2f} ms")
    return torch.cat(tokens)


def product(kind: str, rows: int, weight: Tensor) -> Tensor:
    """As a layer calls it."""
    inputs = weight.shape[1]
    x, norm = torch.ones(rows, inputs, device="cuda", dtype=HALF), torch.ones(inputs, device="cuda", dtype=HALF)
    if kind == "sum":
        return linear(x, weight, add=torch.ones(rows, len(weight), device="cuda", dtype=HALF))
    return linear(x, weight, norm_D=norm, eps=1e-5, swiglu=kind == "swiglu")


def compile_one(job: tuple[str, int, Tile, tuple[bool, bool], int]) -> None:
    """In a process of its own; what is compiled is found on disk by the next one."""
    kind, most, tile, to, inputs = job
    switch(to)
    few_rows.TILES[kind] = {most: tile}
    product(kind, most, torch.zeros(128, inputs, device="cuda", dtype=HALF))


def compile_attention(slots: int, to: tuple[bool, bool]) -> None:
    switch(to)
    qkv, angles = torch.zeros(2, slots, 3, 16, 64, device="cuda", dtype=HALF), torch.zeros(2, slots, 64, device="cuda")
    key, value = (torch.zeros(2, 300, 16, 64, device="cuda", dtype=HALF) for _ in range(2))
    attend_and_store(qkv, (key, value), None, (angles, angles), 7)
    attend(qkv[:, :, 0].contiguous(), key, value, None, (angles, angles))


def compile_all(workers: int) -> None:
    """All kernels at once: one after the other they would take most of the minute."""
    jobs = []
    for kind, sizes in few_rows.TILES.items():
        for most, tile in sizes.items():
            tried = [(tile, to) for to in ways()[1:]]
            tried += [(other, ways()[-1]) for other in CANDIDATES[kind]] if most in ROWS else []
            jobs += [(kind, most, *one, inputs) for one in tried for inputs in ((1024, 2816)[: 1 + (kind == "sum")])]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_attention, slots, to) for to in (ways()[-1], OFF) for slots in (1, 20, 40)]
        futures += [pool.submit(compile_one, job) for job in jobs]
        for future in futures:
            guarded("compiling", future.result)
    say(f"{len(futures)} compiled")


def tiles(model: ARPG, deadline: float) -> None:
    """The best tile of each kind and size goes into the table. The weights of a product are more than a cache holds."""
    blocks = [*model.pass1, *model.pass2]
    square = [block.attn.out.weight for block in blocks] + [block.attn.q.weight for block in model.pass2]
    weights: dict[str, tuple[str, list[Tensor]]] = {
        "qkv": ("plain", [block.attn.qkv.weight for block in model.pass1]),
        "q": ("plain", square),
        "head": ("plain", [model.head.weight.clone() for _ in range(6)]),
        "gate, up": ("swiglu", [block.ffn.gate_up.weight for block in blocks]),
        "out": ("sum", square),
        "down": ("sum", [block.ffn.down.weight for block in blocks]),
    }
    worth = {"qkv": 12, "q": 12, "head": 1, "gate, up": 24, "out": 24, "down": 24}  # in a step
    switch(ways()[-1])
    for (most, rows), kind in itertools.product(ROWS.items(), few_rows.TILES):
        of_kind = {name: some for name, (is_kind, some) in weights.items() if is_kind == kind}
        found: dict[Tile, float] = {}
        table = few_rows.TILES[kind]
        for tile in dict.fromkeys((table[most], *CANDIDATES[kind])):
            if time.perf_counter() - _began > deadline:
                break
            few_rows.TILES[kind] = {**table, most: tile}
            took = {name: guarded(f"{name} {tile}", partial(chain, some, rows, kind)) for name, some in of_kind.items()}
            if None not in took.values():
                found[tile] = sum(worth[name] * each for name, each in took.items())
                say(f"{rows:3d} rows  {tile!s:60s}", ", ".join(f"{name} {each:.2f} us" for name, each in took.items()))
        library = {name: chain(some, rows, "library") for name, some in of_kind.items()}
        say(f"{rows:3d} rows  {'product of the library':60s}", ", ".join(f"{n} {t:.2f} us" for n, t in library.items()))
        few_rows.TILES[kind] = {**table, most: min(found, key=lambda tile: found[tile])} if found else table
    say("best:", few_rows.TILES)


def chain(weights: list[Tensor], rows: int, kind: str) -> float:
    """Microseconds of one product, in a row of products with other weights."""
    inputs, outputs = weights[0].shape[1], len(weights[0])
    x, add = torch.randn(rows, inputs, device="cuda").to(HALF), torch.zeros(rows, outputs, device="cuda", dtype=HALF)
    options: dict[str, Any] = {"add": add}
    if kind != "sum":
        options = {"norm_D": torch.ones_like(x[0]), "eps": 1e-5, "swiglu": kind == "swiglu"}

    def call() -> Tensor:
        for weight in weights:
            made = F.linear(x, weight) if kind == "library" else linear(x, weight, **options)
        return made

    return microseconds(call)[0] / len(weights)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=45, help="after which no more tiles are tried")
    options = parser.parse_args()
    guarded("compiling", lambda: compile_all(options.workers))
    exact = make_model()
    model = make_model().to(HALF)
    say(torch.cuda.get_device_name(), "torch", torch.__version__)
    most, kernels.MOST_ROWS = kernels.MOST_ROWS, MOST_ROWS
    layers(model, exact)
    kernels.MOST_ROWS = most
    del exact
    first = image(model, OFF, NAMES[OFF])
    for to in ways()[1:]:
        ids = guarded("one image", partial(image, model, to, NAMES[to]))
        if ids is not None:
            say(f"{float((ids == first).float().mean()):.1%} of the tokens are the library's")
    guarded("tiles", lambda: tiles(model, options.seconds))
    guarded("one image", lambda: image(model, ways()[-1], "five, best tiles"))


if __name__ == "__main__":
    main()
