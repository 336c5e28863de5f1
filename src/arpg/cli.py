"""The command line: thin verbs over the library. Errors are one line and exit code 2, never a traceback."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.exceptions
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from arpg import config as configs
from arpg.errors import InputError, present, require

app = typer.Typer(name="arpg", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
convert = typer.Typer(no_args_is_help=True, help="Published checkpoints to model folders, and back.")
app.add_typer(convert, name="convert")

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

Order = Enum("Order", {name: name for name in configs.ORDERS}, type=str)  # type: ignore[misc]
GuidanceSchedule = Enum("GuidanceSchedule", {name: name for name in configs.GUIDANCE_SCHEDULES}, type=str)  # type: ignore[misc]
Attention = Enum("Attention", {name: name for name in configs.ATTENTIONS}, type=str)  # type: ignore[misc]

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a published name or a hub id.")]
GridOption = Annotated[str, typer.Option(metavar="HxW", help="Token grid, like 16x16.")]
ScheduleOption = Annotated[
    str | None, typer.Option(help=f"{', '.join(configs.SCHEDULES)}, or the tokens of each step: 16,48,80.")
]


@app.command()
def generate(
    class_: Annotated[list[str], typer.Option("--class", "-c", help="Class name or id; give it once per class.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A folder, a published name or a hub id.")],
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")] = "auto",
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
        "schedule": _schedule(schedule),
        "attention": _value(attention),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    configs.SamplingDefaults().settings(**settings)  # bad settings fail before the model is loaded
    pipe = _load_pipeline(model, device, dtype)
    requests = pipe.requests(class_, num_images=num, seed=seed, batch_size=batch_size, **settings)
    resolved = requests[0][1]
    with _progress() as progress:
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
        save(sheet(images, columns=num if len(class_) > 1 else None), output, about=text)
        out.print(f"{len(images)} images in {output}")


@app.command()
def info(model: Annotated[str | None, typer.Argument(help="A folder, a published name or a hub id.")] = None) -> None:
    """Say what there is: the models known here, or all about one of them."""
    if model is None:
        _info_all()
        return
    from arpg.checkpoint import read_folder
    from arpg.hub import resolve

    folder = resolve(model)
    described = read_folder(folder)
    lines = [("folder", str(folder)), ("license", described.license)]
    for name in ("model", "tokenizer", "sampling"):
        part = getattr(described, name)
        fields = configs.to_dict(part) if part is not None else {}
        lines.append((name, ", ".join(f"{key} {_plain(value)}" for key, value in fields.items()) or "none"))
    if described.classes is not None:
        lines.append(("classes", f"{len(described.classes)}: {described.classes.name(0)}, ... (see `arpg classes`)"))
    for file in sorted(folder.glob("*.safetensors")):
        size = f"{_parameters(file) / 1e6:.2f} M parameters, {file.stat().st_size / 1e6:.1f} MB"
        lines.append((file.name, size))
    for name, text in lines:
        out.print(f"{name:<22} {text}", markup=False)


@app.command()
def classes(
    model: ModelArgument, search: Annotated[str, typer.Argument(help="Only names with this in them.")] = ""
) -> None:
    """List a model's classes."""
    from arpg.checkpoint import read_folder
    from arpg.hub import resolve

    names = present(read_folder(resolve(model)).classes, f"{model} has no model, so it has no classes")
    found = names.search(search)
    require(bool(found), f"no class of {model} has {search!r} in its name; list all with `arpg classes {model}`")
    for class_id in found:
        out.print(f"{class_id:5d}  {names.lines[class_id]}", markup=False)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="arpg-l, arpg-xl or arpg-xxl.")],
    force: Annotated[bool, typer.Option(help="Fetch and convert again.")] = False,
) -> None:
    """Fetch a published model and its tokenizer from the Hugging Face hub, convert and keep them."""
    from arpg import hub

    with err.status(f"pulling {name}"):
        folder = hub.pull(name, force=force)
    out.print(f"{name} is in {folder}")


@convert.command("model")
def convert_model(
    source: Annotated[Path, typer.Argument(help="A published checkpoint, or a model folder to go back.")],
    target: Annotated[Path, typer.Argument(help="A model folder, or a .pt file to go back.")],
    ema: Annotated[bool, typer.Option("--ema", help="Take the averaged weights.")] = False,
    heads: Annotated[int | None, typer.Option(help="Attention heads; needed unless it is a published size.")] = None,
    grid: GridOption = "16x16",
    names: Annotated[Path | None, typer.Option("--classes", help="Class names, one line each.")] = None,
    license: Annotated[str, typer.Option(help="Licence of the weights.")] = "unknown",
) -> None:
    """ARPG weights: published checkpoint to model folder, or a model folder back to the published format."""
    from arpg import checkpoint
    from arpg import convert as converting
    from arpg.classes import imagenet_classes, parse_classes

    with err.status(f"converting {source}"):
        if source.is_dir():
            _check_published_target(target)
            loaded = checkpoint.load_model(source)
            converting.write_published(target, converting.model_to_published(loaded.config, loaded.state_dict()))
        else:
            _check_folder_target(target)
            published = converting.read_published(source, ema=ema)
            found, state = converting.model_from_published(
                published, where=str(source), num_heads=heads, grid=_grid(grid)
            )
            class_names = imagenet_classes() if found.num_classes == 1000 else None
            if names is not None:
                require(names.is_file(), f"{names} does not exist; expected a file with one class name per line")
                class_names = parse_classes(
                    names.read_text(encoding="utf-8"), where=str(names), num_classes=found.num_classes
                )
            preset = next((n for n, c in configs.MODELS.items() if dataclasses.replace(found, grid=c.grid) == c), None)
            sampling = configs.SAMPLING[preset] if preset else configs.SamplingDefaults()
            folder = checkpoint.FolderConfig(model=found, sampling=sampling, classes=class_names, license=license)
            checkpoint.write_folder(target, folder, model=state)
    out.print(f"wrote {target}")


@convert.command("tokenizer")
def convert_tokenizer(
    source: Annotated[Path, typer.Argument(help="A published checkpoint, or a model folder to go back.")],
    target: Annotated[Path, typer.Argument(help="A model folder, or a .pt file to go back.")],
    ema: Annotated[bool, typer.Option("--ema", help="Take the averaged weights.")] = False,
) -> None:
    """Tokenizer weights: published checkpoint to model folder, or a model folder back to the published format."""
    from arpg import checkpoint
    from arpg import convert as converting

    with err.status(f"converting {source}"):
        if source.is_dir():
            _check_published_target(target)
            converting.write_published(target, checkpoint.load_tokenizer(source).state_dict())
        else:
            _check_folder_target(target)
            published = converting.read_published(source, ema=ema)
            found, state = converting.tokenizer_from_published(published, where=str(source))
            checkpoint.write_folder(target, checkpoint.FolderConfig(tokenizer=found), tokenizer=state)
    out.print(f"wrote {target}")


@app.command()
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
    settings = configs.SamplingDefaults().settings(steps=steps, schedule=_schedule(schedule))
    save(draw_plans(_grid(grid), settings, seed=seed), output)
    out.print(f"wrote {output}")


def main() -> None:
    """The entry point: one clear line for whatever goes wrong."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the outcome is reported
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        code = _fail(str(error), 2)
    except typer.exceptions.TyperException as error:
        code = _fail(error.format_message() + _given(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail("interrupted", 130)
    except Exception as error:
        if os.environ.get("ARPG_DEBUG"):
            raise
        code = _fail(f"{type(error).__name__}: {error}; this is a bug, set ARPG_DEBUG=1 to see where", 1)
    sys.exit(code)


def _fail(message: str, code: int) -> int:
    if message:  # none where help was printed instead
        err.print("arpg: " + " ".join(message.split()), markup=False)
    return code


def _given(error: Exception) -> str:
    """What stood on the command line for the option that an error is about; the parser does not say."""
    options = getattr(getattr(error, "param", None), "opts", [])
    pairs = itertools.pairwise(sys.argv)
    return next((f" (got {value!r})" for option, value in pairs if option in options), "")


def _load_pipeline(model: str, device: str, dtype: str) -> Any:
    with err.status("loading"):
        from arpg.pipeline import Pipeline

        return Pipeline.from_pretrained(model, device=device, dtype=dtype)


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        yield progress


def _info_all() -> None:
    import torch

    import arpg
    from arpg.hub import PUBLISHED, home

    out.print(f"arpg {arpg.__version__}, torch {torch.__version__}, {_hardware()}")
    out.print(f"{'model':<10}{'layers':>8}{'width':>7}{'heads':>7}  here")
    for name, published in PUBLISHED.items():
        c = published.model
        here = home() / "models" / name
        layers = f"{c.pass1_layers}+{c.pass2_layers}"
        found = str(here) if (here / "config.json").is_file() else f"no (arpg pull {name})"
        out.print(f"{name:<10}{layers:>8}{c.width:>7}{c.num_heads:>7}  {found}", markup=False)


def _hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"CPU with {torch.get_num_threads()} threads"


def _parameters(file: Path) -> int:
    import math

    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            return sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{file} is not a whole safetensors file ({error}); fetch or convert it again") from None


def _check_folder_target(target: Path) -> None:
    from arpg.image import check_output

    check_output(target, folder=True)


def _check_published_target(target: Path) -> None:
    require(not target.is_dir(), f"{target} is a folder; expected the name of a file, like {target}/published.pt")


def _value(choice: Enum | None) -> Any:
    return None if choice is None else choice.value


def _plain(value: Any) -> str:
    return json.dumps(value).replace('"', "")


def _grid(text: str) -> tuple[int, int]:
    match = present(
        re.fullmatch(r"(\d+)x(\d+)", text), f"grid is {text!r}; expected HEIGHTxWIDTH in tokens, like 16x16"
    )
    height, width = int(match[1]), int(match[2])
    require(1 <= height <= 1024 and 1 <= width <= 1024, f"grid is {text}; expected sides from 1 to 1024")
    return height, width


def _schedule(text: str | None) -> str | tuple[int, ...] | None:
    if text is None or not re.fullmatch(r"\d+(,\d+)*", text):
        return text
    return tuple(int(size) for size in text.split(","))


if __name__ == "__main__":
    main()
