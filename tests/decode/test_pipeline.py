"""The user's API: defaults, previews, checks."""

import numpy as np
import pytest
import torch
from PIL import Image

import arpg.pipeline as pipelines
from arpg import ControlInput, InputError, Pipeline, SamplingDefaults, checkpoint
from arpg.config import DEFAULT_CONTROL_MODEL, DEFAULT_MODEL, SAMPLING
from arpg.settings import TASK_SETTINGS
from support.distribution import require_model
from support.small import noise, small_tokenizer


def test_settings_come_from_the_model(model):
    defaults = SamplingDefaults(steps=6, guidance_by_steps=((4, 2.0), (16, 4.0)), order="halton", top_k=7)
    pipe = Pipeline(model, small_tokenizer(), sampling=defaults)
    settings = pipe.generate_task([0]).spec.settings
    assert (settings.steps, settings.order, settings.top_k) == (6, "halton", 7)
    settings = pipe.generate_task([0], steps=16, order="raster").spec.settings
    assert (settings.steps, settings.guidance, settings.order) == (16, 4.0, "raster")
    settings = pipe.generate_task([0], steps=16, guidance=1.5).spec.settings
    assert settings.guidance == 1.5


def test_guidance_follows_the_number_of_steps():
    best = SAMPLING["arpg-l"]
    for steps, guidance in ((16, 7.8), (24, 6.1), (32, 5.4), (64, 5.1), (128, 4.6), (256, 4.3)):
        assert best.guidance_for(steps) == guidance
    assert 5.1 < best.guidance_for(48) < 5.4
    assert best.guidance_for(4) == 7.8
    assert best.guidance_for(1000) == 4.3


def test_previews_end_in_the_images(pipeline):
    previews = list(pipeline.stream([1, 2], num_images=2, seed=3, steps=5))
    assert [len(images) for images in previews] == [4] * 5
    final = pipeline.generate([1, 2], num_images=2, seed=3, steps=5)
    for a, b in zip(previews[-1], final, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    # Each preview shows exactly the known patches (2 x 2 pixels here); the others are grey.
    task = pipeline.generate_task([1, 2], num_images=2, seed=3, steps=5)
    for step, images in zip(list(task.steps())[:-1], previews[:-1], strict=True):
        for known, image in zip(step.known_BN, images, strict=True):
            patches = np.asarray(image).reshape(4, 2, 4, 2, 3).transpose(0, 2, 1, 3, 4).reshape(16, -1)
            assert (patches[~known.numpy()] == 223).all()
            assert not (patches[known.numpy()] == 223).all(1).any()


def test_seed_plus_i(pipeline):
    batch = pipeline.generate(2, num_images=3, seed=10, steps=4)
    for i, image in enumerate(batch):
        assert np.array_equal(np.asarray(image), np.asarray(pipeline.generate(2, seed=10 + i, steps=4)[0]))


def test_steps_are_reported(pipeline):
    seen = []
    pipeline.generate([0, 1, 2], steps=4, batch_size=2, on_step=lambda step: seen.append(step.index))
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_bad_calls(pipeline):
    for arguments, message in (
        ({"classes": []}, "no class"),
        ({"classes": "tiger"}, "'tiger' is unknown"),
        ({"classes": 0, "stepz": 3}, "generate has no option 'stepz'; did you mean steps"),
        ({"classes": 0, "guidence_scale": 3.0}, "'guidence_scale'; did you mean guidance_scale"),
        ({"classes": 0, "feather": 3}, "generate has no option 'feather'"),
        ({"classes": 0, "schedule": (1, 2)}, "fills 3 tokens"),
    ):
        with pytest.raises(InputError, match=message):
            pipeline.generate(**arguments)


def test_names_of_diffusers(pipeline):
    ours = pipeline.generate(2, num_images=2, steps=4, guidance=2.5, seed=11)
    generator = torch.Generator().manual_seed(11)
    same = {"num_images_per_prompt": 2, "num_inference_steps": 4, "guidance_scale": 2.5, "generator": generator}
    theirs = pipeline.generate(2, **same)
    each = pipeline.generate(2, **{**same, "generator": [torch.Generator().manual_seed(seed) for seed in (11, 12)]})
    for images in (theirs, each):
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(ours, images, strict=True))
    task = pipeline.inpaint_task(noise(8, 8), Image.new("L", (8, 8), 255), 1, generator=generator, guidance_scale=2.0)
    assert (task.spec.seed, task.spec.settings.guidance) == (11, 2.0)
    assert pipeline.expand_task(None, 1, size=(16, 16), way="windows").stages[1].window == (4, 4)
    with pytest.raises(InputError, match="generator is another name of seed"):
        pipeline.generate(1, seed=1, generator=generator)


def test_options_have_the_defaults_of_the_table(pipeline):
    spec = pipeline.generate_task(1).spec
    assert len(spec.labels) == TASK_SETTINGS["num_images"].default
    for name in ("seed", "best_of", "batch_size"):
        assert getattr(spec, name) == TASK_SETTINGS[name].default
    control = ControlInput(noise(8, 8))
    assert (control.kind, control.strength) == (TASK_SETTINGS["kind"].default, TASK_SETTINGS["strength"].default)


@pytest.mark.parametrize("name", [DEFAULT_MODEL, DEFAULT_CONTROL_MODEL])
def test_the_configuration_is_read_once(name, monkeypatch):
    require_model(name)
    opened = []
    read = checkpoint.read_folder
    monkeypatch.setattr(checkpoint, "read_folder", lambda folder: opened.append(folder) or read(folder))
    monkeypatch.setattr(pipelines, "read_folder", checkpoint.read_folder)
    Pipeline.from_pretrained(name, device="cpu")
    assert opened.count(checkpoint.installed_folder(name)) == 1
