"""The user's API: defaults, previews, checks."""

import numpy as np
import pytest

from arpg import InputError, Pipeline, SamplingDefaults
from arpg.config import SAMPLING
from support.small import small_tokenizer


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
        ({"classes": 0, "stepz": 3}, "unknown sampling setting stepz"),
        ({"classes": 0, "schedule": (1, 2)}, "fills 3 tokens"),
    ):
        with pytest.raises(InputError, match=message):
            pipeline.generate(**arguments)
