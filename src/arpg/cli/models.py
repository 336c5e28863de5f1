"""`arpg info`, `arpg classes` and `arpg pull`: what there is, and getting more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg import config as configs
from arpg.cli.console import err, out
from arpg.errors import InputError, present, require


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
        if name == "tokenizer" and described.tokenizer_of is not None:
            lines.append((name, f"that of {described.tokenizer_of}"))
            continue
        lines.append((name, ", ".join(f"{key} {_plain(value)}" for key, value in fields.items()) or "none"))
    if described.base is not None:
        lines.append(("stored as", f"differences from {described.base}"))
    if described.classes is not None:
        lines.append(("classes", f"{len(described.classes)}: {described.classes.name(0)}, ... (see `arpg classes`)"))
    for file in sorted(folder.glob("*.safetensors")):
        size = f"{_parameters(file) / 1e6:.2f} M parameters, {file.stat().st_size / 1e6:.1f} MB"
        lines.append((file.name, size))
    for name, text in lines:
        out.print(f"{name:<22} {text}", markup=False)


def classes(
    search: Annotated[str, typer.Argument(help="Only names with this in them.")] = "",
    model: Annotated[
        str, typer.Option("--model", "-m", help="garden, a folder, a published name or a hub id.")
    ] = configs.DEFAULT_MODEL,
) -> None:
    """List a model's classes."""
    from arpg.checkpoint import read_folder
    from arpg.hub import resolve

    names = present(read_folder(resolve(model)).classes, f"{model} has no classes; it takes prompts, or is no model")
    found = names.search(search)
    require(bool(found), f"no class of {model} has {search!r} in its name; leave it out to list all")
    for class_id in found:
        out.print(f"{class_id:5d}  {names.lines[class_id]}", markup=False)


def pull(
    name: Annotated[str, typer.Argument(help="arpg-l, arpg-xl or arpg-xxl.")],
    force: Annotated[bool, typer.Option(help="Fetch and convert again.")] = False,
) -> None:
    """Fetch a published model and its tokenizer from the Hugging Face hub, convert and keep them."""
    from arpg import hub

    with err.status(f"pulling {name}"):
        folder = hub.pull(name, force=force)
    out.print(f"{name} is in {folder}")


def _info_all() -> None:
    import torch

    import arpg
    from arpg.checkpoint import bundled_folder, read_folder
    from arpg.decode.engine import choose_mode
    from arpg.device import choose_device
    from arpg.hub import PUBLISHED, home

    out.print(f"arpg {arpg.__version__}, torch {torch.__version__}, {_hardware()}")
    out.print(f"--engine auto is {choose_mode('auto', choose_device('auto'))} here")
    out.print(f"{'model':<15}{'layers':>8}{'width':>7}{'heads':>7}{'classes':>9}  here")
    for name in configs.BUNDLED:
        described = present(read_folder(bundled_folder(name)).model, f"{name} has no model")
        out.print(_line(name, described, "in the box"), markup=False)
    for name, published in PUBLISHED.items():
        here = home() / "models" / name
        found = str(here) if (here / "config.json").is_file() else f"no (arpg pull {name})"
        out.print(_line(name, published.model, found), markup=False)


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

    from arpg.quantization.storage import SCALE, SHAPE

    try:
        with safe_open(file, framework="pt") as tensors:
            every = set(tensors.keys())
            keys = [key for key in every if not key.endswith((SCALE, SHAPE))]
            squeezed = {key: tensors.get_tensor(key + SHAPE).tolist()[1:] for key in keys if key + SHAPE in every}
            return sum(math.prod(squeezed.get(key) or tensors.get_slice(key).get_shape()) for key in keys)
    except SafetensorError as error:
        raise InputError(f"{file} is not a whole safetensors file ({error}); fetch or convert it again") from None


def _plain(value: Any) -> str:
    return json.dumps(value).replace('"', "")
