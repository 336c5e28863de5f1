"""`arpg generate`, `arpg inpaint`, `arpg edit` and `arpg plan`: what makes pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image

from arpg import config as configs
from arpg.cli.console import GridOption, ScheduleOption, out, parse_grid, parse_schedule, progress_bar
from arpg.cli.sampling import Sampling, samples
from arpg.errors import present
from arpg.image import check_output, open_image, save, sheet

OutputOption = Annotated[
    Path, typer.Option("--output", "-o", help="An image (a sheet if there are several), or a folder (one file each).")
]
ClassOption = Annotated[str | None, typer.Option("--class", "-c", help="Class name or id; none: whatever fits.")]
ImageArgument = Annotated[Path, typer.Argument(help="The picture, of any size.")]
NumOption = Annotated[int, typer.Option("--num", "-n", help="How many results.")]
SideOption = Annotated[int, typer.Option(help="Pixels to add on this side.")]
FeatherOption = Annotated[int, typer.Option(help="Blend this many pixels inside the seam.")]


@samples
def generate(
    class_: Annotated[list[str], typer.Option("--class", "-c", help="Class name or id; give it once per class.")],
    output: OutputOption = Path("out.png"),
    num: Annotated[int, typer.Option("--num", "-n", help="Images of each class.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Images decoded together; does not change them.")] = 32,
    *,
    sampling: Sampling,
) -> None:
    """Generate images of classes. What is not given is the model's own recommendation."""
    folder = _check_output(output)
    pipe = sampling.load()
    options = {"num_images": num, "seed": sampling.seed, "batch_size": batch_size, **sampling.settings}
    drawing = pipe.generation(class_, **options)
    with _steps(len(drawing)) as on_step:
        images = pipe.finish(drawing, on_step)
    labels = [pipe.classes.find(name) for name in class_ for _ in range(num)]
    about = {"model": sampling.model, **configs.to_dict(drawing.wanted.settings)}
    names = [f"{i:05d}-{_slug(pipe.classes.name(label))}" for i, label in enumerate(labels)]
    abouts = [{**about, "class": label, "seed": sampling.seed + i} for i, label in enumerate(labels)]
    columns = num if min(num, len(class_)) > 1 else None
    _write(images, output, folder=folder, names=names, abouts=abouts, columns=columns)


@samples
def inpaint(
    image: ImageArgument,
    mask: Annotated[Path, typer.Option(help="As large as the picture; white is filled.")],
    class_: ClassOption = None,
    output: OutputOption = Path("out.png"),
    num: NumOption = 1,
    feather: FeatherOption = 0,
    *,
    sampling: Sampling,
) -> None:
    """Fill the masked part of a picture, given the rest; every other pixel stays as it is."""
    painted = open_image(mask, what="mask")

    def draw(pipe: Any, picture: Image.Image, options: dict[str, Any]) -> list[Image.Image]:
        return list(pipe.inpaint(picture, painted, class_, feather=feather, **options))

    _redraw(image, draw, output, num=num, class_=class_, sampling=sampling)


@samples
def edit(
    image: ImageArgument,
    box: Annotated[str, typer.Option(metavar="L,T,R,B", help="Left, top, right and bottom of the part to replace.")],
    class_: Annotated[str, typer.Option("--class", "-c", help="What to put there: class name or id.")],
    output: OutputOption = Path("out.png"),
    num: NumOption = 1,
    feather: FeatherOption = 0,
    *,
    sampling: Sampling,
) -> None:
    """Replace a box of a picture by another class; every other pixel stays as it is."""
    corners = _box(box)

    def draw(pipe: Any, picture: Image.Image, options: dict[str, Any]) -> list[Image.Image]:
        return list(pipe.edit(picture, corners, class_, feather=feather, **options))

    _redraw(image, draw, output, num=num, class_=class_, sampling=sampling)


@samples
def outpaint(
    image: ImageArgument,
    left: SideOption = 0,
    top: SideOption = 0,
    right: SideOption = 0,
    bottom: SideOption = 0,
    class_: ClassOption = None,
    output: OutputOption = Path("out.png"),
    num: NumOption = 1,
    *,
    sampling: Sampling,
) -> None:
    """Continue a picture beyond its sides; the picture itself stays as it is."""
    sides = {"left": left, "top": top, "right": right, "bottom": bottom}

    def draw(pipe: Any, picture: Image.Image, options: dict[str, Any]) -> list[Image.Image]:
        return list(pipe.outpaint(picture, class_, **sides, **options))

    _redraw(image, draw, output, num=num, class_=class_, sampling=sampling)


def plan(
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write.")] = Path("plan.png"),
    grid: GridOption = "16x16",
    steps: Annotated[int, typer.Option(help="Decoding steps.")] = 32,
    schedule: ScheduleOption = None,
    seed: Annotated[int, typer.Option(help="For the orders that depend on one.")] = 0,
) -> None:
    """Draw in which step each token is decoded, for every order. Needs no model."""
    from arpg.grid_picture import draw_plans

    check_output(output, folder=False)
    settings = configs.SamplingDefaults().settings(steps=steps, schedule=parse_schedule(schedule))
    save(draw_plans(parse_grid(grid), settings, seed=seed), output)
    out.print(f"wrote {output}")


@contextmanager
def _steps(num_batches: int | None = None) -> Iterator[Callable[[Any], None]]:
    """A progress bar over the steps of all batches; None: it is not known how many there will be."""
    with progress_bar() as progress:
        task = progress.add_task("drawing", total=None)

        def on_step(step: Any) -> None:
            known = num_batches is not None and step.num_steps is not None
            progress.update(task, advance=1, total=num_batches * step.num_steps if known else None)

        yield on_step


def _check_output(output: Path) -> bool:
    """Whether the output is a folder; fails now if it could not be written later."""
    folder = output.is_dir() or not output.suffix
    check_output(output, folder=folder)
    return folder


def _redraw(
    source: Path,
    draw: Callable[[Any, Image.Image, dict[str, Any]], list[Image.Image]],
    output: Path,
    *,
    num: int,
    class_: str | None,
    sampling: Sampling,
) -> None:
    """What all verbs that start from a picture do around the drawing itself."""
    folder = _check_output(output)
    picture = open_image(source)
    pipe = sampling.load()
    with _steps() as on_step:
        options = {"num_images": num, "seed": sampling.seed, "on_step": on_step, **sampling.settings}
        images = draw(pipe, picture, options)
    given = {name: value for name, value in sampling.settings.items() if value is not None}
    about = {"model": sampling.model, "image": source.name, "class": class_, **given}
    names = [f"{i:05d}-{_slug(source.stem)}" for i in range(len(images))]
    abouts = [{**about, "seed": sampling.seed + i} for i in range(len(images))]
    _write(images, output, folder=folder, names=names, abouts=abouts)


def _write(
    images: Sequence[Image.Image],
    output: Path,
    *,
    folder: bool,
    names: Sequence[str],
    abouts: Sequence[dict[str, Any]],
    columns: int | None = None,
) -> None:
    if folder:
        for image, name, about in zip(images, names, abouts, strict=True):
            save(image, output / f"{name}-seed{about['seed']}.png", about=json.dumps(about))
    else:
        whole = images[0] if len(images) == 1 else sheet(images, columns=columns)
        text = json.dumps({**abouts[0], "images": len(images)})
        save(whole, output, about=text)
    out.print(f"{len(images)} image{'s' if len(images) > 1 else ''} in {output}{'/' if folder else ''}")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _box(text: str) -> tuple[int, int, int, int]:
    match = present(
        re.fullmatch(r"(-?\d+),(-?\d+),(-?\d+),(-?\d+)", text.replace(" ", "")),
        f"box is {text!r}; expected left,top,right,bottom in pixels, like 10,10,80,80",
    )
    left, top, right, bottom = (int(part) for part in match.groups())
    return left, top, right, bottom
