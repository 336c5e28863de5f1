"""What five kernels a layer bring where rows are few: one image of ARPG-L on a GPU, in about a minute.

    PYTHONPATH=src python benchmarks/few_rows.py

First the network (24 layers, head; both passes, 93 tokens known) as one graph: by the library, in five kernels a layer,
and in five that fetch their weights ahead; with the error of the logits against float32. Then the small kernels around
the layers, against tensor operations. Then one image, replayed, and what its caller waits for before. Then tiles,
product by product; the network again for more rows with the best of them, which says how many rows should count as a
handful (`arpg.kernels.MOST_ROWS`); and the image again.
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

from arpg import SamplingSettings, kernels, make_plan, tasks
from arpg.bench.case import Case
from arpg.config import MODELS
from arpg.decode.engine import check
from arpg.decode.execution import Engine
from arpg.decode.planned import Planned
from arpg.decode.recording import shape_of
from arpg.decode.start import read
from arpg.kernels import draw as draws
from arpg.kernels import few_rows, lookup
from arpg.kernels.attention import attend, attend_and_store
from arpg.kernels.few_rows import Tile, linear
from arpg.model import ARPG, rope

HALF, KNOWN, LAYERS = torch.bfloat16, 93, 24
OFF, PLAIN, AHEAD = (False, False), (True, False), (True, True)  # kernels.FEW_ROWS, kernels.AHEAD
NAMES = {OFF: "library", PLAIN: "five kernels", AHEAD: "five, weights ahead"}
CANDIDATES = {  # beside those in the table. All that make the stream have 8 outputs: who norms it is compiled for that
    "plain": (Tile(16, 4, 256, 255), Tile(16, 8, 128, 96), Tile(16, 8, 128, 128), Tile(32, 8, 128, 128)),
    "swiglu": (Tile(8, 4, 256, 255), Tile(8, 8, 128, 80), Tile(8, 8, 128, 128), Tile(16, 8, 128, 128)),
    "sum": (Tile(8, 4, 256, 255), Tile(8, 8, 128, 80), Tile(8, 8, 128, 128), Tile(8, 8, 64, 128)),
}
ROWS = {4: 2, 16: 12, 32: 24}  # what a size of the table is tried with
MAKERS = 128  # programs that make a stream of 1,024 channels
_began = time.perf_counter()


def say(*words: object) -> None:
    print(f"{time.perf_counter() - _began:5.1f} s ", *words, flush=True)  # noqa: T201


def switch(to: tuple[bool, bool]) -> None:
    kernels.FEW_ROWS, kernels.AHEAD = to


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


def layers(model: ARPG, exact: ARPG, sizes: tuple[int, ...], ways: tuple[tuple[bool, bool], ...]) -> None:
    for rows in sizes:
        switch(OFF)
        true = network(exact, rows, torch.float32)()
        call = network(model, rows, HALF)
        made: dict[tuple[bool, bool], Tensor] = {}
        for to in ways:
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
    tokens = []
    waits: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(18):
        every = seed % 2 == 1
        torch.cuda.synchronize()
        began = time.perf_counter()
        *_, step = engine.decode(*case.request(model, seed), case.settings, every=every)
        torch.cuda.synchronize()
        waits[every].append(1e3 * (time.perf_counter() - began))
        tokens.append(step.ids_BN)
    recording = next(iter(engine.recordings.values()))
    began = time.perf_counter()
    for _ in range(5):
        for graph, _, _ in recording.steps:
            graph.replay()
    torch.cuda.synchronize()
    replay = 1e3 * (time.perf_counter() - began) / 5
    last, all_of_them = (statistics.median(waits[every][1:]) for every in (False, True))
    say(
        f"one image  {name:20s} latency {last:.2f} ms (with a copy of every step {all_of_them:.2f} ms),"
        f" replay {replay:.2f} ms"
    )
    return torch.cat(tokens)


def before(model: ARPG) -> None:
    """What comes before the first graph, part by part, in ms: the launches of each, not what they launch."""
    case = Case("arpg-l", 1, SamplingSettings(steps=32, guidance=4.0), (16, 16))
    took: dict[str, list[float]] = {}

    def part(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        made = work()
        took.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        return made

    for seed in range(20):
        torch.cuda.synchronize()
        request = part("request", lambda seed=seed: tasks.generate(model, [seed], [seed], grid=case.grid))
        known, seeds, settings = request.known_BN, request.seeds, case.settings
        plan = part("plan", partial(make_plan, request.grid, known, seeds, settings))
        part("check", partial(check, model, request, plan))
        way = part("indices", partial(Planned, request, plan, model.device))
        inputs = part("inputs", partial(read, model, request, guided=plan.guided, ragged=way.ragged))
        part("shape", partial(shape_of, inputs, way, settings))
    say("before the first graph, ms:", ", ".join(f"{n} {statistics.median(t[1:]):.3f}" for n, t in took.items()))


def small_kernels(model: ARPG) -> None:
    """Around the layers: against tensor operations, then the time of each in a row of many."""
    switch(AHEAD)
    torch.manual_seed(0)
    config, weight = model.config, model.embedding.weight
    ids, place = torch.randint(16384, (1, 257), device="cuda"), torch.rand(1, 257, 2, device="cuda") * 16
    known, key = torch.zeros(1, 257, dtype=torch.bool, device="cuda"), torch.tensor([[5, 7]], device="cuda")
    position, scale = torch.randperm(256, device="cuda")[None, :8], torch.tensor([[4.0]], device="cuda")
    logits = torch.randn(2, 8, config.vocab_size, device="cuda").to(HALF)
    options = {"copies": 2, "head_dim": config.head_dim, "base": rope.BASE}

    def places() -> Tensor:
        return torch.cat([place.gather(1, position[..., None].expand(-1, -1, 2))] * 2)

    def drawn(few: int) -> Tensor:
        draws._FEW, kept = few, draws._FEW
        try:
            return draws.draw(logits, scale, 1.0, key, 0, position)
        finally:
            draws._FEW = kept

    x, cos, sin = lookup.embedded_at(weight, ids, place, position, **options)
    by = rope.rotation(places(), config.head_dim)
    far = max(float((cos - by.cos_BSK).abs().max()), float((sin - by.sin_BSK).abs().max()))
    right = [
        bool((x == torch.cat([weight[ids.gather(1, position)]] * 2)).all()),
        far < 1e-5,
        bool((drawn(128) == drawn(0)).all()),
        all(
            bool((a == b).all())
            for a, b in zip(
                lookup.put(ids, known, position, position),
                (ids.scatter(1, position, position), known.scatter(1, position, True)),
                strict=True,
            )
        ),
    ]
    say("small kernels: embeddings, angles, draw, put are", ", ".join("right" if r else "WRONG" for r in right))
    jobs: dict[str, Callable[[], Any]] = {
        "embedded_at": lambda: lookup.embedded_at(weight, ids, place, position, **options)[0],
        "turned_at": lambda: lookup.turned_at(place, position, **options)[0],
        "put": lambda: lookup.put(ids, known, position, position)[0],
        "draw": lambda: drawn(128),
        "draw, as for many": lambda: drawn(0),
        "tensor operations: embed": lambda: torch.cat([model.embed(ids.gather(1, position))] * 2),
        "tensor operations: turn": lambda: rope.rotation(places(), config.head_dim).cos_BSK,
        "tensor operations: put": lambda: (
            known.scatter(1, position, True),
            ids.scatter(1, position, position),
        )[1],
    }
    for name, job in jobs.items():
        took = guarded(name, partial(microseconds, lambda job=job: [job() for _ in range(20)][-1]))
        if took is not None:
            say(f"  {name:30s} {took[0] / 20:6.2f} us")


def product(kind: str, rows: int, weight: Tensor) -> Tensor:
    """As a layer calls it."""
    x = torch.ones(rows, weight.shape[1], device="cuda", dtype=HALF)
    for squares in (True, False):
        made = linear(x, weight, **options(kind, x, weight, squares=squares))
    return made


def options(kind: str, x: Tensor, weight: Tensor, *, squares: bool) -> dict[str, Any]:
    """`squares`: whether they are summed where rows are made and given to the norms of them, as in a layer."""
    if kind == "sum":
        add = torch.zeros(len(x), len(weight), device="cuda", dtype=HALF)
        return {"add": add, "sums_PM": few_rows.empty_sums(x, weight) if squares else None}
    most = max(few_rows.TILES[kind]) if kind in few_rows.TILES else 16
    padded = next((size for size in few_rows.TILES.get(kind, {}) if size >= len(x)), most)
    sums = torch.ones(MAKERS, -(-len(x) // padded) * padded, device="cuda") if squares else None
    return {"norm_D": torch.ones_like(x[0]), "eps": 1e-5, "swiglu": kind == "swiglu", "squares_PM": sums}


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


def compile_small() -> None:
    switch(AHEAD)
    key, position = (
        torch.zeros(1, 2, device="cuda", dtype=torch.long),
        torch.zeros(1, 8, device="cuda", dtype=torch.long),
    )
    logits, scale = torch.zeros(2, 8, 16384, device="cuda", dtype=HALF), torch.ones(1, 1, device="cuda")
    for few in (128, 0):
        draws._FEW = few
        draws.draw(logits, scale, 1.0, key, 0, position)


def compile_all(workers: int) -> None:
    """All kernels at once: one after the other they would take most of the minute."""
    jobs = []
    for kind, sizes in few_rows.TILES.items():
        for most, tile in sizes.items():
            tried = [(tile, PLAIN), (tile, AHEAD)]
            tried += [(other, AHEAD) for other in CANDIDATES[kind]] if most in ROWS else []
            tried = list(dict.fromkeys(tried))
            jobs += [(kind, most, *one, inputs) for one in tried for inputs in ((1024, 2816)[: 1 + (kind == "sum")])]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_attention, slots, to) for to in (AHEAD, OFF) for slots in (1, 20, 40)]
        futures.append(pool.submit(compile_small))
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
    switch(AHEAD)
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
        few_rows.TILES[kind] = table
        alone = {name: guarded(name, partial(chain, some, rows, kind, squares=False)) for name, some in of_kind.items()}
        say(
            f"{rows:3d} rows  {'the first tile without squares':60s}",
            ", ".join(f"{n} {t:.2f} us" for n, t in alone.items() if t),
        )
        library = {name: chain(some, rows, "library") for name, some in of_kind.items()}
        say(f"{rows:3d} rows  {'product of the library':60s}", ", ".join(f"{n} {t:.2f} us" for n, t in library.items()))
        few_rows.TILES[kind] = {**table, most: min(found, key=lambda tile: found[tile])} if found else table
    say("best:", few_rows.TILES)


def chain(weights: list[Tensor], rows: int, kind: str, *, squares: bool = True) -> float:
    """Microseconds of one product, in a row of products with other weights."""
    x = torch.randn(rows, weights[0].shape[1], device="cuda").to(HALF)
    given = {} if kind == "library" else options(kind, x, weights[0], squares=squares)

    def call() -> Tensor:
        for weight in weights:
            made = F.linear(x, weight) if kind == "library" else linear(x, weight, **given)
        return made

    return microseconds(call)[0] / len(weights)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=40, help="after which no more tiles are tried")
    given = parser.parse_args()
    for kind, sizes in few_rows.TILES.items():  # a size that may become one of the table's
        sizes.setdefault(32, CANDIDATES[kind][2])
    guarded("compiling", lambda: compile_all(given.workers))
    exact = make_model()
    model = make_model().to(HALF)
    say(torch.cuda.get_device_name(), "torch", torch.__version__)
    guarded("layers", lambda: layers(model, exact, (2, 10, 16), (OFF, PLAIN, AHEAD)))
    guarded("small kernels", lambda: small_kernels(model))
    guarded("before", lambda: before(model))
    first = image(model, OFF, NAMES[OFF])
    for to in (PLAIN, AHEAD):
        ids = guarded("one image", partial(image, model, to, NAMES[to]))
        if ids is not None:
            say(f"{float((ids == first).float().mean()):.1%} of the tokens are the library's")
    guarded("tiles", lambda: tiles(model, given.seconds))
    kept, kernels.MOST_ROWS = kernels.MOST_ROWS, 32
    guarded("layers", lambda: layers(model, exact, (12, 20, 28), (OFF, AHEAD)))
    for most in (kept, 24, 32):
        kernels.MOST_ROWS = most
        guarded("one image", partial(image, model, AHEAD, f"best, {most} rows"))


if __name__ == "__main__":
    main()
