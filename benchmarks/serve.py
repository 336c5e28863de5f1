"""Throughput and latency of the server under load: clients that request one image after the other.

python -m benchmarks.serve --clients 1 4 16 64 --mixed --seconds 25 --out benchmarks/results/serve-mixed-cpu.json
python -m benchmarks.serve --clients 1 16 --seconds 12 --repeats 3

Starts `arpg serve` as its own process on a free port and calls it over HTTP. Every client has classes and seeds of its
own. Without `--mixed` all requests generate; with it, they are those of `MIX`. Fairness is Jain's index over the work
that each client got done (1: all the same, 1/n: one got everything), with requests weighted by their mean latency.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from arpg.config import DEFAULT_MODEL
from arpg.device import cpu_name

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
    body["image"] = _base64(Image.fromarray(pixels))
    if kind == "outpaint":
        return "/v1/arpg/outpaint", {**body, "right": width // 4}
    mask = Image.new("L", size)
    mask.paste(255, (width // 4, height // 4, 3 * width // 4, 3 * height // 4))
    return "/v1/arpg/inpaint", {**body, "mask": _base64(mask)}


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


@contextlib.contextmanager
def running_server(*options: str) -> Iterator[tuple[str, int]]:
    """Run `arpg serve` with these options on a free port; yield its address and process id."""
    command = [sys.executable, "-m", "arpg.cli", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+:\d+", line)
        assert found, line
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        try:
            yield found[0], process.pid
        finally:
            process.terminate()
            process.wait()
            drain.wait()


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds that a process has used, from /proc; 0 where there is none."""
    stat = Path(f"/proc/{process}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def resident_mb(process: int) -> float | None:
    """Return the resident memory of a process in MB, from /proc; None where there is none."""
    status = Path(f"/proc/{process}/statm")
    if not status.exists():
        return None
    return round(int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)


def _base64(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--mixed", action="store_true", help="all kinds of requests instead of generate alone")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs="*", default=[], help="more options of `arpg serve`, without the dashes")
    options = parser.parse_args()
    more = [part if i % 2 else f"--{part}" for i, part in enumerate(options.serve)]
    with running_server("--model", options.model, *more) as (address, process):
        rows, same = asyncio.run(run(address, options, process))
    result = {
        "benchmark": "serve",
        "model": options.model,
        "requests": MIX if options.mixed else {"generate": 100},
        "serve": more,
        "rows": rows,
        "same alone, of 16": same,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    text = json.dumps(result, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
