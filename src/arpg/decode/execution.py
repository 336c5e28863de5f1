"""How the loop is executed: eagerly, with the network's parts compiled, or replayed from CUDA graphs. One switch.

The same code draws the same tokens in all three; what differs is who tells the GPU what to do next.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator

import torch

from arpg.config import ENGINES
from arpg.decode.engine import Step, check, decode, run
from arpg.decode.plan import Plan
from arpg.decode.planned import Planned
from arpg.decode.recording import Recording, Shape, shape_of
from arpg.decode.request import Request
from arpg.decode.start import Inputs, read
from arpg.errors import one_of, require
from arpg.model import ARPG
from arpg.settings import SamplingSettings

log = logging.getLogger(__name__)

_BATCHES = sorted({2**k for k in range(13)} | {3 * 2**k for k in range(11)})  # that recordings are made for
_REMEMBERED = 4096  # shapes that are counted
_SHARE = 0.25  # of the GPU's memory that recordings may hold together


def choose_mode(mode: str, device: torch.device) -> str:
    """What `auto` is there."""
    one_of("engine", mode, ENGINES)
    on_gpu = device.type == "cuda"
    require(on_gpu or mode != "graph", f"engine is 'graph', but the model is on {device}; CUDA graphs need a GPU")
    return ("graph" if on_gpu else "eager") if mode == "auto" else mode


class Engine:
    """Runs generations of one model; any number of threads may use it at once.

    `auto` is `graph` on a GPU and `eager` elsewhere. In `auto` a shape is recorded when it comes for the second time,
    since recording takes longer than one generation; in `graph` at once. Recorded batches are filled up to the next of
    1, 2, 3, 4, 6, 8, 12, ... images. Exact and speculative decoding, whose steps depend on what is drawn, run eagerly.
    """

    def __init__(self, model: ARPG, mode: str = "auto", *, memory: int | None = None) -> None:
        """`memory`: bytes that recordings may hold; the least recently used goes first. None: a quarter of all."""
        self.mode = choose_mode(mode, model.device)
        self.model, self.eagerly_first, on_gpu = model, mode == "auto", model.device.type == "cuda"
        if self.mode == "compiled":
            model.compile_parts(dynamic=True)
        if memory is None and on_gpu:
            memory = int(_SHARE * torch.cuda.get_device_properties(model.device).total_memory)
        self.memory = memory or 0
        self.recordings: OrderedDict[Shape, Recording] = OrderedDict()
        self._seen: Counter[Shape] = Counter()
        self._too_large: set[Shape] = set()
        self._lock = threading.Lock()

    def decode(self, request: Request, plan: Plan, settings: SamplingSettings, *, every: bool = True) -> Iterator[Step]:
        """As `engine.decode`. Not `every` step is looked at: those before the last may be left out."""
        if self.mode != "graph" or settings.decode != "steps" or plan.num_steps == 0:
            return decode(self.model, request, plan, settings)
        check(self.model, request, plan)
        return self._decode(request, plan, settings, every=every)

    @torch.no_grad()
    def _decode(self, request: Request, plan: Plan, settings: SamplingSettings, *, every: bool) -> Iterator[Step]:
        batch = len(request.seeds)
        filled, filled_plan = filled_up(request, plan)
        way = Planned(filled, filled_plan, self.model.device)
        inputs = read(self.model, filled, guided=plan.guided, ragged=way.ragged)
        shape = shape_of(inputs, way, settings)
        recording = self._borrow(shape)
        if recording is None and self._worth(shape):
            list(run(self.model, inputs, Planned(filled, filled_plan, self.model.device), settings))  # compiles kernels
            recording = self._record(shape, inputs, Planned(filled, filled_plan, self.model.device), settings)
        if recording is None:  # as it came
            if batch < len(filled.seeds):
                way = Planned(request, plan, self.model.device)
                inputs = read(self.model, request, guided=plan.guided, ragged=way.ragged)
            steps = run(self.model, inputs, way, settings)
        else:
            steps = recording.replay(inputs, way, every=every)
        try:
            for step in steps:
                yield Step(step.index, step.num_steps, step.ids_BN[:batch], step.known_BN[:batch])
        finally:
            steps.close()
            if recording is not None:
                recording.busy.release()

    def forget(self) -> None:
        """Let all recordings go; what comes again is recorded again."""
        with self._lock:
            self.recordings.clear()

    def _borrow(self, shape: Shape) -> Recording | None:
        """The recording, if it is there and nobody uses it."""
        with self._lock:
            found = self.recordings.get(shape)
            if found is None or not found.busy.acquire(blocking=False):
                return None
            self.recordings.move_to_end(shape)
            return found

    def _worth(self, shape: Shape) -> bool:
        with self._lock:
            if len(self._seen) > _REMEMBERED:
                self._seen.clear()
            self._seen[shape] += 1
            often = self._seen[shape] > (1 if self.eagerly_first else 0)
            return often and shape not in self.recordings and shape not in self._too_large

    def _record(self, shape: Shape, inputs: Inputs, way: Planned, settings: SamplingSettings) -> Recording | None:
        """Keep it, and let others go where there is not enough memory for all; None where it does not fit alone."""
        try:
            recording = Recording(self.model, inputs, way, settings)
        except torch.OutOfMemoryError:
            log.warning("a generation of %d images is too large to be recorded; it runs eagerly", len(inputs.ids_BN))
            self.forget()
            self._too_large.add(shape)
            return None
        recording.busy.acquire()
        with self._lock:
            self.recordings[shape] = recording
            idle = [key for key, other in self.recordings.items() if key != shape and not other.busy.locked()]
            while idle and sum(other.bytes for other in self.recordings.values()) > self.memory:
                del self.recordings[idle.pop(0)]
        return recording


def filled_up(request: Request, plan: Plan) -> tuple[Request, Plan]:
    """With the last sample again and again, up to the next size of a batch that recordings are made for."""
    batch = len(request.seeds)
    size = next((size for size in _BATCHES if size >= batch), batch)
    if size == batch:
        return request, plan
    rows = [*range(batch), *[batch - 1] * (size - batch)]
    return request.rows(rows), Plan(tuple(plan.samples[row] for row in rows))
