"""The tokenizer's threads: calls of one shape together, failures raised in the caller."""

import copy
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from arpg.serve.api_error import ApiError
from arpg.serve.job import JobSpec
from arpg.serve.model_worker import ModelWorker
from arpg.serve.observability import WorkerMetrics
from arpg.serve.served_model import ServedModel
from arpg.serve.server_config import ServeSettings
from arpg.serve.workers import TokenizerCall, TokenizerThread
from arpg.tokenizer import PixelCodec
from support.small import small_tokenizer


class PausedCodec(PixelCodec):
    """A codec that records its calls and waits in `decode` until `go` is set."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.calls, self.inside, self.go = [], threading.Event(), threading.Event()

    def decode(self, ids_BN, grid, *, known_BN=None):
        self.calls.append((len(ids_BN), known_BN is not None))
        self.inside.set()
        assert self.go.wait(30)
        return super().decode(ids_BN, grid, known_BN=known_BN)


@pytest.mark.parametrize("preview", [False, True])
@pytest.mark.parametrize(("max_batch", "calls"), [(1, [1, 1, 2, 3, 2, 1]), (4, [1, 4, 3, 2])])  # 1 + 2 + 1 together
def test_calls_wait_and_share_a_batch(max_batch, calls, preview):
    tokenizer = small_tokenizer()
    paused = PausedCodec(tokenizer)
    shared = TokenizerThread(paused, max_batch=max_batch)
    ids = [
        torch.randint(0, 24, (rows, 16), generator=torch.Generator().manual_seed(rows)) for rows in (1, 1, 2, 3, 2, 1)
    ]
    known = [torch.rand(x.shape) < 0.5 if preview else None for x in ids]
    found = [None] * len(ids)

    def decode(i):
        found[i] = shared.run(TokenizerCall(ids[i], (4, 4), known[i]))

    threads = []
    for i in range(len(ids)):
        threads.append(threading.Thread(target=decode, args=(i,)))
        threads[-1].start()
        if i == 0:
            assert paused.inside.wait(30)  # the thread is busy; the others have to wait
        else:
            while len(shared._calls) < i:
                threading.Event().wait(0.001)
    paused.go.set()
    for thread in threads:
        thread.join(30)
    shared.close()
    assert paused.calls == [(rows, preview) for rows in calls]
    for i in range(len(ids)):
        expected = PixelCodec(tokenizer).decode(ids[i], (4, 4), known_BN=known[i])
        np.testing.assert_allclose(found[i].astype(int), expected.astype(int), atol=1)


def test_finished_images_share_a_call_below_float32_only(pipeline):
    for dtype in (torch.float32, torch.bfloat16):
        served = ServedModel("small", lambda dtype=dtype: copy.deepcopy(pipeline).to(dtype=dtype))
        served.open(ServeSettings(), WorkerMetrics())
        lanes = served.loaded.codec
        assert lanes.small.max_batch == (1 if dtype == torch.float32 else 16)
        assert (lanes.large.max_batch, lanes.preview.max_batch) == (1, 16)
        served.close()


@pytest.mark.parametrize(("given", "expected"), [(None, 0.25), (0.0, 0.0), (100.0, 0.1)])
def test_how_long_an_idle_server_waits(pipeline, monkeypatch, given, expected):
    monkeypatch.setattr("arpg.serve.served_model.choose_max_wait", lambda model: 0.25)
    served = ServedModel("small", lambda: pipeline)
    served.open(ServeSettings(max_wait_ms=given), WorkerMetrics())
    assert served.loaded.batcher.small.max_wait == expected
    served.close()


def test_a_batcher_on_a_gpu_knows_how_many_jobs_there_are(pipeline, monkeypatch):
    monkeypatch.setattr("arpg.serve.served_model.choose_pause", lambda model: 0.25)
    worker = ModelWorker([ServedModel("small", lambda: pipeline)], ServeSettings())
    worker.open()
    batcher = worker.loaded.batcher.small
    assert (batcher._pause, batcher._num_jobs()) == (0.25, 0)
    release, events = threading.Event(), queue.Queue()
    spec = JobSpec(id="1", tenant="", share=1.0, model="small", filter=lambda _: release.wait(30))
    worker.run(spec, events.put)
    assert batcher._num_jobs() == 1
    release.set()
    assert isinstance(events.get(timeout=30), ApiError)  # the filter returns no image
    assert batcher._num_jobs() == 0
    worker.close()


def test_a_warm_up_decodes_all_sizes_twice_in_the_thread_of_finished_images(pipeline, monkeypatch):
    served = ServedModel("small", lambda: copy.deepcopy(pipeline).to(dtype=torch.bfloat16))
    served.open(ServeSettings(), WorkerMetrics())
    lanes, sizes = served.loaded.codec, []
    decode = lanes.small._codec.decode
    noted = SimpleNamespace(
        decode=lambda ids, *a, **k: (sizes.append((len(ids), threading.current_thread())), decode(ids, *a, **k))[1]
    )
    monkeypatch.setattr(lanes.small, "_codec", noted)
    lanes.warm_up((4, 4))
    assert [size for size, _ in sizes] == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]
    assert {thread for _, thread in sizes} == {lanes.small._thread}
    served.close()


def test_a_failure_is_raised_in_the_caller_and_the_thread_goes_on():
    shared = TokenizerThread(PixelCodec(small_tokenizer()), max_batch=4)
    with pytest.raises(Exception, match="index"):
        shared.run(TokenizerCall(torch.full((1, 16), 999), (4, 4)))
    assert shared.alive
    assert shared.run(TokenizerCall(np.zeros((1, 8, 8, 3), np.uint8))).shape == (1, 16)
    shared.close()
    assert not shared.alive
