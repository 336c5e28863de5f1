"""Recipes: every shipped one loads; unknown keys, bad values and overrides."""

import dataclasses
import tomllib

import pytest
import torch

from arpg import ARPG, InputError
from arpg.checkpoint import installed_folder, read_folder
from arpg.config import MODELS, TextConfig
from arpg.quantization.storage import pack_difference
from arpg.train.recipe import ModelRecipe, TokenizerRecipe, read_recipe
from support.distribution import require_model
from support.paths import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def kind(path):
    return TokenizerRecipe if "loss" in tomllib.loads(path.read_text()) else ModelRecipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(path):
    recipe = read_recipe(path, kind(path))
    assert recipe.run.steps > 100


@pytest.mark.parametrize(
    ("name", "steps", "batch_size", "lr"),
    [("l", 500_000, 1024, 4e-4), ("xl", 670_000, 768, 3e-4), ("xxl", 1_000_000, 512, 2e-4)],
)
def test_the_papers_recipes(name, steps, batch_size, lr):
    path = next(p for p in RECIPES if p.stem == f"imagenet-256-{name}")
    recipe = read_recipe(path, ModelRecipe)
    assert recipe.model == MODELS[f"arpg-{name}"]
    assert (recipe.run.steps, recipe.run.batch_size, recipe.optim.lr) == (steps, batch_size, lr)
    assert (recipe.optim.warmup, recipe.optim.weight_decay, recipe.optim.betas) == (0.25, 0.05, (0.9, 0.95))
    assert recipe.optim.min_lr == 1e-5


def test_the_papers_512_fine_tune():
    path = next(p for p in RECIPES if p.stem == "imagenet-512-xl")
    recipe = read_recipe(path, ModelRecipe)
    assert recipe.model == dataclasses.replace(MODELS["arpg-xl"], grid=(32, 32))
    assert recipe.init_from == "arpg-xl"
    assert (recipe.run.steps, recipe.run.batch_size) == (500_000, 128)
    assert (recipe.optim.lr, recipe.optim.schedule, recipe.optim.warmup) == (5e-5, "linear", 1.0)


def test_the_papers_text_to_image():
    """50 epochs of 4 million pairs, 1e-4 per 256 images; 64 steps, guidance 8, top-k 900."""
    recipe = read_recipe(next(p for p in RECIPES if p.stem == "text-512-xl"), ModelRecipe)
    text = TextConfig("flan-t5-xl", 2048, 120)
    assert recipe.model == dataclasses.replace(MODELS["arpg-xl"], grid=(32, 32), num_classes=0, text=text)
    assert recipe.run.steps * recipe.run.batch_size == pytest.approx(50 * 4e6, rel=0.01)
    assert recipe.optim.lr / recipe.run.batch_size == pytest.approx(1e-4 / 256)
    assert (recipe.sampling.settings().guidance, recipe.sampling.steps, recipe.sampling.top_k) == (8.0, 64, 900)


def test_garden_text_fits_its_size():
    """Under 25 MB in half precision."""
    recipe = read_recipe(next(p for p in RECIPES if p.stem == "garden-text"), ModelRecipe)
    with torch.device("meta"):
        model = ARPG(recipe.model)
    assert sum(tensor.numel() for tensor in model.state_dict().values()) * 2 < 25e6


def test_the_papers_control_fine_tune():
    """60 K iterations from the class-conditional model, at the same constant rate from the first."""
    recipe = read_recipe(next(p for p in RECIPES if p.stem == "imagenet-256-l-control"), ModelRecipe)
    assert dataclasses.replace(recipe.model, control=None) == MODELS["arpg-l"]
    assert (recipe.init_from, recipe.label_drop, recipe.model.control.patch) == ("arpg-l", 0.1, 16)
    assert (recipe.run.steps, recipe.run.batch_size, recipe.optim.lr) == (60_000, 1024, 4e-4)
    assert (recipe.optim.schedule, recipe.optim.warmup) == ("constant", 0.0)


def test_garden_control_fits_its_size():
    """`garden` with an encoder of two to three million parameters; under 25 MB as 6-bit differences."""
    require_model("garden")
    recipe = read_recipe(next(p for p in RECIPES if p.stem == "garden-control"), ModelRecipe)
    assert dataclasses.replace(recipe.model, control=None) == read_folder(installed_folder("garden")).model
    assert (recipe.init_from, recipe.optim.schedule, recipe.label_drop) == ("garden", "constant", 0.1)
    model = ARPG(recipe.model)
    assert 2e6 < sum(p.numel() for p in model.control.parameters()) < 3e6
    base = {key: t for key, t in model.state_dict().items() if not key.startswith("control.")}
    packed = pack_difference(model.state_dict(), base, "int6")
    assert sum(t.nbytes for t in packed.values()) < 22e6


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(
        """
[model]
width = 32
num_heads = 2
pass1_layers = 1
pass2_layers = 1
[data]
train = "tokens"
[optim]
lr = 1e-3
[run]
steps = 10
batch_size = 8
"""
    )
    return path


def test_overrides(recipe):
    changed = read_recipe(
        recipe, ModelRecipe, ["optim.lr=3e-4", "model.grid=[4, 6]", "data.train=other", "run.compile=false", "seed=7"]
    )
    assert (changed.optim.lr, changed.model.grid, changed.data.train) == (3e-4, (4, 6), "other")
    assert (changed.run.compile, changed.seed) == (False, 7)


def test_an_optional_value_can_be_unset(recipe):
    inherited = read_recipe(recipe, ModelRecipe, ["data.validation=held-out", "tokenizer=garden"])
    assert (inherited.data.validation, inherited.tokenizer) == ("held-out", "garden")
    recipe.write_text(recipe.read_text().replace("[optim]", 'validation = "held-out"\n[optim]'))
    unset = read_recipe(recipe, ModelRecipe, ["data.validation=none", "run.parallel=none"])
    assert unset.data.validation is None
    assert unset.run.parallel == "none"  # a choice of that name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.rate=1", "unknown key rate"),
        ("speed=1", "unknown key speed"),
        ("optim.lr=-1", "optim.lr is -1"),
        ("optim.lr=fast", "optim.lr is 'fast'; expected float"),
        ("optim.schedule=step", "'step'"),
        ("run.steps=0", "run.steps is 0"),
        ("run.accumulate=3", "cannot be cut into"),
        ("run.parallel=zero", "'zero'"),
        ("run.patience=2", "run.patience is 2 and data.validation is not set"),  # nothing would be measured
        ("label_drop=1.0", "label_drop is 1.0"),
        ("control_drop=0.1", r"control_drop is 0.1; expected .* 0 without \[model.control\]"),
        ("model.num_heads=3", "width 32"),
        ("nonsense", "no key=value"),
        ("seed.x=1", "not a section|is a value"),
    ],
)
def test_bad_overrides(recipe, override, message):
    if override.startswith("seed."):
        recipe.write_text("seed = 1\n" + recipe.read_text())
    with pytest.raises(InputError, match=message):
        read_recipe(recipe, ModelRecipe, [override])


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_recipe(tmp_path / "none.toml", ModelRecipe)
    bad = tmp_path / "bad.toml"
    bad.write_text("[model")
    with pytest.raises(InputError, match="not valid TOML"):
        read_recipe(bad, ModelRecipe)
    bad.write_text("[model]\nwidth = 32\n")
    with pytest.raises(InputError, match="missing key data, optim, run"):
        read_recipe(bad, ModelRecipe)
