"""The uvicorn server around the application: listening, TLS, signals and draining, and limits on connections.

The HTTP parser is h11: it refuses what RFC 9112 refuses, and its speed does not matter beside that of generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from arpg.errors import InputError, require
from arpg.serve.api_error import ApiError
from arpg.serve.app import create_app
from arpg.serve.middleware import allowed_hosts
from arpg.serve.observability import configure_logging
from arpg.serve.server_config import ServeSettings
from arpg.serve.service import ImageService
from arpg.serve.workers import SWITCH_INTERVAL_S, freeze_heap

log = logging.getLogger(__name__)
_BLANK_LINE = re.compile(rb"\n\r?\n")


def bind(host: str, port: int) -> socket.socket:
    """Listen on an address, or raise an `InputError` with the reason, before anything is loaded."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot listen on {host} port {port} ({reason}); choose another with --port") from None


def tls_options(certfile: Path | None, keyfile: Path | None) -> dict[str, str]:
    """Return the options of a server for HTTPS; none without a certificate. An invalid one is an `InputError`."""
    require(
        (certfile is None) == (keyfile is None), "ssl_certfile and ssl_keyfile belong together; give both or neither"
    )
    if certfile is None or keyfile is None:
        return {}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise InputError(
            f"{certfile} and {keyfile} cannot be used ({reason}); expected a PEM certificate and its key, not encrypted"
        ) from None
    return {"ssl_certfile": str(certfile), "ssl_keyfile": str(keyfile)}


def run(service: ImageService, bound: socket.socket, **tls: str) -> None:
    """Serve until a signal; then finish the admitted requests, respond to new ones with 503, and exit.

    `tls`: see `tls_options`. Where a worker thread dies, the pending requests fail and the process exits with status 1,
    to be started again.
    """
    configure_logging()
    hosts = allowed_hosts(bound.getsockname()[0], service.keys)
    server = Server(service, hosts=hosts, **tls)
    server.run(sockets=[bound])
    if server.failed:
        raise SystemExit(1)


class Server(uvicorn.Server):
    """A uvicorn server that drains on the first signal, with open sockets until no request is left, and then exits.

    Draining is: not ready any more, and after `drain_delay_s`, when no load balancer sends requests any more, also no
    new requests. A second signal exits at once.
    """

    def __init__(self, service: ImageService, *, hosts: frozenset[str] | None = None, **options: Any) -> None:
        settings = service.settings
        config = uvicorn.Config(
            create_app(service, hosts=hosts),
            http=functools.partial(HttpProtocol, settings=settings),  # type: ignore[arg-type]  # it is only called
            loop="asyncio",
            ws="none",
            proxy_headers=False,  # who the client is, is not for the client to say
            log_config=None,
            access_log=False,  # the middleware logs each request, with its id
            server_header=False,
            timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]  # it goes to call_later
            timeout_graceful_shutdown=math.ceil(settings.io_timeout_s),
            **options,
        )
        super().__init__(config)
        self.service = service
        self.failed = False  # a worker thread has died
        self._frozen = False  # `freeze_heap` has been called
        self._drain_at = self._exit_by = math.inf

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the end. The decode thread gets the interpreter lock back sooner than by Python's default."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            super().run(sockets)
        finally:
            gc.unfreeze()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals until the process ends: one that arrives while it exits must not print a traceback."""
        if threading.current_thread() is threading.main_thread():
            for sig in (signal.SIGINT, signal.SIGTERM):
                signal.signal(sig, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal; exit at once at the second, whatever is in progress."""
        service = self.service
        if service.stopping:
            try:
                log.warning("a second signal; exiting at once", extra={"admitted": service.admission.num_admitted})
            finally:
                os._exit(128 + sig)
        service.stopping = True
        log.info("not ready any more", extra={"admitted": service.admission.num_admitted})
        self._drain_at = time.monotonic() + service.settings.drain_delay_s
        self._exit_by = self._drain_at + service.settings.deadline + 5
        self._drain_if_due()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to exit; uvicorn calls this every 0.1 s."""
        admission = self.service.admission
        if self.service.alive and not self._frozen:
            self._frozen = True
            freeze_heap()
        if self.service.broken and not self.failed:  # what was pending has failed; send the answers, then exit
            self.failed = admission.draining = True
            self._exit_by = time.monotonic() + 5
        self._drain_if_due()
        if admission.draining and (admission.num_admitted == 0 or time.monotonic() > self._exit_by):
            self.should_exit = True
        return await super().on_tick(counter)

    def _drain_if_due(self) -> None:
        admission = self.service.admission
        if not admission.draining and time.monotonic() >= self._drain_at:
            admission.draining = True
            log.info("draining", extra={"admitted": admission.num_admitted})


class HttpProtocol(H11Protocol):
    """One HTTP/1.1 connection, with limits on its headers and on the time it may be silent.

    A request line and headers that are too long, or late, are refused before they are parsed. When there are too many
    connections, the one that has been idle for longest is closed; without an idle one, the new one gets a 503.
    """

    def __init__(self, *args: Any, settings: ServeSettings, **options: Any) -> None:
        super().__init__(*args, **options)
        self.settings = settings
        self.idle_since = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: str | None = None  # what the timer limits: "headers", or "rest" of a body that nobody reads

    @property
    def idle(self) -> bool:
        """Whether the connection is open and no request is being answered or sent, except for a part of its headers."""
        return self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for headers; make room where there are too many connections."""
        super().connection_made(transport)
        most = self.settings.max_connections
        if len(self.connections) > most:
            others = [each for each in self.connections if isinstance(each, HttpProtocol) and each is not self]
            idle = [each for each in others if each.idle]
            if idle:
                min(idle, key=lambda each: each.idle_since).transport.close()
            elif sum(not each.transport.is_closing() for each in others) >= most:
                message = f"{most} connections are open, which is the limit; try again later"
                self._refuse(ApiError(503, message, code="too_many_connections", retry_after=5))
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Pass on what has arrived, unless it is the start of a request whose headers are too long."""
        if self.conn.their_state is h11.IDLE and not self._headers_fit(self.conn.trailing_data[0] + data):
            most = f"at most {self.settings.max_header_bytes} bytes and {self.settings.max_headers} headers"
            self._refuse(ApiError(431, f"the request line and headers are too long; {most} are accepted"))
        else:
            super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._set_timer(None)

    def on_response_complete(self) -> None:
        """Wait for the next request as long as uvicorn's keep-alive timer does, and for the rest of this one."""
        self.idle_since = self.loop.time()
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in JSON; also in the middle of a body, when a response may have begun."""
        self._refuse(ApiError(400, "the request is not valid HTTP/1.1"))

    def _headers_fit(self, head: bytes) -> bool:
        most = self.settings.max_header_bytes
        end = _BLANK_LINE.search(head, 0, most)
        length = len(head) if end is None else end.end()
        return length <= most and head.count(b"\n", 0, length) <= self.settings.max_headers + 2

    def _watch(self) -> None:
        """Start the timer of what the connection waits for, unless it runs already."""
        their = self.conn.their_state
        if self.transport.is_closing():
            self._set_timer(None)
        elif their is h11.IDLE:
            self._set_timer("headers", self.settings.header_timeout_s)
        elif their is h11.SEND_BODY and self.cycle.response_complete:  # it is discarded, but not for ever
            self._set_timer("rest", self.settings.io_timeout_s)
        else:
            self._set_timer(None)

    def _set_timer(self, awaited: str | None, seconds: float = 0.0) -> None:
        if awaited == self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._awaited = awaited
        self._timer = None if awaited is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self._awaited == "headers" and self.conn.trailing_data[0]:
            self._refuse(ApiError(408, "the headers of the request did not arrive in time; send it again"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Send an error, where no response has begun, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application must not respond as well
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            made = error.response()
            headers = [*made.raw_headers, (b"connection", b"close")]
            start = h11.Response(status_code=made.status_code, headers=headers, reason=STATUS_PHRASES[made.status_code])
            for event in (start, h11.Data(data=bytes(made.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
