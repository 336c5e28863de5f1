"""Model folders: one config.json, safetensors weights, class names. Saved whole, loaded strictly, found by name.

    folder/
      config.json             format, model, tokenizer, sampling, license; what the model knows (about, examples)
      model.safetensors       the network
      tokenizer.safetensors   the tokenizer
      classes.txt             one line per class: name, synonyms; none where the model takes prompts
      model_index.json        what diffusers reads, see `arpg.diffusers_pipeline`

A folder may hold the network, the tokenizer or both; writing one leaves the other as it is. Instead of a tokenizer it
may name an installed model whose tokenizer it shares (`tokenizer_of`); likewise its weights may be differences from
those of an installed model (`base`).

A distribution provides a model by an entry point of the group `arpg.models`. Its name is the model's name, its value is
a package, and the model folder is the folder of that name inside the package:

    [project.entry-points."arpg.models"]
    my-model = "my_models"          # site-packages/my_models/my-model/config.json, model.safetensors, ...

No code of that distribution runs when models are looked up.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata, resources
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from arpg.classes import ClassNames, numbered_classes, parse_classes
from arpg.config import ModelConfig, TokenizerConfig, from_dict, to_dict
from arpg.device import meta_device
from arpg.errors import present, require
from arpg.files import State, check_state, read_json, read_tensors, write_tensors, write_together
from arpg.model import ARPG
from arpg.quantization.packed import pack_linears
from arpg.quantization.storage import add_difference, pack, pack_difference, unpack
from arpg.settings import SamplingDefaults
from arpg.storage import AnyPath
from arpg.tokenizer import VQTokenizer

FORMAT = "arpg-1"
CONFIG = "config.json"  # what makes a folder a model folder
MODEL, TOKENIZER, CLASSES = "model.safetensors", "tokenizer.safetensors", "classes.txt"
INDEX = "model_index.json"
DIFFUSERS_INDEX = {
    "_class_name": "ARPGPipeline",
    "_diffusers_version": "0.42.1",
    "model": ["arpg.diffusers_pipeline", "ARPGModel"],
}
GROUP = "arpg.models"  # of entry points
# Models of this project in distributions of their own (packages/), to be named where one is missing.
DISTRIBUTIONS = {
    "garden": "arpg-garden",
    "garden-text": "arpg-garden",
    "garden-control": "arpg-garden",
    "meadow-256": "arpg-meadow",
    "meadow-control": "arpg-meadow",
}

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class FolderConfig:
    """The contents of config.json and classes.txt."""

    model: ModelConfig | None = None
    tokenizer: TokenizerConfig | None = None
    sampling: SamplingDefaults | None = None
    tokenizer_of: str | None = None  # an installed model
    base: str | None = None  # an installed model, where the stored weights are differences from its weights
    license: str = "unknown"
    about: str = ""  # what the model knows, in a sentence or two
    examples: tuple[str, ...] = ()  # classes or prompts to try
    classes: ClassNames | None = None  # of classes.txt


def read_folder(folder: AnyPath) -> FolderConfig:
    """Read the configuration and the class names of a model folder."""
    path = folder / CONFIG
    require(path.is_file(), f"{folder} is not a model folder: it has no {CONFIG}")
    data = read_json(path)
    good = isinstance(data, dict) and data.pop("format", None) == FORMAT
    require(good, f'{path} does not say "format": "{FORMAT}"')
    require("classes" not in data, f"{path}: unknown key classes; their names are in {CLASSES}")
    config = from_dict(FolderConfig, data, where=str(path))
    both = config.tokenizer is not None and config.tokenizer_of is not None
    require(not both, f"{path} has a tokenizer and shares one; take one of them out")
    if config.model is None or config.model.text is not None:
        return config
    names, num_classes = folder / CLASSES, config.model.num_classes
    if not names.is_file():
        return replace(config, classes=numbered_classes(num_classes))
    text = names.read_text(encoding="utf-8")
    return replace(config, classes=parse_classes(text, where=str(names), num_classes=num_classes))


def write_folder(
    folder: AnyPath, config: FolderConfig, *, model: State | None = None, tokenizer: State | None = None
) -> None:
    """Write what is given and keep the rest of an existing folder; config.json comes last, since it names the rest."""
    if (folder / CONFIG).exists():
        old = read_folder(folder)
        kept = {
            name: getattr(old, name)
            for name in ("model", "tokenizer", "sampling", "classes", "tokenizer_of")
            if getattr(config, name) is None
        }
        if config.tokenizer is not None:  # its own, from now on
            kept["tokenizer_of"] = None
        if model is None:
            kept |= {"base": old.base, "about": config.about or old.about, "examples": config.examples or old.examples}
        if config.license == "unknown":
            kept["license"] = old.license
        config = replace(config, **kept)
    writes: dict[AnyPath, Callable[[Path], object]] = {}
    for name, state in ((MODEL, model), (TOKENIZER, tokenizer)):
        if state is not None:
            tensors = {key: tensor.detach().contiguous() for key, tensor in state.items()}
            writes[folder / name] = partial(write_tensors, tensors)
    if config.classes is not None:
        text = "\n".join(config.classes.lines) + "\n"
        writes[folder / CLASSES] = lambda path: path.write_text(text, encoding="utf-8")
    described = to_dict(replace(config, classes=None))
    data = {"format": FORMAT, **{name: value for name, value in described.items() if value not in (None, "", ())}}
    if config.model is not None:
        index = json.dumps(DIFFUSERS_INDEX, indent=1) + "\n"
        writes[folder / INDEX] = lambda path: path.write_text(index, encoding="utf-8")
    writes[folder / CONFIG] = lambda path: path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    write_together(writes)


@dataclass(frozen=True)
class InstalledModel:
    """A model by its name, the distribution that provides it, and its folder; or why it cannot be used."""

    name: str
    distribution: str  # name and version; "arpg" for the models of this package
    folder: Path | None
    problem: str = ""


def installed_models() -> dict[str, InstalledModel]:
    """Return all installed models by name: first those of this package, then those of other distributions."""
    assets = Path(str(resources.files("arpg").joinpath("assets")))
    folders = sorted(path.parent for path in assets.glob(f"*/{CONFIG}"))
    found = {folder.name: InstalledModel(folder.name, "arpg", folder) for folder in folders}
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        model = _provided(entry)
        if (other := found.get(model.name)) is not None and other.distribution != model.distribution:
            both = f"{other.distribution} and {model.distribution}"
            model = InstalledModel(model.name, both, None, f"{both} provide it; uninstall one of them")
        found[model.name] = model
    return found


def installed_folder(name: str, *, what: str = "model") -> Path:
    """Return the folder of an installed model; an `InputError` says what (`what` `name`) is not installed."""
    models = installed_models()
    require(
        name in models,
        f"{what} is {name!r}, which is not installed; "
        + (f"pip install {DISTRIBUTIONS[name]}" if name in DISTRIBUTIONS else f"installed are {', '.join(models)}"),
    )
    return present(models[name].folder, f"{what} is {name!r}, which cannot be used: {models[name].problem}")


def load_model(
    folder: AnyPath,
    *,
    config: FolderConfig | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> ARPG:
    """Load the network of a folder in eval mode; `dtype` None keeps the stored one.

    `config` is what `read_folder` returns, where the caller has it already.
    """
    config = config or read_folder(folder)
    model_config = present(config.model, f"{folder / CONFIG} describes no model; `arpg convert model` adds one")
    with meta_device():
        model = ARPG(model_config)
    base = None
    if config.base is not None:
        base = load_model(installed_folder(config.base, what=f"{folder / CONFIG}: base")).state_dict()
    return _load(model, folder / MODEL, device, dtype, base)


def load_tokenizer(
    folder: AnyPath,
    *,
    config: FolderConfig | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> VQTokenizer:
    """Load the tokenizer of a folder in eval mode; arguments as in `load_model`."""
    config = config or read_folder(folder)
    if config.tokenizer_of is not None:
        shared = installed_folder(config.tokenizer_of, what=f"{folder / CONFIG}: tokenizer_of")
        return load_tokenizer(shared, device=device, dtype=dtype)
    tokenizer_config = present(
        config.tokenizer, f"{folder / CONFIG} describes no tokenizer; `arpg convert tokenizer` adds one"
    )
    with meta_device():
        tokenizer = VQTokenizer(tokenizer_config)
    return _load(tokenizer, folder / TOKENIZER, device, dtype)


def prepare(model: ARPG, tokenizer: VQTokenizer, *, engine: str = "auto") -> None:
    """Make inference with this kind of engine faster on the device the model is on; the weights do not change."""
    if model.device.type == "cpu" and engine != "compiled":  # the compiler cannot read packed weights
        pack_linears(model)
    if model.dtype == torch.bfloat16:
        tokenizer.decode_in(torch.bfloat16)
    elif tokenizer.pixel_dtype is not None:  # the model has had another type
        tokenizer.decode_in(tokenizer.dtype)


def store_folder(folder: AnyPath, target: AnyPath, *, form: str) -> None:
    """Write a model folder whole, its weights in the storage format `form`."""
    described = replace(read_folder(folder), base=None)
    parts = {}
    if described.model is not None:
        parts["model"] = pack(load_model(folder).state_dict(), form)
    if described.tokenizer is not None:
        parts["tokenizer"] = pack(load_tokenizer(folder).state_dict(), form)
    write_folder(target, described, **parts)


def require_tokenizer_of(base: str, folder: AnyPath) -> None:
    """Raise an `InputError` unless the tokenizer of `folder` is that of the installed model `base`."""
    ours = load_tokenizer(folder).state_dict()
    theirs = load_tokenizer(installed_folder(base, what="base")).state_dict()
    same = ours.keys() == theirs.keys() and all(torch.equal(t, theirs[key].to(t)) for key, t in ours.items())
    require(same, f"the tokenizer of {folder} is not that of {base}; take that of {base}, or store the model whole")


def write_difference(folder: AnyPath, target: AnyPath, *, base: str, form: str) -> None:
    """Write a model folder as differences from the installed model `base`, whose tokenizer it must share."""
    described, other = read_folder(folder), installed_folder(base, what="base")
    if described.tokenizer is not None:
        require_tokenizer_of(base, folder)
    states = [load_model(each, dtype=torch.float32).state_dict() for each in (folder, other)]
    config = replace(described, tokenizer=None, tokenizer_of=base, base=base)
    write_folder(target, config, model=pack_difference(states[0], states[1], form))


def _provided(entry: metadata.EntryPoint) -> InstalledModel:
    """Find the folder of an entry point, without an import of its package."""
    distribution = "unknown" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    try:
        spec = importlib.util.find_spec(entry.module)
    except (ImportError, ValueError):
        spec = None
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    folder = next((path for place in places if ((path := Path(place) / entry.name) / CONFIG).is_file()), None)
    problem = "" if folder is not None else f"{distribution} names the package {entry.module}, which has no folder "
    return InstalledModel(entry.name, distribution, folder, problem and f"{problem}{entry.name} with a {CONFIG}")


def _load(
    module: Module, path: AnyPath, device: torch.device | str, dtype: torch.dtype | None, base: State | None = None
) -> Module:
    state = unpack(read_tensors(path), where=str(path))
    if base is not None:
        state = add_difference(state, base)
    check_state(state, module, where=str(path))
    module.load_state_dict(state, strict=True, assign=True)
    return module.to(device=device, dtype=dtype).eval()
