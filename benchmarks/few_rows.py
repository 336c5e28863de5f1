"""What five kernels a layer bring where rows are few: one image of ARPG-L on a GPU, in about half a minute.

    PYTHONPATH=src python benchmarks/few_rows.py

First the network (24 layers, head; both passes, 93 tokens known) as one graph: by the library, in five kernels a layer,
and in five that fetch their weights ahead (compute capability 9.0 and later); with the error of the logits against
float32. That says how many rows should count as a handful (`arpg.kernels.MOST_ROWS`). Then the small kernels around the
layers, against tensor operations; what a caller waits for before the first graph; and one image.
`benchmarks/few_rows_tiles.py` compares tiles.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from arpg.decode.planned import Planned
from arpg.decode.recording import shape_of
from arpg.decode.start import read
from arpg.kernels.few_rows import TILES, empty_sums, linear
from torch import Tensor, nn

from arpg import SamplingSettings, kernels, make_plan, tasks
from arpg.bench.case import Case
from arpg.config import MODELS
from arpg.decode.engine import Engine, check
from arpg.kernels import draw as draws
from arpg.kernels import lookup
from arpg.kernels.attention import attend, attend_and_store
from arpg.model import ARPG, rope

HALF, KNOWN, LAYERS = torch.bfloat16, 93, 24
OFF, PLAIN, AHEAD = (False, False), (True, False), (True, True)  # kernels.FEW_ROWS, kernels.AHEAD
NAMES = {OFF: "library", PLAIN: "five kernels", AHEAD: "five, weights ahead"}
ROWS = (2, 8, 10, 12, 16, 24, 32, 48)
_began = time.perf_counter()


def say(*words: object) -> None:
    print(f"{time.perf_counter() - _began:5.1f} s ", *words, flush=True)  # noqa: T201


def ways() -> tuple[tuple[bool, bool], ...]:
    """The last one is the best that this GPU can."""
    return (OFF, PLAIN, AHEAD) if torch.cuda.get_device_capability() >= (9, 0) else (OFF, PLAIN)


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
        cache.settle()  # as between two steps
        model.encode(x, place, cache, causal=False)
        return model.predict(place, None, cache)

    return call


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def layers(model: ARPG, exact: ARPG) -> None:
    for rows in ROWS:
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
    recording = next(iter(engine.graphs.captured.values()))
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


def compile_product(kind: str, to: tuple[bool, bool]) -> None:
    """In a process of its own; what is compiled is found on disk by the next one."""
    switch(to)
    x = torch.ones(2, 1024, device="cuda", dtype=HALF)
    sums = empty_sums(x, x.new_empty(1024, 0)).fill_(1.0)
    for inputs in (1024, 2816) if kind == "sum" else (1024,):
        rows, weight = x.new_ones(2, inputs), x.new_zeros(2048, inputs)
        if kind == "sum":
            linear(rows, weight[:1024], add=x, sums_PM=sums)
            continue
        for given in (None, sums):
            linear(rows, weight, norm_D=x[0], eps=1e-5, swiglu=kind == "swiglu", squares_PM=given)


def compile_attention(slots: int, to: tuple[bool, bool]) -> None:
    switch(to)
    qkv, angles = torch.zeros(2, slots, 3, 16, 64, device="cuda", dtype=HALF), torch.zeros(2, slots, 64, device="cuda")
    key, value = (torch.zeros(2, 300, 16, 64, device="cuda", dtype=HALF) for _ in range(2))
    for settled in (0, 100, 200):
        first = settled or 7
        attend_and_store(qkv, (key, value), None, (angles, angles), first, settled=settled)
        seen = (x[:, : first + slots] for x in (key, value))
        attend(qkv[:, :, 0].contiguous(), *seen, None, (angles, angles), settled=settled)


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
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_attention, slots, to) for to in (ways()[-1], OFF) for slots in (1, 8, 20, 40)]
        futures += [pool.submit(compile_product, kind, to) for kind in TILES for to in ways()[1:]]
        futures.append(pool.submit(compile_small))
        for future in futures:
            guarded("compiling", future.result)
    say(f"{len(futures)} compiled")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    given = parser.parse_args()
    guarded("compiling", lambda: compile_all(given.workers))
    exact = make_model()
    model = make_model().to(HALF)
    say(torch.cuda.get_device_name(), "torch", torch.__version__)
    most, kernels.MOST_ROWS = kernels.MOST_ROWS, max(ROWS)
    guarded("layers", lambda: layers(model, exact))
    kernels.MOST_ROWS = most
    guarded("small kernels", lambda: small_kernels(model))
    guarded("before", lambda: before(model))
    first = image(model, OFF, NAMES[OFF])
    for to in ways()[1:]:
        ids = guarded("one image", partial(image, model, to, NAMES[to]))
        if ids is not None:
            say(f"{float((ids == first).float().mean()):.1%} of the tokens are the library's")
    for limit in (16, 48):
        kernels.MOST_ROWS = limit
        guarded("one image", partial(image, model, ways()[-1], f"up to {limit} rows so"))


if __name__ == "__main__":
    main()
