"""What a server tells about itself: metrics, a port for them, traces in OpenTelemetry, and the Grafana dashboard."""

import gzip
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from starlette.testclient import TestClient

import arpg
from arpg.errors import InputError
from arpg.serve.app import create_app
from arpg.serve.auth import ApiKeys
from arpg.serve.observability import tracer_from_environment
from support.http import post
from support.paths import ROOT

KEY = "the-first-key-of-alice"


@pytest.fixture
def service(served):
    return served(keys=ApiKeys([f"alice {KEY}"]))


@pytest.fixture
def client(service):
    return TestClient(create_app(service), headers={"authorization": f"Bearer {KEY}"})


def test_metrics_tell_what_happened(service, client, monkeypatch):
    value = service.metrics.registry.get_sample_value
    post(client, "generate", {"class": 1, "num": 3, "steps": 2})
    client.post("/v1/arpg/generate", json={"class": 1, "steps": 4, "stream": True, "previews": 2})
    monkeypatch.setattr(
        type(service.worker.loaded.batcher.small), "_step", lambda batcher: batcher._fail_all(OSError("broken"))
    )
    post(client, "generate", {"class": 1, "num": 2}, status=500)
    assert value("arpg_images_total", {"outcome": "ok"}) == 4
    assert value("arpg_images_total", {"outcome": "error"}) == 2
    assert value("arpg_key_images_total", {"key": "alice"}) == 4
    assert value("arpg_key_requests_total", {"key": "alice", "status": "200"}) == 2
    assert value("arpg_key_requests_total", {"key": "alice", "status": "500"}) == 1
    assert value("arpg_queue_seconds_count") == 3
    assert value("arpg_first_preview_seconds_count") == 1
    assert value("process_resident_memory_bytes") > 1 << 20
    assert value("arpg_gpu_memory_bytes", {"kind": "allocated"}) >= 0
    text = client.get("/metrics").text
    assert re.search(rf'arpg_build_info{{.*version="{re.escape(arpg.__version__)}"', text)
    assert KEY not in text


def test_probes_are_not_logged(client, caplog):
    caplog.set_level("INFO", "arpg.serve.middleware")
    for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):
        assert client.get(path).status_code == 200
    assert [record.route for record in caplog.records if record.message == "request"] == ["/v1/models"]


def test_the_port_of_the_metrics_needs_no_key(service):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1 port {port} .*--metrics-port"):
            service.metrics.serve("127.0.0.1", port)
    service.metrics.serve("127.0.0.1", port)
    answer = httpx.get(f"http://127.0.0.1:{port}/metrics")
    assert answer.status_code == 200
    assert "arpg_queue_depth 0.0" in answer.text.splitlines()


def test_every_metric_of_the_dashboard_exists(client):
    post(client, "generate", {"class": 1, "steps": 1})
    names = set(re.findall(r"^([a-z_]+)", client.get("/metrics").text, flags=re.M))
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used = {name for expression in shown for name in re.findall(r"\b(?:arpg|process)_[a-z_]+\b", expression)}
    assert len(used) >= 12
    assert used <= names


# Traces


class Collector(HTTPServer):
    """An OTLP collector: keeps the spans that it gets over HTTP."""

    def __init__(self):
        self.spans, self.service = [], None
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def by_name(self):
        return {span.name: span for span in self.spans}


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.server.service = names["service.name"]
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.server_port}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "images")
    yield made
    made.shutdown()
    made.server_close()


def flush(service):
    assert service.tracer.span_processor.force_flush(30000)


def test_a_request_is_a_trace(collector, served):
    service = served()
    client = TestClient(create_app(service))
    parent = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"}
    answer = client.post("/v1/arpg/generate", json={"class": 1, "steps": 3, "num": 2}, headers=parent)
    assert answer.status_code == 200
    assert client.get("/healthz").status_code == 200
    flush(service)
    spans = collector.by_name()
    assert sorted(spans) == ["/v1/arpg/generate", "decode", "encode", "pixels", "prepare", "queue"]
    assert collector.service == "images"
    request = spans["/v1/arpg/generate"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == ("ab" * 16, "cd" * 8)
    names = {item.key: item.value for item in request.attributes}
    assert names["http.response.status_code"].int_value == 200
    assert names["request_id"].string_value == answer.headers["x-request-id"]
    parts = [spans[name] for name in ("prepare", "queue", "decode", "pixels", "encode")]
    for span in parts:
        assert (span.trace_id, span.parent_span_id) == (request.trace_id, request.span_id)
        assert request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    ends = [span.end_time_unix_nano for span in parts]
    assert ends == sorted(ends)
    decode = {item.key: item.value.int_value for item in spans["decode"].attributes}
    assert decode == {"rows": 2, "steps": 3}


def test_the_environment_turns_traces_on_and_off(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    assert tracer_from_environment() is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert tracer_from_environment() is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    with pytest.raises(InputError, match="OTEL_TRACES_EXPORTER is 'jaeger'"):
        tracer_from_environment()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracer_from_environment() is None
