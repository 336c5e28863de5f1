"""The gate: what every request passes before and after its route: id, host, key, size, room; headers, log, metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from arpg.serve.jobs import new_id
from arpg.serve.keys import Keys
from arpg.serve.limits import Limits
from arpg.serve.metrics import Metrics
from arpg.serve.problem import Problem, draining, failed

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


def allowed_hosts(host: str, keys: Keys) -> frozenset[str] | None:
    """Names that a server answers to. Without keys on this machine: only its own, or any page could name us its own."""
    return LOCAL if host in LOCAL and not len(keys) else None


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


class Door:
    """How many requests for work are inside. A full house is a 429, a house that closes a 503."""

    def __init__(self, capacity: int, metrics: Metrics, *, wait: Callable[[], float]) -> None:
        self.capacity, self.metrics, self.wait = capacity, metrics, wait
        self.inside = 0
        self.draining = False

    def enter(self) -> None:
        if self.draining:
            raise draining()
        if self.inside >= self.capacity:
            self.metrics.rejected.inc()
            raise Problem(
                429,
                f"{self.inside} requests are waiting or being drawn, which is all there is room for; try again later",
                code="queue_full",
                retry_after=min(60.0, self.wait()),
            )
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1


class Gate:
    """Plain ASGI, so that streams stream and a client that goes away is noticed."""

    def __init__(
        self,
        app: App,
        *,
        door: Door,
        keys: Keys,
        limits: Limits,
        metrics: Metrics,
        hosts: frozenset[str] | None = None,
        patience: float = 30.0,
    ) -> None:
        """`hosts`: names the server answers to (None: any); `patience`: seconds for a body to come or go on."""
        self.app, self.door, self.keys, self.limits, self.metrics = app, door, keys, limits, metrics
        self.hosts, self.patience = hosts, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state.setdefault("id", new_id())  # on Ray, the id that the request got at the front
        began, answer = time.monotonic(), _Answer(send, state["id"], scope["path"], self.patience)
        works = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        inside = False
        try:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            self._check(scope, headers)
            if works:
                self.door.enter()
                inside = True
            await self.app(scope, await self._read(headers, receive), answer.send)
        except ClientGoneError:
            self.metrics.cancelled.inc()
            answer.status = answer.status or 499
        except Problem as problem:
            await answer.tell(problem)
        except Exception:
            log.exception("a request failed", extra={"id": answer.id})
            await answer.tell(failed())
        finally:
            if inside:
                self.door.leave()
            self._note(scope, answer, time.monotonic() - began)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        if self.hosts is not None and _name(host) not in self.hosts:
            raise Problem(421, "the server does not answer to this host name", code="unknown_host")
        origin = headers.get("origin")
        if scope["method"] != "GET" and origin is not None and urlsplit(origin).netloc != host:
            raise Problem(403, "requests from pages of other sites are not taken", code="cross_origin")
        if scope["path"].startswith("/v1/") or scope["path"] == "/metrics":
            self.keys.check(headers.get("authorization"))

    async def _read(self, headers: dict[str, str], receive: Receive) -> Receive:
        """The whole body, within limits of size and time; then `receive` only tells that the client has gone."""
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > self.limits.bytes:
            raise self._too_long()
        body = bytearray()
        try:
            async with asyncio.timeout(self.patience):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    if len(body) > self.limits.bytes:
                        raise self._too_long()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Problem(408, f"the request did not arrive within {self.patience:g} seconds; send it again") from None
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return replay

    def _too_long(self) -> Problem:
        return Problem(413, f"the request is longer than {self.limits.bytes} bytes; send less", code="too_large")

    def _note(self, scope: Scope, answer: _Answer, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or ("static" if scope.get("endpoint") else "other")
        self.metrics.requests.labels(route, str(answer.status)).inc()
        self.metrics.latency.labels(route).observe(seconds)
        extra = {"id": answer.id, "method": scope["method"], "route": route, "status": answer.status}
        client = (scope.get("client") or ("",))[0]
        log.info("request", extra={**extra, "seconds": round(seconds, 4), "client": client})


class _Answer:
    """What goes back: with our headers, and not for ever."""

    def __init__(self, send: Send, id: str, path: str, patience: float) -> None:
        self._send, self.id, self.path, self.patience = send, id, path, patience
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ours = {**HEADERS, "x-request-id": self.id}
            ours["cache-control"] = "no-store" if self.path.startswith("/v1/") else "no-cache"
            given = {name.lower() for name, _ in message.get("headers", [])}
            more = [(k.encode(), v.encode()) for k, v in ours.items() if k.encode() not in given]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        try:
            async with asyncio.timeout(self.patience):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGoneError from None

    async def tell(self, problem: Problem) -> None:
        if self.status:  # the answer has begun; all that is left is to break it off
            return
        body = problem.encoded()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers()}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        try:
            await self.send({"type": "http.response.start", "status": problem.status, "headers": encoded})
            await self.send({"type": "http.response.body", "body": body})
        except ClientGoneError:
            pass


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host[1 : host.index("]")] if host.startswith("[") and "]" in host else host.rsplit(":", 1)[0]
