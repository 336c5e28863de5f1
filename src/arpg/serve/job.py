"""Jobs: the work for one call, where the models are, and the stream of its events where its response is written.

Both may be in different processes: a `JobSpec` and all events can be pickled. The files of results (not of previews)
are encoded by the stream, so that this takes nothing of the interpreter lock of the process that decodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image
from starlette.types import Receive

from arpg.image import Pixels
from arpg.serve.api_error import ApiError, internal_error
from arpg.serve.build_task import BuiltTask, FilteredImage, TaskBuilder
from arpg.serve.middleware import ClientDisconnected, wait_for_disconnect
from arpg.serve.observability import Trace

log = logging.getLogger(__name__)
KEEP_ALIVE_S = 15.0  # a stream without events yields None this often

Encode = Callable[[Image.Image, dict[str, Any]], bytes]  # an image and its settings to a file


@dataclass(frozen=True)
class PreviewOptions:
    """The previews of a job: `most` of them, evenly spread (None: as many as are read), with sides of up to `size`."""

    most: int | None = None
    size: int | None = None  # pixels; None: that of the image


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What a job is to do: `build` a task, or `filter` an image without sampling. Both run in threads."""

    id: str  # of the call
    tenant: str
    share: float  # of the budget for work that this tenant may hold
    model: str
    build: Callable[[TaskBuilder], BuiltTask] | None = None
    filter: Callable[[TaskBuilder], FilteredImage] | None = None
    reads_files: bool = False  # whether `build` reads images
    stream: bool = False  # whether events before the last are read
    previews: PreviewOptions | None = None  # None: no steps
    traced: bool = False


@dataclass(frozen=True)
class Accepted:
    """The event of a job that is checked and admitted: from here on, an error is the last event of a stream."""

    position: int  # images that are waiting before it


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
    """The images of a job, the seed of each, where they are sampled, and the settings that made them."""

    images: Sequence[Pixels]
    seeds: Sequence[int]
    settings: dict[str, Any]
    cost: float = 0.0  # of a task, see `arpg.serve.admission`
    usage: Usage = Usage()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of each image."""
        height, width = self.images[0].shape[:2]
        return width, height


@dataclass(frozen=True)
class ImageFiles:
    """The image files of a result, as its response has them, and the seconds from the call to them."""

    files: Sequence[bytes]
    result: Result
    seconds: float


@dataclass(frozen=True)
class Span:
    """A finished part of a job, for its trace; times are those of `time.monotonic`."""

    name: str
    start: float
    end: float
    attributes: dict[str, int]


Event = Accepted | StepEvent | Result | ApiError | Span


class Job:
    """The work for one call. It sends events from any thread to `deliver`, which returns at once.

    The last event is a `Result` or an `ApiError`; after the deadline, a 504.
    """

    def __init__(self, spec: JobSpec, *, deadline: float, deliver: Callable[[Event], None]) -> None:
        self.spec, self.id, self.tenant = spec, spec.id, spec.tenant
        self.outcome = ""  # ok, cancelled, deadline or error, once it has ended
        self._deadline, self._deliver = deadline, deliver
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._num_sent = self._num_read = 0
        self._ended = self._cancelled = False
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
        return self._num_sent - self._num_read

    def send(self, event: Accepted | StepEvent) -> None:
        """Send an event that is not the last to a stream, unless the job is to stop."""
        if self.spec.stream and not self.should_stop:
            with self._lock:
                self._num_sent += 1
            self._deliver(event)

    def add_span(self, name: str, start: float, end: float, **attributes: int) -> None:
        """Report a finished part of the job to its trace."""
        if self.spec.traced:
            self._deliver(Span(name, start, end, attributes))

    def end(self, event: Result | ApiError) -> None:
        """Send the last event; only the first call counts."""
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
        self._deliver(event)

    def on_end(self, call: Callable[[], None]) -> None:
        """Call `call` once when the job ends; at once where it has."""
        with self._lock:
            ended = self._ended
            if not ended:
                self._on_end.append(call)
        if ended:
            call()

    def read(self) -> None:
        """Count an event of `send` as read."""
        self._num_read += 1

    def cancel(self) -> None:
        """Nobody reads the response any more."""
        self._cancelled = True

    def stop(self) -> None:
        """End a job that was stopped: the deadline has passed, or nobody reads the response."""
        self.end(deadline_error(self._deadline))


def deadline_error(deadline: float) -> ApiError:
    """Return the 504 of a job that is not finished in time."""
    what = f"the request was not finished within {deadline:g} seconds"
    message = f"{what}; request fewer images or steps, or try again later"
    return ApiError(504, message, code="deadline_exceeded", retry_after=5)


class JobControl(Protocol):
    """What the reader of a job tells it: `Job`, in this process or another."""

    def read(self) -> None:
        """Count an event of a stream as read."""
        ...

    def cancel(self) -> None:
        """Nobody reads the response any more."""
        ...

    def stop(self) -> None:
        """End the job, as its deadline has passed."""
        ...


StreamEvent = Accepted | StepEvent | ImageFiles | ApiError


class JobStream:
    """The events of a job for one reader on the event loop, where it is created. `put` is called from any thread.

    The images of its result are encoded in a thread of `pool`.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        encode: Encode,
        pool: Executor,
        deadline: float,
        trace: Trace,
        on_files: Callable[[ImageFiles], None],
    ) -> None:
        self.id, self.is_stream, self.created = spec.id, spec.stream, time.time()
        self.control: JobControl | None = None  # set as soon as the job exists
        self._encode, self._pool, self._on_files = encode, pool, on_files
        self._deadline, self._start = deadline, time.monotonic()
        self._trace, self._loop = trace, asyncio.get_running_loop()
        self._events: asyncio.Queue[StreamEvent | ClientDisconnected] = asyncio.Queue()
        self._closed = False  # nobody reads any more
        self._timer = self._loop.call_later(deadline, self._stop)

    def put(self, event: Event) -> None:
        """Take the next event of the job."""
        if isinstance(event, Span):
            self._trace.add(event.name, event.start, event.end, **event.attributes)
        elif isinstance(event, Result):
            try:
                self._pool.submit(self._encode_images, event)
            except RuntimeError:  # the pool is closed
                self._put(internal_error())
        else:
            self._put(event)

    def _put(self, event: StreamEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _encode_images(self, result: Result) -> None:
        """Make the files of a result, the last event; in a thread of the pool."""
        if self._closed:
            return
        start = time.monotonic()
        seeds: Sequence[int | None] = result.seeds or [None]  # an image that is not sampled has none
        try:
            files = [
                self._encode(Image.fromarray(image), {**result.settings, "seed": seed})
                for image, seed in zip(result.images, seeds, strict=True)
            ]
        except BaseException as error:  # whatever it is: nobody may wait for the files any more
            log.error("encoding failed", exc_info=error, extra={"id": self.id})
            self._put(internal_error())
            return
        end = time.monotonic()
        self._trace.add("encode", start, end, images=len(files))
        self._put(ImageFiles(files, result, end - self._start))

    def _stop(self) -> None:
        if self.control is not None:
            self.control.stop()
        self._events.put_nowait(deadline_error(self._deadline))  # also where its images are being encoded

    async def events(self, receive: Receive) -> AsyncGenerator[StreamEvent | None, None]:
        """Yield the events up to the last, and None where a keep-alive is due; a disconnect cancels the job."""
        watch = asyncio.ensure_future(wait_for_disconnect(receive))
        watch.add_done_callback(lambda _: self._events.put_nowait(ClientDisconnected()))
        ended = False
        try:
            while not ended:
                event = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        event = await self._events.get()
                if isinstance(event, ClientDisconnected):
                    raise event
                ended = isinstance(event, ImageFiles | ApiError)
                if isinstance(event, ImageFiles):
                    self._on_files(event)
                if event is not None and not ended and self.control is not None:
                    self.control.read()
                yield event
        finally:
            self._closed = True
            if not ended and self.control is not None:
                self.control.cancel()
            self._timer.cancel()
            watch.cancel()
