"""The middleware of all routes: id, host, key, size and admission of requests; headers, log and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arpg.serve.admission import AdmissionLimiter
from arpg.serve.api_error import ApiError, internal_error
from arpg.serve.auth import ANONYMOUS, ApiKeys, is_loopback
from arpg.serve.observability import HttpMetrics, RecordedTrace, Trace
from arpg.serve.schemas import TASKS
from arpg.serve.server_config import ServeSettings

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
API_HEADERS, PAGE_HEADERS = (
    [(name.encode(), value.encode()) for name, value in {**SECURITY_HEADERS, "cache-control": caching}.items()]
    for caching in ("no-store", "no-cache")
)
PROBES = frozenset({"/healthz", "/readyz", "/metrics"})  # not logged
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
POST_ROUTES = {  # all that take a body: whether there may be images in it
    **{f"/v1/arpg/{task}": True for task in (*TASKS, "condition", "upscale")},
    "/v1/images/generations": False,
    "/v1/images/edits": True,
    "/v1/images/variations": True,
}


def allowed_hosts(host: str, keys: ApiKeys) -> frozenset[str] | None:
    """Return the accepted Host headers; None: any.

    A server without keys on a loopback address accepts only its own names, which stops DNS rebinding.
    """
    return LOOPBACK | {host.strip("[]").lower()} if is_loopback(host) and not len(keys) else None


class ClientDisconnected(Exception):  # noqa: N818  an outcome, not a failure
    """Nobody reads the response any more."""


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class RequestMiddleware:
    """Checks, admits, logs and counts every request. Plain ASGI, so that streams and disconnects pass through it.

    `hosts`: accepted Host headers; None: any.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        admission: AdmissionLimiter,
        metrics: HttpMetrics,
        settings: ServeSettings,
        hosts: frozenset[str] | None,
        tracer: Tracer | None = None,
    ) -> None:
        self.tracer = tracer
        self.app, self.admission, self.metrics = app, admission, metrics
        self.settings, self.hosts = settings, hosts
        self.body_bytes = 0  # of all requests that are being answered
        self.metrics.gauge("arpg_body_bytes", "Bytes of request bodies in memory", lambda: self.body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._handle(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state.setdefault("id", f"req_{secrets.token_hex(12)}")  # on Ray, the ingress has set it
        start, response = time.monotonic(), _ResponseSender(send, scope, self.settings.io_timeout_s)
        admitted, body = False, b""
        state["trace"] = Trace()
        try:
            headers = self._check(scope)
            if scope["method"] == "POST" and scope["path"] in POST_ROUTES:
                if self.tracer is not None:
                    state["trace"] = RecordedTrace(self.tracer, scope["method"], headers, request_id=response.id)
                self.admission.check(state["tenant"])  # before the body is read
                body = await self._read_body(scope, headers, receive)
                self.admission.enter(state["tenant"])  # a body that does not arrive takes no place
                admitted = True
            await self.app(scope, replay(body, receive), response.send)
        except ClientDisconnected:
            self.metrics.cancelled.inc()
            state["outcome"] = 499
        except ApiError as error:
            await response.send_error(error, receive)
        except Exception:
            log.exception("a request failed", extra={"id": response.id})
            await response.send_error(internal_error(), receive)
        finally:
            if admitted:
                self.admission.leave(state["tenant"])
            self.body_bytes -= len(body)
            self._record(scope, response, time.monotonic() - start)

    def _check(self, scope: Scope) -> dict[str, str]:
        """Return the headers, or raise an error: all that can be said before the body is read."""
        names = [name.lower() for name, _ in scope["headers"]]
        twice = [name for name in (b"host", b"authorization", b"content-type") if names.count(name) > 1]
        if twice or {b"content-length", b"transfer-encoding"} <= set(names):
            what = f"{twice[0].decode()} is given twice" if twice else "both content-length and transfer-encoding"
            raise ApiError(400, f"the headers are ambiguous: {what}; send one", code="ambiguous_headers")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self.hosts is not None and _without_port(host) not in self.hosts:
            raise ApiError(421, "the server does not answer to this host name", code="unknown_host")
        origin = headers.get("origin")
        if scope["method"] != "GET" and origin is not None and _site(origin) != host:
            raise ApiError(403, "requests from pages of other sites are not accepted", code="cross_origin")
        label = ANONYMOUS
        if scope["path"].startswith("/v1/") or scope["path"] == "/metrics":
            label = self.admission.keys.check(headers.get("authorization"))
        scope["state"].setdefault("tenant", label)  # on Ray, the ingress has set it
        return headers

    async def _read_body(self, scope: Scope, headers: dict[str, str], receive: Receive) -> bytes:
        """Return the body, within the limits of its size, of its time, and of the memory for all bodies."""
        limits, seconds = self.settings.limits, self.settings.io_timeout_s
        most = limits.bytes if POST_ROUTES[scope["path"]] else min(limits.bytes, limits.json_bytes)
        too_large = ApiError(413, f"the request is longer than {most} bytes; send less", code="too_large")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > most:
            raise too_large
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    part, more = message.get("body", b""), message.get("more_body", False)
                    if size + len(part) > most:
                        raise too_large
                    if self.body_bytes + len(part) > self.settings.max_body_bytes:
                        full = "the requests in progress take all memory for bodies; try again in a moment"
                        raise ApiError(503, full, code="bodies_full", retry_after=5)
                    self.body_bytes += len(part)
                    size += len(part)
                    parts.append(part)
            return b"".join(parts)
        except BaseException as error:
            self.body_bytes -= size
            if isinstance(error, TimeoutError):
                error = ApiError(408, f"the request did not arrive within {seconds:g} seconds; send it again")
            raise error from None

    def _record(self, scope: Scope, response: _ResponseSender, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or ("static" if scope.get("endpoint") else "other")
        status = scope["state"].get("outcome", response.status)  # of a stream: how it ended
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.latency.labels(route).observe(seconds)
        if status == 429:
            self.metrics.rejected.inc()
        if "tenant" in scope["state"] and scope["path"].startswith("/v1/"):
            self.metrics.key_requests.labels(scope["state"]["tenant"], str(status)).inc()
        scope["state"]["trace"].end(status, route)
        if scope["path"] in PROBES:
            return  # many times a minute, and nothing to read in it
        extra = {"id": response.id, "method": scope["method"], "route": route, "status": status}
        client = (scope.get("client") or ("",))[0]
        log.info("request", extra={**extra, "seconds": round(seconds, 4), "client": client})


class _ResponseSender:
    """Adds the headers to a response; raises `ClientDisconnected` where the client does not read it in time."""

    def __init__(self, send: Send, scope: Scope, io_timeout_s: float) -> None:
        self._send, self.scope, self.io_timeout_s = send, scope, io_timeout_s
        self.id: str = scope["state"]["id"]
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ours = API_HEADERS if self.scope["path"].startswith("/v1/") else PAGE_HEADERS
            own = message.get("headers", [])
            given = {name.lower() for name, _ in own}
            more = [header for header in ours if header[0] not in given]
            message = {**message, "headers": [*own, *more, (b"x-request-id", self.id.encode())]}
        try:
            async with asyncio.timeout(self.io_timeout_s):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientDisconnected from None

    async def send_error(self, error: ApiError, receive: Receive) -> None:
        if self.status:  # the response has begun: the connection can only be closed
            return
        with contextlib.suppress(ClientDisconnected):
            await error.response()(self.scope, receive, self.send)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that has the whole body in its first message, and then waits for the disconnect."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again


def _without_port(host: str) -> str:
    """Return the name in a Host header."""
    host = host.lower()
    return host[1 : host.index("]")] if host.startswith("[") and "]" in host else host.rsplit(":", 1)[0]


def _site(origin: str) -> str | None:
    """Return host and port in an Origin header; None: it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
