"""How requests end: dead worker threads, streams that fail before and after their first event, and what is recorded."""

import base64
import gc
import threading
import weakref

import httpx
import pytest
from PIL import Image
from starlette.testclient import TestClient

from arpg.errors import InputError
from arpg.serve import model_worker, server
from arpg.serve.app import create_app
from arpg.serve.batcher import ContinuousBatch
from arpg.serve.served_model import ServedModel
from arpg.serve.server_config import ServeSettings
from arpg.serve.service import ImageService
from support.http import b64, error, events, post, until
from support.small import noise


class Killed(BaseException):
    """What no `except Exception` catches."""


def kill(*_, **__):
    raise Killed


@pytest.fixture
def service(served):
    return served()


@pytest.fixture
def client(service):
    return TestClient(create_app(service), raise_server_exceptions=False)


def requests(service, status):
    labels = {"route": "/v1/arpg/generate", "status": str(status)}
    return service.metrics.registry.get_sample_value("arpg_requests_total", labels)


def test_a_finished_task_is_freed_without_a_garbage_collection(service, client, monkeypatch):
    tasks = []
    run = model_worker.TaskRun.submit_next
    monkeypatch.setattr(model_worker.TaskRun, "submit_next", lambda self: (tasks.append(weakref.ref(self)), run(self)))
    gc.disable()
    try:
        for _ in range(3):
            assert post(client, "generate", {"class": 1, "steps": 2})["images"]
        assert until(lambda: not any(task() for task in tasks))
    finally:
        gc.enable()
    assert len(tasks) == 6  # each has one request, and then no other


def test_only_tasks_with_files_are_prepared_in_several_threads(service, client, monkeypatch):
    used = []
    for name in ("prepare", "prepare_light"):
        pool = getattr(service.worker.pools, name)
        submit = pool.submit
        monkeypatch.setattr(pool, "submit", lambda work, name=name, submit=submit: (used.append(name), submit(work))[1])
    image = b64(noise(8, 8))
    post(client, "generate", {"class": 1, "steps": 2})
    post(client, "outpaint", {"class": 1, "steps": 2, "image": image, "right": 2})
    post(client, "expand", {"class": 1, "steps": 2, "size": [16, 16]})
    assert client.post("/v1/images/generations", json={"prompt": "1", "steps": 2}).status_code == 200
    files = {"image": base64.b64decode(image)}
    assert client.post("/v1/images/variations", files=files, data={"steps": "2"}).status_code == 200
    assert used == ["prepare_light", "prepare", "prepare_light", "prepare_light", "prepare"]


@pytest.mark.parametrize("worker_process", [False, True])
def test_files_that_cannot_be_encoded_are_a_500_and_the_server_goes_on(served, worker_process, monkeypatch, caplog):
    caplog.set_level("ERROR", "arpg.serve.job")
    service = served(worker_process=worker_process)
    client, body = TestClient(create_app(service)), {"class": 1, "steps": 2}
    monkeypatch.setattr(Image.Image, "save", kill)
    assert error(client.post("/v1/arpg/generate", json=body), 500)["code"] == "internal_error"
    found = events(client.post("/v1/arpg/generate", json={**body, "stream": True, "previews": 0}).text)
    assert [name for name, _ in found] == ["queued", "step", "step", "error"]
    assert [record.message for record in caplog.records] == 2 * ["encoding failed"]
    monkeypatch.undo()
    assert post(client, "generate", body)["images"]
    assert service.ready


@pytest.fixture
def paused_files(monkeypatch):
    """Files are not encoded before this event is set; `started` are their images."""
    go, save = threading.Event(), Image.Image.save
    go.started = []

    def paused(image, *arguments, **options):
        go.started.append(image)
        assert go.wait(30)
        save(image, *arguments, **options)

    monkeypatch.setattr(Image.Image, "save", paused)
    yield go
    go.set()


def test_the_deadline_ends_a_job_whose_files_are_being_encoded(served, paused_files):
    client = TestClient(create_app(served(deadline=3.0)))
    body = {"class": 1, "steps": 1}
    assert error(client.post("/v1/arpg/generate", json=body), 504)["code"] == "deadline_exceeded"
    assert len(paused_files.started) == 1
    paused_files.set()
    assert post(client, "generate", body)["images"]


def test_files_that_nobody_reads_are_not_encoded(live, paused_files):
    address, service = live()
    service.encoders._max_workers = 1
    body = {"class": 1, "steps": 1}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/arpg/generate", json=body, timeout=2)
    with pytest.raises(httpx.ReadTimeout):  # waits for the first
        httpx.post(f"{address}/v1/arpg/generate", json=body, timeout=2)
    assert until(lambda: service.admission.num_admitted == 0)
    paused_files.set()
    assert httpx.post(f"{address}/v1/arpg/generate", json=body, timeout=60).status_code == 200
    assert len(paused_files.started) == 2


def test_files_of_a_service_that_is_closed_are_an_error(service, client):
    service.encoders.shutdown()
    assert error(client.post("/v1/arpg/generate", json={"class": 1, "steps": 1}), 500)["code"] == "internal_error"


@pytest.mark.parametrize("part", ["decode", "tokenizer"])
def test_a_dead_worker_fails_requests_at_once_and_the_health_check(service, client, part, monkeypatch, caplog):
    caplog.set_level("CRITICAL", "arpg.serve.model_worker")
    assert client.get("/healthz").status_code == 200
    if part == "decode":
        monkeypatch.setattr(ContinuousBatch, "step", kill)
        thread = service.worker.loaded.batcher.small._thread
    else:
        monkeypatch.setattr(service.worker.loaded.codec.small, "_execute", kill)
        thread = service.worker.loaded.codec.small._thread
    for _ in range(2):  # the second is submitted to a thread that is dead
        assert error(client.post("/v1/arpg/generate", json={"class": 1, "steps": 2}), 500)
    thread.join(30)
    assert service.broken
    assert [client.get(path).status_code for path in ("/healthz", "/readyz")] == [503, 503]
    assert "died" in caplog.text


def test_the_process_exits_with_1_when_a_worker_dies(pipeline, monkeypatch, caplog):
    caplog.set_level("CRITICAL", "arpg.serve.model_worker")
    monkeypatch.setattr(server, "configure_logging", lambda: None)
    monkeypatch.setattr(ContinuousBatch, "step", kill)
    bound, exits = server.bind("127.0.0.1", 0), []
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"

    def run():
        try:
            server.run(ImageService([ServedModel("small", lambda: pipeline)]), bound)
        except SystemExit as exited:
            exits.append(exited.code)

    thread = threading.Thread(target=run)
    thread.start()
    while httpx.get(f"{address}/readyz", timeout=60).status_code != 200:
        threading.Event().wait(0.05)
    assert error(httpx.post(f"{address}/v1/arpg/generate", json={"class": 1}, timeout=60), 500)
    thread.join(60)
    assert exits == [1]


def test_no_threads_are_refused():
    with pytest.raises(InputError, match="threads is 0; expected 1 or more"):
        ServeSettings(threads=0)
    assert ServeSettings(threads=1).threads == 1


@pytest.mark.parametrize("path", ["/v1/arpg/generate", "/v1/images/generations"])
def test_an_error_before_the_first_event_is_an_http_error(client, path):
    key = "prompt" if "images" in path else "class"
    answer = client.post(path, json={key: "no such class", "stream": True})
    assert error(answer, 400)["code"] == "unknown_class"
    assert answer.headers["content-type"] == "application/json"


def test_a_stream_is_recorded_by_its_end(service, client, monkeypatch, caplog):
    caplog.set_level("INFO", "arpg.serve.middleware")
    body = {"class": 1, "steps": 3, "stream": True}
    assert events(client.post("/v1/arpg/generate", json=body).text)[-1][0] == "done"
    assert requests(service, 200) == 1
    step = ContinuousBatch.step

    def fail_at_the_end(batch):
        step(batch)
        if batch.rows[0].done == 2:
            raise RuntimeError("broken")

    monkeypatch.setattr(ContinuousBatch, "step", fail_at_the_end)
    answer = client.post("/v1/arpg/generate", json=body)
    assert (answer.status_code, events(answer.text)[-1][0]) == (200, "error")
    assert (requests(service, 200), requests(service, 500)) == (1, 1)
    assert [record.status for record in caplog.records if record.message == "request"] == [200, 500]
    monkeypatch.undo()
    post(client, "generate", {"class": 1, "steps": 1})
