"""HttpProtocol: HTTP/1.1 connections with limits on their number, on their headers and on the time they may be silent.

The parser is h11: it refuses what RFC 9112 refuses, and its speed does not matter beside that of generation.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from arpg.serve.api_error import ApiError
from arpg.serve.server_config import ServeSettings

_BLANK_LINE = re.compile(rb"\n\r?\n")


class HttpProtocol(H11Protocol):
    """One connection of a client.

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
