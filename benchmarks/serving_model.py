"""Predict latency and throughput of the server by simulation, from measured step times; compare with a real server.

python -m benchmarks.serving_model compare --seconds 40 --out benchmarks/results/serving-model-cpu.json
python -m benchmarks.serving_model plan --out benchmarks/results/serving-plan-h200.json
python -m benchmarks.serving_model page

`compare` measures the steps of the model on this machine, simulates closed-loop clients, then starts `arpg serve` and
lets as many real clients request one image after the other. `plan` takes the step times of a GPU from a record of
`arpg bench --scaling` and searches the number of replicas for each rate of Poisson arrivals. `page` writes the tables
of docs/performance/serving-cost.md from both records.

The simulation (simpy) has the server's own rules: one decode thread, rows that join the running batch before a step and
leave it when they are finished, pixels decoded on the same device, one image at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simpy
import torch

from arpg import Pipeline
from arpg.config import DEFAULT_MODEL
from arpg.decode import make_plan
from arpg.decode.continuous import ContinuousBatch
from arpg.device import cpu_name
from arpg.errors import present
from arpg.tables import fill_page, markdown_table
from benchmarks.serve import measure, running_server, wait_until_ready


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds of the parts of a request on one device."""

    steps: tuple[tuple[float, float], ...]  # (tokens of a step over all rows, seconds); linear between the points
    pixels: float  # of one image
    request: float  # HTTP, queues and PNG: not on the device

    def step(self, tokens: float) -> float:
        """Return the seconds of a step that computes `tokens` tokens; beyond the last point as between the last two."""
        (x0, y0), (x1, y1) = self.steps[-2:]
        if tokens > x1:
            return y1 + (tokens - x1) * (y1 - y0) / (x1 - x0)
        x, y = zip(*self.steps, strict=True)
        return float(np.interp(tokens, x, y))


@dataclass(eq=False)
class Row:
    """An image: the tokens of its remaining steps."""

    remaining: tuple[int, ...]
    done: simpy.Event


@dataclass(eq=False)
class Server:
    """One replica: its queue, its batch and its device."""

    env: simpy.Environment
    times: ServiceTimes
    max_batch: int
    max_wait: float
    waiting: deque[Row] = field(default_factory=deque)
    running: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = simpy.Resource(self.env)
        self.arrived = self.env.event()
        self.load = 0  # requests that are not answered
        self.env.process(self.decode())

    def request(self, sizes: tuple[int, ...]) -> Generator[simpy.Event, Any, None]:
        """Answer one request for one image."""
        self.load += 1
        row = Row(sizes, self.env.event())
        self.waiting.append(row)
        if not self.arrived.triggered:
            self.arrived.succeed()
        yield row.done
        if self.times.pixels:
            with self.device.request() as turn:
                yield turn
                yield self.env.timeout(self.times.pixels)
        yield self.env.timeout(self.times.request)
        self.load -= 1

    def decode(self) -> Generator[simpy.Event, Any, None]:
        """Run the decode thread: admit rows up to `max_batch`, take a step of all."""
        while True:
            if not self.running and not self.waiting:
                self.arrived = self.env.event()
                yield self.arrived
                yield self.env.timeout(self.max_wait)
            while self.waiting and len(self.running) < self.max_batch:
                self.running.append(self.waiting.popleft())
            tokens = sum(row.remaining[0] for row in self.running)
            with self.device.request() as turn:
                yield turn
                yield self.env.timeout(self.times.step(tokens))
            for row in self.running:
                row.remaining = row.remaining[1:]
                if not row.remaining:
                    row.done.succeed()
            self.running = [row for row in self.running if row.remaining]


def simulate(
    times: ServiceTimes,
    sizes: Sequence[int],
    *,
    clients: int = 0,
    rate: float = 0.0,
    replicas: int = 1,
    max_batch: int = 16,
    max_wait: float = 0.01,
    seconds: float = 120.0,
    warmup: float = 10.0,
    seed: int = 0,
) -> dict[str, float]:
    """Simulate `clients` closed-loop clients, or Poisson arrivals of `rate` per second at the least loaded replica."""
    env, chance = simpy.Environment(), random.Random(seed)
    servers = [Server(env, times, max_batch=max_batch, max_wait=max_wait) for _ in range(replicas)]
    latencies: list[float] = []

    def one() -> Generator[simpy.Event, Any, None]:
        began = env.now
        yield env.process(min(servers, key=lambda server: server.load).request(tuple(sizes)))
        if began >= warmup:
            latencies.append(env.now - began)

    def client() -> Generator[simpy.Event, Any, None]:
        while True:
            yield env.process(one())

    def arrivals() -> Generator[simpy.Event, Any, None]:
        while True:
            yield env.timeout(chance.expovariate(rate))
            env.process(one())

    for _ in range(clients):
        env.process(client())
    if rate:
        env.process(arrivals())
    env.run(until=warmup + seconds)
    if not latencies:
        return {"images/s": 0.0, "p50 s": math.inf, "p99 s": math.inf, "mean s": math.inf}
    p50, p99 = np.percentile(latencies, [50, 99])
    unanswered = sum(server.load for server in servers)
    # Requests that are still waiting would only make the tail longer: a queue that grows is not a latency.
    stable = clients or unanswered <= 2 * rate * max(p50, 0.1) + 10
    found = {"images/s": len(latencies) / seconds, "p50 s": float(p50), "p99 s": float(p99) if stable else math.inf}
    return {name: round(value, 4) for name, value in (found | {"mean s": statistics.mean(latencies)}).items()}


def replicas_needed(times: ServiceTimes, sizes: Sequence[int], *, rate: float, p99: float, **options: Any) -> int:
    """Return the smallest number of replicas that answer `rate` requests per second with this p99."""
    enough = next(
        high
        for high in (1 << i for i in itertools.count())
        if simulate(times, sizes, rate=rate, replicas=high, **options)["p99 s"] <= p99
    )
    low, high = enough // 2, enough  # `low` is too few
    while high - low > 1:
        middle = (low + high) // 2
        good = simulate(times, sizes, rate=rate, replicas=middle, **options)["p99 s"] <= p99
        low, high = (low, middle) if good else (middle, high)
    return high


def measure_times(model: str, batches: Sequence[int]) -> tuple[ServiceTimes, tuple[int, ...]]:
    """Measure the steps of a model in batches of these sizes, and its pixels; return them and the tokens of a step."""
    pipe = Pipeline.from_pretrained(model)
    samples: list[tuple[float, float]] = []
    sizes: tuple[int, ...] = ()
    for rows in [batches[0], *batches]:  # the first one warms up
        task = pipe.generate_task([i % 5 for i in range(rows)], batch_size=rows)
        request = present(task.next_request(), "a new task has a request")
        plan = make_plan(request.grid, request.known_BN, request.seeds, task.spec.settings)
        sizes = plan.samples[0].sizes
        batch, found = ContinuousBatch(pipe.model, request, plan, task.spec.settings), []
        for size in sizes:
            began = time.perf_counter()
            batch.step()
            found.append((float(rows * size), time.perf_counter() - began))
        samples += found
    samples = samples[len(sizes) :]
    tokens, seconds = np.array(samples).T
    slope, offset = np.polyfit(tokens, seconds, 1)
    ids_BN = torch.zeros(1, request.num_tokens, dtype=torch.long)
    taken = []
    with torch.no_grad():
        for _ in range(6):
            began = time.perf_counter()
            pipe.tokenizer.decode(ids_BN, request.grid)
            taken.append(time.perf_counter() - began)
    ends = [(x, max(float(offset + slope * x), float(seconds.min()))) for x in (0.0, float(tokens.max()))]
    return ServiceTimes(tuple(ends), pixels=statistics.median(taken[1:]), request=0.0), sizes


def gpu_times(record: Path, *, steps: int, tokens: int, pixels_per_second: float) -> ServiceTimes:
    """Read the step times of a GPU from the batch series of an `arpg bench --scaling` record."""
    points = {}
    for row in json.loads(record.read_text())["rows"]:
        case = row["settings"]
        if (case["tokens"], case["steps"]) == (tokens, steps):
            points[case["batch"] * tokens / steps] = case["batch"] / row["images/s"] / steps
    return ServiceTimes(tuple(sorted(points.items())), pixels=1 / pixels_per_second, request=0.002)


async def real_rows(address: str, process: int, clients: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Measure closed-loop clients against a running server."""
    await wait_until_ready(address, clients=4)
    return [await measure(address, clients=n, seconds=seconds, process=process, seen={}) for n in clients]


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Predict and measure; the time of a request outside of the device is that of the run with one client."""
    times, sizes = measure_times(options.model, [1, 2, 4, 8, 16])
    with running_server("--model", options.model) as (address, process):
        real = asyncio.run(real_rows(address, process, [1, *options.clients], options.seconds))
    alone = simulate(times, sizes, clients=1)["p50 s"]
    times = ServiceTimes(times.steps, times.pixels, max(0.0, real[0]["p50 s"] - alone))
    rows = []
    for clients, found in zip(options.clients, real[1:], strict=True):
        predicted = simulate(times, sizes, clients=clients, seconds=max(60.0, 4 * options.seconds))
        measured = {name: found[name] for name in ("images/s", "p50 s", "p99 s")}
        rows.append(
            {"clients": clients, "predicted": {name: predicted[name] for name in measured}, "measured": measured}
        )
        print(rows[-1], file=sys.stderr)
    about = {"benchmark": "serving_model", "model": options.model, "cpu": cpu_name(), "cores": os.cpu_count()}
    return {**about, "times": asdict(times), "rows": rows}


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Search the replicas for each rate."""
    times = gpu_times(options.record, steps=32, tokens=256, pixels_per_second=options.pixels_per_second)
    sizes = [256 // 32] * 32
    rows = []
    for rate in options.rates:
        settings = {"max_batch": options.max_batch, "seconds": 20.0, "warmup": 5.0}
        replicas = replicas_needed(times, sizes, rate=rate, p99=options.p99, **settings)
        found = simulate(times, sizes, rate=rate, replicas=replicas, **settings)
        rows.append({"rate": rate, "p99 wanted": options.p99, "replicas": replicas, **found})
        print(rows[-1], file=sys.stderr)
    return {"benchmark": "serving_plan", "record": options.record.name, "rows": rows}


def page_tables(records: Path) -> dict[str, str]:
    """Return the tables of the page by their marks."""
    parts = ("serving-model-cpu", "serving-plan-h200", "serve-null-cpu", "serve-null-worker-cpu")
    names = [f"{part}.json" for part in parts]
    compared, planned, null, worker = (json.loads((records / name).read_text()) for name in names)
    columns = ("images/s", "p50 s", "p99 s")
    rows = [
        [row["clients"], *(f"{row[side][column]:.2f}" for column in columns for side in ("measured", "predicted"))]
        for row in compared["rows"]
    ]
    header = ["clients", *(title for column in columns for title in (column, "predicted"))]
    plan_rows = [
        [f"{row['rate']:,.0f}", row["replicas"], *(f"{1000 * row[name]:.0f}" for name in ("p50 s", "p99 s"))]
        for row in planned["rows"]
    ]
    png_rows = [[name, f"{each['cpu ms']:.1f}", f"{each['bytes']:,}"] for name, each in null["png"].items()]
    return {
        "host": host_table(null["rows"], ""),
        "host-worker": host_table(worker["rows"], "worker "),
        "png": markdown_table(["", "CPU ms", "bytes"], png_rows),
        "compared": markdown_table(header, rows),
        "planned": markdown_table(["requests/s", "replicas", "p50, ms", "p99, ms"], plan_rows),
    }


def host_table(measured: list[dict[str, Any]], prefix: str) -> str:
    """Return the table of the CPU time of an image by thread; `prefix` begins the names of the models' threads."""
    http = {"MainThread": "event loop", "arpg-encode": "encode", "arpg-channel": "pipe, HTTP"}
    names = {"arpg-prepare": "prepare", "arpg-batcher": "batcher", "arpg-tokenizer": "pixels", "arpg-finish": "finish"}
    if prefix:
        http = {f"http {name}": title for name, title in http.items()}
        names = {f"{prefix}{name}": title for name, title in (names | {"arpg-channel": "pipe, models"}).items()}
    used = {name for row in measured for name in row["cpu ms/image by thread"]}
    columns = {name: title for name, title in (http | names).items() if name in used}
    rows = [
        [
            row["clients"],
            f"{row['images/s']:.0f}",
            f"{row['p99 ms']:.0f}",
            f"{row['cpu ms/image']:.1f}",
            *(f"{row['cpu ms/image by thread'].get(name, 0.0):.2f}" for name in columns),
            f"{sum(ms for name, ms in row['cpu ms/image by function'].items() if name.endswith('PNG')):.1f}",
        ]
        for row in measured
    ]
    return markdown_table(["clients", "images/s", "p99, ms", "all", *columns.values(), "of it PNG"], rows)


def write_page(options: argparse.Namespace) -> None:
    """Write the tables of the page."""
    path = Path("docs/performance/serving-cost.md")
    path.write_text(fill_page(path.read_text(), page_tables(Path("benchmarks/results"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("compare", help="predicted beside measured latency on this machine")
    one.add_argument("--model", default=DEFAULT_MODEL)
    one.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    one.add_argument("--seconds", type=float, default=40.0)
    one.set_defaults(run=compare)
    other = verbs.add_parser("plan", help="replicas for given rates")
    other.add_argument("--record", type=Path, default=Path("benchmarks/results/scaling-arpg-l-h200.json"))
    other.add_argument("--rates", type=float, nargs="+", default=[10, 100, 500, 1000, 2000])
    other.add_argument("--p99", type=float, default=0.5, help="seconds")
    other.add_argument("--max-batch", type=int, default=64)
    other.add_argument("--pixels-per-second", type=float, default=1502, help="images/s of the VQ decoder")
    other.set_defaults(run=plan)
    for verb in (one, other):
        verb.add_argument("--out", type=Path)
    verbs.add_parser("page", help="write the tables of the page from the records").set_defaults(run=write_page)
    options = parser.parse_args()
    result = options.run(options)
    if result is None:
        return
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
