"""Measure the rows that the engine is held to on an NVIDIA H200, each with its bar and its goal.

    python benchmarks/engine.py
    python benchmarks/engine.py --rows "L, 32 steps" "VQ-16" --minutes 8 --again
    python benchmarks/engine.py --rows "L, 32 steps, to pixels" --switch pixel_graphs --out pixel-graphs.json
    python benchmarks/engine.py --table --write
    python benchmarks/engine.py --table --out after.json --against before.json
    python benchmarks/engine.py --host

Each row is written as soon as it is measured; rows that are in the file already are skipped, unless they failed or
--again is given. Weights are random: speed does not depend on them. All rows are bf16 (but fp8), guided, batch 64, 256
tokens and without pixels, unless they say otherwise; the tokenizer is on the device. A sustained row goes on for a
minute, when clocks and temperatures have settled. Memory is that of another row's measurement: peak is what was in use
and what captured graphs hold, reserved all that torch's allocator has taken of the device. --table only prints;
--write puts the table into docs/performance/results.md; --against shows another record beside this one. --like FOLDER
runs all rows at a small size with that model's configuration. --switch measures each row twice, with a field of
`KernelPolicy` off and on. --host needs no GPU: it prints the CPU time of one batch before its graph is replayed, as the
least of many repeats.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from arpg import ARPG, SamplingSettings, make_plan, tasks
from arpg.bench.case import Case, open_pipeline
from arpg.bench.record import commit, environment, error_line
from arpg.bench.roofline import device_limits, pixel_work
from arpg.bench.throughput import MeasureOptions, measure, time_pipelined
from arpg.config import MODELS
from arpg.decode.engine import check, make_strategy, pad_to_bucket
from arpg.decode.graphs import graph_key
from arpg.decode.state import PlannedSteps, to_device
from arpg.device import choose_device, set_threads, synchronize
from arpg.files import write_json, write_text
from arpg.kernels.dispatch import KernelPolicy, kernel_policy
from arpg.pipeline import Pipeline
from arpg.tables import fill_page, markdown_table, significant

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "engine-h200.json"
PAGE = ROOT / "docs" / "performance" / "results.md"
REPEATS, WARMUP = 10, 3
POLICY = KernelPolicy()
SWITCHES = list(asdict(POLICY))
HOST_BATCHES, HOST_REPEATS = (1, 64), 500


@dataclass(frozen=True)
class Row:
    """What is measured, the bar it must reach, and the goal."""

    name: str
    bar: float
    goal: float | None = None
    model: str = "arpg-l"
    precision: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    batch: int = 64
    steps: int = 32
    side: int = 16  # tokens
    pixels: bool = False
    value: str = "token images/s"  # of `arpg bench`'s row; or `p50 ms`, `peak GiB`, `reserved GiB`
    only_pixels: bool = False  # the tokenizer alone
    seconds: float = 0.0  # how long it goes on at least, after the batches of other rows
    of: str = ""  # the row whose measurement it shows
    policy: KernelPolicy = POLICY

    @property
    def unit(self) -> str:
        return "images/s" if self.value.endswith("images/s") else self.value.split()[-1]

    @property
    def less(self) -> bool:
        """Whether a lower value is better."""
        return self.unit != "images/s"


ROWS = (
    Row("L, 32 steps", 1300, 1550),
    Row("L, 32 steps, sustained for 60 s", 1300, 1550, seconds=60),
    Row("L, 64 steps", 820, 950, steps=64),
    Row("L, batch 1, 32 steps: latency", 11, 8, batch=1, value="p50 ms"),
    Row("L, batch 4, 32 steps: latency", 20, 16, batch=4, value="p50 ms"),
    Row("L, batch 8, 32 steps: latency", 21, 16, batch=8, value="p50 ms"),
    Row("L, 32 steps, to pixels", 770, 900, pixels=True, value="images/s"),
    Row("VQ-16 decode, 256 px", 1900, 2300, only_pixels=True, value="images/s"),
    Row("L, 32 steps: peak memory", 2.5, 2.3, value="peak GiB", of="L, 32 steps"),
    Row("L, 32 steps: reserved memory", 3.2, value="reserved GiB", of="L, 32 steps"),
    Row("L, 32 steps, fp8", 1650, 2000, precision="fp8"),
    Row("L, 32 steps, fp8 with fp8 cache", 1650, 2000, precision="fp8", kv_cache_dtype="fp8"),
    Row("XL, 32 steps", 640, 760, model="arpg-xl"),
    Row("XL, 512 px, 64 steps", 95, 150, model="arpg-xl", steps=64, side=32),
    Row("XXL, 32 steps", 380, 430, model="arpg-xxl"),
)


def small(row: Row, folder: str) -> Row:
    """Return the row with that folder's configuration, small enough for any machine."""
    batch, steps = min(row.batch, 2), min(row.steps, 4)
    return replace(row, model=folder, batch=batch, steps=steps, side=row.side // 4, seconds=row.seconds / 300)


def is_named(row: Row, text: str) -> bool:
    """Whether the text is the row's name, or the beginning of it and no other row's name."""
    return row.name == text or (row.name.startswith(text) and all(other.name != text for other in ROWS))


def switched(row: Row, field: str) -> tuple[Row, Row]:
    """Return the row with a field of its kernel policy off and on."""
    off, on = (replace(row.policy, **{field: value}) for value in (False, True))
    return replace(row, name=f"{row.name}, without {field}", policy=off), replace(row, policy=on)


class Bench:
    """Measures rows. It keeps the pipeline of the last row, which the next one may share."""

    def __init__(self, device: str, repeats: int) -> None:
        self.device, self.repeats = choose_device(device), repeats
        self._open: tuple[tuple[str, str, str, KernelPolicy], Pipeline] | None = None

    def pipeline(self, row: Row) -> Pipeline:
        precision = row.precision if self.device.type == "cuda" else "auto"
        what = (row.model, precision, row.kv_cache_dtype, row.policy)
        if self._open is None or self._open[0] != what:
            self.close()
            options = {"dtype": what[1], "kv_cache_dtype": what[2]}
            engine = "graph" if self.device.type == "cuda" else "auto"
            opened = open_pipeline(row.model, random=True, device=str(self.device), engine=engine, **options)
            self._open = (what, opened)
        return self._open[1]

    def close(self) -> None:
        self._open = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure(self, row: Row) -> dict[str, Any]:
        """Return `value` and the whole row of `arpg bench`."""
        with kernel_policy(row.policy):
            return self._measure(row)

    def _measure(self, row: Row) -> dict[str, Any]:
        pipe = self.pipeline(row)
        grid = (row.side, row.side)
        if row.only_pixels:
            return self._pixels(pipe, row, grid)
        settings = pipe.sampling.settings(steps=row.steps, guidance=4.0)
        case = Case(f"{row.model} (random)", row.batch, settings, grid)
        on_gpu = self.device.type == "cuda"
        options = MeasureOptions(repeats=self.repeats, warmup=WARMUP, pixels=row.pixels, top_kernels=on_gpu)
        found = measure(pipe, case, options, limits=lambda dtype: device_limits(self.device, dtype))
        if row.seconds:
            batches = math.ceil(row.seconds * found[row.value] / row.batch)
            took = time_pipelined(pipe, case, batches, pixels=row.pixels)
            found |= {row.value: significant(row.batch * batches / took), "batches timed": batches}
        return {"value": _flat(found)[row.value], "roofline": _roofline(row, found), **found}

    @torch.no_grad()
    def _pixels(self, pipe: Pipeline, row: Row, grid: tuple[int, int]) -> dict[str, Any]:
        """Time decoding of given tokens to pixels, batch after batch."""
        tokenizer = pipe.graphed_tokenizer
        ids_BN = torch.randint(tokenizer.config.codebook_size, (row.batch, row.side**2)).to(self.device)
        for _ in range(WARMUP):
            tokenizer.decode(ids_BN, grid)
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(self.repeats):
            tokenizer.decode(ids_BN, grid)
        synchronize(self.device)
        found: dict[str, Any] = {"value": round(row.batch * self.repeats / (time.perf_counter() - began), 1)}
        if (limits := device_limits(self.device, torch.bfloat16)) is not None:
            found["roofline"] = round(row.batch / limits.seconds(pixel_work(tokenizer.config, grid, row.batch, 2)), 1)
        return found


def _flat(found: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `arpg bench` with its percentiles beside the other values."""
    return {**found, **{f"{name} ms": value for name, value in found.get("latency ms", {}).items()}}


def _roofline(row: Row, found: dict[str, Any]) -> float | None:
    """Return the roofline in images/s: of the tokens, or of tokens and pixels together, which share the device."""
    names = ["roofline token images/s", *(["roofline pixel images/s"] if row.pixels else [])]
    if row.unit != "images/s" or not all(name in found for name in names):
        return None
    return round(1 / sum(float(1 / found[name]) for name in names), 1)


@torch.no_grad()
def host_times(model: ARPG, batch: int, repeats: int) -> dict[str, float]:
    """Return the milliseconds of CPU time of each part from the labels of a batch to the key of its graph."""
    settings = SamplingSettings(steps=32, guidance=4.0)
    found: dict[str, float] = {}
    for i in range(repeats):
        times = {"": time.process_time()}
        seeds = range(i * batch, (i + 1) * batch)
        request = tasks.generate(model, [seed % model.config.num_classes for seed in seeds], seeds)
        times["request"] = time.process_time()
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        times["plan"] = time.process_time()
        check(model, request, plan)
        times["check"] = time.process_time()
        request, plan = pad_to_bucket(request, plan)
        strategy = make_strategy(request, plan, settings, model.device)
        assert isinstance(strategy, PlannedSteps)
        times["cursor"] = time.process_time()
        state = to_device(model, request, guided=plan.guided, ragged=strategy.ragged)
        times["state"] = time.process_time()
        graph_key(state, strategy.cursor, settings, every_step=False)
        times["graph key"] = time.process_time()
        edges = list(times.values())
        parts = dict(zip(list(times)[1:], (b - a for a, b in itertools.pairwise(edges)), strict=True))
        parts["all"] = edges[-1] - edges[0]
        found = {name: min(1000 * part, found.get(name, math.inf)) for name, part in parts.items()}
    return found


def host_table(device: torch.device) -> str:
    """Return a Markdown table of `host_times` with ARPG-L's configuration; one layer each, which none of it needs."""
    set_threads(1)  # CPU time counts all of them
    config = replace(MODELS["arpg-l"], pass1_layers=1, pass2_layers=1)
    model = ARPG(config).init_weights(seed=0).eval().to(device)
    found = {batch: host_times(model, batch, HOST_REPEATS) for batch in HOST_BATCHES}
    rows = [[f"batch {batch}", *(f"{part:.2f}" for part in parts.values())] for batch, parts in found.items()]
    return markdown_table(["CPU ms", *found[HOST_BATCHES[0]]], rows)


def reached(row: Row, value: float, wanted: float) -> float:
    """Return the share of `wanted` that `value` reaches."""
    return wanted / value if row.less else value / wanted


def value_of(row: Row, record: dict[str, Any]) -> float | None:
    """Return what the record has for a row; None: it was not measured."""
    found = record["rows"].get(row.of or row.name, {})
    value: float | None = _flat(found).get(row.value) if row.of else found.get("value")
    return value


def table(record: dict[str, Any]) -> str:
    """Return a Markdown table of what was reached, the bars and the goals."""
    rows = []
    for row in ROWS:
        found, value = record["rows"].get(row.of or row.name, {}), value_of(row, record)
        shown, shares, share = found.get("error", "-").replace("|", "/"), ["", ""], ""
        if value is not None:
            shares = ["" if x is None else f"{100 * reached(row, value, x):.0f}%" for x in (row.bar, row.goal)]
            shown = f"**{value:,.4g}**" if reached(row, value, row.bar) >= 1 else f"{value:,.4g}"
            shown += f" {row.unit}"
            if row.unit == "images/s" and found.get("roofline"):
                share = f"{100 * value / found['roofline']:.0f}%"
        goal = "" if row.goal is None else f"{row.goal:g}"
        rows.append([row.name, shown, f"{row.bar:g}", shares[0], goal, shares[1], share])
    return markdown_table(["", "reached", "bar", "of it", "goal", "of it", "of the roofline"], rows)


def comparison(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return a Markdown table of two records and how many times better the second is; a dash: not measured."""
    rows = []
    for row in ROWS:
        values = [value_of(row, record) for record in (before, after)]
        old, new = values
        gain = "-" if old is None or new is None else f"{reached(row, new, old):.3f}"
        rows.append([f"{row.name}, {row.unit}", *("-" if x is None else f"{x:,.4g}" for x in values), gain])
    return markdown_table(["", "before", "after", "times as good"], rows)


def page_part(record: dict[str, Any]) -> str:
    """Return the tables with the hardware, the versions and the commits of their numbers."""
    if not record["rows"]:
        return "Not measured yet.\n"
    where = record["where"]
    commits = sorted({str(found["commit"]) for found in record["rows"].values() if found.get("commit")})
    about = f"{where['device']}, torch {where['torch']}" + (f", commit {', '.join(commits)}" if commits else "")
    kernels = _kernels(record)
    return f"{about}. Bold: the bar is reached.\n\n{table(record)}" + (f"\n{kernels}" if kernels else "")


def _kernels(record: dict[str, Any]) -> str:
    """Return a table of the time of a batch's tokens by kind of kernel, and of the time to capture the graph."""
    found = {row.name: each for row in ROWS if "kernels ms" in (each := record["rows"].get(row.name, {}))}
    if not found:
        return ""
    parts = list(next(iter(found.values()))["kernels ms"])
    rows = []
    for name, each in found.items():
        captured = f"{each['capture']['s']} s" if "capture" in each else ""
        cells = [*(f"{each['kernels ms'].get(part, 0):.4g}" for part in parts), f"{each['kernels']:,}", captured]
        rows.append([name, *cells])
    return markdown_table(["ms", *parts, "kernels", "captured in"], rows)


def read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"benchmark": "engine", "where": {}, "rows": {}}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(rows: Sequence[Row], bench: Bench, path: Path, *, minutes: float, again: bool) -> dict[str, Any]:
    """Measure the rows that are not in the file yet; begin none after so many minutes."""
    record, deadline = read(path), time.monotonic() + 60 * minutes
    where = environment(bench.device)
    if record["where"].get("device") not in (None, where["device"]):
        raise SystemExit(f"{path} is from {record['where']['device']}, this is {where['device']}; choose another --out")
    record["where"] = where
    for row in rows:
        if not again and "value" in record["rows"].get(row.name, {}):
            say(f"{row.name}: in the file already")
            continue
        if time.monotonic() > deadline:
            say(f"{row.name}: no time left; run it again to go on")
            continue
        began = time.monotonic()
        try:
            found = bench.measure(row)
        except Exception as error:  # the other rows are still measured
            found = {"error": error_line(error)}
        if "error" in found:
            bench.close()
        goal = "" if row.goal is None else f", goal {row.goal:g}"
        found |= {"bar": row.bar, "goal": row.goal, "unit": row.unit, "commit": commit()}
        found["seconds taken"] = round(time.monotonic() - began, 1)
        record["rows"][row.name] = found
        write_json(path, record)
        shown = found.get("error") or f"{found['value']:g} {row.unit} (bar {row.bar:g}{goal})"
        say(f"{row.name}: {shown}, {found['seconds taken']} s")
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", help="Only rows whose names begin with one of these.")
    parser.add_argument("--minutes", type=float, default=30.0, help="Begin no row after this many minutes.")
    parser.add_argument("--again", action="store_true", help="Also measure rows that are in the file already.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--like", metavar="FOLDER", help="Run small rows with that model's configuration.")
    parser.add_argument("--switch", choices=SWITCHES, help="Measure each row with it off and on.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="Measure nothing.")
    parser.add_argument("--against", type=Path, metavar="FILE", help="Another record, to show before this one.")
    parser.add_argument("--host", action="store_true", help="Measure the CPU time before a graph is replayed, only.")
    parser.add_argument("--write", action="store_true", help="Put the table into docs/performance/results.md.")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.host:
        say(host_table(choose_device(options.device)))
        return
    named = [row for row in ROWS if not options.rows or any(is_named(row, text) for text in options.rows)]
    chosen = [row for row in ROWS if not row.of and row.name in {each.of or each.name for each in named}]
    if not chosen:
        parser.error(f"no row begins with {' or '.join(options.rows)}; there are {'; '.join(row.name for row in ROWS)}")
    if options.table:
        record = read(options.out)
    else:
        wanted = [small(row, options.like) for row in chosen] if options.like else chosen
        if options.switch:
            if options.out == RESULTS:
                parser.error("--switch compares two engines; give another --out")
            wanted = [each for row in wanted for each in switched(row, options.switch)]
        bench = Bench(options.device, options.repeats)
        if bench.device.type != "cuda" and not options.like:
            parser.error("there is no GPU; --like FOLDER --out FILE runs small rows")
        if options.like and options.out == RESULTS:
            parser.error("--like does not measure the engine; give another --out")
        record = run(wanted, bench, options.out, minutes=options.minutes, again=options.again)
    say("\n" + page_part(record))
    if options.against:
        say(comparison(read(options.against), record))
    if options.write:
        page = fill_page(options.page.read_text(encoding="utf-8"), {"engine": page_part(record)})
        write_text(options.page, page)


if __name__ == "__main__":
    main()
