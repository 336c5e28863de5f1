"""SIGTERM and SIGINT during training: finish the step, save, then stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed

from arpg.train.distributed import World


class Interrupt:
    """Notes the first signal; a second one acts as usual."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, world: World) -> None:
        self.world = world
        self.signalled = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        self._restore()

    def requested(self) -> bool:
        """Whether any process was signalled: all of them stop at the same step."""
        if self.world.size == 1:
            return self.signalled
        flag = torch.tensor(int(self.signalled))
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)

    def _restore(self) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
        self._old = {}
