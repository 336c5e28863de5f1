"""Responses of jobs: image files, JSON, and server-sent events."""

from __future__ import annotations

import io
import json
import secrets
import zlib
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

import pybase64
from PIL import Image, PngImagePlugin
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arpg.serve.api_error import ApiError
from arpg.serve.job import Accepted, ImageFiles, JobStream, StepEvent

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


SseEvent = tuple[str, dict[str, Any]]  # name and data of a server-sent event


async def wait_for_files(job: JobStream, call: Request) -> ImageFiles:
    """Return the image files of a job, or raise its error."""
    async with aclosing(job.events(call.receive)) as events:
        async for event in events:
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, ImageFiles):
                return event
    raise AssertionError("a job ends with image files or an error")


ToBody = Callable[[JobStream, ImageFiles], dict[str, Any]]
ToSse = Callable[[JobStream, Accepted | StepEvent | ImageFiles], Iterable[SseEvent]]


async def respond(job: JobStream, call: Request, *, to_body: ToBody, to_sse: ToSse) -> Response:
    """Return the response of a job: the JSON of its images or, of a stream, server-sent events."""
    if job.is_stream:
        return EventStream(job, to_sse)
    return json_response(to_body(job, await wait_for_files(job, call)))


class EventStream(Response):
    """The events of a job as server-sent events.

    The response begins with the first event of the job, or where that takes longer than `KEEP_ALIVE_S`. An error before
    is raised, and becomes an HTTP error. `scope["state"]["outcome"]` is the HTTP status of what happened later.
    """

    media_type = "text/event-stream"

    def __init__(self, job: JobStream, to_sse: ToSse) -> None:
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
