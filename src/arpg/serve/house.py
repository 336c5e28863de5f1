"""The house: everything that one running server consists of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from arpg.config import ENGINES
from arpg.errors import one_of, require
from arpg.pipeline import Pipeline
from arpg.serve.gate import Door
from arpg.serve.jobs import Job
from arpg.serve.keys import Keys
from arpg.serve.limits import Limits
from arpg.serve.metrics import Metrics
from arpg.serve.orders import Studies
from arpg.serve.problem import Problem
from arpg.serve.studio import Studio

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeSettings:
    """How a server behaves, apart from what it serves."""

    max_batch: int = 16  # images drawn together
    max_wait_ms: float = 10.0  # how long an idle server waits for company
    queue: int = 64  # requests inside, waiting or being drawn
    deadline: float = 120.0  # seconds for one request
    patience: float = 30.0  # seconds for a body to arrive, or for a client to read on
    threads: int | None = None  # of torch; None: as it is
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("max_batch", "queue"):
            value = getattr(self, name)
            require(value >= 1, f"{name} is {value}; expected 1 or more")
        for name in ("deadline", "patience"):
            value = getattr(self, name)
            require(value > 0, f"{name} is {value}; expected more than 0 seconds")
        require(self.max_wait_ms >= 0, f"max_wait_ms is {self.max_wait_ms}; expected 0 or more milliseconds")


def check_engine(engine: str) -> None:
    """Rows join and leave the batches of a server from step to step, so no two decodes have one shape to record."""
    one_of("engine", engine, ENGINES)
    require(engine != "graph", "engine is 'graph', which a server cannot replay; expected auto, eager or compiled")


class House:
    """Opened with a function that loads the model, so that a server can say that it is alive while it loads."""

    def __init__(
        self,
        load: Callable[[], Pipeline],
        *,
        name: str,
        folder: Path | None = None,
        keys: Keys | None = None,
        settings: ServeSettings | None = None,
    ) -> None:
        self.settings = settings or ServeSettings()
        self.limits, self.name, self.folder, self.keys = self.settings.limits, name, folder, keys or Keys()
        self.metrics = Metrics()
        self.door = Door(self.settings.queue, self.metrics, wait=self._wait)
        self._load = load
        self._studio: Studio | None = None
        self._studies: Studies | None = None
        watch = self.metrics.watch
        watch("arpg_queue_depth", "Requests inside, waiting or being drawn", lambda: self.door.inside)
        watch("arpg_rows_waiting", "Images that are not begun", lambda: self._rows("waiting"))
        watch("arpg_rows_running", "Images that are being drawn", lambda: self._rows("running"))

    def open(self) -> None:
        """Load the model and start the threads; takes a while."""
        settings, pipeline = self.settings, self._load()
        studio = Studio(
            pipeline,
            max_batch=settings.max_batch,
            max_wait=settings.max_wait_ms / 1000,
            threads=settings.threads,
            metrics=self.metrics,
        )
        self._studies = Studies(studio.pipeline, self.name, self.limits)
        self._studio = studio
        log.info("ready", extra={"model": self.name, "device": str(pipeline.model.device)})

    def close(self) -> None:
        if self._studio is not None:
            self._studio.close()

    @property
    def ready(self) -> bool:
        return self._studio is not None and self._studio.alive and not self.door.draining

    @property
    def studio(self) -> Studio:
        if self._studio is None:
            raise Problem(503, "the model is still loading; try again in a moment", code="loading", retry_after=5)
        return self._studio

    @property
    def studies(self) -> Studies:
        _ = self.studio
        assert self._studies is not None
        return self._studies

    @property
    def pipeline(self) -> Pipeline:
        return self.studio.pipeline

    def job(self, request: Request, *, previews: bool) -> Job:
        _ = self.studio  # a problem if there is none yet
        return Job(id=request.state.id, deadline=self.settings.deadline, previews=previews)

    def _wait(self) -> float:
        """A guess at how long it takes until there is room."""
        return 5.0 if self._studio is None else self._studio.seconds_per_image

    def _rows(self, which: str) -> float:
        return 0.0 if self._studio is None else float(getattr(self._studio.batcher, which))
