"""Observability: metrics for Prometheus, logs of one JSON object per line, and traces with OpenTelemetry.

Logs and traces never contain a key, a body or a query string.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
    start_http_server,
)
from prometheus_client.registry import Collector
from starlette.responses import Response

import arpg
from arpg.errors import InputError, one_of

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
_RECORD_FIELDS = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_OTEL_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Metrics:
    """Metrics in a registry of their own, so that one process can have several services."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def gauge(self, name: str, help: str, value: Callable[[], float], **labels: str) -> None:
        """Register a gauge whose value is computed when the metrics are read."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, help, tuple(labels), registry=self.registry)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set_function(value)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(name, help, labels, buckets=buckets, registry=self.registry)


class HttpMetrics(Metrics):
    """The metrics of the process that answers HTTP requests. `worker` yields those of the models."""

    def __init__(self, worker: Collector | None = None) -> None:
        super().__init__()
        self.requests = self._counter("arpg_requests", "HTTP requests answered", "route", "status")
        self.latency = self._histogram("arpg_request_seconds", "Duration of an HTTP request", "route")
        self.key_requests = self._counter("arpg_key_requests", "HTTP requests by label of the API key", "key", "status")
        self.cancelled = self._counter("arpg_cancelled", "HTTP requests whose client disconnected")
        self.rejected = self._counter("arpg_rejected", "HTTP requests rejected with 429")
        ProcessCollector(registry=self.registry)
        build = {"version": arpg.__version__, "torch": torch.__version__, "python": platform.python_version()}
        Info("arpg_build", "Versions", registry=self.registry).info(build)
        if worker is not None:
            self.registry.register(worker)

    def serve(self, host: str, port: int) -> None:
        """Serve the metrics, without a key, at a port of their own, from a thread of its own."""
        try:
            start_http_server(port, host, self.registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(f"cannot listen on {host} port {port} ({reason}); choose another --metrics-port") from None

    def response(self) -> Response:
        """Return all metrics in the text format of Prometheus."""
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class WorkerMetrics(Metrics):
    """The metrics of the models and of their work."""

    def __init__(self) -> None:
        super().__init__()
        self.images = self._counter("arpg_images", "Images: ok, cancelled, deadline, error", "outcome")
        self.key_images = self._counter("arpg_key_images", "Images by label of the API key", "key")
        self.queue = self._histogram("arpg_queue_seconds", "Time that a decoding request waits for a batch")
        self.first_preview = self._histogram("arpg_first_preview_seconds", "Time to the first preview of a stream")
        self.batch = self._histogram("arpg_batch_rows", "Rows (images) decoded together in a step", buckets=_ROWS)
        self.step = self._histogram("arpg_step_seconds", "Duration of a decoding step of a batch")
        about = "Time of the decode threads: idle, admit, launch, device, deliver, pause"
        self.decode_thread = self._counter("arpg_decode_thread_seconds", about, "part")
        self.prompt = self._histogram("arpg_prompt_seconds", "Time to encode a prompt that is not cached")
        self.failures = self._counter("arpg_failures", "Batches that failed on the server")
        for kind, value in (("allocated", torch.cuda.memory_allocated), ("reserved", torch.cuda.memory_reserved)):
            self.gauge("arpg_gpu_memory_bytes", "Memory of the GPU", partial(_gpu_bytes, value), kind=kind)


def _gpu_bytes(value: Callable[[], int]) -> float:
    return float(value()) if torch.cuda.is_initialized() else 0.0  # type: ignore[no-untyped-call]


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
    """Write all logs as JSON lines to stderr; uvicorn, without a configuration of its own, logs to the root too."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("arpg").setLevel(logging.INFO)


class Trace:
    """The spans of one request: prepare, queue, decode, pixels and encode. This one records nothing.

    Times are those of `time.monotonic`.
    """

    def add(self, name: str, start: float, end: float, **attributes: int) -> None:
        """Record a finished part of the request; may be called from any thread."""

    def end(self, status: int, route: str) -> None:
        """Record the end of the request."""

    def headers(self) -> dict[str, str]:
        """Return the headers that continue the trace in another process."""
        return {}


class RecordedTrace(Trace):
    """The spans of one request in OpenTelemetry; its headers may name the span that it belongs to."""

    def __init__(self, tracer: Tracer, method: str, headers: Mapping[str, str], **attributes: str) -> None:
        from opentelemetry import propagate, trace

        self._tracer = tracer
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        given = {"http.request.method": method, **attributes}
        parent = propagate.extract(headers)
        self._span = tracer.start_span("request", context=parent, kind=trace.SpanKind.SERVER, attributes=given)
        self._context = trace.set_span_in_context(self._span)

    def add(self, name: str, start: float, end: float, **attributes: int) -> None:
        """Record a finished part of the request; may be called from any thread."""
        span = self._tracer.start_span(
            name, context=self._context, attributes=attributes, start_time=int(start * 1e9) + self._offset_ns
        )
        span.end(int(end * 1e9) + self._offset_ns)

    def end(self, status: int, route: str) -> None:
        """Record the end of the request."""
        from opentelemetry.trace import StatusCode

        self._span.update_name(route)
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def headers(self) -> dict[str, str]:
        """Return the headers that continue the trace in another process."""
        from opentelemetry import propagate

        headers: dict[str, str] = {}
        propagate.inject(headers, self._context)
        return headers


def tracer_from_environment() -> Tracer | None:
    """Return a tracer as the environment configures it (extra `otel`); None: traces are off.

    They are on where an endpoint or OTEL_TRACES_EXPORTER (otlp, console, none) is set.
    """
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "")
    wanted = exporter or any(os.environ.get(name) for name in _OTEL_ENDPOINTS)
    if not wanted or exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    exporter = exporter or "otlp"
    one_of("OTEL_TRACES_EXPORTER", exporter, ("otlp", "console", "none"))
    os.environ.setdefault("OTEL_SERVICE_NAME", "arpg")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed; pip install 'arpg[otel]' brings OpenTelemetry") from None
    provider = TracerProvider()  # reads the resource, the sampler and the limits from the environment
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter() if exporter == "otlp" else ConsoleSpanExporter()))
    return provider.get_tracer("arpg.serve")
