"""Time continuous batching without a server: the host's part of a step, and images that join a running batch.

    python -m benchmarks.continuous --host
    python -m benchmarks.continuous
    python -m benchmarks.continuous --model arpg-l --random --images 512 --running 64 --rows captured offline

`--host`: CPU time of a step and of a joining sample for 1, 16, 64 and 256 samples at all steps of their plans, with a
network whose calls cost nothing; no GPU is needed. Otherwise images/s (tokens only) of a steady stream: as many samples
as `--running` at different steps, each replaced when it is finished. On a GPU eagerly, from captured steps, and the
offline engine with batches of that size (`--rows`); `--profile` shows which kernels take the time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arpg.bench.case import Case, open_pipeline
from arpg.bench.profile import profile_kernels
from arpg.config import ModelConfig
from arpg.decode import Engine, continuous
from arpg.decode.continuous import ContinuousBatch, TokenCopy
from arpg.decode.engine import pipelined_decode
from arpg.decode.graphs import CapturedStep, GraphCache
from arpg.device import choose_device, synchronize
from arpg.model import ARPG, Cache
from arpg.settings import SamplingSettings
from arpg.tables import markdown_table

ROWS = ["eager", "captured", "offline"]


class FreeNetwork(ARPG):
    """A network whose calls cost nothing."""

    def encode(self, x_BSD: Tensor, pos_BS2: Any, cache: Cache, **options: Any) -> None:
        """Count the slots."""
        cache.commit(cache.reserve(x_BSD.shape[1]).num_new, count_B=options["count_B"], end=options["end"])

    def predict(self, pos_BS2: Any, *arguments: Any, **options: Any) -> Tensor:
        """Return logits of zero."""
        return self.embedding.weight.new_zeros(1, pos_BS2.shape[1], self.config.vocab_size)


class FreeGraphs:
    """Stands for `GraphPool`: graphs whose replay costs nothing."""

    def __init__(self, device: torch.device) -> None:
        """Take no memory."""

    def capture(self, runs: list[Any]) -> list[tuple[FreeGraphs, None]]:
        """Capture nothing."""
        return [(self, None) for _ in runs]

    def replay(self) -> None:
        """Run nothing."""


class Stream:
    """A steady stream of images through a running batch."""

    def __init__(self, model: ARPG, settings: SamplingSettings, *, running: int, captured: bool) -> None:
        """`running`: samples at the same time, at different steps."""
        self.model, self.settings, self.running = model, settings, running
        self.case = Case("", 1, settings, model.config.grid)
        graphs: GraphCache[CapturedStep] | None = GraphCache(model.device) if captured else None
        self.batch = ContinuousBatch(model, *self.case.request(model, 0), settings, graphs=graphs)
        self.batch.keep([])
        self.join_seconds = self.step_seconds = 0.0
        self.joined = self.steps = 0

    @torch.no_grad()
    def run(self, images: int, *, measured_from: int = 0) -> None:
        """Decode images; time the steps from a number of finished images on, while images still join."""
        waiting, batch = [self.case.request(self.model, seed) for seed in range(images)], self.batch
        due, made, copies = 0.0, 0, list[TokenCopy]()
        while batch.rows or waiting:
            began = time.process_time()
            due = max(due + self.running / self.settings.steps, not batch.rows)
            due = min(due, self.running - len(batch.rows))
            joining = [waiting.pop() for _ in range(min(int(due), len(waiting)))]
            due -= len(joining)
            for request, plan in joining:
                batch.add_rows([(request, 0)], plan.samples)
            stepping = time.process_time()
            batch.step()
            finished = [i for i, end in enumerate(batch.finished()) if end]
            if finished:
                copies.append(batch.fetch(finished))
                gone = set(finished)
                batch.keep([i for i in range(len(batch.rows)) if i not in gone])
            if len(copies) > 1:
                copies.pop(0).wait()  # one step late
            ended = time.process_time()
            if made >= measured_from and waiting:
                self.joined, self.steps = self.joined + len(joining), self.steps + 1
                self.join_seconds += stepping - began
                self.step_seconds += ended - stepping
            made += len(finished)
        synchronize(self.model.device)


def host_rows(samples: list[int]) -> list[list[str]]:
    """Return the CPU time of the host's part for each number of samples, eagerly and from captured steps."""
    config = ModelConfig(
        width=8, num_heads=1, pass1_layers=1, pass2_layers=1, vocab_size=4, num_classes=1000, grid=(16, 16)
    )
    model = FreeNetwork(config).eval()
    settings, rows = SamplingSettings(steps=32, guidance=4.0, temperature=0.0), []
    setattr(continuous, "GraphPool", FreeGraphs)  # noqa: B010  (another type)
    for num in samples:
        cells = [str(num)]
        for captured in (False, True):
            stream = Stream(model, settings, running=num, captured=captured)
            stream.run(4 * num + 4, measured_from=2 * num)
            joined = 1e3 * stream.join_seconds / max(1, stream.joined)
            cells += [f"{1e3 * stream.step_seconds / stream.steps:.3f}", f"{joined:.3f}"]
        rows.append(cells)
    return rows


def stream_rows(options: argparse.Namespace) -> list[list[str]]:
    """Return images/s of a steady stream; on a GPU also from captured steps, and of the offline engine."""
    device = choose_device(options.device)
    where = {"device": str(device), "dtype": options.precision, "engine": "eager"}
    pipe = open_pipeline(options.model, random=options.random, **where)
    model, settings, on_gpu = pipe.model, pipe.sampling.settings(), device.type == "cuda"
    names = [name for name in options.rows if on_gpu or name == "eager"]
    if not names:
        raise SystemExit(f"rows {' '.join(options.rows)} need an NVIDIA GPU; the device is {device}")
    runs: dict[str, Callable[[int], None]] = {
        name: Stream(model, settings, running=options.running, captured=name == "captured").run
        for name in names
        if name != "offline"
    }
    if "offline" in names:
        engine, case = Engine(model, "graph"), Case("", options.running, settings, model.config.grid)

        def offline(images: int) -> None:
            batches = [case.request(model, seed) for seed in range(0, images, options.running)]
            for _ in pipelined_decode(engine, batches, settings, lambda ids_BN, grid: ids_BN):
                pass
            synchronize(device)

        runs["offline"] = offline
    rows = []
    for name, run in runs.items():
        times = []
        for _ in range(options.repeats + 1):
            began, began_cpu = time.perf_counter(), time.process_time()
            run(options.images)
            times.append((time.perf_counter() - began, time.process_time() - began_cpu))
        seconds, cpu = min(times[1:])  # the first one compiles and captures
        rows.append([name, f"{seconds:.3f}", f"{cpu:.3f}", f"{options.images / seconds:.2f}", f"{times[0][0]:.1f}"])
        if options.profile and on_gpu:
            found = profile_kernels(partial(run, options.images))
            each = {group: f"{1000 * ms / options.images:.0f}" for group, ms in found["kernels ms"].items()}
            print(f"{name}, us per image: {each}", flush=True)
            for kernel in found["top kernels"]:
                print(f"{kernel['ms']:9.1f} ms {kernel['launches']:6d} x {kernel['kernel']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="The host's part alone.")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 16, 64, 256], help="Of --host.")
    parser.add_argument("--model", default="garden")
    parser.add_argument("--random", action="store_true", help="Random weights.")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--running", type=int, default=8, help="Images at the same time.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="Those of a GPU; elsewhere eager alone.")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="Also print the time of the kernels, on a GPU.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    if options.images % options.running:
        parser.error(f"--images is {options.images}; expected a multiple of --running, {options.running}")
    if options.host:
        torch.set_num_threads(1)
        heads = ["samples", "eager step, ms", "join, ms", "captured step, ms", "join, ms"]
        print(markdown_table(heads, host_rows(options.samples)))
    else:
        print(markdown_table(["", "s", "CPU s", "images/s", "first run, s"], stream_rows(options)))


if __name__ == "__main__":
    main()
