"""The custom pipeline of diffusers: a model folder loads with it and gives the images of our pipeline."""

import json

import diffusers
import numpy as np
import pytest
import torch

from arpg import InputError, Pipeline
from arpg.checkpoint import DIFFUSERS_INDEX, installed_folder
from arpg.config import DEFAULT_CONTROL_MODEL, DEFAULT_MODEL, DEFAULT_TEXT_MODEL
from support.distribution import require_model
from support.paths import ROOT
from support.small import noise

OPTIONS = {"num_inference_steps": 3, "guidance_scale": 2.0}


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True))


@pytest.fixture
def load(folder, tmp_path, monkeypatch):
    """Load the saved small pipeline as a user of diffusers does."""
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def load(path=folder, **options):
        return diffusers.DiffusionPipeline.from_pretrained(
            str(path), custom_pipeline=str(ROOT / "integrations" / "diffusers"), trust_remote_code=True, **options
        )

    return load


def test_a_model_folder_loads_and_gives_the_same_images(load, pipeline):
    pipe = load()
    assert isinstance(pipe, diffusers.DiffusionPipeline)
    assert pipe.dtype == torch.float32
    assert same(pipe([1, "class 2"], **OPTIONS).images, pipeline.generate([1, 2], steps=3, guidance=2.0))
    mask = np.zeros((8, 8), dtype=bool)
    mask[:, :4] = True
    filled = pipe(2, image=noise(8, 8), mask_image=mask, generator=torch.Generator().manual_seed(4), **OPTIONS)
    assert same(filled.images, pipeline.inpaint(noise(8, 8), mask, 2, seed=4, steps=3, guidance=2.0))
    (array,) = pipe(1, output_type="np", return_dict=False, **OPTIONS)
    assert array.shape == (1, 8, 8, 3)
    seen = []
    pipe(1, callback_on_step_end=lambda own, step, timestep, kwargs: seen.append((own, step)), **OPTIONS)
    assert seen == [(pipe, 0), (pipe, 1), (pipe, 2)]
    with pytest.raises(InputError, match="did you mean guidance_scale"):
        pipe(1, guidance_scal=2.0)


def test_types_and_saving(load, folder, tmp_path, capsys):
    half = load(dtype=torch.bfloat16)
    ours = Pipeline.from_pretrained(folder, device="cpu", precision="bfloat16")
    assert half.dtype == torch.bfloat16
    assert same(half(1, **OPTIONS).images, ours.generate(1, steps=3, guidance=2.0))
    assert same(load().to(torch.bfloat16)(1, **OPTIONS).images, half(1, **OPTIONS).images)
    load().save_pretrained(tmp_path / "again")
    assert same(load(tmp_path / "again")(1, **OPTIONS).images, load()(1, **OPTIONS).images)
    capsys.readouterr()
    half.set_progress_bar_config(disable=False)
    half(1, **OPTIONS)
    assert "sampling" in capsys.readouterr().err


def test_the_class_loads_by_name(folder, pipeline):
    from arpg.diffusers_pipeline import ARPGPipeline

    pipe = ARPGPipeline.from_pretrained(folder)
    assert same(pipe(1, **OPTIONS).images, pipeline.generate(1, steps=3, guidance=2.0))
    with pytest.raises(InputError, match="device_map is 'balanced'; leave it out"):
        ARPGPipeline.from_pretrained(folder, device_map="balanced")


@pytest.mark.parametrize("name", [DEFAULT_MODEL, DEFAULT_TEXT_MODEL, DEFAULT_CONTROL_MODEL])
def test_installed_folders_have_an_index(name):
    require_model(name)
    assert json.loads((installed_folder(name) / "model_index.json").read_text()) == DIFFUSERS_INDEX
