"""Jobs: one request on its way, between the event loop that answers it and the threads that draw it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from arpg.serve.problem import Problem, too_late


@dataclass(frozen=True)
class Preview:
    """What is there after a step."""

    step: int  # finished steps of the current window, from 1
    steps: int | None
    window: int
    windows: int
    grid: tuple[int, int]
    pngs: Sequence[bytes]
    decoded_at: list[list[int]]


@dataclass(frozen=True)
class Result:
    """The pictures, as PNG files, with what made them."""

    pngs: Sequence[bytes]
    images: Sequence[Image.Image]
    seeds: Sequence[int]
    settings: dict[str, Any]
    seconds: float


Event = Preview | Result | Problem


class Mailbox:
    """Events from any thread to the one reader on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def get(self) -> Event:
        return await self._queue.get()

    @property
    def unread(self) -> int:
        return self._queue.qsize()


class Job:
    """Made on the event loop. Its last event is a result or a problem; after that there are none."""

    def __init__(self, *, id: str, deadline: float, previews: bool) -> None:
        self.id = id
        self.previews = previews
        self.created = time.time()
        self.mailbox = Mailbox()
        self._deadline = deadline
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._ended = False
        self._cancelled = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - self.seconds

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def stop(self) -> bool:
        """Whether no more work should go into it: its client went away, time is up, or it has ended."""
        return self._cancelled or self._ended or self.left <= 0

    def cancel(self) -> None:
        """The client is gone; the threads look at this before every step."""
        self._cancelled = True

    def show(self, preview: Preview) -> None:
        if not self.stop:
            self.mailbox.put(preview)

    def end(self, event: Result | Problem) -> None:
        """Only the first end counts, whichever thread it comes from."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self.mailbox.put(event)

    def give_up(self) -> None:
        """Time is up, or nobody is there to tell."""
        self.end(too_late(self._deadline))

    async def next(self) -> Event:
        """The next event; the deadline is one of its problems."""
        try:
            return await asyncio.wait_for(self.mailbox.get(), max(0.0, self.left))
        except TimeoutError:
            self.give_up()
            return too_late(self._deadline)


def new_id() -> str:
    return f"req_{secrets.token_hex(12)}"
