"""Soak: thousands of mixed requests against a real server, with faults injected; nothing may leak, hang or get lost.

Usage: python benchmarks/soak.py [--requests 2000] [--clients 24] [--seed 0] [--output FILE]

The model is tiny and has random weights. A fifth of the requests are faults, of all kinds in `FAULTS`; besides, steps
and tokenizer calls raise. Good requests that meet an injected fault are sent again, as a client would. Every answer is
compared with what the pipeline generates alone; the exit status is 1 if any is wrong or missing, if anything is left
when the clients are done, or if memory grows.
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
from arpg.decode.continuous import ContinuousBatch
from arpg.serve.auth import ApiKeys
from arpg.serve.model_worker import ModelWorker
from arpg.serve.served_model import ServedModel
from arpg.serve.server import Server
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


def head(path: str, *headers: str, method: str = "POST", length: int | None = None, key: str = KEY) -> bytes:
    """The request line and the headers of a request."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {key}", *headers]
    lines += [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def post(route: str, body: bytes | dict[str, Any], kind: str = "application/json") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(route, f"content-type: {kind}", length=len(content)) + content


def form(*fields: tuple[str, str], end: str = "--b--\r\n", charset: str = "utf-8") -> bytes:
    parts = "".join(f'--b\r\ncontent-disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in fields)
    kind = f"multipart/form-data; boundary=b; charset={charset}"
    return post("/v1/images/edits", (parts + end).encode(), kind)


def strip(width: int, height: int) -> str:
    return b64(Image.new("L", (width, height)))


GENERATE, OUTPAINT, MAX_BYTES = "/v1/arpg/generate", "/v1/arpg/outpaint", 1 << 24
# By kind: what is sent on a connection of its own, and the status of the answer. A 429 is right for all POST requests.
FAULTS: dict[str, list[tuple[bytes, int]]] = {
    "malformed json": [
        (post(GENERATE, b"{"), 400),
        (post(GENERATE, b"\xff\xfe\x00"), 400),
        (post(GENERATE, {"class": "no such thing"}), 400),
        (post(GENERATE, {"class": 1, "steps": -1}), 400),
    ],
    "json bomb": [
        (post(GENERATE, {f"k{i}": 1 for i in range(100_000)}), 400),
        (post(GENERATE, b'{"class": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"), 400),
    ],
    "malformed image": [
        (post(OUTPAINT, {"image": "https://example.org/a.png", "right": 4}), 400),
        (post(OUTPAINT, {"image": b64(noise(9, 9))[:200], "right": 4}), 400),
    ],
    "image bomb": [
        (post(OUTPAINT, {"image": b64(Image.new("1", (30000, 20000))), "right": 4}), 413),
        (post(OUTPAINT, {"image": strip(50000, 1), "right": 4}), 413),
        (post(OUTPAINT, {"image": strip(16000, 1), "right": 4, "steps": 1}), 400),
    ],
    "malformed form": [
        (form(("prompt", "1"), ("schedule", "1,,2")), 400),
        (form(("prompt", "1"), charset="undefined"), 400),
        (form(("prompt", "1"), end=""), 400),
    ],
    "body too long": [
        (head(GENERATE, length=MAX_BYTES + 1), 413),
        (head("/v1/images/generations", length=MAX_BYTES), 413),
        (head(GENERATE, "transfer-encoding: chunked") + b"1100000\r\n" + b" " * (17 << 20) + b"\r\n0\r\n\r\n", 413),
    ],
    "no key": [(head(GENERATE, length=MAX_BYTES, key="a-wrong-key-of-the-soak"), 401)],
    "no such route": [
        (head("/v1/arpg/nowhere", length=MAX_BYTES), 404),
        (head(GENERATE, method="PUT", length=MAX_BYTES), 405),
    ],
    "headers too long": [
        (head("/healthz", "x: " + "y" * 40_000, method="GET"), 431),
        (head("/healthz", *(f"x-{i}: y" for i in range(200)), method="GET"), 431),
    ],
    "ambiguous headers": [
        (head("/healthz", "host: evil.example", method="GET"), 400),
        (head(GENERATE, "transfer-encoding: chunked", length=2) + b"0\r\n\r\n", 400),
    ],
    "not http": [(b"\x16\x03\x01\x02\x00\r\n\r\n", 400), (b"GET / HTTP/9\r\n\r\n", 400)],
    "other origin": [
        (head(GENERATE, "origin: http://[", length=2), 403),
        (head(GENERATE, "origin: null", length=2), 403),
    ],
    "slow headers": [(b"GET /healthz HTTP/1.1\r\nhost: local", 408)],
    "slow body": [(head(GENERATE, length=50) + b"{", 408)],
}


class Faults:
    """Makes steps and tokenizer calls fail, rarely and by a seed."""

    def __init__(self, service: ImageService, *, seed: int, share: float) -> None:
        self.random, self.share, self.count = random.Random(seed), share, 0
        self._step = ContinuousBatch.step
        assert isinstance(service.worker, ModelWorker)
        codec = service.worker.loaded.codec.small._codec
        decode = codec.decode

        def step(running: ContinuousBatch) -> None:
            self._maybe()
            self._step(running)

        def decode_or_fail(*arguments: Any, **options: Any) -> Any:
            self._maybe()
            return decode(*arguments, **options)

        ContinuousBatch.step = step  # type: ignore[method-assign, assignment]
        codec.decode = decode_or_fail  # type: ignore[method-assign]

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
        self.kinds = random.Random(f"{seed} kinds")  # apart: what is sent must not depend on timing
        self.good = good_bodies()
        self.expected: dict[int, str] = {}
        self.done: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
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
        good = {"good": 50, "stream": 20, "openai": 5, "slow": 3, "health": 2}
        faults = dict.fromkeys((*FAULTS, "silent"), 0.8) | {"drop": 8}
        kinds = good | faults
        kind = self.kinds.choices(list(kinds), list(kinds.values()))[0]
        try:
            await (self._fault(kind) if kind in FAULTS else getattr(self, f"_{kind}")(client))
        except Exception as error:
            self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        (self.faults if kind in faults else self.done)[kind] += 1

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

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.address.removeprefix("http://").split(":")
        return await asyncio.open_connection(host, int(port))

    async def _fault(self, kind: str) -> None:
        """Send a request that must be refused, and read the status of the answer."""
        content, status = self.random.choice(FAULTS[kind])
        reader, writer = await self._connect()
        try:
            writer.write(content)
            async with asyncio.timeout(60):
                answer = await reader.readuntil(b"\r\n\r\n") + await reader.read(1 << 16)
        except ConnectionResetError:  # the server may stop reading a body that is too long
            assert kind == "body too long", "the connection was reset"
            return
        finally:
            writer.transport.abort()
        found = int(answer.split()[1])
        assert found in (status, 429), f"got {found}, not {status}: {answer[:200]!r}"
        assert b"Traceback" not in answer

    async def _silent(self, client: httpx.AsyncClient) -> None:
        """Connect eight times, say nothing, and wait until the server has closed all connections."""
        opened = [await self._connect() for _ in range(8)]
        async with asyncio.timeout(60):
            for reader, writer in opened:
                assert await reader.read() == b""
                writer.close()

    async def _drop(self, client: httpx.AsyncClient) -> None:
        """Disconnect in the middle of the request, while it waits, or in the middle of the stream."""
        route, body = self.random.choice(self.good)
        stage = self.random.choice(("request", "waiting", "stream"))
        content = json.dumps({**body, "stream": stage == "stream"}).encode()
        reader, writer = await self._connect()
        whole = post(f"/v1/arpg/{route}", content)
        writer.write(whole[: -(len(content) // 2)] if stage == "request" else whole)
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
    settings = ServeSettings(
        max_batch=8, max_pending_requests=16, io_timeout_s=5.0, header_timeout_s=2.0, max_wait_ms=2.0
    )
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
        "faults": dict(sorted(run.faults.items())),
        "num_faults": run.faults.total(),
        "faults_injected": faults.count,
        "wrong": run.wrong[:20],
        "num_wrong": len(run.wrong),
        "latency": seconds,
        "left_after_each_quarter": left,
    }


def problems(report: dict[str, Any]) -> list[str]:
    """Say what is not as it should be; memory may grow by 32 MiB from the first quarter to the last."""
    found = list(report["wrong"])
    if not report["server_stopped"]:
        found.append("the server did not stop")
    first, *_, last = left = report["left_after_each_quarter"]
    if any(any(each[name] for name in ("inside", "rows_running", "rows_waiting", "body_bytes")) for each in left):
        found.append("requests, rows or bodies are left after the clients are done")
    for name, more in (("threads", 4), ("files", 8), ("tensors", 20), ("memory_mb", 32)):
        if first[name] is not None and last[name] > first[name] + more:
            found.append(f"{name} grew from {first[name]} to {last[name]}")
    return found


async def _leftover(service: ImageService) -> dict[str, Any]:
    """Count requests, rows, threads, files and tensors when all clients are done."""
    assert isinstance(service.worker, ModelWorker)
    batcher = service.worker.loaded.batcher
    for _ in range(600):
        if (service.admission.num_admitted, batcher.num_running, batcher.num_waiting) == (0, 0, 0):
            break
        await asyncio.sleep(0.05)
    gc.collect()
    return {
        "inside": service.admission.num_admitted,
        "rows_running": batcher.num_running,
        "rows_waiting": batcher.num_waiting,
        "body_bytes": service.metrics.registry.get_sample_value("arpg_body_bytes"),
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
    found = problems(report)
    for each in found:
        print(each)
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
