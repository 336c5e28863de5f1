"""Gradients from a CUDA graph: the losses and weights of a run without one. Without a GPU, its recording is played."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from arpg.checkpoint import FolderConfig, write_folder
from arpg.config import ModelConfig
from arpg.data.tokens import TokenWriter
from arpg.train import objective
from arpg.train.distributed import init_distributed, shutdown_distributed
from arpg.train.model import ModelTraining, train_model
from arpg.train.objective import GraphedGradients
from arpg.train.recipe import ModelRecipe, OptimRecipe, RunRecipe, TokenData
from support.small import small_model

GPU = torch.cuda.is_available()


@pytest.fixture
def recipe(tmp_path):
    rng = np.random.default_rng(0)
    writer = TokenWriter(tmp_path / "tokens", grid=(4, 4), vocab_size=24, classes=tuple("abcde"), views=1)
    writer.add(rng.integers(24, size=(20, 1, 16)).astype(np.uint16), np.arange(20) % 5)
    writer.close()
    return ModelRecipe(
        model=ModelConfig(
            width=64, num_heads=2, pass1_layers=2, pass2_layers=3, vocab_size=24, num_classes=5, grid=(4, 4)
        ),
        data=TokenData(train=str(tmp_path / "tokens")),
        optim=OptimRecipe(lr=1e-2, warmup=0.0, clip=0.5),
        run=RunRecipe(steps=10, batch_size=8, precision="float32", log_every=1, save_every=4, graph=False),
    )


@pytest.fixture
def world():
    yield init_distributed("cpu")
    shutdown_distributed()


def play(parameters):
    """A recording as a GPU makes it: nothing is computed at first, and all of it again with each replay."""

    def record(work, stream):
        assert stream is None
        value = work()
        gradients = [p.grad for p in parameters]
        for tensor in (value, *gradients):
            tensor.fill_(float("nan"))

        def replay():
            for parameter in parameters:
                parameter.grad = None
            value.copy_(work())
            for gradient, parameter in zip(gradients, parameters, strict=True):
                gradient.copy_(parameter.grad)

        return replay, value

    return record


@pytest.fixture(params=["labels", "guidance"])
def any_recipe(recipe, request, tmp_path):
    """The recipe, and one that distills guidance."""
    if request.param == "labels":
        return recipe
    model = small_model(recipe.model)
    write_folder(tmp_path / "teacher", FolderConfig(model=recipe.model), model=model.state_dict())
    student = dataclasses.replace(recipe.model, guidance_input=True)
    return dataclasses.replace(
        recipe, model=student, init_from=str(tmp_path / "teacher"), guidance_scales=(1.0, 4.0), label_drop=0.0
    )


def test_a_replayed_run_is_the_run(any_recipe, world, tmp_path, monkeypatch):
    recipe = any_recipe
    plain, replayed = (ModelTraining(recipe, tmp_path / name, world) for name in ("plain", "replayed"))
    parameters = list(replayed.objective.parameters())
    monkeypatch.setattr(objective, "capture_graph", play(parameters))
    replayed.graphed = GraphedGradients(replayed.loss, parameters)
    losses = [[float(training.step(step)["loss"]) for step in range(8)] for training in (plain, replayed)]
    assert losses[0] == losses[1]
    for a, b in zip(plain.objective.parameters(), parameters, strict=True):
        assert torch.equal(a, b)
    assert all(parameter.grad is None for parameter in parameters)
    # Another shape is computed as ever, and does not disturb the recording.
    batch = replayed.batches.batch(9, 0)
    half = type(batch)(*(None if x is None else x[:4] for x in dataclasses.astuple(batch)))
    kept = replayed.graphed(batch), replayed.graphed(half), replayed.graphed(batch)
    assert kept[0] == kept[2] == plain.loss(batch)
    assert kept[1] == plain.loss(half)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler reads it
@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_graphs_change_no_loss_and_resume(any_recipe, tmp_path, precision):
    recipe = any_recipe

    def run(name, *, resume=False, steps=10, **change):
        changed = dataclasses.replace(
            recipe.run, precision=precision, compile=precision == "bf16", steps=steps, **change
        )
        # With the recipe's rate of 1e-2, gradients that differ by 1e-7 give losses that differ by 3e-2 after ten steps.
        constant = dataclasses.replace(recipe.optim, schedule="constant", lr=3e-4)
        train_model(dataclasses.replace(recipe, run=changed, optim=constant), tmp_path / name, resume=resume)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]

    plain, replayed = run("plain"), run("replayed", graph=True)
    close = 1e-3 if precision == "float32" else 5e-3
    assert replayed == pytest.approx(plain, rel=close)
    run("cut", steps=8, graph=True)
    assert run("cut", resume=True, graph=True) == pytest.approx(replayed, rel=close)
