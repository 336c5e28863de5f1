"""Time batches that are decoded at the same time on one GPU, each on a CUDA stream of its own (tokens only).

    python -m benchmarks.streams --out out/streams.json
    python -m benchmarks.streams --cases 1x64 2x32 2x64 --seconds 5

A case SxB has S threads. Each decodes batches of B images one after the other, from a graph and a cache of its own, so
that the kernels of one batch can run where those of another leave the GPU idle. The rate is the sum over the threads;
each is timed from the end of its first batch to the end of its last one while all threads are running.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arpg.bench.case import Case, open_pipeline
from arpg.bench.record import environment
from arpg.decode import Engine
from arpg.decode.pipelined import pipelined_decode
from arpg.device import choose_device, reset_peak
from arpg.files import write_json
from arpg.model import ARPG
from arpg.tables import markdown_table, significant

CASES = ((1, 64), (1, 128), (2, 32), (2, 64), (3, 64), (1, 256), (2, 128))


class Lane:
    """One thread's engine, and when each of its batches was finished."""

    def __init__(self, model: ARPG, case: Case) -> None:
        self.model, self.case = model, case
        self.engine = Engine(model, "graph" if model.device.type == "cuda" else "eager")
        self.ends: list[float] = []

    @torch.no_grad()
    def decode_first(self) -> Tensor:
        """Decode the batch with seeds from 0 on; this captures the graph."""
        *_, step = self.engine.decode(*self.case.request(self.model, 0), self.case.settings, every_step=False)
        return step.ids_BN.cpu()

    def run(self, until: float) -> None:
        """Decode batches up to the first one that ends after `until`."""
        device, size = self.model.device, self.case.batch
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            batches = (self.case.request(self.model, seed) for seed in itertools.count(step=size))
            for _ in pipelined_decode(self.engine, batches, self.case.settings, lambda ids_BN, grid: ids_BN):
                self.ends.append(time.perf_counter())
                if self.ends[-1] > until:
                    return

    def rate(self, until: float) -> float:
        """Return images/s of the batches that ended before `until`; nan if there were not two."""
        ends = [end for end in self.ends if end <= until]
        return self.case.batch * (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else math.nan


def measure(model: ARPG, case: Case, streams: int, seconds: float) -> dict[str, Any]:
    """Return the rate and the memory of a case, and whether all its graphs make the same tokens."""
    device = model.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_peak(device)
    lanes = [Lane(model, case) for _ in range(streams)]
    first, *others = [lane.decode_first() for lane in lanes]
    until = time.perf_counter() + seconds
    with ThreadPoolExecutor(streams) as threads:
        for done in [threads.submit(lane.run, until) for lane in lanes]:
            done.result()
    rate = sum(lane.rate(until) for lane in lanes)
    row = {"streams": streams, "batch": case.batch, "images/s": None if math.isnan(rate) else significant(rate)}
    row |= {"batches": sum(len(lane.ends) for lane in lanes)}
    row |= {"equal": all(torch.equal(first, other) for other in others)}
    if device.type == "cuda":
        row |= {"reserved GiB": significant(torch.cuda.max_memory_reserved(device) / 2**30)}
    return row


def streams_and_batch(text: str) -> tuple[int, int]:
    """Parse `2x64`."""
    streams, batch = map(int, text.split("x"))
    return streams, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="SxB", type=streams_and_batch)
    parser.add_argument("--model", default="arpg-l", help="Random weights of its configuration.")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4.0, help="Of each case: at least two batches per stream.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="Also write a record.")
    options = parser.parse_args()
    device = choose_device(options.device)
    pipe = open_pipeline(options.model, random=True, device=str(device), dtype=options.precision, engine="eager")
    settings, rows = pipe.sampling.settings(steps=options.steps, guidance=4.0), []
    for streams, batch in options.cases:
        case = Case(f"{options.model} (random)", batch, settings, pipe.model.config.grid)
        rows.append(measure(pipe.model, case, streams, options.seconds))
        if options.out:
            record = {"benchmark": "streams", "where": environment(device), "model": options.model, "rows": rows}
            write_json(options.out, record | {"precision": options.precision, "steps": options.steps})
        print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]), flush=True)


if __name__ == "__main__":
    main()
