"""The server around a model that costs nothing: it answers as the real one does, and its CPU time is counted."""

import json
import time

import numpy as np
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from arpg.serve import batcher
from arpg.serve.app import create_app
from benchmarks import null_server
from support.http import image_of, pixels, post


def test_it_answers_with_one_of_its_images(served, monkeypatch):
    monkeypatch.setattr(batcher, "start_batch", null_server.NullBatch)
    service = served(pipeline=null_server.null_pipeline())
    answer = post(TestClient(create_app(service)), "generate", {"class": 7, "num": 2, "seed": 5})
    known = [null_server.photo_like(i) for i in range(null_server.NUM_IMAGES)]
    for entry, seed in zip(answer["images"], (5, 6), strict=True):
        assert any(np.array_equal(pixels(image_of(entry)), each) for each in known)
        assert json.loads(image_of(entry).text["arpg"])["seed"] == seed


def test_cpu_time_is_counted_by_thread_and_function(monkeypatch):
    for owner, name in null_server.STAGES.values():
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    times = null_server.CpuTimes()
    owner, name = null_server.STAGES["parse JSON"]
    assert getattr(owner, name)(b'{"class": 1}') == {"class": 1}
    found = times.read()
    assert found["threads"]["MainThread"] > 0
    assert list(found["stages"]) == ["parse JSON"]
    registry = CollectorRegistry()
    registry.register(times)
    again = null_server.read_cpu_times(registry)
    assert again["stages"] == found["stages"]
    assert again["threads"]["MainThread"] >= found["threads"]["MainThread"]


def test_a_step_takes_time_for_itself_and_for_each_image(monkeypatch):
    monkeypatch.setattr(null_server.NullDevice, "step_s", 100.0)
    monkeypatch.setattr(null_server.NullDevice, "row_s", 10.0)
    device = null_server.NullDevice()
    began = time.perf_counter()
    assert device.launch(3)  # it had nothing to do
    assert not device.launch(5)  # after the first
    assert [round(end - began, -1) for end in device.ends] == [130.0, 280.0]
