"""Jobs and their responses: a job passes events from the worker threads to the HTTP response, as JSON or as SSE."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from PIL import Image, PngImagePlugin
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arpg.serve.api_error import ApiError, deadline_exceeded
from arpg.serve.middleware import ClientDisconnected, wait_for_disconnect
from arpg.serve.tracing import Trace

KEEP_ALIVE_S = 15.0  # a stream without events sends a comment this often


@dataclass(frozen=True)
class PreviewOptions:
    """The previews of a job: `most` of them, evenly spread (None: as many as are read), with sides of up to `size`."""

    most: int | None = None
    size: int | None = None  # pixels; None: that of the image


@dataclass(frozen=True)
class Preview:
    """The state of a task after a step; `pngs` is empty where no preview was made."""

    step: int  # finished steps of the current window, from 1
    steps: int | None
    window: int
    windows: int
    grid: tuple[int, int]
    pngs: Sequence[bytes]
    decoded_at: list[list[int]]


@dataclass(frozen=True)
class Usage:
    """Tokens of a task: of its prompt or class, of the kept part of its image, and of its results."""

    text_tokens: int = 0
    image_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Result:
    """The images of a task, also as PNG files, and the settings that made them."""

    pngs: Sequence[bytes]
    images: Sequence[Image.Image]
    seeds: Sequence[int]
    settings: dict[str, Any]
    seconds: float
    usage: Usage = Usage()


class Accepted:
    """The event of a job that is checked and admitted: from here on, an error is the last event of a stream."""


Event = Accepted | Preview | Result | ApiError
SseEvent = tuple[str, dict[str, Any]]  # name and data of a server-sent event


class Job:
    """The work for one call: events from any thread to one reader on the event loop, where it is created.

    The last event is a `Result` or an `ApiError`.
    """

    def __init__(
        self, *, id: str, key: str, deadline: float, previews: PreviewOptions | None, trace: Trace | None = None
    ) -> None:
        self.id, self.key = id, key  # of the call; the label of its API key
        self.previews = previews
        self.trace = trace or Trace()
        self.outcome = ""  # ok, cancelled, deadline or error, once it has ended
        self.created = time.time()
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._deadline = deadline
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._ended = False
        self._cancelled = False
        self._on_end: list[Callable[[], None]] = []

    @property
    def seconds(self) -> float:
        """Seconds since the job was created."""
        return time.monotonic() - self._start

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - self.seconds

    @property
    def should_stop(self) -> bool:
        """Whether it is cancelled, past its deadline, or ended. The threads read this at every step."""
        return self._cancelled or self._ended or self.seconds_left <= 0

    @property
    def num_unread(self) -> int:
        """Events that the reader has not taken yet."""
        return self._events.qsize()

    def cancel(self) -> None:
        """Let the threads stop working on it."""
        self._cancelled = True

    def send(self, event: Accepted | Preview) -> None:
        """Send an event that is not the last, unless the job is to stop."""
        if not self.should_stop:
            self._send(event)

    def end(self, event: Result | ApiError) -> None:
        """Send the last event; only the first call counts, whichever thread it comes from."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self.outcome = "ok" if isinstance(event, Result) else self._failure(event)
        for call in self._on_end:
            call()
        self._send(event)

    def _failure(self, error: ApiError) -> str:
        return "cancelled" if self._cancelled else "deadline" if error.status == 504 else "error"

    def on_end(self, call: Callable[[], None]) -> None:
        """Call `call` once when the job ends; at once where it has."""
        with self._lock:
            ended = self._ended
            if not ended:
                self._on_end.append(call)
        if ended:
            call()

    def stop(self) -> None:
        """End a job that was stopped: the deadline has passed, or nobody reads the response."""
        self.end(deadline_exceeded(self._deadline))

    async def next_event(self) -> Event:
        """Return the next event; after the deadline, a 504."""
        try:
            return await asyncio.wait_for(self._events.get(), max(0.0, self.seconds_left))
        except TimeoutError:
            self.stop()
            return deadline_exceeded(self._deadline)

    def _send(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


async def follow(job: Job, receive: Receive) -> AsyncGenerator[Event | None, None]:
    """Yield the events of a job up to its last, and None where a keep-alive is due; a disconnect cancels the job."""
    disconnected = asyncio.ensure_future(wait_for_disconnect(receive))
    pending: asyncio.Future[Event] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(job.next_event())
            watched: set[asyncio.Future[Any]] = {disconnected, pending}
            await asyncio.wait(watched, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if pending.done():
                event = pending.result()
                pending = None
                yield event
                if isinstance(event, Result | ApiError):
                    return
            elif disconnected.done():
                raise ClientDisconnected
            else:
                yield None
    finally:
        job.cancel()  # without effect when it has ended
        disconnected.cancel()
        if pending is not None:
            pending.cancel()


async def wait_for_result(job: Job, call: Request) -> Result:
    """Return the result of a job, or raise its error."""
    async with aclosing(follow(job, call.receive)) as events:
        async for event in events:
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Result):
                return event
    raise AssertionError("a job ends with a result or an error")


ToBody = Callable[[Job, Result], dict[str, Any]]
ToSse = Callable[[Job, Preview | Result], Iterable[SseEvent]]


async def respond(
    job: Job, call: Request, *, stream: bool, to_body: ToBody, to_sse: ToSse, first: Iterable[SseEvent] = ()
) -> Response:
    """Return the response of a job: the JSON of its result or, with `stream`, server-sent events, `first` before."""
    if stream:
        return EventStream(job, to_sse, first)
    return json_response(to_body(job, await wait_for_result(job, call)))


class EventStream(Response):
    """The events of a job as server-sent events.

    The response begins with the first event of the job, or where that takes longer than `KEEP_ALIVE_S`. An error before
    is raised, and becomes an HTTP error. `scope["state"]["outcome"]` is the HTTP status of what happened later.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, to_sse: ToSse, first: Iterable[SseEvent]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.job, self.to_sse, self.first = job, to_sse, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        started = False
        async with aclosing(follow(self.job, receive)) as events:
            async for event in events:
                if not started:
                    if isinstance(event, ApiError):
                        raise event
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    for sse in self.first:
                        await write(_sse_bytes(sse))
                if event is None:
                    await write(b": keep-alive\n\n")
                elif isinstance(event, ApiError):
                    scope["state"]["outcome"] = event.status
                    await write(_sse_bytes(("error", event.body())))
                elif not isinstance(event, Accepted):
                    for sse in self.to_sse(self.job, event):
                        await write(_sse_bytes(sse))
        await write(b"", more=False)


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """Return a response with `body` as JSON."""
    return Response(json.dumps(body), status, media_type="application/json")


def to_base64(data: bytes) -> str:
    """Return `data` in base64."""
    return base64.b64encode(data).decode()


def to_png(image: Image.Image, settings: dict[str, Any] | None = None) -> bytes:
    """Return a PNG file with `settings` as its text chunk `arpg`. Previews, which have none, are compressed less."""
    text = PngImagePlugin.PngInfo()
    if settings is not None:
        text.add_text("arpg", json.dumps(settings))
    file = io.BytesIO()
    image.save(file, format="PNG", pnginfo=text, compress_level=6 if settings is not None else 1)
    return file.getvalue()


def _sse_bytes(event: SseEvent) -> bytes:
    return f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n".encode()
