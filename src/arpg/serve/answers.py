"""Answers: what a job has become, as one JSON object or as server-sent events while it is drawn."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from arpg.serve.gate import ClientGoneError, Receive, Scope, Send
from arpg.serve.jobs import Event, Job, Result
from arpg.serve.problem import Problem

BEAT = 15.0  # seconds of silence after which a stream says that it is alive

Named = tuple[str, dict[str, Any]]  # the name and the data of an event


async def follow(job: Job, receive: Receive) -> AsyncGenerator[Event | None, None]:
    """The events of a job up to its last, None when there was none for a while. Cancels the job if the client goes."""
    gone = asyncio.ensure_future(_gone(receive))
    turn: asyncio.Future[Event] | None = None
    try:
        while True:
            turn = turn or asyncio.ensure_future(job.next())
            watched: set[asyncio.Future[Any]] = {gone, turn}
            await asyncio.wait(watched, timeout=BEAT, return_when=asyncio.FIRST_COMPLETED)
            if turn.done():
                event = turn.result()
                turn = None
                yield event
                if isinstance(event, Result | Problem):
                    return
            elif gone.done():
                raise ClientGoneError
            else:
                yield None
    finally:
        job.cancel()  # without effect when it has ended
        gone.cancel()
        if turn is not None:
            turn.cancel()


async def result_of(job: Job, request: Request) -> Result:
    """The result, or the problem raised."""
    async with aclosing(follow(job, request.receive)) as events:
        async for event in events:
            if isinstance(event, Problem):
                raise event
            if isinstance(event, Result):
                return event
    raise AssertionError("a job ends with a result or a problem")


class EventStream(Response):
    """Server-sent events; `name` says what becomes of each event of the job."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, first: Iterable[Named], name: Callable[[Event], Iterable[Named]]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.job, self.first, self.name = job, first, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def say(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async with aclosing(follow(self.job, receive)) as events:
            for named in self.first:
                await say(_event(named))
            async for event in events:
                if event is None:
                    await say(b": still drawing\n\n")
                else:
                    for named in self.name(event):
                        await say(_event(named))
        await say(b"", more=False)


def json_response(body: dict[str, Any]) -> Response:
    return Response(json.dumps(body), media_type="application/json")


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _event(named: Named) -> bytes:
    return f"event: {named[0]}\ndata: {json.dumps(named[1])}\n\n".encode()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
