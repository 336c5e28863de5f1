"""The zero-shot benchmark: in batches it generates what the pipeline generates, and its numbers mean what they say."""

import numpy as np
import pytest
import torch
from PIL import Image

from arpg.tasks.canvas import box_mask
from experiments.garden.measurements import zero_shot
from support.small import noise


@pytest.fixture
def bench(pipeline, monkeypatch, tmp_path):
    monkeypatch.setattr(zero_shot, "SIZE", 8)
    pixels = np.stack([np.asarray(noise(8, 8, seed=i)) for i in range(5)])
    return zero_shot.Bench(
        pipe=pipeline,
        lpips=None,
        classifier=None,
        inception=None,
        test=None,
        pixels=pixels,
        labels=np.array([0, 3, 1, 4, 2]),
        batch=2,
        out=tmp_path,
    )


@pytest.mark.parametrize("labels", [True, False])
def test_batches_generate_what_the_pipeline_generates(bench, labels):
    box = (2, 3, 7, 6)
    made = bench.fill(bench.pixels, bench.labels if labels else None, box, bench.pipe.sampling.settings(steps=3))
    mask = Image.fromarray(box_mask((8, 8), box).astype(np.uint8) * 255)
    for i, pixels in enumerate(made):
        class_ = int(bench.labels[i]) if labels else None
        (alone,) = bench.pipe.inpaint(Image.fromarray(bench.pixels[i]), mask, class_, seed=i, steps=3, feather=0)
        assert abs(np.asarray(alone).astype(int) - pixels).max() <= 1


def test_classification_is_that_of_the_pipeline(bench, monkeypatch):
    monkeypatch.setattr(zero_shot, "accuracy", lambda *_: {"top1": 0.0})
    found = [int(bench.pipe.classify(Image.fromarray(pixels)).argmin()) for pixels in bench.pixels]
    right = float((np.array(found) == bench.labels).mean())
    result = zero_shot.classify(bench, None, 1000.0)
    assert result["images"] == 5
    assert result["accuracy"] == pytest.approx(right)
    assert zero_shot.classify(bench, 3, 1000.0)["images"] == 3
    assert zero_shot.classify(bench, None, 0.0)["images"] == 1, "it stops when the time is over"


def test_an_image_is_not_compared_with_its_own_original():
    """Of the same distribution, the mean over many samples is zero; with pairs it would be clearly below."""
    generator = torch.Generator().manual_seed(0)
    values, paired = [], []
    for _ in range(200):
        x = torch.randn(20, 4, generator=generator)
        values.append(zero_shot.halves_distance(x, x).mean)
        paired.append(zero_shot.kernel_distance(x, x).mean)
    error = np.std(values) / np.sqrt(len(values))
    assert abs(np.mean(values)) < 4 * error
    assert np.mean(paired) < -10 * error


def test_detail_is_what_halving_loses():
    flat = np.full((1, 8, 8, 3), 90, np.uint8)
    assert zero_shot._detail(flat) == 0
    board = np.indices((8, 8)).sum(0) % 2 * 200
    assert zero_shot._detail(np.repeat(board[None, ..., None], 3, -1).astype(np.uint8)) == pytest.approx(100)
    blocks = board[:4, :4].repeat(2, 0).repeat(2, 1)
    assert zero_shot._detail(np.repeat(blocks[None, ..., None], 3, -1).astype(np.uint8)) == 0
