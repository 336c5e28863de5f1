"""`arpg generate` and `arpg plan`."""

from __future__ import annotations

import dataclasses
import json
import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg import config as configs
from arpg.cli.console import (
    DeviceOption,
    GridOption,
    ScheduleOption,
    err,
    out,
    parse_grid,
    parse_schedule,
    progress_bar,
)

Order = Enum("Order", {name: name for name in configs.ORDERS}, type=str)  # type: ignore[misc]
GuidanceSchedule = Enum("GuidanceSchedule", {name: name for name in configs.GUIDANCE_SCHEDULES}, type=str)  # type: ignore[misc]
Attention = Enum("Attention", {name: name for name in configs.ATTENTIONS}, type=str)  # type: ignore[misc]


def generate(
    class_: Annotated[list[str], typer.Option("--class", "-c", help="Class name or id; give it once per class.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="garden, a folder, a published name or a hub id.")
    ] = configs.DEFAULT_MODEL,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="An image (a sheet), or a folder (one file each).")
    ] = Path("out.png"),
    num: Annotated[int, typer.Option("--num", "-n", help="Images of each class.")] = 4,
    steps: Annotated[int | None, typer.Option(help="Decoding steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; 1 turns it off.")] = None,
    guidance_schedule: Annotated[GuidanceSchedule | None, typer.Option(help="How guidance grows.")] = None,
    order: Annotated[Order | None, typer.Option(help="In which order the tokens are filled.")] = None,
    schedule: ScheduleOption = None,
    attention: Annotated[Attention | None, typer.Option(help="Do the tokens of a step see each other?")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely codes.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Only the most likely codes that reach this share.")] = None,
    seed: Annotated[int, typer.Option(help="Image i has seed SEED + i.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Images decoded together; does not change them.")] = 32,
    device: DeviceOption = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Generate images of classes. What is not given is the model's own recommendation."""
    from arpg.decode import Step
    from arpg.image import check_output, save, sheet

    folder = output.is_dir() or not output.suffix
    check_output(output, folder=folder)
    settings: dict[str, Any] = {
        "steps": steps,
        "guidance": guidance,
        "guidance_schedule": _value(guidance_schedule),
        "order": _value(order),
        "schedule": parse_schedule(schedule),
        "attention": _value(attention),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    configs.SamplingDefaults().settings(**settings)  # bad settings fail before the model is loaded
    pipe = _load_pipeline(model, device, dtype)
    requests = pipe.requests(class_, num_images=num, seed=seed, batch_size=batch_size, **settings)
    resolved = requests[0][1]
    with progress_bar() as progress:
        task = progress.add_task("generating", total=None)

        def advance(step: Step) -> None:
            progress.update(task, advance=1, total=len(requests) * step.num_steps)

        images = pipe.generate(class_, num_images=num, seed=seed, batch_size=batch_size, on_step=advance, **settings)
    labels = [pipe.classes.find(name) for name in class_ for _ in range(num)]
    about = {"model": model, **dataclasses.asdict(resolved)}
    if folder:
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            name = re.sub(r"[^a-z0-9]+", "-", pipe.classes.name(label).lower()).strip("-")
            text = json.dumps({**about, "class": label, "seed": seed + i})
            save(image, output / f"{i:05d}-{name}-seed{seed + i}.png", about=text)
        out.print(f"{len(images)} images in {output}/")
    else:
        text = json.dumps({**about, "classes": labels, "seed": seed})
        save(sheet(images, columns=num if min(num, len(class_)) > 1 else None), output, about=text)
        out.print(f"{len(images)} images in {output}")


def plan(
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write.")] = Path("plan.png"),
    grid: GridOption = "16x16",
    steps: Annotated[int, typer.Option(help="Decoding steps.")] = 32,
    schedule: ScheduleOption = None,
    seed: Annotated[int, typer.Option(help="For the orders that depend on one.")] = 0,
) -> None:
    """Draw in which step each token is decoded, for every order. Needs no model."""
    from arpg.image import check_output, save
    from arpg.plan_picture import draw_plans

    check_output(output, folder=False)
    settings = configs.SamplingDefaults().settings(steps=steps, schedule=parse_schedule(schedule))
    save(draw_plans(parse_grid(grid), settings, seed=seed), output)
    out.print(f"wrote {output}")


def _load_pipeline(model: str, device: str, dtype: str) -> Any:
    with err.status("loading"):
        from arpg.pipeline import Pipeline

        return Pipeline.from_pretrained(model, device=device, dtype=dtype)


def _value(choice: Enum | None) -> Any:
    return None if choice is None else choice.value
