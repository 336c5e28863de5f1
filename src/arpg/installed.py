"""Installed models: the model folders of this package, and those that other distributions name in `arpg.models`.

A distribution provides a model by an entry point of the group `arpg.models`. Its name is the model's name, its value is
a package, and the model folder is the folder of that name inside the package:

    [project.entry-points."arpg.models"]
    my-model = "my_models"          # site-packages/my_models/my-model/config.json, model.safetensors, ...

No code of that distribution runs when models are looked up.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

from arpg.errors import present, require

GROUP = "arpg.models"
CONFIG = "config.json"  # what makes a folder a model folder
# Models of this project in distributions of their own (packages/), to be named where one is missing.
DISTRIBUTIONS = {
    "garden": "arpg-garden",
    "garden-text": "arpg-garden",
    "garden-control": "arpg-garden",
    "meadow-256": "arpg-meadow",
    "meadow-control": "arpg-meadow",
}


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
