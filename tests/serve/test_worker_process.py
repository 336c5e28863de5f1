"""A server whose models are in a process of their own: the same responses, and how each process ends."""

import asyncio
import base64
import contextlib
import json
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from PIL import Image
from starlette.testclient import TestClient

from arpg.decode.continuous import ContinuousBatch
from arpg.serve.admission import LANES
from arpg.serve.api_error import ApiError
from arpg.serve.app import create_app
from arpg.serve.auth import ApiKeys
from arpg.serve.job import Job, JobSpec, Result, Span
from arpg.serve.schemas import Generate
from arpg.serve.served_model import ServedModel
from arpg.serve.server import Server
from arpg.serve.server_config import ServeSettings
from arpg.serve.service import ImageService
from arpg.serve.worker_process import RemoteJob, WorkerProcess, _WorkerMain
from support.http import b64, error, events, post, until
from support.small import noise

MASK = noise(8, 8).convert("L").point(lambda value: 255 * (value > 127))


def client_of(service):
    return TestClient(create_app(service), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def service(served_module):
    return served_module(worker_process=True)


@pytest.fixture(scope="module")
def both(served_module, service):
    """Clients of the process, and of the same models in this one."""
    return client_of(service), client_of(served_module())


def metric(service, name, **labels):
    return service.metrics.registry.get_sample_value(name, labels)


def pid_of(service):
    return service.worker._process.pid


@contextlib.contextmanager
def paused(service):
    """The process of the models does nothing meanwhile."""
    os.kill(pid_of(service), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid_of(service), signal.SIGCONT)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("generate", {"class": 1, "num": 2, "best_of": 2}),
        ("inpaint", {"class": 1, "image": b64(noise(8, 8)), "mask": b64(MASK)}),
        ("expand", {"class": 1, "size": [16, 16]}),
        ("outpaint", {"image": b64(noise(8, 8)), "right": 2}),
    ],
)
def test_images_are_the_same(both, route, body):
    found, expected = (post(client, route, {**body, "steps": 4, "seed": 3}) for client in both)
    assert found["images"] == expected["images"]
    assert found["settings"] == expected["settings"]


@pytest.mark.parametrize("more", [{}, {"previews": 2, "preview_size": 8}])
def test_events_are_the_same(both, more):
    """But for previews that were overtaken, and the times."""
    streams = []
    for client in both:
        body = {"class": 1, "steps": 6, "seed": 3, "stream": True, **more}
        found = events(client.post("/v1/arpg/generate", json=body).text)
        assert [name for name, _ in found] == ["queued", *["step"] * 6, "done"]
        for _, data in found:
            for name in ("id", "created", "seconds", "position", *([] if more else ["previews"])):
                data.pop(name, None)
        streams.append(found)
    assert streams[0] == streams[1]


def test_the_openai_api_is_the_same(both):
    bodies = []
    for client in both:
        given = {"seed": 3, "steps": 4}
        made = client.post("/v1/images/generations", json={"prompt": "1", "n": 2, "output_format": "webp", **given})
        files = {
            "image": base64.b64decode(b64(noise(8, 8))),
            "mask": base64.b64decode(b64(noise(8, 8).convert("RGBA"))),
        }
        edited = client.post("/v1/images/edits", files=files, data={"prompt": "1", **given})
        varied = client.post("/v1/images/variations", files={"image": files["image"]}, data=given)
        url = client.post("/v1/images/generations", json={"prompt": "1", "response_format": "url", **given}).json()
        assert client.get(httpx.URL(url["data"][0]["url"]).path).headers["content-type"] == "image/png"
        bodies.append([(answer.status_code, {**answer.json(), "created": 0}) for answer in (made, edited, varied)])
    assert [status for status, _ in bodies[0]] == [200, 400, 200]  # no pixel of that mask is transparent
    assert bodies[0] == bodies[1]


def test_files_are_encoded_in_the_process_that_answers(both, monkeypatch):
    """With or without the other process: by the same threads of this one."""
    threads, save = [], Image.Image.save

    def recorded(image, *arguments, **options):
        threads.append(threading.current_thread().name.split("_")[0])
        save(image, *arguments, **options)

    monkeypatch.setattr(Image.Image, "save", recorded)
    for client in both:
        post(client, "generate", {"class": 1, "steps": 2, "num": 2})
    assert threads == 4 * ["arpg-encode"]


def test_what_is_said_of_the_models_is_the_same(both):
    for path in ("/v1/arpg/info", "/v1/arpg/classes", "/readyz", "/healthz"):
        found, expected = (client.get(path) for client in both)
        assert (found.status_code, found.json()) == (200, expected.json())


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("generate", {"class": 99}, 400),
        ("generate", {"class": "nothing"}, 400),
        ("inpaint", {"class": 1, "image": "AAAA", "mask": "AAAA"}, 400),
        ("expand", {"class": 1, "size": [4096, 4096]}, 400),
        ("condition", {"image": b64(noise(8, 8)), "kind": "canny"}, 400),  # the model has no conditions
        ("generate", {"class": 1, "model": "other"}, 404),
    ],
)
def test_errors_are_the_same(both, route, body, status):
    found, expected = (error(client.post(f"/v1/arpg/{route}", json=body), status) for client in both)
    assert found == expected


def test_metrics_of_both_processes_are_in_one_page(service, both):
    before = metric(service, "arpg_images_total", outcome="ok") or 0
    post(both[0], "generate", {"class": 1, "steps": 2, "num": 3})
    assert metric(service, "arpg_images_total", outcome="ok") == before + 3
    page = both[0].get("/metrics").text
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert {"arpg_requests_total", "arpg_batch_rows", "process_cpu_seconds_total"} <= set(names)
    assert metric(service, "arpg_worker_process_resident_memory_bytes") > 1e7


def test_spans_come_from_the_process(service):
    received = queue.Queue()
    about = {"id": "req_spans", "tenant": "none", "share": 1.0, "model": "small"}
    build = methodcaller("from_params", "generate", Generate(**{"class": 1, "steps": 3}))
    service.worker.run(JobSpec(**about, build=build, traced=True), received.put)
    spans = {}
    while isinstance(event := received.get(timeout=60), Span):
        spans[event.name] = event
    assert isinstance(event, Result)
    assert list(spans) == ["prepare", "queue", "decode", "pixels"]
    assert spans["decode"].attributes == {"rows": 1, "steps": 3}
    assert (
        spans["prepare"].start <= spans["queue"].start <= spans["decode"].end <= spans["pixels"].end <= time.monotonic()
    )


def test_a_disconnect_cancels_the_job(service, both):
    finished = metric(service, "arpg_images_total", outcome="ok") or 0

    async def disconnect():
        transport = httpx.ASGITransport(both[0].app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            with paused(service), pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.post("/v1/arpg/generate", json={"class": 1, "num": 16, "best_of": 2})

    jobs = service.worker._jobs
    asyncio.run(disconnect())
    assert jobs == {}
    post(both[0], "generate", {"class": 1, "steps": 2})
    assert until(lambda: [metric(service, "arpg_pending_cost", lane=lane) for lane in LANES] == [0, 0])
    assert metric(service, "arpg_images_total", outcome="ok") == finished + 1
    assert service.admission.num_admitted == 0


def test_a_deadline_does_not_wait_for_the_process(served):
    service = served(worker_process=True, deadline=0.5)
    client = client_of(service)
    with paused(service):
        found = error(client.post("/v1/arpg/generate", json={"class": 1}), 504)
        streamed = error(client.post("/v1/arpg/generate", json={"class": 1, "stream": True}), 504)
    assert found == streamed
    assert found["code"] == "deadline_exceeded"
    assert until(lambda: client.post("/v1/arpg/generate", json={"class": 1, "steps": 1}).status_code == 200)


def test_a_process_that_dies_fails_its_jobs_and_the_server(served, caplog):
    caplog.set_level("CRITICAL")
    service = served(worker_process=True)
    client, answers = client_of(service), []

    async def kill():
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as sender:
            os.kill(pid_of(service), signal.SIGSTOP)
            pending = asyncio.ensure_future(sender.post("/v1/arpg/generate", json={"class": 1}))
            while not service.worker._jobs:
                await asyncio.sleep(0.01)
            os.kill(pid_of(service), signal.SIGKILL)
            answers.append(await pending)

    asyncio.run(kill())
    assert error(answers[0], 500)["code"] == "internal_error"
    assert error(client.post("/v1/arpg/generate", json={"class": 1}), 500)["code"] == "internal_error"
    assert service.broken
    assert client.get("/healthz").status_code == 503
    assert client.get("/metrics").status_code == 200
    server = Server(service, lifespan="off")
    asyncio.run(server.on_tick(1))
    assert server.failed  # it exits with status 1, to be started again


def unloadable():
    raise OSError("no such weights")


def test_a_model_that_cannot_be_loaded_ends_the_process():
    service = ImageService([ServedModel("broken", unloadable)], settings=ServeSettings(worker_process=True))
    with pytest.raises(RuntimeError, match="ended with exit code 1 while it loaded"):
        service.open()
    assert error(client_of(service).post("/v1/arpg/generate", json={"class": 1}), 503)["code"] == "loading"
    service.close()


class Killed(BaseException):
    """Ends a thread."""


def deadly(pipeline):
    """In the process of the models: load one whose steps end the thread that runs them."""

    def kill(batch):
        raise Killed

    ContinuousBatch.step = kill
    return pipeline


def test_a_thread_that_dies_in_the_process_is_reported(pipeline):
    service = ImageService(
        [ServedModel("small", partial(deadly, pipeline))], settings=ServeSettings(worker_process=True)
    )
    service.open()
    client = client_of(service)
    assert error(client.post("/v1/arpg/generate", json={"class": 1}), 500)["code"] == "internal_error"
    assert until(lambda: service.broken)
    assert not service.ready
    service.close()


def test_closing_ends_jobs_and_the_process(served):
    service = served(worker_process=True)
    received, process = queue.Queue(), service.worker._process
    about = {"id": "req_1", "tenant": "none", "share": 1.0, "model": "small"}
    build = methodcaller("from_params", "generate", Generate(**{"class": 1, "num": 16, "best_of": 2}))
    with paused(service):
        service.worker.run(JobSpec(**about, build=build), received.put)
    service.close()
    assert isinstance(received.get(timeout=30), Result | ApiError)
    assert process.exitcode == 0
    assert not service.broken


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [("cuda", None, True), ("cpu", None, False), ("cuda", False, False), ("cpu", True, True)],
)
def test_models_on_a_gpu_have_a_process_of_their_own(folder, monkeypatch, device, given, expected):
    monkeypatch.setattr("arpg.serve.service.choose_device", lambda name: SimpleNamespace(type=device))
    settings = ServeSettings(worker_process=given)
    service = ImageService.from_pretrained(str(folder), keys=ApiKeys(), settings=settings)
    assert isinstance(service.worker, WorkerProcess) == expected


def test_what_is_said_of_a_job_reaches_it():
    """Events that were read, a disconnect and the deadline, as messages; a job that has ended is dropped."""
    ours, theirs = multiprocessing.Pipe()
    jobs, said, forgotten = [], [], []

    class Listening(Job):
        def read(self):
            said.append("read")

        def cancel(self):
            said.append("cancel")

        def stop(self):
            said.append("stop")
            super().stop()

    def run(spec, deliver):
        jobs.append(Listening(spec, deadline=9.0, deliver=deliver))
        return jobs[-1]

    worker = _WorkerMain(theirs, SimpleNamespace(run=run))
    ours.send(JobSpec(id="a", tenant="none", share=1.0, model="small"))
    remote = RemoteJob(SimpleNamespace(send=ours.send, forget=forgotten.append), "a")
    remote.read()
    remote.cancel()
    assert until(lambda: said == ["read", "cancel"])
    assert list(worker.jobs) == ["a"]
    remote.stop()
    assert until(lambda: said == ["read", "cancel", "stop"] and not worker.jobs)
    assert forgotten == ["a", "a"]  # its reader gets no more events from the process
    assert ours.recv().event.code == "deadline_exceeded"
    ours.close()
    assert worker.closing.wait(30)


def exists(pid):
    """Whether a process runs; one that has ended and that nobody waits for does not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("by", ["signal", "kill"])
def test_the_process_ends_with_the_server(folder, by):
    port = socket.create_server(("127.0.0.1", 0))
    number = port.getsockname()[1]
    port.close()
    command = ["-m", "arpg", "serve", "--model", str(folder), "--worker-process", "--port", str(number)]
    server = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{number}") as client:

            def ready():
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/readyz").status_code == 200
                return False

            assert until(ready, seconds=120)
            threads = Path(f"/proc/{server.pid}/task").iterdir()
            children = [pid for thread in threads for pid in (thread / "children").read_text().split()]
            found = [pid for pid in map(int, children) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
            assert len(found) == 1
            assert json.loads(client.post("/v1/arpg/generate", json={"class": 1, "steps": 2}).text)["images"]
        server.send_signal(signal.SIGTERM if by == "signal" else signal.SIGKILL)
        assert server.wait(60) == (0 if by == "signal" else -signal.SIGKILL)
        assert until(lambda: not exists(found[0]))
    finally:
        server.kill()
