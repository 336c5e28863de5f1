"""Observability: Prometheus metrics, and logs of one JSON object per line (never a key, a body or a query string)."""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
_RECORD_FIELDS = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class Metrics:
    """The metrics of one service, in a registry of its own so that one process can have several services."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

        def histogram(name: str, help: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(name, help, labels, buckets=buckets, registry=registry)

        self.requests = Counter("arpg_requests", "HTTP requests answered", ("route", "status"), registry=registry)
        self.latency = histogram("arpg_request_seconds", "Duration of an HTTP request", _SECONDS, ("route",))
        self.images = Counter("arpg_images", "Images generated (the rate is images per second)", registry=registry)
        self.batch = histogram("arpg_batch_rows", "Rows (images) decoded together in a step", _ROWS)
        self.step = histogram("arpg_step_seconds", "Duration of a decoding step of a batch", _SECONDS)
        self.prompt = histogram("arpg_prompt_seconds", "Time to encode a prompt that is not cached", _SECONDS)
        self.cancelled = Counter("arpg_cancelled", "HTTP requests whose client disconnected", registry=registry)
        self.failures = Counter("arpg_failures", "Batches that failed on the server", registry=registry)
        self.rejected = Counter("arpg_rejected", "HTTP requests rejected with 429", registry=registry)

    def gauge(self, name: str, help: str, value: Callable[[], float], **labels: str) -> None:
        """Register a gauge whose value is computed when the metrics are read."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, help, tuple(labels), registry=self.registry)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set_function(value)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


def peak_rss_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON, with its extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return `record` as one line of JSON."""
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _RECORD_FIELDS}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure_logging() -> None:
    """Write all logs, uvicorn's own included, as JSON lines to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("arpg").setLevel(logging.INFO)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [], True
    logging.getLogger("uvicorn.access").disabled = True  # the middleware logs each request, with its id
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
