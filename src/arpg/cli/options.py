"""What the verbs share: consoles, progress bars, help, and options, which are made from the tables of settings."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from arpg.config import DEFAULT_CONTROL_MODEL, DEFAULT_MODEL, DEFAULT_TEXT_MODEL, ENGINES, KV_CACHE_DTYPES, PRECISIONS
from arpg.errors import InputError, one_of, present, require
from arpg.settings import SETTINGS, TASK_SETTINGS, SamplingDefaults

T = TypeVar("T")
Command = Callable[..., None]
ALL_SETTINGS = {**SETTINGS, **TASK_SETTINGS}
DEFAULTS: dict[str, Any] = {name: setting.default for name, setting in ALL_SETTINGS.items()}

# What is printed is plain text: file names may hold brackets and colons.
out = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)

# Former names of options, which still work and are not shown.
FORMER_NAMES = {
    "--out": "--output",
    "--json": "--output",
    "--map": "--output",
    "--dtype": "--precision",
    "--way": "--method",
    "--most": "--max-seconds",
    "--queue": "--max-pending-requests",
}


def _current_names(command: Any, args: list[str]) -> list[str]:
    """Return `args` with former names of options replaced where `command` has the current ones."""
    known = {name for param in command.params for name in param.opts}

    def rename(word: str) -> str:
        name, equals, value = word.partition("=")
        current = FORMER_NAMES.get(name, "")
        return current + equals + value if current in known and name not in known else word

    end = args.index("--") if "--" in args else len(args)
    return [*map(rename, args[:end]), *args[end:]]


def _escape_help(command: Any) -> Any:
    """Return a copy of `command` in whose help brackets are text, not markup for rich."""
    command = copy.copy(command)
    command.help = escape(command.help or "")
    command.params = [copy.copy(param) for param in command.params]
    for param in command.params:
        param.help = escape(getattr(param, "help", None) or "")
    if hasattr(command, "commands"):
        command.commands = {name: _escape_help(each) for name, each in command.commands.items()}
    return command


class _CommandLine:
    """What commands and groups share: options keep their former names, and help may hold brackets."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the command line, also with former names of options."""
        return super().parse_args(ctx, _current_names(self, args))  # type: ignore[misc]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, with brackets as they are."""
        super(_CommandLine, _escape_help(self)).format_help(ctx, formatter)  # type: ignore[misc]


class Verb(_CommandLine, TyperCommand):
    """A command of `arpg`."""


class VerbGroup(_CommandLine, TyperGroup):
    """A group of commands of `arpg`."""


def setting_help(name: str) -> str:
    """Return the help text of a setting, with its choices."""
    setting = ALL_SETTINGS[name]
    hint = setting.hint + (" (@FILE)" if name == "order" else "")
    return setting.help + (f" One of {', '.join(setting.names)}{hint}." if setting.choices else "")


def setting_option(name: str, *flags: str) -> Any:
    """Return the typer option of a setting; `flags` where they are not made from its name."""
    return typer.Option(*flags, help=setting_help(name))


def output_option(help: str) -> Any:
    """Return the typer option for what a command writes."""
    return typer.Option("--output", "-o", help=help)


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="An installed name, a folder, a published name or a hub id.")
]
AdaptedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help=f"An installed name, a folder, a published name or a hub id; none: that of --lora, or {DEFAULT_MODEL}.",
    ),
]
SeedOption = Annotated[int, setting_option("seed")]
BatchSizeOption = Annotated[int, setting_option("batch_size")]
GridOption = Annotated[str, typer.Option(metavar="HxW", help="Token grid, like 16x16.")]
ScheduleOption = Annotated[str | None, setting_option("schedule")]
LoraOption = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="FILE[:SCALE]", help="A LoRA adapter to merge into the weights (repeatable)."),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")]
PrecisionOption = Annotated[str, typer.Option("--precision", help=f"One of {', '.join(PRECISIONS)}.")]
KvCacheOption = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="Type of the key-value cache: auto, the type that the model computes in (16 bits with --precision fp8), "
        "or fp8, which takes half the memory.",
    ),
]
RayOption = Annotated[bool, typer.Option("--ray", help="Run on the Ray cluster of $RAY_ADDRESS, or on a local one.")]
WorkersOption = Annotated[
    int, typer.Option("--workers", help="Workers on Ray; 0: one per GPU, or per $OMP_NUM_THREADS cores.")
]
DepthModelOption = Annotated[
    str | None, typer.Option(help="Depth model: an .onnx file, or a model of transformers; none: FastDepth.")
]
EngineOption = Annotated[str, typer.Option(help=f"How the decode loop is executed: {', '.join(ENGINES)}.")]


@dataclass(frozen=True)
class SamplingOptions:
    """The options of every sampling verb; `settings` are those that were given."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help=f"A folder, a published name or a hub id; none: {DEFAULT_MODEL}, {DEFAULT_TEXT_MODEL} for prompts, "
            f"{DEFAULT_CONTROL_MODEL} for condition images.",
        ),
    ] = None
    lora: LoraOption = None
    seed: SeedOption = DEFAULTS["seed"]
    device: DeviceOption = "auto"
    dtype: PrecisionOption = "auto"
    kv_cache_dtype: KvCacheOption = "auto"
    engine: EngineOption = "auto"
    settings: dict[str, Any] = field(kw_only=True)

    def __post_init__(self) -> None:
        one_of("engine", self.engine, ENGINES)
        one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)

    def with_default_model(self, *, prompts: bool = False, control: bool = False) -> SamplingOptions:
        """Name the model where the user did not: the base of an adapter, or the default for the inputs."""
        require(
            self.model is not None or not (prompts and control),
            "no installed model takes a prompt and a condition image together; give a class instead, or name a model "
            "with --model",
        )
        default = DEFAULT_CONTROL_MODEL if control else DEFAULT_TEXT_MODEL if prompts else DEFAULT_MODEL
        return dataclasses.replace(self, model=choose_model(self.model, self.lora, default=default))

    def load(self) -> Any:
        """Load the pipeline."""
        return load_pipeline(self.model, lora=self.lora, **self.loading)

    @property
    def loading(self) -> dict[str, str]:
        """The options of `Pipeline.from_pretrained`."""
        names = ("device", "dtype", "engine", "kv_cache_dtype")
        return {name: getattr(self, name) for name in names}


def load_pipeline(
    model: str | None, *, default: str = DEFAULT_MODEL, lora: Sequence[str] | None = None, **options: Any
) -> Any:
    """Load a pipeline and its adapters, with a spinner meanwhile; none named: an adapter's base, or `default`."""
    with err.status("loading"):
        from arpg.device import set_threads
        from arpg.lora import parse_lora
        from arpg.pipeline import load_with_adapters

        set_threads()
        adapters = [parse_lora(text) for text in lora or ()]
        return load_with_adapters(choose_model(model, lora, default=default), adapters, **options)


def choose_model(model: str | None, lora: Sequence[str] | None, *, default: str = DEFAULT_MODEL) -> str:
    """Return the model to load; none named: an adapter's base, or `default`."""
    if model is not None or not lora:
        return model or default
    from arpg.lora import parse_lora, read_adapter

    return read_adapter(parse_lora(lora[0])[0]).config.base or default


def ray_options(ray: bool, workers: int) -> Any:
    """Return where workers run: None for this process."""
    require(ray or workers == 0, f"--workers is {workers}, which needs --ray")
    if not ray:
        return None
    from arpg.device import set_threads
    from arpg.executor import RayOptions

    return RayOptions(workers, set_threads())


def with_sampling_options(command: Command) -> Command:
    """Give a command the options of every sampling verb; its parameter `sampling` receives `SamplingOptions`."""

    def option(name: str) -> Any:
        return typer.Option(help=setting_help(name), show_default="the model's", rich_help_panel="Sampling")

    settings = [
        make_parameter(name, Annotated[setting.kind | None, option(name)], None) for name, setting in SETTINGS.items()
    ]
    return add_options(command, add_options(SamplingOptions, _read_settings, "settings", more=settings), "sampling")


def with_axes(*names: str) -> Callable[[Command], Command]:
    """Give a command an option with several values for each named setting; its parameter `axes` receives the lists."""

    def read(**texts: str) -> dict[str, list[Any]]:
        return {name: parse_values(name, text, SETTINGS[name].kind) for name, text in texts.items()}

    def decorate(command: Command) -> Command:
        parameters = []
        for name in names:
            choices = ", ".join(SETTINGS[name].names)
            values = f"One or more of {choices}." if choices else "One or more values, with commas."
            option = typer.Option(help=f"{SETTINGS[name].help} {values}")
            parameters.append(make_parameter(name, Annotated[str, option], ""))
        return add_options(command, read, "axes", more=parameters)

    return decorate


def add_options(
    command: Callable[..., T], options: Callable[..., Any], name: str, *, more: Sequence[inspect.Parameter] = ()
) -> Callable[..., T]:
    """Replace the parameter `name` of a command by those of `options`; it receives what `options` returns.

    `more` are parameters that `options` takes as keywords and does not name.
    """
    own = [p for p in _parameters(command) if p.name != name]
    shared = [*more, *_parameters(options)]

    def run(**values: Any) -> T:
        return command(**{name: options(**{p.name: values.pop(p.name) for p in shared})}, **values)

    required = [p for p in own if p.default is p.empty]
    optional = [p for p in own if p.default is not p.empty]
    every = [*required, *optional, *shared]
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in every}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


class RateColumn(ProgressColumn):
    """Images per second."""

    def render(self, task: Task) -> Text:
        """Return the rate of `task` as text; empty until it is known."""
        return Text(f"{task.speed:.1f} images/s" if task.speed else "")


@contextmanager
def progress_bar(what: str, *, rate: bool = False, active: bool = True) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar on the terminal, with `rate` also images per second; yield `progress(done, total)`, which moves it."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    shown = [*columns, *([RateColumn()] if rate else [])]
    hidden = not active or not err.is_terminal
    with Progress(*shown, console=err, transient=True, disable=hidden, speed_estimate_period=300) as bar:
        task = bar.add_task(what, total=None)
        started = False

        def progress(done: int, total: int | None) -> None:
            nonlocal started
            if not started:  # what an earlier run did says nothing about the speed of this one
                bar.reset(task, total=total, completed=done)
                started = True
            bar.update(task, completed=done, total=total)

        yield progress


def parse_grid(text: str) -> tuple[int, int]:
    """Parse HEIGHTxWIDTH in tokens."""
    match = present(
        re.fullmatch(r"(\d+)x(\d+)", text), f"grid is {text!r}; expected HEIGHTxWIDTH in tokens, like 16x16"
    )
    height, width = int(match[1]), int(match[2])
    require(1 <= height <= 1024 and 1 <= width <= 1024, f"grid is {text}; expected sides from 1 to 1024")
    return height, width


def parse_schedule(text: str | None) -> str | tuple[int, ...] | None:
    """Parse the name of a schedule, or the number of tokens of each step, like 16,48,80."""
    if text is None or not re.fullmatch(r"\d+(,\d+)*", text):
        return text
    return tuple(int(size) for size in text.split(","))


def parse_order(text: str | None) -> str | tuple[int, ...] | None:
    """Parse the name of an order, or @FILE: a text file with the raster position of every token."""
    if text is None or not text.startswith("@"):
        return text
    path = Path(text[1:])
    require(path.is_file(), f"order is {text!r}, but there is no file {path}; expected one with the positions as text")
    words = path.read_bytes().decode("utf-8", "replace").strip().strip("[]").replace(",", " ").split()
    wrong = next((word for word in words if not word.isascii() or not word.isdigit()), None)
    require(wrong is None, f"{path} has {wrong!r} in it; expected whole numbers with spaces or commas between them")
    return tuple(map(int, words))


def parse_values(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Parse several values with commas between them."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{name} is {text!r}; expected {expected} with commas, like 8,12,24") from None


def _read_settings(**settings: Any) -> dict[str, Any]:
    settings["order"] = parse_order(settings["order"])
    settings["schedule"] = parse_schedule(settings["schedule"])
    SamplingDefaults().settings(**settings)  # bad settings fail before the model is loaded
    return settings


def make_parameter(name: str, annotation: Any, value: Any) -> inspect.Parameter:
    """Return a keyword parameter with a default, for `add_options`."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the named parameters of a function, keyword-only, with their annotations resolved."""
    if hasattr(function, "__signature__"):  # made, not written
        return list(inspect.signature(function).parameters.values())
    hints = get_type_hints(function, include_extras=True)
    named = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in named]
