"""Exact decoding measured: calls, acceptance, time, class accuracy; beside one token at a time and block-wise steps.

    python -m experiments.garden exact --num 4 --device cpu --out exact-cpu.json
    python -m experiments.garden exact --num 136 --classifier runs/classifier --out exact-h200.json

A call is one Pass 1 and one Pass 2. The calls of an image are those until its last token is accepted, whatever else is
in the batch. Acceptance counts the drafts that were verified: those accepted, and the first of a call that was not.
Shapes: B images, N grid tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arpg import Pipeline, Plan, SamplingSettings, decode, make_plan, tasks
from arpg.device import synchronize
from arpg.evaluation.classifier import Classifier
from arpg.evaluation.sample import balanced_labels
from arpg.files import write_json
from arpg.image import to_uint8
from arpg.tables import markdown_table
from experiments.scorer_training import accuracy

log = logging.getLogger("garden")
PARTS = 6  # of an order, for the acceptance by place


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure exact and speculative decoding."""
    parser = argparse.ArgumentParser(prog="experiments.garden exact", description=main.__doc__)
    parser.add_argument("--model", default="garden")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num", type=int, default=136, help="Images per setting, in one batch.")
    parser.add_argument("--orders", nargs="+", default=["halton", "random", "local", "raster"])
    parser.add_argument("--drafts", nargs="+", type=int, default=[2, 4, 8, 16, 32])
    parser.add_argument("--steps", nargs="*", type=int, default=[12, 24, 48], help="Steps of block-wise decoding.")
    parser.add_argument("--guidance", type=float, help="Default: that of the model.")
    parser.add_argument("--classifier", type=Path, help="Folder of a classifier: adds class accuracy.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    pipe = Pipeline.from_pretrained(options.model, device=options.device, dtype=options.dtype)
    classifier = Classifier.load(options.classifier, device=pipe.model.device) if options.classifier else None
    bench = Bench(pipe, balanced_labels(options.num, len(pipe.classes)), classifier)

    exact = pipe.sampling.settings(decode="exact", guidance=options.guidance)
    num_tokens = pipe.model.config.grid[0] * pipe.model.config.grid[1]
    bench.warm_up(exact)
    for order in options.orders:
        exact = dataclasses.replace(exact, order=order)
        bench.run("one at a time", dataclasses.replace(exact, decode="steps", steps=num_tokens, schedule="arccos"))
        for draft in options.drafts:
            bench.run("exact", dataclasses.replace(exact, draft=draft))
        if order == options.orders[0]:
            for draft in options.drafts:
                bench.run("speculative", dataclasses.replace(exact, decode="speculative", draft=draft))
        for steps in options.steps:
            bench.run("block-wise", pipe.sampling.settings(steps=steps, order=order, guidance=options.guidance))

    cuda = pipe.model.device.type == "cuda"
    result = {
        "benchmark": "exact",
        "model": options.model,
        "tokens": num_tokens,
        "images": options.num,
        "guidance": exact.guidance,
        "classifier": options.classifier is not None,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "dtype": str(pipe.model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.perf_counter() - bench.began, 1),
        "rows": bench.rows,
    }
    if options.out:
        write_json(options.out, result)
    log.info("%s", table(result))


class Bench:
    def __init__(self, pipe: Pipeline, labels: Any, classifier: Classifier | None) -> None:
        self.pipe, self.labels, self.classifier = pipe, labels, classifier
        self.rows: list[dict[str, Any]] = []
        self.began = time.perf_counter()
        self._one_at_a_time: Tensor | None = None

    def warm_up(self, settings: SamplingSettings) -> None:
        self._decode(settings, len(self.labels))
        self._decode(settings, 1)

    def run(self, name: str, settings: SamplingSettings) -> None:
        plan, steps, seconds = self._decode(settings, len(self.labels))
        *_, alone = self._decode(settings, 1)
        known_TBN = torch.stack([step.known_BN for step in steps]).cpu().numpy()
        calls_B = 1 + (~known_TBN.all(2)).sum(0)
        row: dict[str, Any] = {
            "decoding": name,
            "order": settings.order,
            "draft": None if settings.decode == "steps" else settings.draft,
            "calls": round(float(calls_B.mean()), 2),
            "most calls": int(calls_B.max()),
            "passes": round(2 * float(calls_B.mean()), 2),
            "ms per image": round(1000 * seconds / len(self.labels), 2),
            "ms alone": round(1000 * alone, 1),
        }
        ids_BN = steps[-1].ids_BN
        if name == "one at a time":
            self._one_at_a_time = ids_BN
        elif self._one_at_a_time is not None:
            row["same images"] = round(float((ids_BN == self._one_at_a_time).all(1).float().mean()), 4)
        if settings.decode != "steps":
            row |= acceptance(known_TBN, plan, settings)
        if self.classifier is not None:
            row["top1"] = round(self._accuracy(ids_BN), 4)
        self.rows.append(row)

    def _decode(self, settings: SamplingSettings, num: int) -> tuple[Plan, list[Any], float]:
        """Return the plan, every step, and the seconds from the plan to the last token."""
        request = tasks.generate(self.pipe.model, self.labels[:num].tolist(), range(num))
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        synchronize(self.pipe.model.device)
        began = time.perf_counter()
        steps = list(decode(self.pipe.model, request, plan, settings))
        synchronize(self.pipe.model.device)
        return plan, steps, time.perf_counter() - began

    @torch.no_grad()
    def _accuracy(self, ids_BN: Tensor) -> float:
        assert self.classifier is not None
        grid = self.pipe.model.config.grid
        pixels = torch.cat([to_uint8(self.pipe.tokenizer.decode(part, grid)) for part in ids_BN.split(64)])
        return float(accuracy(self.classifier, pixels.cpu().numpy(), self.labels)["top1"])


def acceptance(known_TBN: Any, plan: Plan, settings: SamplingSettings) -> dict[str, Any]:
    """Return the share of drafted tokens that were accepted, over all and in each part of the order."""
    right, wrong = (np.zeros(known_TBN.shape[2]) for _ in range(2))
    for b, sample in enumerate(plan.samples):
        done_T = [0, *known_TBN[:, b, :].sum(1).tolist()]
        for t, (before, after) in enumerate(itertools.pairwise(done_T)):
            drafting = settings.decode == "speculative" and t % 2 == 0  # the first draft is right and never checked
            if after == before or drafting or t == 0:
                continue
            drafts = settings.draft - (settings.decode == "speculative")
            checked = min(drafts, len(sample.order) - before - 1)
            kept = after - before - 1
            right[before : before + kept] += 1
            if kept < checked:
                wrong[before + kept] += 1
    parts = zip(np.array_split(right, PARTS), np.array_split(wrong, PARTS), strict=True)
    share = [round(float(r.sum() / max(1, r.sum() + w.sum())), 3) for r, w in parts]
    return {"acceptance": round(float(right.sum() / max(1, (right + wrong).sum())), 3), "acceptance by place": share}


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    classified = result["classifier"]
    head = ["order", "decoding", "calls", "most", "accepted", "by place, first to last sixth", "ms/image", "ms alone"]
    head += ["same images"] + ["class accuracy"] * classified
    about = (
        f"{result['model']}, {result['tokens']} tokens, {result['images']} images of each, "
        f"guidance {result['guidance']}; {result['device']}, {result['dtype']}"
    )
    rows = []
    for row in result["rows"]:
        name = row["decoding"] if row["draft"] is None else f"{row['decoding']}, draft {row['draft']}"
        cells = [row["order"], name, f"{row['calls']:.1f}", str(row["most calls"])]
        cells += [f"{row['acceptance']:.0%}" if "acceptance" in row else ""]
        cells += [" ".join(f"{share:.0%}" for share in row.get("acceptance by place", []))]
        cells += [f"{row['ms per image']:.1f}", f"{row['ms alone']:.0f}"]
        cells += [f"{row['same images']:.0%}" if "same images" in row else ""]
        cells += [f"{row['top1']:.1%}"] if classified else []
        rows.append(cells)
    return f"{about}\n\n{markdown_table(head, rows)}"
