"""Tables, figures and verdicts from measured lines, beside what the paper reports.

    python -m experiments.paper report --lines runs/paper/results/lines --out docs/results/paper.md

We agree with a claim where the whole 95 % interval is on its side, contradict it where the whole interval
is on the other, and otherwise cannot tell. What was not measured says so; every number comes from a line or from
`quoted.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from arpg.config import MODELS
from arpg.evaluation.sample import json_settings
from arpg.figures import new_plot, save_plot
from arpg.files import write_text
from arpg.settings import SamplingSettings
from arpg.tables import markdown_table
from experiments.paper.lines import Line, matching, read_lines
from experiments.paper.queue import FIRST_GUIDANCE
from experiments.paper.rows import designs, fine_tuned_orders, peers, sizes

KEPT = Path(__file__).parent / "results"  # lines that are in the repository
QUOTED = json.loads((Path(__file__).parent / "quoted.json").read_text(encoding="utf-8"))
AGREES, CONTRADICTS, UNSURE, MISSING = "agrees", "contradicts", "cannot tell", "not measured"
NARROWLY, ONE_TRAINING = ", narrowly", ", one training"
# 97.5 % quantiles of Student's t by degrees of freedom, from 1 on; more than 10 use the last.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
SUBJECT = "meadow"  # the model that the claims of `block-causal` and `few-steps` are about (`--model meadow`)


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval. `trainings`: of each model; with one, the interval is that of these models."""

    value: float
    low: float
    high: float
    trainings: int | None = None  # None: the number does not depend on a training

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def verdict(found: Estimate | None, *, at_least: float | None = None, at_most: float | None = None) -> str:
    """Compare an interval with a claim: the number is at least, or at most, so much."""
    assert (at_least is None) != (at_most is None)
    if found is None:
        return MISSING
    if at_least is not None:
        return AGREES if found.low >= at_least else CONTRADICTS if found.high < at_least else UNSURE
    assert at_most is not None
    return AGREES if found.high <= at_most else CONTRADICTS if found.low > at_most else UNSURE


def mean_of(lines: list[Line], name: str) -> Estimate | None:
    """Return the mean of a measured number over sampling seeds, then over trainings; the interval is that of the mean.

    With two trainings or more it is Student's, from the variance between trainings, but no narrower than the noise of
    sampling.
    """
    if not lines:
        return None
    by_training: dict[int, list[Line]] = {}
    for line in lines:
        by_training.setdefault(line.get("training seed", 0), []).append(line)
    means = [float(np.mean([line[name] for line in some])) for some in by_training.values()]
    noises = [
        math.hypot(*((line[f"{name} interval"][1] - line[f"{name} interval"][0]) / 2 for line in some)) / len(some)
        for some in by_training.values()
    ]
    value, half, count = float(np.mean(means)), math.hypot(*noises) / len(means), len(means)
    if count > 1:
        student = STUDENT_95[min(count - 1, len(STUDENT_95)) - 1]
        half = max(half, student * float(np.std(means, ddof=1)) / math.sqrt(count))
    return Estimate(value, value - half, value + half, count)


def less(a: Estimate | None, b: Estimate | None) -> Estimate | None:
    """Return a - b of independent estimates."""
    if a is None or b is None:
        return None
    half, value = math.hypot(*((x.high - x.low) / 2 for x in (a, b))), a.value - b.value
    trainings = min((x.trainings for x in (a, b) if x.trainings is not None), default=None)
    return Estimate(value, value - half, value + half, trainings)


def fid_difference(lines: list[Line], a: str, b: str) -> Estimate | None:
    """Return FID of row `a` less that of row `b`, whose samples are independent."""
    return less(mean_of(matching(lines, row=a), "fid"), mean_of(matching(lines, row=b), "fid"))


def rate_ratio(a: Line | None, b: Line | None) -> Estimate | None:
    """Return images per second of `a` over those of `b`, with the range of the timed batches."""
    if a is None or b is None:
        return None
    return Estimate(a["images/s"] / b["images/s"], a["range"][0] / b["range"][1], a["range"][1] / b["range"][0])


@dataclass(frozen=True)
class Claim:
    """What the paper says, and what of our lines answers it."""

    text: str
    paper: str
    ours: Callable[[list[Line]], Estimate | None]
    at_least: float | None = None
    at_most: float | None = None

    def row(self, lines: list[Line]) -> list[str]:
        """Return the cells of the claim: text, the paper's number, ours, verdict."""
        found = self.ours(lines)
        answer = verdict(found, at_least=self.at_least, at_most=self.at_most)
        bound = self.at_least if self.at_most is None else self.at_most
        if found is not None and answer != UNSURE and abs(found.value - (bound or 0.0)) < found.high - found.low:
            answer += NARROWLY
        if found is not None and found.trainings == 1:
            answer += ONE_TRAINING
        return [self.text, self.paper, "" if found is None else str(found), answer]


def one(lines: list[Line], **key: Any) -> Line | None:
    """Return the first line with these values, or None."""
    return next(iter(matching(lines, **key)), None)


def _design(name: str) -> Callable[[list[Line]], Estimate | None]:
    """FID of a design less that of the even split."""

    def difference(lines: list[Line]) -> Estimate | None:
        return fid_difference(matching(lines, table="designs", measure="quality"), name, "12+12")

    return difference


def _shared_kv(lines: list[Line]) -> Estimate | None:
    """Images per second of the even split over those with a key-value projection per layer."""
    speed = matching(lines, table="designs", measure="speed", batch=64)
    return rate_ratio(one(speed, row="12+12"), one(speed, row="unshared KV"))


def _speedup(other: str, other_steps: int | None) -> Callable[[list[Line]], Estimate | None]:
    """Images per second of ARPG in 32 steps over those of a peer."""

    def ratio(lines: list[Line]) -> Estimate | None:
        speed = matching(lines, table="peers", measure="speed", batch=64)
        theirs = matching(speed, row=other) if other_steps is None else matching(speed, row=other, steps=other_steps)
        return rate_ratio(one(speed, row="ARPG", steps=32), theirs[0] if theirs else None)

    return ratio


def _memory(other: str, other_steps: int) -> Callable[[list[Line]], Estimate | None]:
    """Peak memory of ARPG in 32 steps over that of a peer."""

    def ratio(lines: list[Line]) -> Estimate | None:
        speed = matching(lines, table="peers", measure="speed", batch=64)
        ours, theirs = one(speed, row="ARPG", steps=32), one(speed, row=other, steps=other_steps)
        if ours is None or theirs is None:
            return None
        share = ours["GiB"] / theirs["GiB"]
        return Estimate(share, share, share)

    return ratio


def paired(lines: list[Line], steps: int) -> Estimate | None:
    """Return the mean over sampling seeds and trainings of FID block-wise less causal, with the interval of `mean_of`.

    Of `SUBJECT` alone: other models, as the even split of `designs`, have lines of their own.
    """
    return mean_of(matching(lines, table="block-causal", row=SUBJECT, measure="paired", steps=steps), "difference")


def all_sizes(lines: list[Line]) -> list[Line] | None:
    """Return the lines of `scaling` by the number of parameters; None before all sizes are measured."""
    found = matching(lines, table="scaling", measure="quality", seed=0)
    return sorted(found, key=lambda line: line["parameters"]) if len(found) == len(EXPECTED["scaling"]) else None


def larger_is_better(lines: list[Line]) -> Estimate | None:
    """Return the least share of logged steps at which a larger model has the lower loss, over neighbouring sizes."""
    found = all_sizes(lines)
    if found is None:
        return None
    curves = [dict(map(tuple, line["losses"]["loss"])) for line in found]
    shares = []
    for small, large in itertools.pairwise(curves):
        common = sorted(set(small) & set(large))
        shares.append(float(np.mean([large[step] < small[step] for step in common])))
    return Estimate(min(shares), min(shares), min(shares), trainings=1)


def _attention(lines: list[Line], row: str, name: str) -> Estimate | None:
    line = one(lines, table="attention", row=row)
    if line is None:
        return None
    low, high = line[f"{name} interval"]
    return Estimate(line[name], low, high, trainings=1)


def _tuned(lines: list[Line], **key: Any) -> Estimate | None:
    """FID after the fine-tune on its own orders, less that after one of the same length on random orders."""
    return fid_difference(matching(lines, table="orders", **key), "own orders", "random orders")


def _distilled(lines: list[Line], steps: int) -> Estimate | None:
    found = matching(lines, table="guidance", measure="quality", steps=steps)
    return fid_difference(found, "distilled guidance", "two passes")


def _distilled_speed(lines: list[Line], steps: int) -> Estimate | None:
    found = matching(lines, table="guidance", measure="speed", steps=steps, batch=64)
    return rate_ratio(one(found, row="distilled guidance"), one(found, row="two passes"))


def _block_wise(steps: int, paper: str) -> Claim:
    text = f"block-wise attention is better at {steps} steps"
    return Claim(text, paper, lambda lines: paired(lines, steps), at_most=0.0)


CLAIMS = [
    Claim("without Pass 2, random orders fail", "FID > 90 against 3.51", _design("24+0, random orders"), at_least=10.0),
    Claim("no Pass 1 (0+24) is worse than 12+12", "4.57 against 3.51", _design("0+24"), at_least=0.0),
    Claim("fewer Pass-2 layers (18+6) are worse than 12+12", "3.82 against 3.51", _design("18+6"), at_least=0.0),
    Claim("more Pass-2 layers (6+18) are no better than 12+12", "3.51 against 3.51", _design("6+18"), at_least=0.0),
    Claim("keys and values of each layer's own are better", "3.46 against 3.51", _design("unshared KV"), at_most=0.0),
    Claim("cosine positions are worse than RoPE", "3.61 against 3.51", _design("cosine positions"), at_least=0.0),
    Claim("shared keys and values are faster", "67.5 against 48.0 images/s", _shared_kv, at_least=1.0),
    Claim(
        "30 times as fast as raster AR (32 steps against 256)",
        "55.3 against 1.58 images/s (XXL; 576 tokens in raster order)",
        _speedup("raster AR", None),
        at_least=30.0,
    ),
    Claim(
        "3 times as fast as parallel peers (32 steps against 64 with interleaved positions)",
        "130 against 25.3 images/s (RandAR-L, 88 steps)",
        _speedup("interleaved positions", 64),
        at_least=3.0,
    ),
    _block_wise(16, "2.67 against 3.51"),
    _block_wise(32, "2.30 against 2.69"),
    _block_wise(64, "2.37 against 2.59"),
    Claim(
        "less memory than raster AR (32 steps against 256)",
        "2.78 against 10.23 GB (LlamaGen-L)",
        _memory("raster AR", 256),
        at_most=1.0,
    ),
    Claim(
        "less memory than parallel peers (32 steps against 64 with interleaved positions)",
        "2.78 against 7.32 GB (RandAR-L)",
        _memory("interleaved positions", 64),
        at_most=1.0,
    ),
    Claim(
        "75 % less memory than VAR (32 steps against 10 scales)",
        "2.78 against 10.85 GB (VAR-d16)",
        _memory("next scale", 10),
        at_most=0.25,
    ),
    Claim("a larger model has a lower loss at every step", "7.50, 7.29, 7.03", larger_is_better, at_least=1.0),
    Claim(
        "[MASK]s of a coupled decoder receive less than an even share of attention",
        "Figure 3",
        lambda lines: _attention(lines, "interleaved positions", "masks: on masks"),
        at_most=1.0,
    ),
    Claim(
        "attention of Pass 2 is more even than that of a coupled decoder",
        "Figures 3 and 11",
        lambda lines: less(
            _attention(lines, "ARPG", "pass2: evenness"), _attention(lines, "interleaved positions", "masks: evenness")
        ),
        at_least=0.0,
    ),
]

# Beyond the paper: what we ask ourselves, with the same kind of verdict.
QUESTIONS = [
    *(
        Claim(
            f"a fine-tune on its own orders is better than on random ones at {steps} steps, in confident order",
            "",
            partial(_tuned, measure="quality", steps=steps, order="confident"),
            at_most=0.0,
        )
        for steps in (8, 12)
    ),
    Claim(
        "it inpaints in random order as well as one on random orders (FID at most 1 higher)",
        "",
        lambda lines: _tuned(lines, measure="inpainting"),
        at_most=1.0,
    ),
    Claim(
        "distilled guidance is as good as a second pass at 24 steps (FID at most 1 higher)",
        "",
        lambda lines: _distilled(lines, 24),
        at_most=1.0,
    ),
    Claim(
        "distilled guidance is 1.5 times as fast as a second pass at 24 steps, batch 64",
        "",
        lambda lines: _distilled_speed(lines, 24),
        at_least=1.5,
    ),
]


def exponent(lines: list[Line]) -> float | None:
    """Return the exponent of final loss over parameters, fitted through the sizes on logarithmic axes."""
    found = all_sizes(lines)
    if found is None:
        return None
    sizes = np.log([line["parameters"] for line in found])
    losses = np.log([line["losses"]["loss"][-1][1] for line in found])
    return float(np.polyfit(sizes, losses, 1)[0])


EXPECTED: dict[str, list[str]] = {
    "designs": [row.name for row in designs()],
    "peers": [row.name for row in peers()],
    "scaling": [row.name for row in sizes()],
    "steps": list(MODELS),
    "block-causal": [SUBJECT],
    "few-steps": [SUBJECT],
    "orders": [row.name for row in fine_tuned_orders()],
    "guidance": ["two passes", "distilled guidance"],
    "attention": ["ARPG", "interleaved positions"],
}
SEARCHES = ("guidance", "search")  # measures that are not shown: what settings were chosen by
COLUMNS = (
    *("row", "steps", "seed", "training seed", "order", "samples"),
    *("fid", "fid block", "fid causal", "guidance block", "guidance causal", "difference"),
    *("accuracy", "bits per token", "parameters"),
    *("training samples", "loss", "validation loss", "settings"),
    *("pass1: evenness", "pass2: evenness", "masks: evenness", "tokens: evenness"),
    *("masks: on masks", "tokens: on masks", "pass1: low", "pass2: low", "masks: low", "tokens: low"),
)
Column = tuple[str, dict[str, Any], str]  # heading, the values of the lines it shows, the number of such a line
MEMORY = ("GiB", "GiB reserved")
SPEED_COLUMNS: tuple[Column, ...] = (
    ("images/s", {"batch": 64}, "images/s"),
    ("one image, ms", {"batch": 1}, "seconds per batch"),
    *((name, {"batch": 64}, name) for name in MEMORY),
)
STEPS_COLUMNS: tuple[Column, ...] = tuple(
    (f"{heading}{what}", {"attention": attention, "pixels": pixels}, name)
    for pixels, what in ((False, ""), (True, ", to pixels"))
    for heading, attention, name in (
        *((f"images/s {attention}", attention, "images/s") for attention in ("block", "causal")),
        *((name, "block", name) for name in MEMORY),
    )
)


def speed_table(lines: list[Line], table: str) -> str:
    """Return speed and peak memory as Markdown, one line for each row and number of steps."""
    columns = STEPS_COLUMNS if table == "steps" else SPEED_COLUMNS
    rows = []
    for row, steps in dict.fromkeys((line["row"], line["steps"]) for line in lines):
        cells: list[str | None] = [row, str(steps)]
        for _, values, name in columns:
            line = one(lines, row=row, steps=steps, **values) or {}
            number = line.get(name)
            scale = 1000 if name == "seconds per batch" else 1  # shown in ms
            cells.append(None if number is None else f"{scale * number:,.4g}")
        rows.append(cells)
    return markdown_table(["row", "steps", *(heading for heading, _, _ in columns)], rows)


def measured_table(lines: list[Line], table: str) -> str:
    """Return the measured rows as Markdown, one part for each measure, and name the rows that are missing."""
    chosen = [line for line in matching(lines, table=table) if line["measure"] not in SEARCHES]
    rows_in_order = list(dict.fromkeys(line["row"] for line in chosen))
    chosen.sort(key=lambda line: (rows_in_order.index(line["row"]), line.get("steps", 0)))  # stable: seeds as measured
    largest = largest_searched(lines, table)
    found, parts = [_shown(line, largest) for line in chosen], []
    for measure in dict.fromkeys(line["measure"] for line in found):
        some = matching(found, measure=measure)
        if measure == "speed":
            parts.append(speed_table(some, table))
            continue
        shown = [name for name in COLUMNS if any(name in line for line in some)]
        parts.append(markdown_table(shown, [[_cell(line, name, largest) for name in shown] for line in some]))
    rows = {line["row"] for line in found}
    if missing := [name for name in EXPECTED[table] if name not in rows]:
        what = "" if not rows else f": {'; '.join(missing)}"
        parts.append(f"Not measured yet{what} (`python -m experiments.paper {table}`).\n")
    return "\n".join(parts)


def searched_table(lines: list[Line]) -> str:
    """Return FID of the orders and schedules that few steps were searched with, by steps, as Markdown."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    lines = matching(lines, table="few-steps", row=SUBJECT, measure="search")
    fewest = min((line["samples"] for line in lines), default=0)
    for line in matching(lines, samples=fewest):
        settings = line["settings"]
        if (settings["guidance_schedule"], settings["guidance"]) == ("linear", FIRST_GUIDANCE):
            found.setdefault((settings["order"], settings["schedule"]), {})[line["steps"]] = line["fid"]
    steps = sorted({each for fids in found.values() for each in fids})
    rows = [[*name, *(f"{fids[s]:.1f}" if s in fids else None for s in steps)] for name, fids in found.items()]
    about = f"FID of {fewest} samples by order, schedule and number of steps, linear guidance {FIRST_GUIDANCE:g}:\n\n"
    return about + markdown_table(["order", "schedule", *map(str, steps)], rows) if rows else ""


def paired_table(lines: list[Line]) -> str:
    """Return the mean difference of block-wise and causal attention by steps, as Markdown."""
    steps = sorted({line["steps"] for line in matching(lines, table="block-causal", row=SUBJECT, measure="paired")})
    if not steps:
        return ""
    about = (
        "FID block-wise less causal, each at the best guidance scale of its search, mean of seeds and trainings, 95% "
        "interval:\n\n"
    )
    found = [(each, paired(lines, each)) for each in steps]
    rows = [[str(each), str(mean), str(mean.trainings)] for each, mean in found if mean is not None]
    return about + markdown_table(["steps", "difference", "trainings"], rows)


def scales_table(lines: list[Line]) -> str:
    """Return FID of both attentions at the same guidance scales, from the searches of `block-causal`, as Markdown."""
    lines = matching(lines, table="block-causal", row=SUBJECT, measure="search", **{"training seed": 0})
    fewest = min((line["samples"] for line in lines), default=0)
    found: dict[tuple[int, str], dict[float, float]] = {}
    for line in matching(lines, samples=fewest):
        settings = line["settings"]
        found.setdefault((line["steps"], settings["attention"]), {})[settings["guidance"]] = line["fid"]
    scales = sorted({scale for fids in found.values() for scale in fids})
    rows = [
        [str(steps), attention, *(f"{fids[s]:.1f}" if s in fids else None for s in scales)]
        for (steps, attention), fids in sorted(found.items())
    ]
    about = f"FID of {fewest} samples by guidance scale (the search; few samples have a higher FID):\n\n"
    return about + markdown_table(["steps", "attention", *map(str, scales)], rows) if rows else ""


def _shown(line: Line, largest: Mapping[str, float]) -> Line:
    """Return a line with its final losses, and its settings as one text: those that are not the defaults."""
    losses = {name: curve[-1][1] for name, curve in line.get("losses", {}).items() if curve}
    if losses:
        losses["training samples"] = line["losses"]["loss"][-1][0]  # of the training, equal for all rows of a table
    settings = line.get("settings")
    if settings is None:
        return {**line, **losses}
    plain, shape = json_settings(SamplingSettings()), settings["guidance_schedule"]
    chosen = [
        f"{name.replace('_', ' ')} {_scale(value, largest[shape]) if name == 'guidance' else value}"
        for name, value in settings.items()
        if name != "steps" and value != plain[name]
    ]
    return {**line, **losses, "settings": ", ".join(chosen)}


def largest_searched(lines: list[Line], table: str) -> Mapping[str, float]:
    """Return the largest guidance scale that was searched for a table, by guidance schedule; infinity: none was."""
    found: defaultdict[str, float] = defaultdict(lambda: math.inf)
    for line in matching(lines, table=table, measure="search"):
        shape, scale = line["settings"]["guidance_schedule"], line["settings"]["guidance"]
        found[shape] = max(found.get(shape, scale), scale)
    return found


def _scale(value: float, largest: float) -> str:
    """Return a guidance scale as text, marked where it is the largest that was searched: the best may be larger."""
    return f"{value} (largest searched)" if value == largest else str(value)


def _cell(line: Line, name: str, largest: Mapping[str, float]) -> str | None:
    if name not in line:
        return None
    value = line[name]
    if name.startswith("guidance"):  # of `block-causal`, which is linear
        return _scale(value, largest["linear"])
    text = (
        f"{value:.4g}" if isinstance(value, float) else f"{value / 1e6:.1f} M" if name == "parameters" else str(value)
    )
    if f"{name} interval" in line:
        low, high = line[f"{name} interval"]
        text += f" ({low:.4g} to {high:.4g})"
    return text


def quoted_table(name: str) -> str:
    """Return a quoted table of the paper as Markdown."""
    rows = QUOTED[name]
    columns = list(rows[0])
    return markdown_table(columns, [[None if row[c] is None else str(row[c]) for c in columns] for row in rows])


SECTIONS = (
    ("Designs (Table 5)", "designs", "table 5: designs"),
    ("Peers (Table 2)", "peers", "table 2: peers"),
    ("Scaling (Figure 10)", "scaling", None),
    ("Steps, attention and size (Table 8)", "steps", "table 8: parallel decoding"),
    ("Block-wise against causal attention", "block-causal", None),
    ("Few steps", "few-steps", None),
    ("Orders of highest confidence", "orders", None),
    ("Guidance as an input", "guidance", None),
    ("Attention (Figures 3 and 11)", "attention", None),
)
SUMMARIES = {"block-causal": (paired_table, scales_table), "few-steps": (searched_table,)}
INTRODUCTION = """\
The paper compares models that were trained differently. Here all models of a table share the layers, training data
(that of `meadow`: photographs of 225 classes, 128 x 128 pixels, 256 tokens), optimizer, seed and number of steps.
`experiments/paper/README.md` describes the runs; `python -m experiments.paper report` writes this page.

- FID is against the training split, with weights in 8 bits, at the best guidance scale of a search with other seeds.
  "Largest searched": the best one was the end of the range, so a larger one may be better.
- Speed and memory are measured on one NVIDIA H200 in bfloat16, guided, with random weights: tokens of 64 images at the
  size of ARPG-L, unless a table says otherwise. GiB is the peak of what was allocated, reserved what torch had taken
  from the GPU. All rows run in this project's engine (the same kernels, CUDA graphs), while the paper times each model
  in the code of its authors, LlamaGen with 576 tokens. So the ratios here are those of the methods alone: "contradicts"
  means that a ratio is not reached in one engine, not that the paper's measurement is wrong. Tables were measured in
  different runs, which differ by up to 7% for the same row; compare rows of one table.
- "Ours" is a difference of FIDs, the first design named less the other (negative: a lower FID), a ratio of images/s,
  or a ratio of peak GiB.
- A verdict is "agrees" or "contradicts" if the whole 95% interval is on one side of the claim, else "cannot tell".
  "Narrowly": the distance to the bound is less than the width of the interval; more seeds are needed.
- "One training": each model was trained once. The interval covers the noise of sampling, not the differences between
  trainings with other seeds, so the verdict is about these models only. With more trainings the interval is Student's,
  from the variance between trainings."""


def page(lines: list[Line], figures: Mapping[str, str]) -> str:
    """Return the page: verdicts, then each table beside the paper's. What is not measured yet says so.

    `figures`: the file of the loss curves of a table.
    """
    text = ["# The paper's tables on photographs", "", INTRODUCTION, ""]
    text += [f"{_unfilled(lines)} Quoted: {QUOTED['source']}; {QUOTED['hardware']}.", ""]
    headings = ["claim", "paper", "ours (95% interval)", "verdict"]
    text += ["## Claims", "", markdown_table(headings, [claim.row(lines) for claim in CLAIMS])]
    text += [
        _trained(lines),
        "The VAR-like peer (next scale) has speed and memory only: training it would need a tokenizer of all scales.",
        "",
    ]
    asked = [[row[0], *row[2:]] for row in (claim.row(lines) for claim in QUESTIONS)]
    text += ["Beyond the paper:", "", markdown_table(["question", *headings[2:]], asked)]
    if (fitted := exponent(lines)) is not None:
        text += ["", f"Final loss falls with the number of parameters to the power {fitted:.3f}.", ""]
    for title, table, quoted in SECTIONS:
        text += [f"## {title}", "", measured_table(lines, table)]
        text += [made for make in SUMMARIES.get(table, ()) if (made := make(lines))]
        if table in figures:
            text += [f"![Validation losses of the rows over training images]({figures[table]})", ""]
        if quoted is not None:
            text += ["The paper's:", "", quoted_table(quoted)]
        if table == "peers":
            given = QUOTED["authors' code on an H200"]
            text += [f"The authors' code ({given['hardware']}), images/s:", "", _given_table(given)]
            text += ["Their ARPG beside ours in one run: [Results](../performance/results.md#the-authors-code).", ""]
    return "\n".join(text).rstrip() + "\n"


def _unfilled(lines: list[Line]) -> str:
    """Say how much of the page is filled."""
    claims = [*CLAIMS, *QUESTIONS]
    answered = sum(claim.ours(lines) is not None for claim in claims)
    tables = [table for _, table, _ in SECTIONS if not matching(lines, table=table)]
    if not lines:
        return "Nothing has been measured yet."
    empty = f"; not measured yet: {', '.join(tables)}" if tables else ""
    return f"{answered} of {len(claims)} claims and questions are answered{empty}."


def _trained(lines: list[Line]) -> str:
    """Say how long the rows were trained, beside the paper's models."""
    found = {line["losses"]["loss"][-1][0] for line in lines if line.get("losses", {}).get("loss")}
    if not found:
        return ""
    theirs, images = QUOTED["training images of table 5"], " or ".join(f"{each:,}" for each in sorted(found))
    return (
        f"Each row saw {images} images in training, {max(found) / theirs:.1%} of the {theirs / 1e6:.0f} million (150 "
        "epochs of ImageNet) of the paper's Table 5. Claims about quality are answered for models trained this long.\n"
    )


def _given_table(given: dict[str, Any]) -> str:
    rows = [[name, " to ".join(map(str, dict.fromkeys(rate)))] for name, rate in given["images/s"].items()]
    return markdown_table(["model", "images/s"], rows)


def curves(lines: list[Line], table: str) -> dict[str, list[list[float]]]:
    """Return the validation losses of the trained rows of a table: pairs of training images and loss."""
    found = matching(lines, table=table, measure="quality", seed=0)
    curve_of = {line["row"]: line.get("losses", {}).get("validation loss", []) for line in found}
    return {row: curve for row, curve in curve_of.items() if curve}


def draw_curves(curve_of: Mapping[str, list[list[float]]], path: Path) -> bool:
    """Plot losses over training images; return whether they were drawn."""
    figure = new_plot((9, 4.5), file=path.name)
    if figure is None:
        return False
    axes = figure.subplots()
    for row, curve in curve_of.items():
        axes.plot(*zip(*curve, strict=True), label=row, linewidth=1.3)
    axes.set_xlabel("training images")
    axes.set_ylabel("validation loss")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    save_plot(figure, path)
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and the figures of measured lines."""
    parser = argparse.ArgumentParser(prog="experiments.paper report", description=main.__doc__)
    parser.add_argument("--lines", type=Path, default=KEPT, help="A folder.")
    parser.add_argument("--out", type=Path, required=True, help="The Markdown page to write.")
    options = parser.parse_args(arguments)
    lines, figures = read_lines(options.lines), {}
    for _, table, _ in SECTIONS:
        path = options.out.with_name(f"{options.out.stem}-{table}.png")
        if (found := curves(lines, table)) and draw_curves(found, path):
            figures[table] = path.name
    write_text(options.out, page(lines, figures))
