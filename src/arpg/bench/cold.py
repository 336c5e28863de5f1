"""The time to the first image in a fresh process: starting Python and importing, loading, the first and the next one.

`cold_start` runs this file as a program of its own, which prints one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from arpg.errors import InputError


def cold_start(
    name: str, *, random: bool, device: str, dtype: str, threads: int, steps: int | None, engine: str = "auto"
) -> dict[str, Any]:
    """Seconds of a fresh process with batch 1; `recording s`, where one was made, is part of the image that made it."""
    wanted = {"name": name, "random": random, "device": device, "dtype": dtype, "engine": engine}
    wanted |= {"threads": threads, "steps": steps}
    began = time.time()
    run = subprocess.run(
        [sys.executable, "-m", "arpg.bench.cold", json.dumps(wanted), repr(began)], capture_output=True, text=True
    )
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        raise InputError(f"the fresh process failed: {last}")
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    wanted, began = json.loads(sys.argv[1]), float(sys.argv[2])
    from arpg.bench.case import open_pipeline
    from arpg.device import set_threads

    imported = time.time()
    set_threads(wanted.pop("threads"))
    steps = wanted.pop("steps")
    pipe = open_pipeline(wanted.pop("name"), **wanted)
    times = [time.time()]
    for seed in (0, 1):
        pipe.generate(0, seed=seed, steps=steps)
        times.append(time.time())
    parts = {
        "import s": imported - began,
        "load s": times[0] - imported,
        "first image s": times[1] - times[0],
        "next image s": times[2] - times[1],
        "to the first image s": times[1] - began,
    }
    if pipe.engine.graphs.captured:
        parts["recording s"] = sum(recording.seconds for recording in pipe.engine.graphs.captured.values())
    sys.stdout.write(json.dumps({name: round(seconds, 3) for name, seconds in parts.items()}) + "\n")


if __name__ == "__main__":
    main()
