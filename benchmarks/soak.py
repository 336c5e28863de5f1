"""Soak: thousands of mixed requests against a real server, with faults injected; nothing may leak, hang or get lost.

Usage: python benchmarks/soak.py [--requests 2000] [--clients 24] [--seed 0] [--output FILE]

The model is tiny and has random weights. Among good requests of every kind there are connections that are dropped, slow
readers and writers, malformed bodies, images that are too large, and steps and tokenizer calls that raise. Good
requests that meet an injected fault are sent again, as a client would. Every answer is compared with what the
pipeline generates alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import hashlib
import io
import json
import logging
import os
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from arpg import ARPG, ModelConfig, Pipeline, SamplingDefaults, TokenizerConfig, VQTokenizer
from arpg.serve.app import Server
from arpg.serve.auth import ApiKeys
from arpg.serve.batcher import ContinuousBatch
from arpg.serve.served_model import ServedModel
from arpg.serve.server_config import ServeSettings
from arpg.serve.service import ImageService

KEY = "the-key-of-the-soak-test"
TRIES = 200
HEADERS = {"authorization": f"Bearer {KEY}"}


def tiny_pipeline() -> Pipeline:
    torch.manual_seed(0)
    model = ARPG(
        ModelConfig(width=32, num_heads=2, pass1_layers=1, pass2_layers=1, vocab_size=24, num_classes=5, grid=(4, 4))
    )
    model.init_weights(seed=0, std=0.15)
    torch.nn.init.normal_(model.head.weight, std=0.5)
    config = TokenizerConfig(
        channels=32, multipliers=(1, 1), res_blocks=1, z_channels=8, codebook_size=24, codebook_dim=4
    )
    sampling = SamplingDefaults(steps=4, guidance_by_steps=((4, 2.0),))
    return Pipeline(model.eval(), VQTokenizer(config).eval(), sampling=sampling, license="MIT")


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def b64(image: Image.Image) -> str:
    return base64.b64encode(png(image)).decode()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def good_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Requests that must be answered, of every kind."""
    mask = Image.new("L", (12, 10))
    mask.paste(255, (2, 2, 8, 8))
    source = b64(noise(12, 10))
    made: list[tuple[str, dict[str, Any]]] = []
    for i in range(8):
        made.append(("generate", {"class": i % 5, "num": 1 + i % 3, "seed": i, "steps": 2 + i}))
        made.append(("generate", {"class": i % 5, "seed": 50 + i, "temperature": 0.5, "attention": "causal"}))
    made += [
        ("generate", {"class": 1, "num": 8, "seed": 9, "guidance": 1.0}),
        ("generate", {"class": 2, "seed": 1, "decode": "exact", "draft": 3}),
        ("generate", {"class": 2, "num": 2, "best_of": 2, "seed": 3}),
        ("inpaint", {"image": source, "mask": b64(mask), "class": 3, "seed": 4, "feather": 1}),
        ("inpaint", {"image": source, "mask": b64(mask), "seed": 5}),
        ("edit", {"image": source, "box": [1, 1, 9, 9], "class": 2, "seed": 6}),
        ("outpaint", {"image": b64(noise(8, 8)), "right": 4, "class": 1, "seed": 7, "steps": 2}),
        ("expand", {"size": [16, 16], "class": 4, "seed": 8}),
    ]
    return made


BAD: list[tuple[str, bytes, int]] = [
    ("generate", b"{", 400),
    ("generate", b'{"class": "no such thing"}', 400),
    ("generate", b'{"class": 1, "steps": -1}', 400),
    ("generate", b"\xff\xfe\x00", 400),
    ("outpaint", b'{"image": "https://example.org/a.png", "right": 4}', 400),
    ("outpaint", json.dumps({"image": b64(Image.new("1", (30000, 20000))), "right": 4}).encode(), 413),
    ("outpaint", json.dumps({"image": b64(noise(9, 9))[:200], "right": 4}).encode(), 400),
    ("generate", b" " * (17 << 20), 413),
    ("nowhere", b"{}", 404),
]


class Faults:
    """Makes steps and tokenizer calls fail, rarely and by a seed."""

    def __init__(self, service: ImageService, *, seed: int, share: float) -> None:
        self.random, self.share, self.count = random.Random(seed), share, 0
        self._step = ContinuousBatch.step
        tokenizer = service.loaded.tokenizer.small._tokenizer
        decode = tokenizer.decode

        def step(running: ContinuousBatch) -> None:
            self._maybe()
            self._step(running)

        def decode_or_fail(*arguments: Any, **options: Any) -> Any:
            self._maybe()
            return decode(*arguments, **options)

        ContinuousBatch.step = step  # type: ignore[method-assign]
        tokenizer.decode = decode_or_fail  # type: ignore[method-assign]

    def _maybe(self) -> None:
        value = self.random.random()
        if value < self.share:
            self.count += 1
            raise (torch.OutOfMemoryError if value < self.share / 2 else RuntimeError)("injected")

    def stop(self) -> None:
        ContinuousBatch.step = self._step  # type: ignore[method-assign]
        self.share = 0.0


class Soak:
    def __init__(self, address: str, service: ImageService, *, seed: int) -> None:
        self.address, self.service, self.random = address, service, random.Random(seed)
        self.good, self.expected = good_bodies(), {}
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []

    async def learn(self, client: httpx.AsyncClient) -> None:
        """Record the response to each good request alone, on an idle server."""
        for i, (route, body) in enumerate(self.good):
            answer = await client.post(f"{self.address}/v1/arpg/{route}", json=body)
            assert answer.status_code == 200, answer.text
            self.expected[i] = _digest(answer.json())

    async def run(self, requests: int, clients: int) -> None:
        left = iter(range(requests))

        async def work() -> None:
            async with httpx.AsyncClient(timeout=120, headers=HEADERS) as client:
                for _ in left:
                    await self.one(client)

        await asyncio.gather(*(work() for _ in range(clients)))

    async def one(self, client: httpx.AsyncClient) -> None:
        kinds = {"good": 50, "stream": 20, "openai": 5, "bad": 8, "drop": 12, "slow": 3, "health": 2}
        kind = self.random.choices(list(kinds), list(kinds.values()))[0]
        try:
            await getattr(self, f"_{kind}")(client)
        except Exception as error:
            self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        self.done[kind] += 1

    async def _good(self, client: httpx.AsyncClient) -> None:
        i = self.random.randrange(len(self.good))
        route, body = self.good[i]
        for _ in range(TRIES):
            began = time.monotonic()
            answer = await client.post(f"{self.address}/v1/arpg/{route}", json=body)
            if answer.status_code == 200:
                self.seconds.append(time.monotonic() - began)
                assert _digest(answer.json()) == self.expected[i], f"{route} {i} differs from its response alone"
                return
            await self._again(answer.status_code)
        raise AssertionError(f"{route} was never answered")

    async def _stream(self, client: httpx.AsyncClient, pause: float = 0.0) -> None:
        i = self.random.randrange(len(self.good))
        route, body = self.good[i]
        for _ in range(TRIES):
            last: dict[str, Any] = {}
            request = client.stream("POST", f"{self.address}/v1/arpg/{route}", json={**body, "stream": True})
            async with request as answer:
                if answer.status_code != 200:
                    await self._again(answer.status_code)
                    continue
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        last = json.loads(line.removeprefix("data: "))
                    await asyncio.sleep(pause)
            if "images" in last:
                assert _digest(last) == self.expected[i], f"stream of {route} {i} differs from its response alone"
                return
            assert "error" in last, "a stream ended without a last event"
            self.done["sent again"] += 1
        raise AssertionError(f"stream of {route} was never answered")

    async def _slow(self, client: httpx.AsyncClient) -> None:
        await self._stream(client, pause=0.05)

    async def _openai(self, client: httpx.AsyncClient) -> None:
        for _ in range(TRIES):
            mask = Image.new("RGBA", (12, 10), (0, 0, 0, 255))
            mask.paste((0, 0, 0, 0), (2, 2, 8, 8))
            files = {"image": ("a.png", png(noise(12, 10)), "image/png"), "mask": ("m.png", png(mask), "image/png")}
            answer = await client.post(
                f"{self.address}/v1/images/edits", files=files, data={"prompt": "3", "seed": "4", "feather": "1"}
            )
            if answer.status_code == 200:
                assert len(answer.json()["data"]) == 1
                return
            await self._again(answer.status_code)
        raise AssertionError("an edit was never answered")

    async def _bad(self, client: httpx.AsyncClient) -> None:
        route, content, status = self.random.choice(BAD)
        headers = {"content-type": "application/json"}
        try:
            answer = await client.post(f"{self.address}/v1/arpg/{route}", content=content, headers=headers)
        except (httpx.WriteError, httpx.ReadError):
            if status != 413:  # the server may stop reading a body that is too long
                raise
            return
        assert answer.status_code in (status, 429), (
            f"{route} got {answer.status_code}, not {status}: {answer.text[:200]}"
        )
        assert "Traceback" not in answer.text

    async def _drop(self, client: httpx.AsyncClient) -> None:
        """Disconnect in the middle of the request, while it waits, or in the middle of the stream."""
        route, body = self.random.choice(self.good)
        stage = self.random.choice(("request", "waiting", "stream"))
        content = json.dumps({**body, "stream": stage == "stream"}).encode()
        host, port = self.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/arpg/{route} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + (content[: len(content) // 2] if stage == "request" else content))
        await writer.drain()
        if stage == "stream":
            await reader.readline()
        else:
            await asyncio.sleep(self.random.random() * 0.05)
        writer.transport.abort()

    async def _health(self, client: httpx.AsyncClient) -> None:
        for path in ("/healthz", "/readyz", "/metrics", "/v1/arpg/info"):
            answer = await client.get(self.address + path)
            assert answer.status_code == 200, f"{path}: {answer.status_code}"

    async def _again(self, status: int) -> None:
        assert status in (429, 500), f"a good request got {status}"
        self.done["sent again"] += 1
        if status == 429:  # Retry-After is a second or more; a shorter pause keeps the queue full
            await asyncio.sleep(0.1 + 0.2 * self.random.random())


def soak(*, requests: int, clients: int, seed: int, share: float = 0.01) -> dict[str, Any]:
    """Run the test; the report counts the requests by kind and the resources left after each quarter."""
    logging.getLogger("arpg").setLevel(logging.CRITICAL)  # without the injected failures and their tracebacks
    pipeline = tiny_pipeline()
    settings = ServeSettings(max_batch=8, max_pending_requests=16, io_timeout_s=5.0, max_wait_ms=2.0)
    service = ImageService([ServedModel("tiny", lambda: pipeline)], keys=ApiKeys([KEY]), settings=settings)
    service.open()
    bound = socket.create_server(("127.0.0.1", 0))
    server = Server(service, lifespan="off")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    run = Soak(f"http://127.0.0.1:{bound.getsockname()[1]}", service, seed=seed)
    report = asyncio.run(_run(run, service, requests=requests, clients=clients, seed=seed, share=share))
    server.should_exit = True
    thread.join(60)
    service.close()
    report["server_stopped"] = not thread.is_alive()
    bound.close()
    return report


async def _run(
    run: Soak, service: ImageService, *, requests: int, clients: int, seed: int, share: float
) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=120, headers=HEADERS) as client:
        await run.learn(client)
        began = time.monotonic()
        faults = Faults(service, seed=seed, share=share)
        try:
            left = []
            for quarter in range(4):
                await run.run(requests * (quarter + 1) // 4 - requests * quarter // 4, clients)
                left.append(await _leftover(service))
        finally:
            faults.stop()
        await run.learn(client)  # its results are still those of the start
    run.seconds.sort()
    seconds = {
        f"p{p}": round(run.seconds[min(len(run.seconds) - 1, len(run.seconds) * p // 100)], 3) for p in (50, 95, 99)
    }
    return {
        "requests": requests,
        "clients": clients,
        "seconds": round(time.monotonic() - began, 1),
        "kinds": dict(sorted(run.done.items())),
        "faults_injected": faults.count,
        "wrong": run.wrong[:20],
        "num_wrong": len(run.wrong),
        "latency": seconds,
        "left_after_each_quarter": left,
    }


async def _leftover(service: ImageService) -> dict[str, Any]:
    """Count requests, rows, threads, files and tensors when all clients are done."""
    for _ in range(600):
        busy = (service.admission.num_admitted, service.loaded.batcher.num_running, service.loaded.batcher.num_waiting)
        if busy == (0, 0, 0):
            break
        await asyncio.sleep(0.05)
    gc.collect()
    return {
        "inside": service.admission.num_admitted,
        "rows_running": service.loaded.batcher.num_running,
        "rows_waiting": service.loaded.batcher.num_waiting,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else None,
        "tensors": sum(type(thing) is torch.Tensor for thing in gc.get_objects()),
        "memory_mb": _memory(),
    }


def _memory() -> float | None:
    status = Path("/proc/self/statm")
    return (
        round(int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1) if status.exists() else None
    )


def _digest(answer: dict[str, Any]) -> str:
    """Digest the pixels; the files also contain the settings."""
    digest = hashlib.sha256()
    for entry in answer["images"]:
        digest.update(Image.open(io.BytesIO(base64.b64decode(entry["png"]))).tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny
    report = soak(requests=arguments.requests, clients=arguments.clients, seed=arguments.seed)
    text = json.dumps(report, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)
    raise SystemExit(bool(report["num_wrong"]))


if __name__ == "__main__":
    main()
