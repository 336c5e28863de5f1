"""Installed models: those of this package, and those of other distributions, found by entry points."""

import importlib
import shutil
import tomllib

import pytest
import torch

from arpg import InputError, Pipeline
from arpg.checkpoint import (
    DISTRIBUTIONS,
    FolderConfig,
    installed_folder,
    installed_models,
    read_folder,
    write_difference,
    write_folder,
)
from arpg.config import DEFAULT_CONTROL_MODEL, DEFAULT_MODEL, DEFAULT_TEXT_MODEL
from arpg.hub import resolve
from support.distribution import install
from support.paths import ROOT
from support.small import small_model


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    return site


@pytest.fixture
def provided(site, folder):
    """`someones-models 1.0` with the model `tiny` in its package, whose code must not run."""
    package = site / "someones_models"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    shutil.copytree(folder, package / "tiny")
    install(site, "someones-models", {"tiny": "someones_models"})
    return package / "tiny"


def test_the_package_provides_its_own_models():
    models = installed_models()
    assert DEFAULT_MODEL in models
    assert models[DEFAULT_MODEL].distribution == "arpg"
    for model in models.values():
        assert model.folder is not None
        assert (model.folder / "config.json").is_file()
    assert resolve(DEFAULT_MODEL) == installed_folder(DEFAULT_MODEL) == models[DEFAULT_MODEL].folder


def test_a_distribution_provides_a_model(provided, run):
    assert installed_models()["tiny"].distribution == "someones-models 1.0"
    assert resolve("tiny") == provided
    pipe = Pipeline.from_pretrained("tiny", device="cpu")
    assert torch.equal(pipe.model.head.weight, small_model().head.weight)
    code, out, _ = run("info")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("tiny ")]
    assert line.endswith("installed with someones-models 1.0")
    assert any(line.startswith(DEFAULT_MODEL) and line.endswith("installed with arpg") for line in out.splitlines())


def test_models_of_other_distributions_are_bases(provided, tmp_path, monkeypatch):
    """Differences and shared tokenizers work with any installed model; once it is gone, the message names it."""
    tuned = small_model()
    with torch.no_grad():
        tuned.head.weight += 0.01
    write_folder(tmp_path / "whole", FolderConfig(model=tuned.config), model=tuned.state_dict())
    write_difference(tmp_path / "whole", tmp_path / "small", base="tiny", form="int8")
    pipe = Pipeline.from_pretrained(tmp_path / "small", device="cpu")
    assert (pipe.model.head.weight - tuned.head.weight).abs().max() < 1e-3
    shutil.rmtree(provided.parent.parent / "someones_models-1.0.dist-info")
    with pytest.raises(InputError, match=r"small/config.json: base is 'tiny', which is not installed; installed are"):
        Pipeline.from_pretrained(tmp_path / "small", device="cpu")


def test_what_cannot_be_used_says_why(provided, site, run):
    """Two providers of a name, a package without the folder and one that does not exist hide no other model."""
    install(site, "more-models", {"tiny": "someones_models", "no-folder": "someones_models", "nothing": "no.package"})
    for name, message in (
        ("tiny", "more-models 1.0 and someones-models 1.0 provide it|someones-models 1.0 and more-models 1.0 provide"),
        ("no-folder", "more-models 1.0 names the package someones_models, which has no folder no-folder"),
        ("nothing", "names the package no.package, which has no folder nothing"),
    ):
        with pytest.raises(InputError, match=message):
            resolve(name)
    code, out, _ = run("info")
    assert code == 0
    assert out.count("cannot be used") == 3
    assert resolve(DEFAULT_MODEL).is_dir()


def test_the_defaults_take_what_they_are_for():
    models = installed_models()
    takes = {DEFAULT_MODEL: "num_classes", DEFAULT_TEXT_MODEL: "text", DEFAULT_CONTROL_MODEL: "control"}
    for name, section in takes.items():
        if name in models:
            assert getattr(read_folder(models[name].folder).model, section)


def test_a_missing_model_of_this_project_names_its_distribution(monkeypatch):
    only = {DEFAULT_MODEL: installed_models()[DEFAULT_MODEL]}
    for module in ("arpg.hub", "arpg.checkpoint"):
        monkeypatch.setattr(f"{module}.installed_models", lambda: only)
    for name, distribution in DISTRIBUTIONS.items():
        if name != DEFAULT_MODEL:
            with pytest.raises(InputError, match=f"'{name}', which is not installed; pip install {distribution}"):
                resolve(name)


def test_the_distributions_of_this_repository_provide_what_they_should():
    """Each model is in the folder of one distribution: that of this package has the default model alone."""
    for distribution in set(DISTRIBUTIONS.values()):
        folder = ROOT / "packages" / distribution
        described = tomllib.loads((folder / "pyproject.toml").read_text())
        provided = described["project"]["entry-points"]["arpg.models"]
        assert described["project"]["name"] == distribution
        assert set(provided) == {name for name, where in DISTRIBUTIONS.items() if where == distribution}
        packages = described["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        assert packages == [f"src/{package}" for package in set(provided.values())]
        (package,) = (folder / path for path in packages)
        assert (package / "__init__.py").is_file()
        assert {path.parent.name for path in package.glob("*/config.json")} == set(provided)
    assert [path.parent.name for path in ROOT.glob("src/arpg/assets/*/config.json")] == [DEFAULT_MODEL]
