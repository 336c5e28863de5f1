"""`arpg bench`: how fast it is here; `arpg bench compare`: what became faster or slower between two records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg import config as configs
from arpg import settings as settings_table
from arpg.cli.options import DeviceOption, err, out, parse_values
from arpg.errors import one_of, require
from arpg.image import check_writable

app = typer.Typer(help="Measure speed, memory and where the time goes.", invoke_without_command=True)


@app.callback()
def bench(
    context: typer.Context,
    model: Annotated[
        str, typer.Option("--model", "-m", help="garden, a folder, a published name or a hub id; or several.")
    ] = configs.DEFAULT_MODEL,
    random: Annotated[bool, typer.Option("--random", help="Random weights: of a preset nothing is fetched.")] = False,
    batch: Annotated[str, typer.Option(help="Images at once; values to combine, like 1,8,64.")] = "",
    steps: Annotated[str, typer.Option(help="Decoding steps, like 12,24.")] = "",
    dtype: Annotated[
        str,
        typer.Option("--precision", "--dtype", help=f"Of {', '.join(configs.PRECISIONS)}."),
    ] = "auto",
    engine: Annotated[str, typer.Option(help=f"Of {', '.join(configs.ENGINES)}.")] = "auto",
    guidance: Annotated[str, typer.Option(help="Guidance scales, like 1,4; 1 turns it off.")] = "",
    order: Annotated[str, typer.Option(help=f"Of {', '.join(settings_table.ORDERS)}.")] = "",
    attention: Annotated[str, typer.Option(help=f"Of {', '.join(settings_table.ATTENTIONS)}.")] = "",
    decode: Annotated[str, typer.Option(help=f"Of {', '.join(settings_table.DECODES)}.")] = "",
    tokens: Annotated[str, typer.Option(help="Tokens of a square grid, like 64,256; none: the model's grid.")] = "",
    scaling: Annotated[bool, typer.Option("--scaling", help="Let tokens and batch grow; fit the exponent.")] = False,
    most: Annotated[float, typer.Option(help="Seconds that a growing row may take; larger ones are left out.")] = 120.0,
    repeats: Annotated[int, typer.Option(help="Batches that are timed.")] = 10,
    warmup: Annotated[int, typer.Option(help="Batches before that.")] = 2,
    pixels: Annotated[bool, typer.Option(help="Also make the pixels.")] = True,
    split: Annotated[bool, typer.Option(help="Also measure where the time goes, in a run of its own.")] = True,
    profile: Annotated[bool, typer.Option("--profile", help="Also the 20 kernels that take longest (GPU).")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Also time a fresh process, to its first image.")] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads; none: as many as there are free cores.")] = None,
    device: DeviceOption = "auto",
    output: Annotated[Path, typer.Option("--out", "-o", help="The JSON file to write.")] = Path("bench.json"),
    picture: Annotated[Path | None, typer.Option("--plot", help="A picture of speed over steps and batch.")] = None,
) -> None:
    """Throughput, latency, peak memory, time split and share of the roofline, for every combination of settings."""
    if context.invoked_subcommand is not None:
        return
    names, dtypes = parse_values("model", model, str), parse_values("precision", dtype, str)
    require(bool(names), f"model is {model!r}; expected one or more names")
    for name in dtypes:
        one_of("precision", name, configs.PRECISIONS)
    engines = parse_values("engine", engine, str) or ["auto"]
    for name in engines:
        one_of("engine", name, configs.ENGINES)
    settings: dict[str, list[Any]] = {
        "steps": parse_values("steps", steps, int),
        "guidance": parse_values("guidance", guidance, float),
        "order": parse_values("order", order, str),
        "attention": parse_values("attention", attention, str),
        "decode": parse_values("decode", decode, str),
    }
    batches, sizes = parse_values("batch", batch, int), parse_values("tokens", tokens, int)
    require(most > 0, f"most is {most}; expected seconds above 0")
    for path in (output, *([picture] if picture else [])):
        check_writable(path)
        require(not path.is_dir(), f"{path} is a folder; expected the name of a file")
    kinds = (".png", ".svg", ".pdf")
    require(picture is None or picture.suffix in kinds, f"{picture} does not end in one of {', '.join(kinds)}")
    with err.status("loading"):
        from arpg.bench import cold as fresh
        from arpg.bench import record, report
        from arpg.bench.case import make_cases, open_pipeline, square
        from arpg.bench.throughput import Effort
        from arpg.device import set_threads
    effort = Effort(repeats=repeats, warmup=warmup, pixels=pixels, split=split, top=profile)
    grids = [square(size) for size in sizes]
    make_cases(
        "", settings_table.SamplingDefaults(), grids=grids or [(64, 64)], batches=batches or [1], settings=settings
    )
    used = set_threads(threads)
    rows: list[dict[str, Any]] = []
    series: list[dict[str, Any]] = []
    starts: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for name, kind, way in itertools.product(names, dtypes or ["auto"], engines):
        with err.status(f"loading {name}"):
            pipe = open_pipeline(name, random=random, device=device, dtype=kind, engine=way)
        about = about or record.environment(pipe.model.device)
        label = f"{name} (random)" if random else name
        own = grids or [pipe.model.config.grid]
        cases = make_cases(label, pipe.sampling, grids=own, batches=batches or [1], settings=settings)
        measured = _measurer(pipe, effort, len(cases))
        if scaling:
            found, grown = _scale(label, pipe, settings, (sizes, batches), measured, (most, repeats + warmup))
            series += grown
        else:
            found = [measured(case) for case in cases]
        rows += [row for row in found if row not in rows]
        if cold:
            at_once = way == "auto" and pipe.engine.mode == "graph"  # auto records later; tell also what that takes
            options: dict[str, Any] = {"random": random, "device": device, "dtype": kind, "threads": used}
            options["steps"] = settings["steps"][0] if settings["steps"] else None
            for each in (way, "graph") if at_once else (way,):
                with err.status("a fresh process"):
                    start = fresh.cold_start(name, **options, engine=each)
                starts.append({"model": label, "dtype": kind, "engine": each, **start})
        record.write_record(output, about, rows, scaling=series, cold=starts)
    out.print(report.table(rows), markup=False)
    for text in (report.kernel_table(rows), report.top_kernels(rows), report.scaling_text(series)):
        if text:
            out.print(text, markup=False)
    for start in starts:
        out.print("cold: " + ", ".join(f"{name} {value}" for name, value in start.items()), markup=False)
    drawn = picture is not None and report.plot(rows, picture)
    out.print(f"{len(rows)} rows in {output}" + (f", picture in {picture}" if drawn else ""), markup=False)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A record of `arpg bench`.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    tolerance: Annotated[float, typer.Option(help="By how much a number may be worse before it is named.")] = 0.05,
    fail: Annotated[bool, typer.Option("--fail", help="Exit with code 1 if something got slower.")] = False,
) -> None:
    """Print how many times better the second record is, row by row, and say what got slower."""
    from arpg.bench import record, report

    found = record.compare(record.read_record(before), record.read_record(after), tolerance=tolerance)
    out.print(report.comparison(found), markup=False)
    if fail and found["slower"]:
        raise typer.Exit(1)


def _measurer(pipe: Any, effort: Any, total: int) -> Callable[[Any], dict[str, Any]]:
    from arpg.bench.roofline import device_limits
    from arpg.bench.throughput import measure

    done = 0

    def measured(case: Any) -> dict[str, Any]:
        nonlocal done
        done += 1
        settings = case.settings
        with err.status(f"{case.model}, batch {case.batch}, {settings.steps} steps, {case.tokens} tokens ({done})"):
            return measure(pipe, case, effort, limits=lambda dtype: device_limits(pipe.model.device, dtype))

    return measured


def _scale(
    label: str,
    pipe: Any,
    settings: dict[str, list[Any]],
    given: tuple[Sequence[int], Sequence[int]],
    measured: Callable[[Any], dict[str, Any]],
    effort: tuple[float, int],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tokens grow at the first batch size, then the batch grows at the model's own grid."""
    from arpg.bench.case import make_cases, square
    from arpg.bench.scaling import BATCHES, TOKENS, grow, summary

    tokens, batches = (sorted(given[0]) or list(TOKENS), sorted(given[1]) or list(BATCHES))
    first = {name: values[:1] for name, values in settings.items()}
    wide = make_cases(label, pipe.sampling, grids=[square(n) for n in tokens], batches=batches[:1], settings=first)
    deep = make_cases(label, pipe.sampling, grids=[pipe.model.config.grid], batches=batches, settings=first)
    rows: list[dict[str, Any]] = []
    series = []
    for over, cases in (("tokens", wide), ("batch", deep)):
        found, left = grow(cases, measured, size=attrgetter(over), most=effort[0], batches=effort[1])
        rows += found
        series.append({"model": label, **summary(over, found), "left out": [getattr(case, over) for case in left]})
    return rows, series
