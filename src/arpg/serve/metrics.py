"""Metrics: what Prometheus is told about requests, batches and images."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)


class Metrics:
    """One registry for each application, so that several can live in one process (as in tests)."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("arpg_requests", "Requests that were answered", ("route", "status"), registry=registry)
        self.latency = Histogram(
            "arpg_request_seconds", "From the first byte to the last", ("route",), buckets=_SECONDS, registry=registry
        )
        self.images = Counter(
            "arpg_images", "Images that were finished (their rate is images per second)", registry=registry
        )
        self.batch = Histogram(
            "arpg_batch_rows", "Images that were drawn together in a step", buckets=_ROWS, registry=registry
        )
        self.step = Histogram("arpg_step_seconds", "Time of a step of a batch", buckets=_SECONDS, registry=registry)
        self.prompt = Histogram(
            "arpg_prompt_seconds", "Time to read a prompt that is not kept", buckets=_SECONDS, registry=registry
        )
        self.cancelled = Counter("arpg_cancelled", "Requests whose client went away", registry=registry)
        self.failures = Counter("arpg_failures", "Batches that failed on the server", registry=registry)
        self.rejected = Counter("arpg_rejected", "Requests that found the queue full", registry=registry)

    def watch(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(name, about, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)
