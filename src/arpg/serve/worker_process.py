"""WorkerProcess: a `ModelWorker` in a process of its own, so that decoding shares its interpreter lock with less.

The two processes send each other pickled messages over a pipe: a `JobSpec` starts a job, `Delivery`s bring its events,
the last of them with the pixels of its images.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from prometheus_client import Metric, ProcessCollector
from prometheus_client.registry import Collector

from arpg.serve.api_error import ApiError, internal_error
from arpg.serve.job import Event, Job, JobSpec, Result
from arpg.serve.model_worker import ModelWorker
from arpg.serve.observability import configure_logging
from arpg.serve.served_model import ModelFacts, ServedModel
from arpg.serve.server_config import ServeSettings
from arpg.serve.workers import SWITCH_INTERVAL_S, freeze_heap

log = logging.getLogger(__name__)
METRICS_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 30.0
_POLL_S = 0.1  # how often the worker looks for threads that have died


class Control(NamedTuple):
    """A method of `JobControl` to call, for the job of a call."""

    id: str
    method: Literal["read", "cancel", "stop"]


class Delivery(NamedTuple):
    """The next event of the job of a call."""

    id: str
    event: Event


class Ready(NamedTuple):
    """The models are loaded."""

    facts: dict[str, ModelFacts]


class Broken(NamedTuple):
    """A thread of the worker has died."""


class MetricsRequest(NamedTuple):
    """Ask for the metrics; the answer has the same number."""

    number: int


class MetricsAnswer(NamedTuple):
    """The metrics of the worker."""

    number: int
    metrics: list[Metric]


class Close(NamedTuple):
    """End the worker."""


class Channel:
    """One end of a pipe between two processes. `send` may be called from any thread, and returns at once."""

    def __init__(self, connection: Connection, *, receive: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """`receive` is called with each message, `on_end` once when the other end is closed, from a thread."""
        self._connection, self._receive, self._on_end = connection, receive, on_end
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="arpg-channel", daemon=True)
        self._reader = threading.Thread(target=self._read, name="arpg-channel", daemon=True)
        for thread in (self._writer, self._reader):
            thread.start()

    def send(self, message: Any) -> None:
        """Send a message; where the other end is closed, it is lost."""
        self._outgoing.put(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def close(self) -> None:
        """Wait until everything is sent."""
        self._outgoing.put(None)
        self._writer.join(CLOSE_TIMEOUT_S)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while (data := self._outgoing.get()) is not None:
                self._connection.send_bytes(data)

    def _read(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):  # the other end is closed
                while True:
                    self._receive(pickle.loads(self._connection.recv_bytes()))
        finally:
            self._on_end()


class WorkerProcess(Collector):
    """Used like a `ModelWorker`. Where its process dies, its jobs end with a 500 and it is `broken`."""

    def __init__(self, models: Sequence[ServedModel], settings: ServeSettings) -> None:
        self.facts: dict[str, ModelFacts] = {}  # of the loaded models
        self.broken = False  # the process, or a thread of it, has died
        self._models, self._settings = tuple(models), settings
        self._process: Any = None
        self._channel: Channel | None = None
        self._jobs: dict[str, Callable[[Event], None]] = {}  # where the events of each go, by the id of its call
        self._metrics: dict[int, queue.SimpleQueue[list[Metric]]] = {}  # answers that are waited for
        self._num_metrics = 0
        self._lock = threading.Lock()
        self._started = threading.Event()  # the models are loaded, or the process has ended
        self._ended = self._closing = False

    def open(self) -> None:
        """Start the process and wait until it has loaded the models."""
        context = multiprocessing.get_context("spawn")  # a fork would share threads, and a GPU cannot be used in it
        ours, theirs = context.Pipe()
        arguments = (theirs, self._models, self._settings)
        self._process = context.Process(target=_run_worker, args=arguments, name="arpg-worker", daemon=True)
        self._process.start()
        theirs.close()
        self._channel = Channel(ours, receive=self._receive, on_end=self._on_end)
        self._started.wait()
        if self._ended:
            self._process.join(CLOSE_TIMEOUT_S)
            code = self._process.exitcode
            raise RuntimeError(f"the worker process ended with exit code {code} while it loaded; its log says why")

    def close(self) -> None:
        """End the process; jobs that are not finished end with an error."""
        self._closing = True
        if self._channel is None:
            return
        self._channel.send(Close())
        self._process.join(CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            log.warning("the worker process did not end in time and is killed")
            self._process.kill()
        self._channel.close()

    def run(self, spec: JobSpec, deliver: Callable[[Event], None]) -> RemoteJob:
        """Start a job of a loaded model; its events go to `deliver`, from a thread."""
        with self._lock:
            ended = self._ended
            if not ended:
                self._jobs[spec.id] = deliver
        if ended:
            deliver(internal_error())
        self.send(spec)
        return RemoteJob(self, spec.id)

    def send(self, message: Any) -> None:
        """Send a message to the process."""
        assert self._channel is not None
        self._channel.send(message)

    def forget(self, id: str) -> Callable[[Event], None] | None:
        """Return where the events of a job go, and drop those that follow; None: it has ended."""
        with self._lock:
            return self._jobs.pop(id, None)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the process; none before the models are loaded."""
        if not self.facts or self._ended:
            return []
        answer: queue.SimpleQueue[list[Metric]] = queue.SimpleQueue()
        with self._lock:
            self._num_metrics += 1
            number = self._num_metrics
            self._metrics[number] = answer
        self.send(MetricsRequest(number))
        try:
            return answer.get(timeout=METRICS_TIMEOUT_S)
        except queue.Empty:
            log.warning("the worker process sent no metrics in time")
            return []
        finally:
            del self._metrics[number]

    def _receive(self, message: Delivery | Ready | Broken | MetricsAnswer) -> None:
        if isinstance(message, Delivery):
            last = isinstance(message.event, Result | ApiError)
            deliver = self.forget(message.id) if last else self._jobs.get(message.id)
            if deliver is not None:
                deliver(message.event)
        elif isinstance(message, Ready):
            self.facts = message.facts
            self._started.set()
        elif isinstance(message, Broken):
            self.broken = True
        elif (answer := self._metrics.get(message.number)) is not None:
            answer.put(message.metrics)

    def _on_end(self) -> None:
        with self._lock:
            self._ended = True
            self.broken = self.broken or not self._closing
            jobs, self._jobs = self._jobs, {}
        if jobs:
            log.error("the worker process ended", extra={"jobs": len(jobs)})
        for deliver in jobs.values():
            deliver(internal_error())
        self._started.set()


class RemoteJob:
    """The `JobControl` of a job in another process."""

    def __init__(self, worker: WorkerProcess, id: str) -> None:
        self._worker, self._id = worker, id

    def read(self) -> None:
        """Count an event of a stream as read."""
        self._worker.send(Control(self._id, "read"))

    def cancel(self) -> None:
        """Nobody reads the response any more."""
        self._worker.forget(self._id)
        self._worker.send(Control(self._id, "cancel"))

    def stop(self) -> None:
        """End the job, as its deadline has passed; its reader does not wait for the other process."""
        self._worker.forget(self._id)
        self._worker.send(Control(self._id, "stop"))


@dataclass
class _WorkerMain:
    """What runs in the process: a `ModelWorker`, and the jobs that are not finished."""

    connection: Connection
    worker: ModelWorker

    def __post_init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.closing = threading.Event()
        self.channel = Channel(self.connection, receive=self.receive, on_end=self.closing.set)

    def run(self) -> None:
        """Load the models and work until the other process closes the connection, or says so."""
        self.worker.open()
        freeze_heap()
        self.channel.send(Ready(self.worker.facts))
        reported = False
        while not self.closing.wait(_POLL_S):
            if self.worker.broken and not reported:
                reported = True
                self.channel.send(Broken())
        self.worker.close()
        self.channel.close()

    def receive(self, message: JobSpec | Control | MetricsRequest | Close) -> None:
        """Handle a message of the other process."""
        if isinstance(message, JobSpec):
            self.start(message)
        elif isinstance(message, Control):
            job = self.jobs.get(message.id)
            if job is not None:
                getattr(job, message.method)()
        elif isinstance(message, MetricsRequest):
            self.channel.send(MetricsAnswer(message.number, list(self.worker.collect())))
        else:
            self.closing.set()

    def start(self, spec: JobSpec) -> None:
        """Start a job."""

        def deliver(event: Event) -> None:
            self.channel.send(Delivery(spec.id, event))

        job = self.worker.run(spec, deliver)
        self.jobs[spec.id] = job
        job.on_end(lambda: self.forget(spec.id))

    def forget(self, id: str) -> None:
        """Drop a job that has ended."""
        self.jobs.pop(id, None)


def _run_worker(connection: Connection, models: Sequence[ServedModel], settings: ServeSettings) -> None:
    """Run the process of a worker. Signals are for the other process, which tells this one when to end."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    configure_logging()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    worker = ModelWorker(models, settings)
    ProcessCollector(namespace="arpg_worker", registry=worker.metrics.registry)
    try:
        _WorkerMain(connection, worker).run()
    except Exception:
        log.exception("the worker failed")
        os._exit(1)
