"""A batcher that takes steps when it is allowed to, and rows to submit to it."""

import threading

import torch

from arpg import Request, SamplingSettings, decode, make_plan, tasks
from arpg.serve.batcher import Batcher, PendingRows

SETTINGS = SamplingSettings(steps=5, guidance=2.0)


class SteppedBatcher(Batcher):
    """Takes a step only when it is allowed to, and records its rows."""

    def __init__(self, *arguments, **options):
        self.allowed, self.seen, self.stepped = threading.Semaphore(0), [], threading.Semaphore(0)
        super().__init__(*arguments, max_wait=0, **options)

    def _step(self):
        if self._batches:
            self.seen.append([(pending.owner, row) for pending, row in self._batches[0].rows])
            self.stepped.release()
            assert self.allowed.acquire(timeout=30)
        super()._step()

    def step(self, times=1):
        """Allow the steps that it waits before."""
        for _ in range(times):
            assert self.stepped.acquire(timeout=30)
            self.allowed.release()

    def close(self):
        self.allowed.release(1000)
        super().close()


class SubmittedRows:
    """The rows of a request, and how they ended."""

    def __init__(self, model, owner, *, num=1, settings=SETTINGS, seed=0, request=None, stopped=None):
        self.model, self.ended, self.error, self.shown = model, threading.Event(), None, []
        self.request = request or tasks.generate(model, [i % 5 for i in range(num)], range(seed, seed + num))
        plan = make_plan(self.request.grid, self.request.known_BN, self.request.seeds, settings)
        self.stopped = stopped or threading.Event()
        self.pending = PendingRows(owner, self.request, plan, settings, self.stopped.is_set, self.end)

    def end(self, pending, error):
        assert not self.ended.is_set()
        self.error = error
        self.ended.set()

    def wait(self):
        assert self.ended.wait(30)
        return self

    def is_right(self):
        """The tokens are those of the request alone, sample by sample."""
        assert self.wait().error is None
        settings = self.pending.settings
        for i in range(len(self.request.seeds)):
            one = Request.gather([(self.request, i)])
            *_, last = decode(self.model, one, make_plan(one.grid, one.known_BN, one.seeds, settings), settings)
            assert torch.equal(self.pending.ids_BN[i : i + 1], last.ids_BN)
        return True
