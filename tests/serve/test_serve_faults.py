"""Faults: clients that disconnect, slow clients, a server that is stopped, a worker that fails."""

import asyncio
import contextlib
import gc
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from arpg import InputError, cli
from arpg.serve import model_worker
from arpg.serve.app import create_app
from arpg.serve.batcher import ContinuousBatch
from arpg.serve.server import Server
from arpg.serve.service import ImageService
from arpg.serve.workers import SWITCH_INTERVAL_S
from support.http import until
from support.paths import ROOT


class PausedSteps:
    """Pauses every step of the batcher until it is released."""

    def __init__(self, monkeypatch):
        self.allowed, self.waiting = threading.Semaphore(0), threading.Semaphore(0)
        step = ContinuousBatch.step

        def paused_step(running):
            self.waiting.release()
            assert self.allowed.acquire(timeout=60)
            step(running)

        monkeypatch.setattr(ContinuousBatch, "step", paused_step)

    def reached(self):
        assert self.waiting.acquire(timeout=60)

    def release(self, steps=1):
        self.allowed.release(steps)


@pytest.fixture
def paused_steps(monkeypatch):
    made = PausedSteps(monkeypatch)
    yield made
    made.release(10000)


def send(address, body, path="/v1/arpg/generate", headers=()):
    """Send a request; return the socket, with the response unread."""
    where = urlsplit(address)
    connection = socket.create_connection((where.hostname, where.port), timeout=60)
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    connection.sendall("\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content)
    return connection


def call(address, body=None, path="/v1/arpg/generate"):
    """Return the status and the JSON of a response."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    content = None if body is None else json.dumps(body)
    connection.request("POST" if body is not None else "GET", path, content, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_its_rows_within_a_step(live, paused_steps, stream):
    address, service = live()
    connection = send(address, {"class": 1, "steps": 16, "num": 4, "stream": stream})
    paused_steps.reached()
    assert (service.worker.loaded.batcher.num_running, service.admission.num_admitted) == (4, 1)
    connection.close()
    assert until(lambda: service.admission.num_admitted == 0)
    paused_steps.release(1)  # the step that it was in, and no other
    assert until(
        lambda: (service.worker.loaded.batcher.num_running, service.worker.loaded.batcher.num_waiting) == (0, 0)
    )
    paused_steps.release(1000)
    assert call(address, {"class": 1, "steps": 2})[0] == 200
    assert service.metrics.registry.get_sample_value("arpg_cancelled_total") == 1


def test_a_body_that_does_not_arrive_is_a_408(live):
    address, service = live(io_timeout_s=0.2)
    where = urlsplit(address)
    connection = socket.create_connection((where.hostname, where.port), timeout=60)
    connection.sendall(b"POST /v1/arpg/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
    assert connection.recv(100).startswith(b"HTTP/1.1 408")
    connection.close()
    assert until(lambda: service.admission.num_admitted == 0)


def test_a_client_that_does_not_read_is_disconnected(live, monkeypatch):
    """Its responses fill the buffers of the socket; after the timeout it is disconnected."""
    address, service = live(io_timeout_s=0.2)
    monkeypatch.setattr(model_worker, "base64_png", lambda image: b"x" * 10_000_000)  # more than socket buffers hold
    connection = send(address, {"class": 1, "steps": 16, "stream": True})
    assert until(lambda: service.metrics.registry.get_sample_value("arpg_cancelled_total") == 1)
    assert until(lambda: (service.admission.num_admitted, service.worker.loaded.batcher.num_running) == (0, 0))
    connection.close()


def test_too_many_pending_requests(live, paused_steps):
    address, service = live(max_pending_requests=2)
    first, second = (send(address, {"class": i, "steps": 1}) for i in range(2))
    assert until(lambda: service.admission.num_admitted == 2)
    status, answer = call(address, {"class": 1})
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    paused_steps.release(1000)
    for connection in (first, second):
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()


def test_a_failing_worker_is_a_500_and_the_server_goes_on(live, monkeypatch, caplog):
    address, _ = live()
    caplog.set_level("CRITICAL")
    step = ContinuousBatch.step

    def failing(running):
        raise MemoryError("a secret detail")

    monkeypatch.setattr(ContinuousBatch, "step", failing)
    status, answer = call(address, {"class": 1})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in json.dumps(answer)
    monkeypatch.setattr(ContinuousBatch, "step", step)
    assert call(address, {"class": 1, "steps": 2})[0] == 200


def test_a_failing_tokenizer_is_a_500_and_the_server_goes_on(live, caplog):
    address, service = live()
    caplog.set_level("CRITICAL")
    inner, broken = service.worker.loaded.codec.small._codec, object()
    service.worker.loaded.codec.small._codec = broken
    assert call(address, {"class": 1, "steps": 2})[0] == 500
    service.worker.loaded.codec.small._codec = inner
    assert call(address, {"class": 1, "steps": 2})[0] == 200


def test_requests_at_the_same_time_get_what_they_get_alone(live):
    address, _ = live(max_wait_ms=100)
    bodies = [{"class": i % 5, "seed": i, "steps": 3 + i % 4, "num": 1 + i % 2} for i in range(12)]
    alone = [call(address, body)[1]["images"] for body in bodies]
    found = [None] * len(bodies)

    def run(i):
        found[i] = call(address, bodies[i])[1]["images"]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == alone


@contextlib.contextmanager
def serving(folder, *arguments):
    """A real process that is ready; yields it and its address."""
    command = [sys.executable, "-m", "arpg", "serve", "--model", str(folder), "--port", "0", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "ARPG_API_KEYS": ""}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stderr.readline()
            assert "serving model at http://127.0.0.1:" in line
            address = line.split()[3]
            assert until(lambda: call(address, path="/readyz")[0] == 200)
            yield process, address
        finally:
            process.kill()


def start_stream(address, steps):
    """Start a task of many windows; return its connection and the stream, after its first step."""
    body = {"class": 1, "size": [32, 32], "method": "windows", "steps": steps, "stream": True}
    connection = send(address, body, "/v1/arpg/expand", ["connection: close"])
    stream = connection.makefile("rb")
    while not (line := stream.readline()).startswith(b"event: step"):
        assert line
    return connection, stream


def test_sigterm_finishes_admitted_requests(folder):
    """A real process: the running stream is finished, new work gets a 503, then the process exits."""
    with serving(folder) as (process, address):
        connection, stream = start_stream(address, steps=16)
        process.send_signal(signal.SIGTERM)
        assert until(lambda: call(address, path="/readyz")[0] == 503)
        status, answer = call(address, {"class": 1})
        assert (status, answer["error"]["code"]) == (503, "draining")
        rest = stream.read()
        assert b"event: done" in rest
        connection.close()
        assert process.wait(60) == 0
        entries = [json.loads(line) for line in process.stderr.read().splitlines()]
        (done,) = [entry for entry in entries if entry.get("route") == "/v1/arpg/expand"]
        assert (done["status"], done["method"]) == (200, "POST")
        assert done["id"].startswith("req_")
        assert "draining" in [entry["message"] for entry in entries]


def test_a_second_signal_ends_at_once_and_a_third_is_quiet(folder):
    """Although a client holds its connection, with a body that never comes."""
    with serving(folder) as (process, address):
        where = urlsplit(address)
        with socket.create_connection((where.hostname, where.port), timeout=60) as held:
            held.sendall(b"POST /v1/arpg/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
            assert call(address, {"class": 1, "steps": 1})[0] == 200
            process.send_signal(signal.SIGTERM)
            assert until(lambda: '"draining"' in process.stderr.readline())
            start = time.monotonic()
            for _ in range(2):
                process.send_signal(signal.SIGINT)
            assert process.wait(60) == 128 + signal.SIGINT
            assert time.monotonic() - start < 10
        messages = [json.loads(line)["message"] for line in process.stderr.read().splitlines()]
        assert messages[-1] == "a second signal; exiting at once"


def test_threads_of_a_server_take_turns_often(served, monkeypatch):
    seen, before = [], sys.getswitchinterval()
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: seen.append((sys.getswitchinterval(), sockets)))
    try:
        Server(served()).run(sockets=["a socket"])
    finally:
        sys.setswitchinterval(before)
    assert seen == [(pytest.approx(SWITCH_INTERVAL_S), ["a socket"])]


def test_garbage_collections_leave_out_what_is_loaded(served, monkeypatch):
    """From when the models are loaded until the server ends."""
    server, counts = Server(served(), lifespan="off"), []

    def run(self, sockets):
        for _ in range(2):
            asyncio.run(self.on_tick(1))
            counts.append(gc.get_freeze_count())

    monkeypatch.setattr("uvicorn.Server.run", run)
    gc.unfreeze()
    interval = sys.getswitchinterval()
    try:
        monkeypatch.setattr(ImageService, "alive", False)
        server.run()
        assert counts == [0, 0]
        monkeypatch.setattr(ImageService, "alive", True)
        server.run()
    finally:
        sys.setswitchinterval(interval)
    assert counts[2] > 10_000
    assert counts[3] == counts[2]
    assert gc.get_freeze_count() == 0


def test_readiness_ends_before_requests_are_refused(served):
    service = served(drain_delay_s=3600.0)
    server, client = Server(service, lifespan="off"), TestClient(create_app(service))
    assert client.get("/readyz").status_code == 200
    server.handle_exit(signal.SIGTERM, None)
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200
    assert not asyncio.run(server.on_tick(1))
    assert client.post("/v1/arpg/generate", json={"class": 1, "steps": 1}).status_code == 200
    server._drain_at = 0.0
    assert asyncio.run(server.on_tick(1))
    assert client.post("/v1/arpg/generate", json={"class": 1}).json()["error"]["code"] == "draining"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "give --keys-file"),
        (["--host", "::"], "give --keys-file"),
        (["--host", "example.org"], "give --keys-file"),
        (["--keys-file", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--keys-file", "empty.txt"], "no key in it"),
        (["--keys-file", "short.txt"], "at least 16"),
        (["--max-batch", "0"], "max_batch is 0"),
        (["--max-connections", "0"], "max_connections is 0"),
        (["--header-timeout", "0"], "header_timeout_s is 0"),
        (["--drain-delay", "-1"], "drain_delay_s is -1"),
        (["--url-seconds", "0"], "url_seconds is 0.0; expected more than 0 seconds"),
        (["--url-seconds", "nan"], "url_seconds is nan; expected more than 0 seconds"),
        (["--public-url", "images.example.org"], "public_url is 'images.example.org'; expected an address such as"),
        (["--ssl-certfile", "short.txt"], "give both or neither"),
        (["--ssl-certfile", "nowhere.pem", "--ssl-keyfile", "short.txt"], "cannot be used (No such file"),
        (["--ssl-certfile", "short.txt", "--ssl-keyfile", "short.txt"], "expected a PEM certificate and its key"),
        (["--model", "nowhere"], "'nowhere' is neither"),
        (["--host", "203.0.113.7", "--insecure"], "cannot listen on 203.0.113.7"),
    ],
)
def test_the_command_refuses_what_is_not_safe(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARPG_API_KEYS", raising=False)
    Path("empty.txt").write_text("# none\n\n")
    Path("short.txt").write_text("hunter2\n")
    monkeypatch.setattr(sys, "argv", ["arpg", "serve", *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 2
    message = capsys.readouterr().err
    assert says in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        (["--url-seconds", "30"], "url_seconds", 30.0),
        ([], "worker_process", None),
        (["--worker-process"], "worker_process", True),
        (["--no-worker-process"], "worker_process", False),
    ],
)
def test_options_become_settings(monkeypatch, given, name, expected):
    seen = []

    def record_settings(*models, keys, settings):
        seen.append(getattr(settings, name))
        raise InputError("no model is loaded in this test")

    monkeypatch.setattr(ImageService, "from_pretrained", record_settings)
    monkeypatch.setattr(sys, "argv", ["arpg", "serve", "--model", "any", *given])
    with pytest.raises(SystemExit):
        cli.main()
    assert seen == [expected]


def test_a_missing_extra_is_named(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("arpg.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delattr("arpg.serve.server", raising=False)
    monkeypatch.setattr(sys, "argv", ["arpg", "serve"])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 2
    assert "pip install 'arpg[serve]'" in capsys.readouterr().err


def test_keys_come_from_a_file_and_the_environment(tmp_path):
    from arpg.serve.auth import read_keys

    file = tmp_path / "keys"
    file.write_text("# ours\nthe-first-key-of-the-file\n\n  the-second-key-of-the-file  \n")
    keys = read_keys(file, "a-key-of-the-environment,and-another-one-of-it")
    assert len(keys) == 4
    assert keys.find("the-second-key-of-the-file")
    assert keys.find("and-another-one-of-it")
    assert keys.find("the-third-key-of-the-file") is None
    assert len(read_keys(None, None)) == 0
