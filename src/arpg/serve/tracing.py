"""Traces with OpenTelemetry (extra `otel`): a span for each request, with prepare, queue, decode and pixels inside.

The usual environment variables configure it. Traces are on where OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_TRACES_EXPORTER (otlp, console, none) is set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from arpg.errors import InputError, one_of

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SERVICE_NAME = "arpg"


class Trace:
    """The spans of one request; this one records nothing. Times are those of `time.monotonic`."""

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
    """Return a tracer as the environment configures it; None: traces are off."""
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "")
    wanted = exporter or any(os.environ.get(name) for name in ENDPOINTS)
    if not wanted or exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    exporter = exporter or "otlp"
    one_of("OTEL_TRACES_EXPORTER", exporter, ("otlp", "console", "none"))
    os.environ.setdefault("OTEL_SERVICE_NAME", SERVICE_NAME)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed; pip install 'arpg[otel]' brings OpenTelemetry") from None
    provider = TracerProvider()  # reads the resource, the sampler and the limits from the environment
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter() if exporter == "otlp" else ConsoleSpanExporter()))
    return provider.get_tracer("arpg.serve")
