"""Time continuous batching without a server: the host's part of a step, and images that join a running batch.

    python -m benchmarks.continuous --host
    python -m benchmarks.continuous
    python -m benchmarks.continuous --model arpg-l --random --images 512 --running 64

`--host`: CPU time of a step and of a joining sample for 1, 16, 64 and 256 samples at all steps of their plans, with a
network whose calls cost nothing; no GPU is needed. Otherwise images/s (tokens only) of a steady stream: as many samples
as `--running` at different steps, each replaced when it is finished. On a GPU eagerly, from captured steps, and the
offline engine with batches of that size.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from arpg.bench.case import Case, open_pipeline
from arpg.config import ModelConfig
from arpg.decode import Engine, continuous
from arpg.decode.continuous import ContinuousBatch, TokenCopy
from arpg.decode.graphs import CapturedStep, GraphCache
from arpg.decode.pipelined import pipelined_decode
from arpg.device import choose_device, synchronize
from arpg.model import ARPG, Cache
from arpg.settings import SamplingSettings
from arpg.tables import markdown_table


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

    def __init__(self, model: ARPG, settings: SamplingSettings, *, running: int, images: int, captured: bool) -> None:
        """`running`: samples at the same time, at different steps."""
        self.model, self.settings, self.running = model, settings, running
        case = Case("", 1, settings, model.config.grid)
        self.waiting = [case.request(model, seed) for seed in range(images)]
        self.graphs: GraphCache[CapturedStep] | None = GraphCache(model.device) if captured else None
        self.join_seconds = self.step_seconds = 0.0
        self.joined = self.steps = self.made = 0

    @torch.no_grad()
    def run(self, *, measured_from: int = 0) -> None:
        """Decode all images; time the steps from a number of finished images on, while images still join."""
        batch = ContinuousBatch(self.model, *self.waiting.pop(), self.settings, graphs=self.graphs)
        due, copies = 0.0, list[TokenCopy]()
        while batch.rows or self.waiting:
            began = time.process_time()
            due = max(due + self.running / self.settings.steps, not batch.rows)
            due = min(due, self.running - len(batch.rows))
            joining = [self.waiting.pop() for _ in range(min(int(due), len(self.waiting)))]
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
            if self.made >= measured_from and self.waiting:
                self.joined, self.steps = self.joined + len(joining), self.steps + 1
                self.join_seconds += stepping - began
                self.step_seconds += ended - stepping
            self.made += len(finished)
        synchronize(self.model.device)


def host_rows(samples: list[int], *, steps: int = 32) -> list[list[str]]:
    """Return the CPU time of the host's part for each number of samples, eagerly and from captured steps."""
    config = ModelConfig(
        width=8, num_heads=1, pass1_layers=1, pass2_layers=1, vocab_size=4, num_classes=1000, grid=(16, 16)
    )
    model = FreeNetwork(config).eval()
    settings, rows = SamplingSettings(steps=steps, guidance=4.0, temperature=0.0), []
    setattr(continuous, "GraphPool", FreeGraphs)  # noqa: B010  (another type)
    for num in samples:
        cells = [str(num)]
        for captured in (False, True):
            stream = Stream(model, settings, running=num, images=4 * num + 4, captured=captured)
            stream.run(measured_from=2 * num)
            joined = 1e3 * stream.join_seconds / max(1, stream.joined)
            cells += [f"{1e3 * stream.step_seconds / stream.steps:.3f}", f"{joined:.3f}"]
        rows.append(cells)
    return rows


def stream_rows(options: argparse.Namespace) -> list[list[str]]:
    """Return images/s of a steady stream; on a GPU also from captured steps, and of the offline engine."""
    device = choose_device(options.device)
    where = {"device": str(device), "dtype": options.precision, "engine": "eager"}
    pipe = open_pipeline(options.model, random=options.random, **where)
    model, settings, rows = pipe.model, pipe.sampling.settings(), []
    for captured in (False, True) if device.type == "cuda" else (False,):
        best = (float("inf"), float("inf"))
        for repeat in range(options.repeats + 1):
            stream = Stream(model, settings, running=options.running, images=options.images, captured=captured)
            began, began_cpu = time.perf_counter(), time.process_time()
            stream.run()
            if repeat:  # the first one warms up
                best = min(best, (time.perf_counter() - began, time.process_time() - began_cpu))
        name = "captured" if captured else "eager"
        rows.append([name, f"{best[0]:.3f}", f"{best[1]:.3f}", f"{options.images / best[0]:.2f}"])
    if device.type == "cuda":
        engine, case = Engine(model, "graph"), Case("", options.running, settings, model.config.grid)
        for _ in range(2):
            batches = [case.request(model, seed) for seed in range(0, options.images, options.running)]
            began, began_cpu = time.perf_counter(), time.process_time()
            for _ in pipelined_decode(engine, batches, settings, lambda ids_BN, grid: ids_BN):
                pass
            synchronize(device)
            seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        images = len(batches) * options.running
        rows.append(["offline", f"{seconds:.3f}", f"{cpu:.3f}", f"{images / seconds:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="The host's part alone.")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 16, 64, 256], help="Of --host.")
    parser.add_argument("--model", default="garden")
    parser.add_argument("--random", action="store_true", help="Random weights.")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--running", type=int, default=8, help="Images at the same time.")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    if options.host:
        torch.set_num_threads(1)
        heads = ["samples", "eager step, ms", "join, ms", "captured step, ms", "join, ms"]
        print(markdown_table(heads, host_rows(options.samples)))
    else:
        print(markdown_table(["", "s", "CPU s", "images/s"], stream_rows(options)))


if __name__ == "__main__":
    main()
