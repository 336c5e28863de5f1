"""`arpg generate`, `inpaint`, `edit`, `outpaint`, `expand` and `plan`: what makes pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image

from arpg import config as configs
from arpg import settings as settings_table
from arpg.cli.console import GridOption, ScheduleOption, out, parse_grid, parse_schedule
from arpg.cli.drawing import Output, draws
from arpg.cli.prompts import Line, read_prompts
from arpg.cli.sampling import Sampling
from arpg.errors import one_of, present, require
from arpg.image import check_output, open_image, save

PromptOption = Annotated[str | None, typer.Option("--prompt", "-p", help="Instead of a class, where a model takes it.")]
NegativeOption = Annotated[str | None, typer.Option(help="A prompt that guidance leads away from.")]
ClassOption = Annotated[str | None, typer.Option("--class", "-c", help="Class name or id; none: whatever fits.")]
ImageArgument = Annotated[Path, typer.Argument(help="The picture, of any size.")]
NumOption = Annotated[int, typer.Option("--num", "-n", help="How many results.")]
SideOption = Annotated[int, typer.Option(help="Pixels to add on this side.")]
FeatherOption = Annotated[int, typer.Option(help="Blend this many pixels inside the seam.")]


@draws
def generate(
    class_: Annotated[
        list[str] | None, typer.Option("--class", "-c", help="Class name or id; give it once per class.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Instead of a class; give it once per prompt.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt per line, or (.jsonl) prompt, negative and seed.")
    ] = None,
    negative: NegativeOption = None,
    num: Annotated[int, typer.Option("--num", "-n", help="Images of each class or prompt.")] = 4,
    *,
    output: Output,
    sampling: Sampling,
) -> None:
    """Generate images of classes or prompts. What is not given is the model's own recommendation."""
    ways = [class_, prompt, prompts]
    require(
        sum(bool(way) for way in ways) == 1,
        "give --class, --prompt or --prompts, one of them; see `arpg generate --help`",
    )
    lines = [Line(text, negative) for text in prompt or ()] if prompts is None else read_prompts(prompts, negative)
    sampling = sampling.asked(prompts=bool(lines), control="control" in output.options)
    pipe = sampling.load()
    seed: Any = sampling.seed
    if any(line.seed is not None for line in lines):
        own = [sampling.seed + i * num if line.seed is None else line.seed for i, line in enumerate(lines)]
        seed = [first + k for first in own for k in range(num)]
    what = {"classes": class_} if class_ else {"prompt": [line.prompt for line in lines]}
    negatives = [line.negative for line in lines]
    drawing = pipe.generate_task(
        **what,
        negative=negatives if any(text is not None for text in negatives) else None,
        num_images=num,
        **output.options,
        seed=seed,
        **sampling.settings,
    )
    names = [label.text if lines else pipe.classes.name(label) for label in drawing.spec.labels]
    columns = num if min(num, len(class_ or lines)) > 1 else 0
    output.draw(drawing, pipe=pipe, sampling=sampling, about={"task": "generate"}, names=names, columns=columns)


@draws
def inpaint(
    image: ImageArgument,
    mask: Annotated[Path, typer.Option(help="As large as the picture; white is filled.")],
    class_: ClassOption = None,
    prompt: PromptOption = None,
    negative: NegativeOption = None,
    num: NumOption = 1,
    feather: FeatherOption = 0,
    *,
    output: Output,
    sampling: Sampling,
) -> None:
    """Fill the masked part of a picture, given the rest; every other pixel stays as it is."""
    picture, painted = open_image(image), open_image(mask, what="mask")
    details = {"class_": class_, "prompt": prompt, "negative": negative, "feather": feather}
    _redraw("inpaint", image, (picture, painted), details, num=num, output=output, sampling=sampling)


@draws
def edit(
    image: ImageArgument,
    box: Annotated[str, typer.Option(metavar="L,T,R,B", help="Left, top, right and bottom of the part to replace.")],
    class_: Annotated[str | None, typer.Option("--class", "-c", help="What to put there: class name or id.")] = None,
    prompt: PromptOption = None,
    negative: NegativeOption = None,
    num: NumOption = 1,
    feather: FeatherOption = 0,
    *,
    output: Output,
    sampling: Sampling,
) -> None:
    """Replace a box of a picture by another class or prompt; every other pixel stays as it is."""
    details = {"box": _box(box), "class_": class_, "prompt": prompt, "negative": negative, "feather": feather}
    _redraw("edit", image, (open_image(image),), details, num=num, output=output, sampling=sampling)


@draws
def outpaint(
    image: ImageArgument,
    left: SideOption = 0,
    top: SideOption = 0,
    right: SideOption = 0,
    bottom: SideOption = 0,
    class_: ClassOption = None,
    prompt: PromptOption = None,
    negative: NegativeOption = None,
    num: NumOption = 1,
    *,
    output: Output,
    sampling: Sampling,
) -> None:
    """Continue a picture beyond its sides; the picture itself stays as it is."""
    details = {
        "class_": class_,
        "prompt": prompt,
        "negative": negative,
        "left": left,
        "top": top,
        "right": right,
        "bottom": bottom,
    }
    _redraw("outpaint", image, (open_image(image),), details, num=num, output=output, sampling=sampling)


@draws
def expand(
    size: Annotated[str, typer.Option(metavar="WxH", help="Width and height of the result in pixels.")],
    image: Annotated[Path | None, typer.Argument(help="The picture; none: one is generated.")] = None,
    class_: ClassOption = None,
    prompt: PromptOption = None,
    negative: NegativeOption = None,
    way: Annotated[
        str, typer.Option(help=f"{', '.join(configs.EXPAND_METHODS)}; see docs/guides/edit.md.")
    ] = configs.EXPAND_METHODS[0],
    num: NumOption = 1,
    *,
    output: Output,
    sampling: Sampling,
) -> None:
    """Make a picture larger, with detail that is new."""
    one_of("way", way, configs.EXPAND_METHODS)
    details = {"class_": class_, "prompt": prompt, "negative": negative, "size": _size(size), "way": way}
    given = None if image is None else open_image(image)
    _redraw("expand", image, (given,), details, num=num, output=output, sampling=sampling)


def plan(
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write.")] = Path("plan.png"),
    grid: GridOption = "16x16",
    steps: Annotated[int, typer.Option(help="Decoding steps.")] = 32,
    schedule: ScheduleOption = None,
    seed: Annotated[int, typer.Option(help="For the orders that depend on one.")] = 0,
) -> None:
    """Draw in which step each token is decoded, for every order. Needs no model."""
    from arpg.figures import draw_plans

    check_output(output, folder=False)
    settings = settings_table.SamplingDefaults().settings(steps=steps, schedule=parse_schedule(schedule))
    save(draw_plans(parse_grid(grid), settings, seed=seed), output)
    out.print(f"wrote {output}")


def _redraw(
    task: str,
    source: Path | None,
    pictures: tuple[Image.Image | None, ...],
    details: dict[str, Any],
    *,
    num: int,
    output: Output,
    sampling: Sampling,
) -> None:
    """What all verbs that may start from a picture do around the drawing itself."""
    sampling = sampling.asked(prompts=details["prompt"] is not None, control="control" in output.options)
    pipe = sampling.load()
    start = {
        "inpaint": pipe.inpaint_task,
        "edit": pipe.edit_task,
        "outpaint": pipe.outpaint_task,
        "expand": pipe.expand_task,
    }
    options = {"num_images": num, "seed": sampling.seed, **output.options, **sampling.settings}
    drawing = start[task](*pictures, **details, **options)
    about = {"task": task, **({"image": source.name} if source else {}), **details}
    for name in ("class_", "prompt", "negative"):  # they come with the seed
        del about[name]
    label = drawing.spec.labels[0]
    name = source.stem if source else pipe.classes.name(label) if isinstance(label, int) else label.text
    output.draw(drawing, pipe=pipe, sampling=sampling, about=about, names=[name] * num)


def _box(text: str) -> tuple[int, int, int, int]:
    match = present(
        re.fullmatch(r"(-?\d+),(-?\d+),(-?\d+),(-?\d+)", text.replace(" ", "")),
        f"box is {text!r}; expected left,top,right,bottom in pixels, like 10,10,80,80",
    )
    left, top, right, bottom = (int(part) for part in match.groups())
    return left, top, right, bottom


def _size(text: str) -> tuple[int, int]:
    match = present(
        re.fullmatch(r"(\d{1,9})x(\d{1,9})", text), f"size is {text!r}; expected WIDTHxHEIGHT in pixels, like 192x192"
    )
    return int(match[1]), int(match[2])
