"""CUDA graphs: a generation, a step of a continuous batch or pixels, captured once and replayed for all of one shape.

The GPU then runs the steps without the CPU launching each kernel, which for small steps takes longer than the kernels.
What is captured is the decode loop itself: in one graph per step where somebody watches the steps, so that previews can
be taken and a generation can be left between them; else in one graph.

The tokenizer's decoder is captured once for each size of a chunk and each grid. A batch is split into chunks of the
sizes 64, 32, ... 1, so that few captures serve all batches and nothing is padded. Large images, and GPUs with little
memory, have smaller chunks: a graph keeps the memory of its feature maps.
Shapes: B batch, N grid tokens, HW pixels.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from arpg.config import TokenizerConfig
from arpg.decode.state import DecodeState, PlanCursor
from arpg.device import peak_bytes, reset_peak
from arpg.kernels.dispatch import use_pixel_graphs
from arpg.settings import SamplingSettings
from arpg.tokenizer import Tokenizer, VQTokenizer

if TYPE_CHECKING:
    from arpg.decode.engine import Step

log = logging.getLogger(__name__)

T = TypeVar("T")
GraphKey = tuple[Any, ...]
_MAX_COUNTED_KEYS = 4096
_MEMORY_SHARE = 0.25  # of the GPU's memory that the captured graphs of a cache may hold together
_PIXEL_SHARE = 0.125  # the same of the graphs of a tokenizer
_LARGEST_CHUNK = 64
_LIVE_MAPS = 5  # feature maps of the size of the image that the decoder holds at once, at most
_CAPTURING = threading.Lock()  # one capture at a time: before it, free memory is returned to the device


def graph_key(
    state: DecodeState, cursor: PlanCursor, settings: SamplingSettings, *, every_step: bool = True
) -> GraphKey:
    """Return all that the kernels of a generation depend on; requests with the same key can share graphs."""
    sampling = (settings.attention, settings.temperature, settings.top_k, settings.top_p)
    shapes = tuple((tuple(x.shape), x.dtype) for x in cursor.tensors())
    return _structure(state), shapes, tuple(cursor.widths), tuple(cursor.longest), sampling, every_step


class GraphPool:
    """Captures graphs that share their memory, and so can only be replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._handle = device, torch.cuda.graph_pool_handle()

    def capture(self, runs: Iterable[Callable[[], T]], *, scratch: int = 0) -> list[tuple[torch.cuda.CUDAGraph, T]]:
        """Capture what each of `runs` launches, in a graph of its own; return the graphs and the results.

        `scratch`: bytes that are taken first and freed at once: one piece for all that follows, which may grow from run
        to run.
        """
        captured: list[tuple[torch.cuda.CUDAGraph, T]] = []
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), _own_workspace():
            for run in runs:
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
                try:
                    if scratch and not captured:
                        torch.empty(scratch, dtype=torch.uint8, device=self._device)
                    result = run()
                finally:
                    graph.capture_end()
                captured.append((graph, result))
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return captured

    @property
    def bytes(self) -> int:
        """All memory that the graphs hold."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        own = (part for part in segments if tuple(part.get("segment_pool_id", ())) == tuple(self._handle))
        return sum(part["total_size"] for part in own)


class Capture(Generic[T]):
    """Work captured as CUDA graphs with the memory they work in. `busy` is held while one is being replayed."""

    @torch.no_grad()
    def __init__(self, parts: Iterable[Callable[[], T]], device: torch.device, *, run_bytes: int = 0) -> None:
        """Capture each of `parts`, in order, in a graph of its own.

        A run of the same work must have come before: it compiles the kernels, and took `run_bytes` of memory.
        """
        self.busy, self._device = threading.Lock(), device
        # What the run before has freed stays with torch's allocator, which could not give it to the graphs.
        torch.cuda.empty_cache()
        allocated, started = torch.cuda.memory_allocated(device), time.perf_counter()
        pool = GraphPool(device)
        self.graphs = pool.capture(parts, scratch=run_bytes)
        # The scratch memory of the kernels is free again for the next graph of the pool, but for nothing else.
        self.live_bytes = torch.cuda.memory_allocated(device) - allocated
        self.bytes = max(self.live_bytes, pool.bytes)
        self.seconds = time.perf_counter() - started
        self._replayed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run(self, own: Iterable[Tensor], new: Iterable[Tensor]) -> Iterator[T]:
        """Copy the tensors `new` into `own`, which the graphs read, and replay them; yield the result of each.

        The caller holds `busy` and releases it. A result is overwritten by the next replay.
        """
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._replayed)  # the last replay may have run on another stream
        try:
            for mine, given in zip(own, new, strict=True):
                mine.copy_(given)
            for graph, result in self.graphs:
                graph.replay()
                yield result
        finally:
            self._replayed.record(stream)


class CapturedGraphs(Capture[tuple[Tensor, Tensor]]):
    """The graphs of one generation: its ids and known after each."""

    def __init__(
        self,
        state: DecodeState,
        cursor: PlanCursor,
        steps: Generator[Step],
        *,
        every_step: bool = True,
        run_bytes: int = 0,
    ) -> None:
        """Capture `steps`, the loop over `state` and `cursor`, which then belong to the graphs.

        `every_step`: in one graph each, else in one.
        """
        self.state, self.cursor = state, cursor
        self._steps = steps  # holds the cache, which must live as long as the graphs

        def advance(num_steps: int) -> tuple[Tensor, Tensor]:
            for _ in range(num_steps):
                step = next(steps)
            return step.ids_BN, step.known_BN

        sizes = [1] * cursor.num_steps if every_step else [cursor.num_steps]
        super().__init__([partial(advance, size) for size in sizes], state.ids_BN.device, run_bytes=run_bytes)

    def replay(self, state: DecodeState, cursor: PlanCursor) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the graphs on another request of the same shape; yield copies of ids and known after each graph."""
        own, new = [*_leaves(self.state), *self.cursor.tensors()], [*_leaves(state), *cursor.tensors()]
        for ids_BN, known_BN in self.run(own, new):
            yield ids_BN.clone(), known_BN.clone()


class CapturedStep:
    """The graph of a step of a continuous batch, and the tensor that it reads its numbers from."""

    def __init__(self, run: Callable[[], None], inputs: Tensor, pool: GraphPool) -> None:
        """Capture `run`, which reads `inputs`. It must have run before: that compiles the kernels."""
        before = torch.cuda.memory_reserved()
        self.busy, self.inputs = threading.Lock(), inputs
        ((self._graph, _),) = pool.capture([run])
        self.bytes = max(0, torch.cuda.memory_reserved() - before)  # by which the pool has grown

    def replay(self, inputs: Tensor) -> None:
        """Run the step with other numbers, on the CPU until now. The caller holds `busy`."""
        self.inputs.copy_(inputs.pin_memory() if self.inputs.is_cuda else inputs, non_blocking=True)
        self._graph.replay()


class Captured(Protocol):
    """What a `GraphCache` keeps. `busy` is held while it is used."""

    busy: threading.Lock
    bytes: int


G = TypeVar("G", bound=Captured)


class GraphCache(Generic[G]):
    """Captured graphs by key; the least recently used ones go first where memory is short."""

    def __init__(
        self,
        device: torch.device,
        *,
        memory: int | None = None,
        share: float = _MEMORY_SHARE,
        capture_after: int = 0,
    ) -> None:
        """`memory`: bytes that graphs may hold (None: a `share` of all); `capture_after`: runs before a capture."""
        if memory is None and device.type == "cuda":
            memory = int(share * torch.cuda.get_device_properties(device).total_memory)
        self.memory, self.capture_after = memory or 0, capture_after
        self.captured: OrderedDict[GraphKey, G] = OrderedDict()
        self._runs: Counter[GraphKey] = Counter()
        self._too_large: set[GraphKey] = set()
        self._lock = threading.Lock()

    def acquire(self, key: GraphKey) -> G | None:
        """Return the graphs of a key with `busy` held, if they are there and not in use."""
        with self._lock:
            found = self.captured.get(key)
            if found is None or not found.busy.acquire(blocking=False):
                return None
            self.captured.move_to_end(key)
            return found

    def worth_capturing(self, key: GraphKey) -> bool:
        """Count a run of `key`, and say whether it should be captured now."""
        with self._lock:
            if len(self._runs) > _MAX_COUNTED_KEYS:
                self._runs.clear()
            self._runs[key] += 1
            return self._runs[key] > self.capture_after and key not in self.captured and key not in self._too_large

    def capture(self, key: GraphKey, make: Callable[[], G]) -> G | None:
        """Capture, keep and return graphs with `busy` held, evicting idle ones; None where they do not fit."""
        try:
            with _CAPTURING:
                graphs = make()
        except torch.OutOfMemoryError:
            log.warning("a shape is too large to be captured as CUDA graphs; it runs eagerly")
            self.clear()
            self._too_large.add(key)
            return None
        graphs.busy.acquire()
        with self._lock:
            self.captured[key] = graphs
            idle = [other for other, kept in self.captured.items() if other != key and not kept.busy.locked()]
            while idle and sum(kept.bytes for kept in self.captured.values()) > self.memory:
                del self.captured[idle.pop(0)]
        return graphs

    def clear(self) -> None:
        """Drop all graphs; a shape that comes again is captured again."""
        with self._lock:
            self.captured.clear()


@contextmanager
def _own_workspace() -> Iterator[None]:
    """Matrix products inside use a workspace of their own, not that of other graphs which may run at the same time:
    torch keeps one workspace per stream, and hands out the same streams again and again.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()


def run_and_measure(steps: Iterable[Any], device: torch.device) -> int:
    """Run the steps, and return the bytes of a GPU that they held at most, beyond what was held before."""
    before = 0
    if device.type == "cuda":
        reset_peak(device)
        before = torch.cuda.memory_allocated(device)
    for _ in steps:
        pass
    return max(0, peak_bytes(device) - before) if device.type == "cuda" else 0


def _leaves(x: Any) -> Iterator[Tensor]:
    """The tensors in a dataclass of tensors and dataclasses, in order."""
    if isinstance(x, Tensor):
        yield x
    elif dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            yield from _leaves(getattr(x, field.name))


def copy_tensors(x: Any) -> Any:
    """Copy a dataclass of tensors and dataclasses: captured graphs must not share tensors with a request."""
    if isinstance(x, Tensor):
        return x.clone()
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = dataclasses.fields(x)
        return dataclasses.replace(x, **{field.name: copy_tensors(getattr(x, field.name)) for field in fields})
    return x


def _structure(x: Any) -> Any:
    """What is not in the tensors themselves."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype
    if dataclasses.is_dataclass(x):
        return tuple(_structure(getattr(x, field.name)) for field in dataclasses.fields(x))
    return x


class GraphedTokenizer:
    """A `Tokenizer` whose images are replayed from CUDA graphs where the policy allows it; any thread may use it.

    Only the fused decoder is captured: it is a copy of the weights, which nobody changes. A graph that another thread
    is replaying is not waited for; images are copied out of its memory.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # As in the engine, a size is captured when it comes for the second time.
        self.graphs: GraphCache[CapturedPixels] = GraphCache(tokenizer.device, share=_PIXEL_SHARE, capture_after=1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the tokenizer, not the captured graphs."""
        return GraphedTokenizer, (self.tokenizer,)

    @property
    def config(self) -> TokenizerConfig:
        """The sizes of the tokenizer."""
        return self.tokenizer.config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.tokenizer.device

    def encode(self, image_B3HW: Tensor) -> Tensor:
        """Return the code ids `[B, N]` of images in [-1, 1]."""
        return self.tokenizer.encode(image_B3HW)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name."""
        return self.tokenizer.state_dict()

    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Tensor:
        """Return the images `[B, 3, H, W]` of code ids, as `VQTokenizer.decode` does."""
        tokenizer = self.tokenizer
        if not use_pixel_graphs() or not isinstance(tokenizer, VQTokenizer) or tokenizer.fused is None:
            return _decode_pixels(tokenizer, ids_BN, grid, known_BN)
        largest = largest_chunk(tokenizer.config, grid, self.graphs.memory)
        if min(largest, len(ids_BN)) == 0:
            return _decode_pixels(tokenizer, ids_BN, grid, known_BN)
        sizes = list(chunk_sizes(len(ids_BN), largest))
        known = [None] * len(sizes) if known_BN is None else torch.split(known_BN, sizes)
        parts = [
            self._replay(tokenizer, ids, grid, k) for ids, k in zip(torch.split(ids_BN, sizes), known, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _replay(self, tokenizer: VQTokenizer, ids_BN: Tensor, grid: tuple[int, int], known_BN: Tensor | None) -> Tensor:
        key = (len(ids_BN), grid, known_BN is not None, tokenizer.pixel_dtype, id(tokenizer.fused))
        graphs = self.graphs.acquire(key)
        if graphs is None and self.graphs.worth_capturing(key):
            graphs = self.graphs.capture(key, lambda: CapturedPixels(tokenizer, ids_BN, grid, known_BN))
        if graphs is None:
            return _decode_pixels(tokenizer, ids_BN, grid, known_BN)
        try:
            return graphs.replay(ids_BN, known_BN)
        finally:
            graphs.busy.release()


class CapturedPixels(Capture[Tensor]):
    """The decoder as a graph, for a number of images and a grid."""

    def __init__(self, tokenizer: VQTokenizer, ids_BN: Tensor, grid: tuple[int, int], known_BN: Tensor | None) -> None:
        self._inputs = [x.clone() for x in _pixel_inputs(ids_BN, known_BN)]
        ids, known = self._inputs[0], None if known_BN is None else self._inputs[1]
        self._weights = tokenizer.fused  # must live as long as the graph, and with it its id
        for _ in range(2):  # cuDNN tunes a size when it comes again, and knows what it tuned in this thread alone
            tokenizer.decode(ids, grid, known_BN=known)
        super().__init__([lambda: tokenizer.decode(ids, grid, known_BN=known)], ids.device)

    def replay(self, ids_BN: Tensor, known_BN: Tensor | None) -> Tensor:
        """Return the images of other ids of the same shape."""
        (image,) = (image.clone() for image in self.run(self._inputs, _pixel_inputs(ids_BN, known_BN)))
        return image


def largest_chunk(config: TokenizerConfig, grid: tuple[int, int], memory: int) -> int:
    """Return the largest number of images in a graph, a power of two; 0: not even one fits.

    Its feature maps in half precision take at most half of `memory`, so that graphs of all smaller sizes fit beside it.
    """
    channels, pixels = config.channels * max(config.multipliers[:2]), math.prod(grid) * config.stride**2
    fitting = min(_LARGEST_CHUNK, memory // (2 * 2 * _LIVE_MAPS * channels * pixels))
    return 1 << (fitting.bit_length() - 1) if fitting else 0


def chunk_sizes(count: int, largest: int) -> Iterator[int]:
    """Split `count` images into chunks of sizes that are captured: powers of two, the largest first."""
    while count > 0:
        size = min(largest, 1 << (count.bit_length() - 1))
        yield size
        count -= size


def _pixel_inputs(ids_BN: Tensor, known_BN: Tensor | None) -> list[Tensor]:
    return [ids_BN] if known_BN is None else [ids_BN, known_BN]


def _decode_pixels(tokenizer: Tokenizer, ids_BN: Tensor, grid: tuple[int, int], known_BN: Tensor | None) -> Tensor:
    return tokenizer.decode(ids_BN, grid) if known_BN is None else tokenizer.decode(ids_BN, grid, known_BN=known_BN)
