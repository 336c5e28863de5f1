"""`arpg bench` measures speed on this machine; `arpg bench compare` compares two of its records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg import config as configs
from arpg.cli.options import (
    DeviceOption,
    KvCacheOption,
    Verb,
    VerbGroup,
    err,
    out,
    output_option,
    parse_values,
    with_axes,
)
from arpg.errors import one_of, require
from arpg.settings import SamplingDefaults

app = typer.Typer(cls=VerbGroup, help="Measure speed, memory and where the time goes.", invoke_without_command=True)

PLOT_FORMATS = (".png", ".svg", ".pdf")


@app.callback()
@with_axes("steps", "guidance", "order", "attention", "decode")
def bench(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="An installed name, a folder, a published name or a hub id; one or more."),
    ] = configs.DEFAULT_MODEL,
    random: Annotated[bool, typer.Option("--random", help="Random weights; presets are not downloaded then.")] = False,
    batch: Annotated[str, typer.Option(help="Batch size. One or more, like 1,8,64.")] = "",
    dtype: Annotated[
        str, typer.Option("--precision", help=f"One or more of {', '.join(configs.PRECISIONS)}.")
    ] = "auto",
    kv_cache_dtype: KvCacheOption = "auto",
    engine: Annotated[str, typer.Option(help=f"One or more of {', '.join(configs.ENGINES)}.")] = "auto",
    tokens: Annotated[str, typer.Option(help="Tokens of a square grid, like 64,256; default: the model's grid.")] = "",
    scaling: Annotated[bool, typer.Option("--scaling", help="Grow tokens and batch; fit the exponent.")] = False,
    max_seconds: Annotated[float, typer.Option(help="With --scaling: leave out rows that would take longer.")] = 120.0,
    repeats: Annotated[int, typer.Option(help="Batches that are timed.")] = 10,
    warmup: Annotated[int, typer.Option(help="Batches before them that are not timed.")] = 2,
    pixels: Annotated[bool, typer.Option(help="Also decode the tokens to pixels.")] = True,
    split: Annotated[bool, typer.Option(help="Also measure where the time goes, in a separate run.")] = True,
    profile: Annotated[bool, typer.Option("--profile", help="Also list the 20 most expensive kernels (GPU).")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Also time a fresh process up to its first image.")] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: the number of free cores.")] = None,
    device: DeviceOption = "auto",
    output: Annotated[Path, output_option("The JSON file to write.")] = Path("bench.json"),
    plot: Annotated[Path | None, typer.Option("--plot", help="Plot speed over steps and batch into this file.")] = None,
    *,
    axes: dict[str, list[Any]],
) -> None:
    """Measure throughput, latency, peak memory, time split and share of the roofline for all combinations."""
    if context.invoked_subcommand is not None:
        return
    names, dtypes = parse_values("model", model, str), parse_values("precision", dtype, str)
    require(bool(names), f"model is {model!r}; expected one or more names")
    for name in dtypes:
        one_of("precision", name, configs.PRECISIONS)
    engines = parse_values("engine", engine, str) or ["auto"]
    for name in engines:
        one_of("engine", name, configs.ENGINES)
    one_of("kv_cache_dtype", kv_cache_dtype, configs.KV_CACHE_DTYPES)
    batches, sizes = parse_values("batch", batch, int), parse_values("tokens", tokens, int)
    require(max_seconds > 0, f"max-seconds is {max_seconds}; expected seconds above 0")
    from arpg.image import check_writable

    for path in (output, *([plot] if plot else [])):
        check_writable(path)
    formats = ", ".join(PLOT_FORMATS)
    require(plot is None or plot.suffix in PLOT_FORMATS, f"{plot} does not end in one of {formats}")
    with err.status("loading"):
        from arpg.bench import record
        from arpg.bench.case import make_cases, open_pipeline, square_grid
        from arpg.bench.roofline import device_limits
        from arpg.bench.throughput import MeasureOptions, measure, measure_cold_start
        from arpg.device import set_threads
    options = MeasureOptions(repeats=repeats, warmup=warmup, pixels=pixels, split=split, top_kernels=profile)
    grids = [square_grid(size) for size in sizes]
    # Checks all settings before a model is loaded.
    make_cases("", SamplingDefaults(), grids=grids or [(64, 64)], batches=batches or [1], settings=axes)
    used = set_threads(threads)
    rows: list[dict[str, Any]] = []
    series: list[dict[str, Any]] = []
    starts: list[dict[str, Any]] = []
    about: dict[str, Any] = {}

    def measure_case(pipe: Any, case: Any) -> dict[str, Any]:
        """Measure a case, and write the record with its row: a later one may fail."""
        what = f"{case.model}, batch {case.batch}, {case.settings.steps} steps, {case.tokens} tokens ({len(rows) + 1})"
        with err.status(what):
            rows.append(measure(pipe, case, options, limits=partial(device_limits, pipe.model.device)))
        record.write_record(output, about, rows, scaling=series, cold=starts)
        return rows[-1]

    for name, precision, mode in itertools.product(names, dtypes or ["auto"], engines):
        with err.status(f"loading {name}"):
            opened = {"device": device, "dtype": precision, "kv_cache_dtype": kv_cache_dtype}
            pipe = open_pipeline(name, random=random, engine=mode, **opened)
        about = about or record.environment(pipe.model.device)
        label = f"{name} (random)" if random else name
        own = grids or [pipe.model.config.grid]
        if scaling:
            limits = (max_seconds, repeats + warmup)
            series += _measure_scaling(label, pipe, axes, (sizes, batches), partial(measure_case, pipe), limits)
        else:
            for case in make_cases(label, pipe.sampling, grids=own, batches=batches or [1], settings=axes):
                measure_case(pipe, case)
        if cold:
            # `auto` captures its graph only later; `graph` shows what capturing at the first image takes.
            modes = (mode, "graph") if mode == "auto" and pipe.engine.mode == "graph" else (mode,)
            fresh: dict[str, Any] = {"random": random, "threads": used, **opened}
            fresh["steps"] = axes["steps"][0] if axes["steps"] else None
            for each in modes:
                with err.status("a fresh process"):
                    start = measure_cold_start(name, **fresh, engine=each)
                starts.append({"model": label, "dtype": precision, "engine": each, **start})
        record.write_record(output, about, rows, scaling=series, cold=starts)
    out.print(record.render_rows(rows))
    for text in (record.render_kernels(rows), record.render_top_kernels(rows), record.render_scaling(series)):
        if text:
            out.print(text)
    for start in starts:
        out.print("cold: " + ", ".join(f"{name} {value}" for name, value in start.items()))
    plotted = plot is not None and record.plot_rows(rows, plot)
    out.print(f"{len(rows)} rows in {output}" + (f", plot in {plot}" if plotted else ""))


@app.command(cls=Verb)
def compare(
    before: Annotated[Path, typer.Argument(help="A record of `arpg bench`.")],
    after: Annotated[Path, typer.Argument(help="Another record.")],
    tolerance: Annotated[float, typer.Option(help="The share by which a number may be worse.")] = 0.05,
    fail: Annotated[bool, typer.Option("--fail", help="Exit with code 1 if something got slower.")] = False,
) -> None:
    """Print how many times better the second record is, row by row, and list what got slower."""
    from arpg.bench import record

    found = record.compare(record.read_record(before), record.read_record(after), tolerance=tolerance)
    out.print(record.render_comparison(found))
    if fail and found["slower"]:
        raise typer.Exit(1)


def _measure_scaling(
    label: str,
    pipe: Any,
    axes: dict[str, list[Any]],
    given: tuple[Sequence[int], Sequence[int]],
    measure_case: Callable[[Any], dict[str, Any]],
    limits: tuple[float, int],
) -> list[dict[str, Any]]:
    """Grow the tokens at the first batch size, then the batch at the model's own grid."""
    from arpg.bench.case import make_cases, square_grid
    from arpg.bench.throughput import SCALING_BATCHES, SCALING_TOKENS, measure_growing, summarize_scaling

    tokens, batches = (sorted(given[0]) or list(SCALING_TOKENS), sorted(given[1]) or list(SCALING_BATCHES))
    max_seconds, runs = limits
    first = {name: values[:1] for name, values in axes.items()}
    grids = [square_grid(n) for n in tokens]
    wide = make_cases(label, pipe.sampling, grids=grids, batches=batches[:1], settings=first)
    deep = make_cases(label, pipe.sampling, grids=[pipe.model.config.grid], batches=batches, settings=first)
    series = []
    for over, cases in (("tokens", wide), ("batch", deep)):
        size = attrgetter(over)
        found, left = measure_growing(cases, measure_case, size=size, max_seconds=max_seconds, batches=runs)
        series.append({"model": label, **summarize_scaling(over, found), "left out": [size(case) for case in left]})
    return series
