"""`arpg generate`, `inpaint`, `edit`, `outpaint`, `expand`, `control` and `plan`: the verbs that make images."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arpg.cli.options import (
    DEFAULTS,
    BatchSizeOption,
    Command,
    DepthModelOption,
    GridOption,
    SamplingOptions,
    ScheduleOption,
    add_options,
    err,
    out,
    output_option,
    parse_grid,
    parse_schedule,
    progress_bar,
    setting_option,
    with_sampling_options,
)
from arpg.config import to_dict
from arpg.errors import InputError, present, require, require_file
from arpg.settings import TASK_SETTINGS, SamplingDefaults

if TYPE_CHECKING:
    from PIL import Image

PromptOption = Annotated[
    str | None, typer.Option("--prompt", "-p", help="Prompt, for models that take prompts instead of classes.")
]
NegativeOption = Annotated[str | None, typer.Option(help="A prompt that guidance leads away from.")]
ClassOption = Annotated[str | None, typer.Option("--class", "-c", help="Class name or id; none: unconditional.")]
ImageArgument = Annotated[Path, typer.Argument(help="The image, of any size.")]
NumOption = Annotated[int, setting_option("num_images", "--num", "-n")]
SideOption = Annotated[int, typer.Option(help="Pixels to add on this side.")]
BOX = typer.Option(metavar="L,T,R,B", help="Left, top, right and bottom of the part to replace, in pixels.")
FeatherOption = Annotated[int, setting_option("feather")]


@dataclass(frozen=True)
class OutputOptions:
    """The values of the options that every verb of this file has beside those of sampling."""

    path: Path
    folder: bool
    gif: Path | None
    beside: bool
    kind: str  # of the condition image
    strength: float
    task: dict[str, Any]  # options of the image task

    def run(
        self,
        task: Any,
        *,
        pipe: Any,
        sampling: SamplingOptions,
        about: dict[str, Any],
        names: Sequence[str],
        columns: int = 0,
    ) -> None:
        """Run a task with a progress bar and write its images; `about` becomes part of their metadata."""
        spec, taken = task.spec, []
        require(bool(spec.controls) or not self.beside, "--beside needs a condition image; give --condition")
        most = max(math.prod(stage.window) for stage in task.stages)
        if spec.settings.decode == "steps" and spec.settings.steps > most:
            err.print(f"note: steps is {spec.settings.steps}, but there are {most} tokens; {most} steps are taken")
        done = 0
        with progress_bar("sampling") as progress:

            def on_step(step: Any) -> None:
                nonlocal done
                done += 1
                progress(done, None if step.num_steps is None else len(task) * step.num_steps)  # None: not known yet
                if self.gif is not None:
                    taken.append(task.tokens_after(step))

            images = task.run(on_step)
        images = self._shown(task, task.kept, images)
        about = {"model": sampling.model, **about, **to_dict(spec.settings)}
        if spec.best_of > 1:
            about["best_of"] = spec.best_of
        if spec.controls:
            about |= {"kind": spec.controls[0].kind, "strength": spec.controls[0].strength}
        labels = [_describe(label, pipe.classes) for label in spec.labels]
        abouts = [{**label, "seed": seed} for label, seed in zip(labels, task.seeds, strict=True)]
        self._write(images, names=names, about=about, abouts=abouts, columns=columns)
        if self.gif is not None:
            self._write_gif(self.gif, task, taken, columns=columns)

    def _shown(self, task: Any, rows: Sequence[int], images: list[Image.Image]) -> list[Image.Image]:
        return task.beside_conditions(rows, images) if self.beside else images

    def _write_gif(self, path: Path, task: Any, taken: Sequence[Any], *, columns: int) -> None:
        """Render the candidates that were kept, after every step that was taken; the others are never decoded."""
        from arpg.figures import frame_sheets, save_gif

        previews: dict[int, list[Image.Image]] = {row: [] for row in task.kept}
        with progress_bar("rendering") as progress:
            for i, tokens in enumerate(taken):
                if rows := [row for row in tokens.rows if row in previews]:
                    for row, image in zip(rows, self._shown(task, rows, task.render(tokens, rows)), strict=True):
                        previews[row].append(image)
                progress(i + 1, len(taken))
        save_gif(frame_sheets(list(previews.values()), columns=columns or None), path)
        out.print(f"the steps are in {path}")

    def _write(
        self,
        images: Sequence[Image.Image],
        *,
        names: Sequence[str],
        about: dict[str, Any],  # all images
        abouts: Sequence[dict[str, Any]],  # each image
        columns: int,
    ) -> None:
        from arpg.image import save, sheet

        if self.folder:
            for i, (image, name, own) in enumerate(zip(images, names, abouts, strict=True)):
                path = self.path / f"{i:05d}-{_slug(name)}-seed{own['seed']}.png"
                save(image, path, about=json.dumps({**about, **own}))
        elif len(images) == 1:
            save(images[0], self.path, about=json.dumps({**about, **abouts[0]}))
        else:
            whole = sheet(images, columns=columns or None)
            save(whole, self.path, about=json.dumps({**about, "images": abouts}))
        out.print(f"{len(images)} image{'s' if len(images) > 1 else ''} in {self.path}{'/' if self.folder else ''}")


def _read_output(
    output: Annotated[
        Path, output_option("An image (a sheet if there are several), or a folder (one file each).")
    ] = Path("out.png"),
    gif: Annotated[Path | None, typer.Option(help="Also write an animation of the decoding steps.")] = None,
    condition: Annotated[
        Path | None, typer.Option(help="A condition image to follow, for models that take condition images.")
    ] = None,
    kind: Annotated[str, setting_option("kind")] = DEFAULTS["kind"],
    strength: Annotated[float, setting_option("strength")] = DEFAULTS["strength"],
    beside: Annotated[bool, typer.Option("--beside", help="Show the condition image beside each result.")] = False,
    best_of: Annotated[int, setting_option("best_of")] = DEFAULTS["best_of"],
    batch_size: BatchSizeOption = DEFAULTS["batch_size"],
) -> OutputOptions:
    from arpg.image import check_output

    folder = output.is_dir() or not output.suffix
    check_output(output, folder=folder)
    if gif is not None:
        require(gif.suffix.lower() == ".gif", f"{gif} does not end in .gif; expected the name of a GIF file")
        check_output(gif, folder=False)
    TASK_SETTINGS["kind"].check(kind)
    TASK_SETTINGS["strength"].check(strength)
    task: dict[str, Any] = {"best_of": best_of, "batch_size": batch_size}
    if condition is not None:
        from arpg.tasks.control_input import ControlInput

        task["control"] = ControlInput(condition, kind, strength)
    return OutputOptions(output, folder, gif, beside, kind, strength, task)


def _read_label(
    class_: ClassOption = None, prompt: PromptOption = None, negative: NegativeOption = None, num: NumOption = 1
) -> dict[str, Any]:
    return {"class_": class_, "prompt": prompt, "negative": negative, "num_images": num}


def with_task_options(command: Command) -> Command:
    """Give a command the options of sampling and output; its parameters `sampling` and `output` receive them."""
    return with_sampling_options(add_options(command, _read_output, "output"))


def with_image_options(command: Command) -> Command:
    """Also give a command options for one class or prompt, which its parameter `label` receives."""
    return with_task_options(add_options(command, _read_label, "label"))


@with_task_options
def generate(
    class_: Annotated[
        list[str] | None, typer.Option("--class", "-c", help="Class name or id; give it once per class.")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Prompt, for models that take prompts; give it once per prompt."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt per line, or (.jsonl) prompt, negative and seed.")
    ] = None,
    negative: NegativeOption = None,
    num: Annotated[int, typer.Option("--num", "-n", help="Images of each class or prompt.")] = 4,
    *,
    output: OutputOptions,
    sampling: SamplingOptions,
) -> None:
    """Generate images of classes or prompts. Settings that are not given are those that the model recommends."""
    require(
        sum(map(bool, (class_, prompt, prompts))) == 1,
        "give --class, --prompt or --prompts, one of them; see `arpg generate --help`",
    )
    lines = [PromptLine(text, negative) for text in prompt or ()]
    if prompts is not None:
        lines = read_prompts(prompts, negative)
    sampling = sampling.with_default_model(prompts=bool(lines), control="control" in output.task)
    pipe = sampling.load()
    seed: Any = sampling.seed
    if any(line.seed is not None for line in lines):
        best_of = output.task["best_of"]  # candidates of an image have consecutive seeds
        own = [sampling.seed + i * num * best_of if line.seed is None else line.seed for i, line in enumerate(lines)]
        seed = [first + k * best_of for first in own for k in range(num)]
    labels = {"classes": class_} if class_ else {"prompt": [line.prompt for line in lines]}
    task = pipe.generate_task(
        **labels,
        negative=[line.negative for line in lines] or negative,
        num_images=num,
        seed=seed,
        **output.task,
        **sampling.settings,
    )
    names = [label.text if lines else pipe.classes.name(label) for label in task.spec.labels]
    columns = num if min(num, len(class_ or lines)) > 1 else 0
    output.run(task, pipe=pipe, sampling=sampling, about={"task": "generate"}, names=names, columns=columns)


@with_image_options
def inpaint(
    image: ImageArgument,
    mask: Annotated[Path | None, typer.Option(help="An image of the same size; its white part is filled.")] = None,
    box: Annotated[str | None, BOX] = None,
    feather: FeatherOption = DEFAULTS["feather"],
    *,
    label: dict[str, Any],
    output: OutputOptions,
    sampling: SamplingOptions,
) -> None:
    """Fill a part of an image (--mask or --box), given the rest; every other pixel stays as it is."""
    from arpg.image import open_image
    from arpg.tasks.stages import box_image

    require((mask is None) != (box is None), "give --mask or --box, one of them; see `arpg inpaint --help`")
    source, details = open_image(image), {"feather": feather}
    if mask is not None:
        hole = open_image(mask, what="mask").convert("L")
        require(
            hole.point(lambda level: 255 * (level >= 128)).getbbox() is not None,
            f"mask {mask} has no white part, so nothing was done; make the part to fill white",
        )
        about = {}
    else:
        about = {"box": _box(box or "")}
        hole = box_image(source.size, about["box"])
    _run("inpaint", image, (source, hole), details, about=about, label=label, output=output, sampling=sampling)


@with_image_options
def edit(
    image: ImageArgument,
    box: Annotated[str, BOX],
    feather: FeatherOption = DEFAULTS["feather"],
    *,
    label: dict[str, Any],
    output: OutputOptions,
    sampling: SamplingOptions,
) -> None:
    """Replace a box of an image by a class or a prompt; every other pixel stays as it is."""
    from arpg.image import open_image

    details = {"box": _box(box), "feather": feather}
    _run("edit", image, (open_image(image),), details, label=label, output=output, sampling=sampling)


@with_image_options
def outpaint(
    image: ImageArgument,
    left: SideOption = 0,
    top: SideOption = 0,
    right: SideOption = 0,
    bottom: SideOption = 0,
    *,
    label: dict[str, Any],
    output: OutputOptions,
    sampling: SamplingOptions,
) -> None:
    """Continue an image beyond its sides; its own pixels stay as they are."""
    from arpg.image import open_image

    details = {"left": left, "top": top, "right": right, "bottom": bottom}
    _run("outpaint", image, (open_image(image),), details, label=label, output=output, sampling=sampling)


@with_image_options
def expand(
    size: Annotated[str, typer.Option(metavar="WxH", help="Width and height of the result in pixels.")],
    image: Annotated[Path | None, typer.Argument(help="The image; none: one is generated first.")] = None,
    method: Annotated[str, setting_option("method")] = DEFAULTS["method"],
    *,
    label: dict[str, Any],
    output: OutputOptions,
    sampling: SamplingOptions,
) -> None:
    """Enlarge an image with newly sampled detail."""
    from arpg.image import open_image

    TASK_SETTINGS["method"].check(method)
    details = {"size": _size(size), "way": method}  # the metadata of images says "way"
    images = (None if image is None else open_image(image),)
    _run("expand", image, images, details, label=label, output=output, sampling=sampling)


@with_image_options
def control(
    image: Annotated[Path | None, typer.Argument(help="The condition image, or with --from-image any image.")] = None,
    from_image: Annotated[
        bool, typer.Option("--from-image", help="Extract the condition, edges or depth, from the image.")
    ] = False,
    depth_model: DepthModelOption = None,
    *,
    label: dict[str, Any],
    output: OutputOptions,
    sampling: SamplingOptions,
) -> None:
    """Generate images that follow the edges or the depth of a condition image (IMAGE or --condition)."""
    from arpg.image import open_image
    from arpg.tasks.control_input import ControlInput

    condition = output.task.pop("control", None)
    require((image is None) == (condition is not None), "give an image or --condition, one of them; see --help")
    require(
        image is not None or not from_image, "--from-image needs an image; give it instead of --condition, before it"
    )
    source = open_image(image) if image is not None and from_image else None
    if image is not None and source is None:
        condition = ControlInput(image, output.kind, output.strength)
    sampling = sampling.with_default_model(prompts=label["prompt"] is not None, control=True)
    pipe = sampling.load()
    if source is not None:
        condition = pipe.extract_control(source, output.kind, output.strength, depth=depth_model)
    classes = label.pop("class_")
    task = pipe.generate_task(
        classes, control=condition, seed=sampling.seed, **label, **output.task, **sampling.settings
    )
    name = "control" if image is None else image.stem
    about = {"task": "control", "from_image": from_image, **({"image": image.name} if image else {})}
    output.run(task, pipe=pipe, sampling=sampling, about=about, names=[name] * len(task.spec.labels))


def plan(
    output: Annotated[Path, output_option("The image to write.")] = Path("plan.png"),
    grid: GridOption = "16x16",
    steps: Annotated[int, setting_option("steps")] = DEFAULTS["steps"],
    schedule: ScheduleOption = None,
    seed: Annotated[int, typer.Option(help="Random seed of the orders that have one.")] = 0,
) -> None:
    """Show in which step each token is decoded, for every order. Needs no model."""
    from arpg.figures import draw_plans
    from arpg.image import check_output, save

    check_output(output, folder=False)
    settings = SamplingDefaults().settings(steps=steps, schedule=parse_schedule(schedule))
    save(draw_plans(parse_grid(grid), settings, seed=seed), output)
    out.print(f"wrote {output}")


def _run(
    verb: str,
    source: Path | None,
    images: tuple[Image.Image | None, ...],
    details: dict[str, Any],
    *,
    about: dict[str, Any] | None = None,
    label: dict[str, Any],
    output: OutputOptions,
    sampling: SamplingOptions,
) -> None:
    """Run a verb that starts from an image and write the result.

    `details` are options of the task; they and `about` become part of the metadata.
    """
    sampling = sampling.with_default_model(prompts=label["prompt"] is not None, control="control" in output.task)
    pipe = sampling.load()
    build = getattr(pipe, f"{verb}_task")
    task = build(*images, seed=sampling.seed, **details, **label, **output.task, **sampling.settings)
    about = {"task": verb, **({"image": source.name} if source else {}), **details, **(about or {})}
    first = task.spec.labels[0]
    name = source.stem if source else pipe.classes.name(first) if isinstance(first, int) else first.text
    output.run(task, pipe=pipe, sampling=sampling, about=about, names=[name] * len(task.spec.labels))


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


@dataclass(frozen=True)
class PromptLine:
    """A line of a prompt file."""

    prompt: str
    negative: str | None = None
    seed: int | None = None  # of its first image


def read_prompts(path: Path, negative: str | None = None) -> list[PromptLine]:
    """Read a prompt file: a prompt per line, or JSON lines with prompt, negative and seed, like GenEval's metadata.

    Empty lines are skipped, and in plain files those that begin with #. `negative` is for lines that have none.
    """
    require_file(path, "a file with a prompt per line")
    try:
        rows = [row.strip() for row in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); save it as such") from None
    if path.suffix != ".jsonl":
        lines = [PromptLine(row, negative) for row in rows if row and not row.startswith("#")]
    else:
        lines = [_parse_line(f"{path}, line {i + 1}", row, negative) for i, row in enumerate(rows) if row]
    require(bool(lines), f"{path} has no prompts; expected one per line")
    return lines


def _parse_line(where: str, row: str, negative: str | None) -> PromptLine:
    try:
        data: Any = json.loads(row)
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON: {error}") from None
    require(isinstance(data, dict) and isinstance(data.get("prompt"), str), f'{where} has no "prompt"; expected a text')
    seed, own = data.get("seed"), data.get("negative", negative)
    require(seed is None or (isinstance(seed, int) and seed >= 0), f"{where}: seed is {seed!r}; expected 0 or more")
    require(own is None or isinstance(own, str), f"{where}: negative is {own!r}; expected a text")
    return PromptLine(data["prompt"], own, seed)


def _describe(label: Any, classes: Any) -> dict[str, Any]:
    """Return the class, by id and name, or the prompt of an image for its metadata."""
    if isinstance(label, int):
        return {"class": None} if label == len(classes) else {"class": label, "name": classes.name(label)}
    negative = {"negative": label.negative} if label.negative_TE is not None else {}
    return {"prompt": label.text if label.states_TE is not None else None, **negative}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80].strip("-") or "image"
