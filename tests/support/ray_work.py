"""Work for the actors of Ray tests; workers import it."""

import os
import signal
from pathlib import Path

import torch

from arpg.errors import InputError
from support.features import Tiny


class Square:
    """Squares numbers slowly; dies once, or for ever, at the numbers that it is told."""

    def __init__(self, folder, deadly=(), always=()):
        self.folder, self.deadly, self.always = Path(folder), deadly, always

    def __call__(self, job, report):
        (self.folder / f"{job}-{os.getpid()}").touch()
        mark = self.folder / f"died-{job}"
        if job in self.always or (job in self.deadly and not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if job < 0:
            raise InputError(f"{job} is negative")
        report(1)
        return job * job


class Deadly:
    """A tokenizer's encoder that ends its process in the middle of a shard, once."""

    def __init__(self, encode, mark, after):
        self.encode, self.mark, self.after, self.calls = encode, mark, after, 0

    def __call__(self, images):
        self.calls += 1
        if self.calls == self.after and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.encode(images)


class FakeEncoder:
    """States that follow from the text."""

    def states(self, captions, *, batch_size=1):
        return [torch.full((1 + len(c) % 5, 8), float(sum(c.encode()) % 1000)) for c in captions]


class MovableTiny(Tiny):
    """As `Tiny`, with a network that can be moved."""

    network = torch.nn.Identity()
