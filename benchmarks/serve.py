"""Throughput and latency of the server: one client, then many at once, each requesting one image after the other.

python benchmarks/serve.py --model garden --clients 1 16 --seconds 30 --out benchmarks/results/serve-cpu.json

Starts `arpg serve` as its own process on a free port and calls it over HTTP. Every client has classes and seeds
of its own. The first images after the start are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx


async def request_image(
    client: httpx.AsyncClient, address: str, *, number: int, seen: dict[int, set[str]] | None = None
) -> float:
    """Request one image and return its latency; `seen` collects the images by number."""
    began = time.perf_counter()
    body = {"class": number % 5, "seed": number}
    while True:
        answer = await client.post(f"{address}/v1/arpg/generate", json=body)
        if answer.status_code != 429:
            break
        await asyncio.sleep(float(answer.headers["retry-after"]))
    answer.raise_for_status()
    if seen is not None:
        seen.setdefault(number, set()).add(answer.json()["images"][0]["png"])
    return time.perf_counter() - began


def cpu_seconds(process: int) -> float:
    """CPU seconds that a process has used, from /proc; 0 where there is none."""
    stat = Path(f"/proc/{process}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()


async def measure(
    address: str, *, clients: int, seconds: float, process: int, seen: dict[int, set[str]]
) -> dict[str, Any]:
    """Throughput and latency of `clients` clients with one request at a time, for `seconds`."""
    latencies: list[float] = []

    async def work(number: int) -> None:
        async with httpx.AsyncClient(timeout=600) as client:
            i = 0
            while time.perf_counter() < until:
                latencies.append(await request_image(client, address, number=1000 * number + i, seen=seen))
                i += 1

    used = cpu_seconds(process)
    began = time.perf_counter()
    until = began + seconds
    await asyncio.gather(*(work(number) for number in range(clients)))
    took = time.perf_counter() - began
    used = cpu_seconds(process) - used
    latencies.sort()
    shares = {f"p{p} s": round(latencies[min(len(latencies) - 1, len(latencies) * p // 100)], 3) for p in (50, 95, 99)}
    speed = {"images/s": round(len(latencies) / took, 3), "cpu s/image": round(used / len(latencies), 3)}
    return {"clients": clients, "images": len(latencies), **speed, **shares}


async def run(address: str, options: argparse.Namespace, process: int) -> tuple[list[dict[str, Any]], int]:
    """The measurements, and how many of 16 images from shared batches are the same when requested alone."""
    seen: dict[int, set[str]] = {}
    async with httpx.AsyncClient(timeout=600) as client:
        while True:
            try:
                if (await client.get(f"{address}/readyz")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
        await asyncio.gather(*(request_image(client, address, number=i) for i in range(max(options.clients))))
        await request_image(client, address, number=0)
    rows = []
    for _ in range(options.repeats):
        for clients in options.clients:
            rows.append(await measure(address, clients=clients, seconds=options.seconds, process=process, seen=seen))
            print(rows[-1], file=sys.stderr)
    chosen = sorted(seen)[:: max(1, len(seen) // 16)][:16]
    async with httpx.AsyncClient(timeout=600) as client:
        for number in chosen:
            await request_image(client, address, number=number, seen=seen)
    return rows, sum(len(seen[number]) == 1 for number in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="garden")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs="*", default=[], help="more options of `arpg serve`, without the dashes")
    options = parser.parse_args()
    more = [part if i % 2 else f"--{part}" for i, part in enumerate(options.serve)]
    command = [sys.executable, "-m", "arpg.cli", "serve", "--model", options.model, "--port", "0", *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+:\d+", line)
        assert found, line
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        try:
            rows, same = asyncio.run(run(found[0], options, process.pid))
        finally:
            process.terminate()
            process.wait()
            drain.wait()
    speeds: dict[int, float] = {}
    for row in rows:  # the best of the repeats
        speeds[row["clients"]] = max(speeds.get(row["clients"], 0.0), row["images/s"])
    result = {
        "benchmark": "serve",
        "model": options.model,
        "serve": more,
        "rows": rows,
        "same alone, of 16": same,
        "speedup": round(speeds[max(speeds)] / speeds[min(speeds)], 2),
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
