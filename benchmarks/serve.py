"""Throughput and latency of the server under load: clients that request one image after the other.

python -m benchmarks.serve --clients 1 4 16 64 --mixed --seconds 25 --out benchmarks/results/serve-mixed-cpu.json
python -m benchmarks.serve --clients 1 16 --seconds 12 --repeats 3
python -m benchmarks.serve --null-model --clients 1 16 64 256 --seconds 15 --out benchmarks/results/serve-null-cpu.json
python -m benchmarks.serve --model arpg-l --random --serve engine graph max-pending-requests 512 --clients 1 16 64 256

Starts `arpg serve` as its own process on a free port and calls it over HTTP. Every client has classes and seeds of its
own. Without `--mixed` all requests generate; with it, they are those of `MIX`. Fairness is Jain's index over the work
that each client got done (1: all the same, 1/n: one got everything), with requests weighted by their mean latency.

`--random` serves random weights, which do not affect speed; their images are noise, the worst case for a PNG encoder.
The clients then parse nothing, so that they do not limit the rate of a GPU.

`--null-model` measures the host's share: the server has a model that costs nothing (`benchmarks.null_server`), and each
row says how much CPU time of the server an image takes, in which threads and functions. `--serve worker-process`:
with the models in a process of their own; `--serve no-png`: without the encoder of PNG files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import io
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from arpg.bench.case import open_pipeline
from arpg.bench.record import environment
from arpg.config import DEFAULT_MODEL
from arpg.device import choose_device
from arpg.serve.responses import base64_png, to_png
from benchmarks.null_server import photo_like

MIX = {"generate": 60, "stream": 15, "inpaint": 10, "outpaint": 5, "openai": 5, "expand": 5}  # percent


@dataclass
class Load:
    """What the clients of one measurement saw."""

    latencies: dict[str, list[float]] = field(default_factory=dict)  # seconds, by kind of request
    by_client: dict[int, Counter[str]] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)  # answers other than 200

    def add(self, client: int, kind: str, seconds: float) -> None:
        """Record an answered request."""
        self.latencies.setdefault(kind, []).append(seconds)
        self.by_client.setdefault(client, Counter())[kind] += 1

    def summary(self, seconds: float) -> dict[str, Any]:
        """Return throughput, latency, refusals and fairness."""
        every = sorted(value for values in self.latencies.values() for value in values)
        mean = {kind: statistics.mean(values) for kind, values in self.latencies.items()}
        work = [sum(mean[kind] * count for kind, count in counts.items()) for counts in self.by_client.values()]
        return {
            "images": len(every),
            "images/s": round(len(every) / seconds, 3),
            **{f"p{p} s": round(every[min(len(every) - 1, len(every) * p // 100)], 3) for p in (50, 95, 99)},
            "told to wait (429)": self.statuses[429],
            "errors": sum(count for status, count in self.statuses.items() if status != 429),
            "fairness": round(sum(work) ** 2 / (len(work) * sum(value**2 for value in work)), 3),
            "p50 s by kind": {kind: round(statistics.median(values), 3) for kind, values in self.latencies.items()},
        }


def make_call(kind: str, number: int, size: tuple[int, int]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request for one image; `size` is that of the model's images."""
    body: dict[str, Any] = {"class": number % 5, "seed": number}
    width, height = size
    if kind in ("generate", "stream"):
        return "/v1/arpg/generate", {**body, "stream": kind == "stream"}
    if kind == "openai":
        return "/v1/images/generations", {"prompt": str(number % 5), "seed": number}
    if kind == "expand":
        return "/v1/arpg/expand", {**body, "size": [2 * width, 2 * height]}
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    body["image"] = base64_png(Image.fromarray(pixels)).decode()
    if kind == "outpaint":
        return "/v1/arpg/outpaint", {**body, "right": width // 4}
    mask = Image.new("L", size)
    mask.paste(255, (width // 4, height // 4, 3 * width // 4, 3 * height // 4))
    return "/v1/arpg/inpaint", {**body, "mask": base64_png(mask).decode()}


async def request_image(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], statuses: Counter[int] | None = None
) -> dict[str, Any] | None:
    """Request one image, again where the server says so; return the answer, or None after an error."""
    while True:
        if body.get("stream"):
            async with client.stream("POST", path, json=body) as answer:
                last = [line async for line in answer.aiter_lines() if line.startswith("data: ")][-1:]
                found = json.loads(last[0].removeprefix("data: ")) if last else {}
        else:
            answer = await client.post(path, json=body)
            found = answer.json()
        if answer.status_code == 200 and "error" not in found:
            return found
        if statuses is not None:
            statuses[answer.status_code] += 1
        if answer.status_code != 429:
            return None
        await asyncio.sleep(float(answer.headers["retry-after"]))


async def measure(
    address: str, *, clients: int, seconds: float, process: int, mixed: bool = False, seen: dict[int, set[str]]
) -> dict[str, Any]:
    """Load the server with `clients` clients of one request at a time; `seen` collects generated images by number."""
    load = Load()
    async with httpx.AsyncClient(base_url=address, timeout=600) as any_client:
        size = tuple((await any_client.get("/v1/arpg/info")).json()["image_size"])

    async def work(number: int) -> None:
        chance = random.Random(number)
        async with httpx.AsyncClient(base_url=address, timeout=600) as client:
            i = 1000 * number
            while time.perf_counter() < until:
                kind = chance.choices(list(MIX), list(MIX.values()))[0] if mixed else "generate"
                began = time.perf_counter()
                path, body = make_call(kind, i, size)
                answer = await request_image(client, path, body, load.statuses)
                if answer is not None:
                    load.add(number, kind, time.perf_counter() - began)
                    if kind == "generate":
                        seen.setdefault(i, set()).add(answer["images"][0]["png"])
                i += 1

    used = cpu_seconds(process)
    began = time.perf_counter()
    until = began + seconds
    await asyncio.gather(*(work(number) for number in range(clients)))
    found = load.summary(time.perf_counter() - began)
    found["cpu s/image"] = round((cpu_seconds(process) - used) / found["images"], 3)
    found["server MB"] = resident_mb(process)
    return {"clients": clients, **found}


async def wait_until_ready(address: str, *, clients: int) -> None:
    """Wait for the server, then let it generate a batch of images that are not counted."""
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/readyz")).status_code == 200:
                    break
            await asyncio.sleep(0.2)
        calls = [make_call("generate", i, (1, 1)) for i in range(clients)]
        await asyncio.gather(*(request_image(client, path, body) for path, body in calls))


async def run(address: str, options: argparse.Namespace, process: int) -> tuple[list[dict[str, Any]], int]:
    """Return the measurements, and how many of 16 images from shared batches are the same when requested alone."""
    seen: dict[int, set[str]] = {}
    await wait_until_ready(address, clients=min(16, max(options.clients)))
    rows = []
    for _ in range(options.repeats):
        for clients in options.clients:
            timing = {"seconds": options.seconds, "process": process, "mixed": options.mixed}
            rows.append(await measure(address, clients=clients, seen=seen, **timing))
            print(rows[-1], file=sys.stderr)
    chosen = sorted(seen)[:: max(1, len(seen) // 16)][:16]
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        for number in chosen:
            answer = await request_image(client, *make_call("generate", number, (1, 1)))
            assert answer is not None
            seen[number].add(answer["images"][0]["png"])
    return rows, sum(len(seen[number]) == 1 for number in chosen)


@dataclass
class RawLoad:
    """Keep-alive connections that request one image after the other, until a limit."""

    port: int
    until: float  # of `time.perf_counter`
    most: int  # images
    latencies: list[float] = field(default_factory=list)
    num_bytes: int = 0  # of the bodies of all answers

    async def work(self, number: int) -> None:
        """Request images over one connection. The client parses nothing, so that the server is what is measured."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        seed = 1000 * number
        while time.perf_counter() < self.until and len(self.latencies) < self.most:
            body = json.dumps({"class": number % 1000, "seed": seed}).encode()
            began = time.perf_counter()
            answer = await exchange(reader, writer, "POST /v1/arpg/generate HTTP/1.1\r\nHost: 127.0.0.1", body)
            self.latencies.append(time.perf_counter() - began)
            self.num_bytes += len(answer)
            seed += 1
        writer.close()


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str, body: bytes = b"") -> bytes:
    """Send a request over an open connection and return the body of its answer."""
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n{length}\r\n\r\n".encode() + body)
    status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    size = next(int(line.split(":")[1]) for line in headers if line.lower().startswith("content-length:"))
    answer = await reader.readexactly(size)
    if " 200 " not in status:
        raise RuntimeError(f"{status}: {answer[:200]!r}")
    return answer


async def read_cpu_times(port: int) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of the null server by thread and by function."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = await exchange(reader, writer, "GET /cpu HTTP/1.1\r\nHost: 127.0.0.1")
    writer.close()
    found: dict[str, dict[str, float]] = json.loads(answer)
    return found


async def read_steps(port: int) -> dict[str, float]:
    """Return the number of steps so far, their images in all, and the seconds of the decode thread, from `/metrics`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    page = (await exchange(reader, writer, "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1")).decode()
    writer.close()
    found = {
        "steps": re.findall(r"^arpg_batch_rows_count (\S+)$", page, re.MULTILINE)[0],
        "images": re.findall(r"^arpg_batch_rows_sum (\S+)$", page, re.MULTILINE)[0],
        **dict(re.findall(r'^arpg_decode_thread_seconds_total{part="(\w+)"} (\S+)$', page, re.MULTILINE)),
    }
    return {name: float(value) for name, value in found.items()}


async def measure_raw(port: int, *, clients: int, seconds: float, most: int, process: int) -> dict[str, Any]:
    """Load a server by clients that parse nothing; CPU times are milliseconds of the server for each image.

    A step: the mean number of its images, and the milliseconds of its thread by what it does.
    """
    before = await read_steps(port)
    used, began = cpu_seconds(process), time.perf_counter()
    load = RawLoad(port, began + seconds, most)
    await asyncio.gather(*(load.work(number) for number in range(clients)))
    taken = time.perf_counter() - began
    images, latencies = len(load.latencies), sorted(load.latencies)
    spent = {name: value - before.get(name, 0.0) for name, value in (await read_steps(port)).items()}
    steps, rows = spent.pop("steps"), spent.pop("images")
    return {
        "clients": clients,
        "images": images,
        "images/s": round(images / taken, 1),
        **{f"p{p} ms": round(1000 * latencies[min(images - 1, images * p // 100)], 1) for p in (50, 99)},
        "cpu ms/image": round(1000 * (cpu_seconds(process) - used) / images, 2),
        "images/step": round(rows / steps, 1),
        "ms/step": {part: round(1000 * seconds / steps, 3) for part, seconds in spent.items() if part != "idle"},
        "bytes/image": load.num_bytes // images,
        "server MB": resident_mb(process),
    }


async def measure_null(port: int, **load: Any) -> dict[str, Any]:
    """Load the null server, which says in which threads and functions it spends its CPU time."""
    before, found, after = await read_cpu_times(port), await measure_raw(port, **load), await read_cpu_times(port)

    def per_image(kind: str) -> dict[str, float]:
        spent = {name: after[kind][name] - before[kind].get(name, 0.0) for name in sorted(after[kind])}
        shown = {name: round(1000 * value / found["images"], 3) for name, value in spent.items()}
        return {name: value for name, value in shown.items() if value >= 0.01}

    by = {f"cpu ms/image by {name}": per_image(kind) for name, kind in (("thread", "threads"), ("function", "stages"))}
    return {**found, **by}


async def run_raw(
    address: str,
    options: argparse.Namespace,
    process: int,
    measure_load: Callable[..., Awaitable[dict[str, Any]]] = measure_raw,
) -> list[dict[str, Any]]:
    """Measure all numbers of clients, each after as many images that are not counted."""
    port = int(address.rsplit(":", 1)[1])
    async with asyncio.timeout(180):
        await wait_until_ready(address, clients=16)
    rows = []
    for clients in options.clients * options.repeats:
        limits = {"clients": clients, "process": process}
        await measure_raw(port, **limits, seconds=options.warm_up, most=options.most_images)
        rows.append(await measure_load(port, **limits, seconds=options.seconds, most=options.most_images))
        print(rows[-1], file=sys.stderr)
    return rows


@contextlib.contextmanager
def running_server(*options: str, module: str = "arpg", verb: str | None = "serve") -> Iterator[tuple[str, int]]:
    """Run `arpg serve`, or another module, on a free port of this machine; yield its address and process id."""
    command = [sys.executable, "-m", module, *([] if verb is None else [verb]), "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = None
        while found is None and (line := process.stderr.readline()):  # warnings may come first
            found = re.search(r"http://\S+:\d+", line)
            if found is None:
                print(line, end="", file=sys.stderr)
        assert found, "the server ended before it listened; its last lines are above"
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        try:
            yield found[0], process.pid
        finally:
            process.terminate()
            process.wait()
            drain.wait()


def process_tree(process: int) -> list[int]:
    """Return a process and its children, from /proc."""
    threads = Path(f"/proc/{process}/task").glob("*/children")
    return [process, *(int(child) for thread in threads for child in thread.read_text().split())]


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds that a process and its children have used, from /proc; 0 where there is none."""
    seconds = 0.0
    for each in process_tree(process):
        stat = Path(f"/proc/{each}/stat")
        if stat.exists():
            user, system = stat.read_text().rsplit(")", 1)[1].split()[11:13]
            seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds


def resident_mb(process: int) -> float | None:
    """Return the resident memory of a process and its children in MB, from /proc; None where there is none."""
    files = [Path(f"/proc/{each}/statm") for each in process_tree(process)]
    if not files[0].exists():
        return None
    pages = sum(int(file.read_text().split()[1]) for file in files if file.exists())
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)


def measure_model(options: argparse.Namespace) -> dict[str, Any]:
    """Measure `arpg serve` with a real model."""
    more = [part if i % 2 else f"--{part}" for i, part in enumerate(options.serve)]
    requests = MIX if options.mixed else {"generate": 100}
    about = {"benchmark": "serve", "model": options.model, "requests": requests, "serve": more}
    if options.random:
        with tempfile.TemporaryDirectory() as folder:
            open_pipeline(options.model, random=True, device="cpu", dtype="bfloat16").save_pretrained(folder)
            with running_server("--model", folder, *more) as (address, process):
                rows = asyncio.run(run_raw(address, options, process))
        return {**about, "weights": "random", "rows": rows}
    with running_server("--model", options.model, *more) as (address, process):
        rows, same = asyncio.run(run(address, options, process))
    return {**about, "rows": rows, "same alone, of 16": same}


def measure_host(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the server around a model that costs nothing."""
    settings = {
        "step-ms": options.step_ms,
        "row-ms": options.row_ms,
        "max-batch": options.max_batch,
        "clients": max(*options.clients, 16),
    }
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    given += [f"--{name}" for name in options.serve]
    with running_server(*given, module="benchmarks.null_server", verb=None) as (address, process):
        rows = asyncio.run(run_raw(address, options, process, measure_null))
    about = {"benchmark": "serve", "model": "null", "serve": settings, "options": options.serve}
    return {**about, "rows": rows, "png": compare_png_files()}


def compare_png_files() -> dict[str, dict[str, float]]:
    """Return CPU milliseconds and bytes of a PNG file of the null model, from Pillow and from the server."""
    image, repeats = Image.fromarray(photo_like(0)), 20

    def pillow(level: int) -> bytes:
        file = io.BytesIO()
        image.save(file, format="PNG", compress_level=level)
        return file.getvalue()

    found = {}
    encoders = {f"Pillow, level {level}": functools.partial(pillow, level) for level in (1, 6)}
    for name, encode in {**encoders, "server": functools.partial(to_png, image)}.items():
        began = time.process_time()
        for _ in range(repeats):
            size = len(encode())
        found[name] = {"cpu ms": round(1000 * (time.process_time() - began) / repeats, 2), "bytes": size}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--random", action="store_true", help="random weights, and clients that parse nothing")
    parser.add_argument("--mixed", action="store_true", help="all kinds of requests instead of generate alone")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before each row that are not counted")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs="*", default=[], help="more options of `arpg serve`, without the dashes")
    parser.add_argument("--null-model", action="store_true", help="a model that costs nothing: the host's share")
    parser.add_argument("--step-ms", type=float, default=2.0, help="of the null model: duration of a decoding step")
    parser.add_argument("--row-ms", type=float, default=0.0, help="of the null model: and more for each image in it")
    parser.add_argument("--max-batch", type=int, default=64, help="of the null model")
    parser.add_argument("--most-images", type=int, default=20_000, help="of the null model: for each row")
    options = parser.parse_args()
    machine = {"where": environment(choose_device("auto"))}
    result = {**(measure_host(options) if options.null_model else measure_model(options)), **machine}
    text = json.dumps(result, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
