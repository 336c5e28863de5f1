"""How fast the settings of the ablations generate: labels to pixels, alone on the device, nothing judged meanwhile.

`ablations.py --parts speed` runs it. Quality can be measured by several processes at once, speed cannot, so it has its
own file in --out, speed.json: {"about": {...}, "lines": [{"settings", "images/s", "batches"}, ...]}, the last being
images/s of each timed batch. It is written whole after every line. Run it again to go on; with another device or size
it begins again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ablation_lines import SPEED, SPEED_STEPS, STEPS, read_speed

from arpg import Pipeline
from arpg.evaluation.sample import PixelBatches, balanced_labels, fingerprint, json_settings
from arpg.files import write_whole
from arpg.settings import SCHEDULES, SamplingSettings

log = logging.getLogger("ablations")

ORDERS = ("raster", "halton", "local")  # beside the random one: a table, and two that are computed
SCALE = 3.0  # any but 1 costs the same


def speed_settings(pipe: Pipeline) -> Iterator[SamplingSettings]:
    """Steps with both attentions; at 24 steps also the schedules, some orders, and no guidance."""
    base = pipe.sampling.settings(steps=SPEED_STEPS, guidance=SCALE)
    for steps in STEPS:
        for attention in ("block", "causal"):
            yield dataclasses.replace(base, steps=steps, attention=attention)
    for schedule in SCHEDULES[1:]:
        yield dataclasses.replace(base, schedule=schedule)
    for order in ORDERS:
        yield dataclasses.replace(base, order=order)
    yield dataclasses.replace(base, guidance_schedule="constant")
    yield dataclasses.replace(base, guidance_schedule="none", guidance=1.0)


def measure_speed(pipe: Pipeline, folder: Path, *, batch_size: int, repeats: int, deadline: float) -> bool:
    """Whether all are measured. Each: batches that warm up and are recorded, then `repeats` that are timed."""
    path = folder / SPEED
    about = {
        "weights": fingerprint(pipe),
        "batch size": batch_size,
        "batches timed": repeats,
        "precision": str(pipe.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if pipe.model.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    found = read_speed(folder)
    lines: list[dict[str, Any]] = found["lines"] if found["about"] == about else []
    todo = [s for s in speed_settings(pipe) if json_settings(s) not in [line["settings"] for line in lines]]
    for settings in todo:
        if time.monotonic() > deadline:
            return False
        _time(pipe, settings, batch_size, 2)
        batches = _time(pipe, settings, batch_size, 1 + repeats)
        timed = [round(images / seconds, 1) for images, seconds in batches.times[1:]]
        lines.append({"settings": json_settings(settings), "images/s": round(batches.rate, 1), "batches": timed})
        text = json.dumps({"about": about, "lines": lines}, indent=1) + "\n"
        write_whole(path, lambda temporary, text=text: temporary.write_text(text))  # type: ignore[misc]
        name = f"{settings.steps} steps, {settings.attention}, {settings.order}, {settings.schedule}"
        log.info("%8.1f images/s  %s, guidance %s", batches.rate, name, settings.guidance_schedule)
    return True


def _time(pipe: Pipeline, settings: SamplingSettings, batch_size: int, batches: int) -> PixelBatches:
    labels = balanced_labels(batch_size * batches, pipe.model.config.num_classes)
    run = PixelBatches(pipe, labels, settings, seeds=range(len(labels)), batch_size=batch_size)
    for _ in run:
        pass
    return run
