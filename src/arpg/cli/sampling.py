"""The options that every verb which samples has, added to its signature; it gets them as one argument."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, get_type_hints

import typer

from arpg import config as configs
from arpg import settings as settings_table
from arpg.cli.console import DeviceOption, EngineOption, PrecisionOption, ScheduleOption, err, parse_schedule
from arpg.errors import one_of, require

Order = Enum("Order", {name: name for name in settings_table.ORDERS}, type=str)  # type: ignore[misc]
GuidanceSchedule = Enum("GuidanceSchedule", {name: name for name in settings_table.GUIDANCE_SCHEDULES}, type=str)  # type: ignore[misc]
Decode = Enum("Decode", {name: name for name in settings_table.DECODES}, type=str)  # type: ignore[misc]
Attention = Enum("Attention", {name: name for name in settings_table.ATTENTIONS}, type=str)  # type: ignore[misc]


@dataclass(frozen=True)
class Sampling:
    """What the options say: the model, the seed, and the settings that were given."""

    model: str
    named: bool  # or is the model what is taken where none is named?
    seed: int
    device: str
    dtype: str
    engine: str
    settings: dict[str, Any]

    def asked(self, *, prompts: bool = False, control: bool = False) -> Sampling:
        """For prompts or a condition image, where no model is named: with the one in the box that takes them."""
        require(
            self.named or not (prompts and control),
            "no model in the box takes a prompt and a condition image together; give a class instead, or name a model "
            "with --model",
        )
        in_the_box = configs.DEFAULT_CONTROL_MODEL if control else configs.DEFAULT_TEXT_MODEL
        return dataclasses.replace(self, model=in_the_box) if (prompts or control) and not self.named else self

    def load(self) -> Any:
        with err.status("loading"):
            from arpg.device import set_threads
            from arpg.pipeline import Pipeline

            set_threads()
            return Pipeline.from_pretrained(self.model, device=self.device, dtype=self.dtype, engine=self.engine)


def _options(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A folder, a published name, a hub id; none: garden, garden-text for prompts, garden-control for "
            "condition images.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Decoding steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; 1 turns it off.")] = None,
    guidance_schedule: Annotated[GuidanceSchedule | None, typer.Option(help="How guidance grows.")] = None,
    order: Annotated[Order | None, typer.Option(help="In which order the tokens are filled.")] = None,
    schedule: ScheduleOption = None,
    attention: Annotated[Attention | None, typer.Option(help="Do the tokens of a step see each other?")] = None,
    decode: Annotated[Decode | None, typer.Option(help="In planned steps, or exactly as one by one.")] = None,
    draft: Annotated[int | None, typer.Option(help="Tokens that exact decoding guesses ahead.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely codes.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Only the most likely codes that reach this share.")] = None,
    seed: Annotated[int, typer.Option(help="Image i has seed SEED + i.")] = 0,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
    engine: EngineOption = "auto",
) -> Sampling:
    given = {
        "steps": steps,
        "guidance": guidance,
        "guidance_schedule": guidance_schedule,
        "order": order,
        "attention": attention,
        "decode": decode,
        "draft": draft,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    settings = {name: value.value if isinstance(value, Enum) else value for name, value in given.items()}
    settings["schedule"] = parse_schedule(schedule)
    settings_table.SamplingDefaults().settings(**settings)  # bad settings fail before the model is loaded
    one_of("engine", engine, configs.ENGINES)
    return Sampling(model or configs.DEFAULT_MODEL, model is not None, seed, device, dtype, engine, settings)


def samples(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the sampling options; its last parameter, `sampling`, receives what they say."""
    return add_options(command, _options, "sampling")


def add_options(command: Callable[..., None], options: Callable[..., Any], name: str) -> Callable[..., None]:
    """Give a command the parameters of `options` instead of its parameter `name`, which receives what that returns."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != name]
    shared = list(inspect.signature(options).parameters.values())

    def run(**values: Any) -> None:
        command(**{name: options(**{p.name: values.pop(p.name) for p in shared})}, **values)

    hints = {**get_type_hints(command, include_extras=True), **get_type_hints(options, include_extras=True)}
    required = [p for p in own if p.default is p.empty]
    optional = [p for p in own if p.default is not p.empty]
    parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in (*required, *optional, *shared)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: hints[p.name] for p in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run
