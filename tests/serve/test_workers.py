"""The tokenizer's thread: finished images first, previews together, failures raised in the caller."""

import copy
import threading

import pytest
import torch

from arpg.serve.observability import Metrics
from arpg.serve.served_model import ServedModel
from arpg.serve.server_config import ServeSettings
from arpg.serve.workers import TokenizerThread
from support.small import small_tokenizer


class PausedTokenizer:
    """A tokenizer that records its calls and waits in `decode` until `go` is set."""

    def __init__(self, inner):
        self.inner, self.config, self.device, self.calls, self.go = (
            inner,
            inner.config,
            inner.device,
            [],
            threading.Event(),
        )
        self.inside = threading.Event()

    def decode(self, ids_BN, grid, *, known_BN=None):
        self.calls.append((len(ids_BN), known_BN is not None))
        self.inside.set()
        assert self.go.wait(30)
        return self.inner.decode(ids_BN, grid, known_BN=known_BN)

    def encode(self, image):
        return self.inner.encode(image)


@pytest.mark.parametrize(
    ("share_finished", "calls"),
    [
        (False, [(1, False), (2, False), (1, False), (3, True), (3, True)]),  # 1 + 2 previews together, then 3
        (True, [(1, False), (3, False), (3, True), (3, True)]),  # and 2 + 1 images
    ],
)
def test_calls_wait_and_share_a_batch(share_finished, calls):
    tokenizer = small_tokenizer()
    paused = PausedTokenizer(tokenizer)
    shared = TokenizerThread(paused, max_batch=4, share_finished=share_finished)
    sizes = (1, 1, 2, 3, 2, 1)
    ids = [torch.randint(0, 24, (rows, 16), generator=torch.Generator().manual_seed(rows)) for rows in sizes]
    known = [None, *(torch.rand(x.shape) < 0.5 for x in ids[1:4]), None, None]
    found = [None] * len(ids)

    def decode(i):
        found[i] = shared.decode(ids[i], (4, 4), known_BN=known[i])

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
    assert paused.calls == calls
    for i in range(len(ids)):
        with torch.no_grad():
            expected = tokenizer.decode(ids[i], (4, 4), known_BN=known[i])
        torch.testing.assert_close(found[i], expected)


def test_finished_images_share_a_call_below_float32_only(pipeline):
    for dtype in (torch.float32, torch.bfloat16):
        served = ServedModel("small", lambda dtype=dtype: copy.deepcopy(pipeline).to(dtype=dtype))
        served.open(ServeSettings(), Metrics())
        assert served.loaded.tokenizer.small._share_finished == (dtype != torch.float32)
        assert not served.loaded.tokenizer.large._share_finished
        served.close()


def test_a_failure_is_raised_in_the_caller_and_the_thread_goes_on():
    shared = TokenizerThread(small_tokenizer(), max_batch=4)
    with pytest.raises(Exception, match="index"):
        shared.decode(torch.full((1, 16), 999), (4, 4))
    assert shared.alive
    assert shared.encode(torch.zeros(1, 3, 8, 8)).shape == (1, 16)
    shared.close()
    assert not shared.alive
