"""Distributions that provide models: whether one is installed, and a made-up one on sys.path."""

from pathlib import Path

import pytest

from arpg.checkpoint import installed_models


def require_model(name: str) -> None:
    """Skip the test where a model other than the default one is not installed."""
    if name not in installed_models():
        pytest.skip(f"the model {name} is not installed")


def install(site: Path, name: str, models: dict[str, str], *, version: str = "1.0") -> Path:
    """Write the metadata of a distribution into a folder on sys.path; `models` maps entry points to packages."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{model} = {package}\n" for model, package in models.items())
    (info / "entry_points.txt").write_text(f"[arpg.models]\n{lines}")
    return site
