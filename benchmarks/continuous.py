"""Time continuous batching without a server: images that all start together, and images that join one after the other.

    python -m benchmarks.continuous
    python -m benchmarks.continuous --model arpg-l --random --images 64 --join-every 1

Prints the seconds, the CPU seconds of the process and images/s of each; tokens only.
"""

from __future__ import annotations

import argparse
import time

import torch

from arpg.bench.case import Case, open_pipeline
from arpg.decode import Plan, Request
from arpg.decode.continuous import ContinuousBatch
from arpg.device import choose_device, synchronize
from arpg.model import ARPG
from arpg.tables import markdown_table


def decode_all(model: ARPG, case: Case, images: int, *, join_every: int) -> None:
    """Decode the images; one starts every `join_every` steps, or all at once (0)."""
    one = Case(case.model, images if join_every == 0 else 1, case.settings, case.grid)
    waiting: list[tuple[Request, Plan]] = [one.request(model, seed) for seed in range(images // one.batch)]
    running = ContinuousBatch(model, *waiting.pop(), case.settings)
    step = 0
    while running.rows:
        running.step()
        step += 1
        stay = [i for i, row in enumerate(running.rows) if not row.finished]
        if len(stay) < len(running.rows):
            running.keep(stay)
        if waiting and (not running.rows or step % join_every == 0):
            running.add(*waiting.pop())
    synchronize(model.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="garden")
    parser.add_argument("--random", action="store_true", help="Random weights.")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--join-every", type=int, default=3, help="Steps between two images that join.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    device = str(choose_device(options.device))
    pipe = open_pipeline(options.model, random=options.random, device=device, dtype=options.precision, engine="eager")
    case = Case(options.model, options.images, pipe.sampling.settings(), pipe.model.config.grid)
    rows = []
    kinds = {
        "one image": (1, 0),
        "all at once": (options.images, 0),
        "one by one": (options.images, options.join_every),
    }
    for name, (images, join_every) in kinds.items():
        found = []
        for _ in range(options.repeats + 1):
            began, began_cpu = time.perf_counter(), time.process_time()
            with torch.no_grad():
                decode_all(pipe.model, case, images, join_every=join_every)
            found.append((time.perf_counter() - began, time.process_time() - began_cpu))
        seconds, cpu = (min(part) for part in zip(*found[1:], strict=True))  # the first one warms up
        rows.append([name, images, f"{seconds:.3f}", f"{cpu:.3f}", f"{images / seconds:.2f}"])
    print(markdown_table(["", "images", "s", "CPU s", "images/s"], rows))


if __name__ == "__main__":
    main()
