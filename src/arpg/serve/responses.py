"""Jobs and their responses: a job passes events from the worker threads to the HTTP response, as JSON or as SSE."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import secrets
import threading
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pybase64
from PIL import Image, PngImagePlugin
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arpg.serve.api_error import ApiError
from arpg.serve.middleware import ClientDisconnected, wait_for_disconnect
from arpg.serve.observability import Trace

KEEP_ALIVE_S = 15.0  # a stream without events sends a comment this often
_PLACEHOLDER = secrets.token_hex(16)  # of base64 in JSON; no client can know it


def to_base64(data: bytes) -> bytes:
    """Return `data` in base64, as `to_json` takes it.

    binascii takes 0.13 ms for an image, in which no other thread runs Python; this takes a hundredth of it.
    """
    return pybase64.b64encode(data)


def to_png(image: Image.Image, settings: dict[str, Any] | None = None) -> bytes:
    """Return a PNG file with `settings`, where there are any, as its text chunk `arpg`.

    Run-length compression: photographs have no repeated strings, so the search for them takes time and saves nothing
    (docs/performance/serving-cost.md).
    """
    text = PngImagePlugin.PngInfo()
    if settings is not None:
        text.add_text("arpg", json.dumps(settings))
    file = io.BytesIO()
    image.save(file, format="PNG", pnginfo=text, compress_level=1, compress_type=zlib.Z_RLE)
    return file.getvalue()


def base64_png(image: Image.Image, settings: dict[str, Any] | None = None) -> bytes:
    """Return the file of `to_png` in base64."""
    return to_base64(to_png(image, settings))


@dataclass(frozen=True)
class PreviewOptions:
    """The previews of a job: `most` of them, evenly spread (None: as many as are read), with sides of up to `size`."""

    most: int | None = None
    size: int | None = None  # pixels; None: that of the image


@dataclass(frozen=True)
class StepEvent:
    """The state of a task after a step: the data of a `step` event."""

    step: int  # finished steps of the current window, from 1
    steps: int | None  # None where it is not known before the end (decode: exact)
    window: int
    windows: int
    previews: Sequence[bytes]  # PNG files in base64, one per image; empty where none were made
    grid: tuple[int, int]  # of the whole image, which may have several windows
    decoded_at: list[list[int]]  # the step of each token, over all windows; -1: not yet, -2: was known


@dataclass(frozen=True)
class Usage:
    """Tokens of a task: of its prompt or class, of the kept part of its image, and of its results."""

    text_tokens: int = 0
    image_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Result:
    """The image files of a task, as its response has them, their (width, height), and the settings that made them."""

    files: Sequence[bytes]
    size: tuple[int, int]
    seeds: Sequence[int]
    settings: dict[str, Any]
    seconds: float
    usage: Usage = Usage()


@dataclass(frozen=True)
class Accepted:
    """The event of a job that is checked and admitted: from here on, an error is the last event of a stream."""

    position: int  # images that are waiting before it


Encode = Callable[[Image.Image, dict[str, Any]], bytes]  # an image and its settings to a file of a `Result`
Event = Accepted | StepEvent | Result | ApiError
SseEvent = tuple[str, dict[str, Any]]  # name and data of a server-sent event


class Job:
    """The work for one call: events from any thread to one reader on the event loop, where it is created.

    The last event is a `Result` or an `ApiError`; after the deadline, a 504.
    """

    def __init__(
        self,
        *,
        id: str,
        tenant: str,
        deadline: float,
        trace: Trace,
        stream: bool = False,
        previews: PreviewOptions | None = None,
        encode: Encode = base64_png,
    ) -> None:
        self.id, self.tenant, self.trace = id, tenant, trace  # of the call
        self.stream, self.previews, self.encode = stream, previews, encode
        self.outcome = ""  # ok, cancelled, deadline or error, once it has ended
        self.created = time.time()
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | ClientDisconnected] = asyncio.Queue()
        self._deadline = deadline
        self._start = time.monotonic()
        self._timer = self._loop.call_later(deadline, self.stop)
        self._lock = threading.Lock()
        self._ended = False
        self._cancelled = False
        self._on_end: list[Callable[[], None]] = []

    @property
    def seconds(self) -> float:
        """Seconds since the job was created."""
        return time.monotonic() - self._start

    @property
    def should_stop(self) -> bool:
        """Whether it is cancelled, past its deadline, or ended. The threads read this at every step."""
        return self._cancelled or self._ended or self.seconds >= self._deadline

    @property
    def num_unread(self) -> int:
        """Events that the reader has not taken yet."""
        return self._events.qsize()

    def send(self, event: Accepted | StepEvent) -> None:
        """Send an event that is not the last to a stream, unless the job is to stop."""
        if self.stream and not self.should_stop:
            self._send(event)

    def end(self, event: Result | ApiError) -> None:
        """Send the last event; only the first call counts, whichever thread it comes from."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            if isinstance(event, Result):
                self.outcome = "ok"
            else:
                self.outcome = "cancelled" if self._cancelled else "deadline" if event.status == 504 else "error"
            # They refer to the job and its task; if they were kept, its tensors would wait for the garbage collector.
            calls, self._on_end = self._on_end, []
        for call in calls:
            call()
        self._send(event)

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
        what = f"the request was not finished within {self._deadline:g} seconds"
        message = f"{what}; request fewer images or steps, or try again later"
        self.end(ApiError(504, message, code="deadline_exceeded", retry_after=5))

    async def events(self, receive: Receive) -> AsyncGenerator[Event | None, None]:
        """Yield the events up to the last, and None where a keep-alive is due; a disconnect cancels the job."""
        watch = asyncio.ensure_future(wait_for_disconnect(receive))
        watch.add_done_callback(lambda _: self._events.put_nowait(ClientDisconnected()))
        try:
            while True:
                event = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        event = await self._events.get()
                if isinstance(event, ClientDisconnected):
                    raise event
                yield event
                if isinstance(event, Result | ApiError):
                    return
        finally:
            self._cancelled = True
            self._timer.cancel()
            watch.cancel()

    def _send(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


async def wait_for_result(job: Job, call: Request) -> Result:
    """Return the result of a job, or raise its error."""
    async with aclosing(job.events(call.receive)) as events:
        async for event in events:
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Result):
                return event
    raise AssertionError("a job ends with a result or an error")


ToBody = Callable[[Job, Result], dict[str, Any]]
ToSse = Callable[[Job, Accepted | StepEvent | Result], Iterable[SseEvent]]


async def respond(job: Job, call: Request, *, to_body: ToBody, to_sse: ToSse) -> Response:
    """Return the response of a job: the JSON of its result or, of a stream, server-sent events."""
    if job.stream:
        return EventStream(job, to_sse)
    return json_response(to_body(job, await wait_for_result(job, call)))


class EventStream(Response):
    """The events of a job as server-sent events.

    The response begins with the first event of the job, or where that takes longer than `KEEP_ALIVE_S`. An error before
    is raised, and becomes an HTTP error. `scope["state"]["outcome"]` is the HTTP status of what happened later.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, to_sse: ToSse) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.job, self.to_sse = job, to_sse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        started = False
        async with aclosing(self.job.events(receive)) as events:
            async for event in events:
                if not started:
                    if isinstance(event, ApiError):
                        raise event
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if event is None:
                    await write(b": keep-alive\n\n")
                elif isinstance(event, ApiError):
                    scope["state"]["outcome"] = event.status
                    await write(_sse_bytes(("error", event.body())))
                else:
                    for sse in self.to_sse(self.job, event):
                        await write(_sse_bytes(sse))
        await write(b"", more=False)


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """Return a response with `body` as JSON, see `to_json`."""
    return Response(to_json(body), status, media_type="application/json")


def to_json(body: dict[str, Any]) -> bytes:
    """Return `body` as JSON in ASCII. Its bytes are base64 and become strings: only copied, not escaped."""
    files: list[bytes] = []

    def replace(file: bytes) -> str:
        files.append(file)
        return _PLACEHOLDER

    first, *rest = json.dumps(body, default=replace).encode("ascii").split(_PLACEHOLDER.encode("ascii"))
    return b"".join((first, *(part for pair in zip(files, rest, strict=True) for part in pair)))


def _sse_bytes(event: SseEvent) -> bytes:
    return b"".join((b"event: ", event[0].encode(), b"\ndata: ", to_json(event[1]), b"\n\n"))
