"""The zero-shot benchmark: in batches it generates what the pipeline generates, and its numbers mean what they say."""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import Pipeline
from arpg.evaluation.classifier import Classifier, ClassifierConfig
from arpg.tasks.stages import Canvas, box_mask
from experiments import zero_shot
from experiments.meadow.__main__ import main
from experiments.photos import PhotoSet
from support.small import noise


@pytest.fixture
def bench(pipeline, tmp_path):
    options = argparse.Namespace(batch_size=2, out=tmp_path, classify_images=None, classify_seconds=1000.0)
    bench = zero_shot.ZeroShot(pipeline, PhotoSet("small", (), "", 8), Path("none"), options)
    bench.test = np.stack([np.asarray(noise(8, 8, seed=i)) for i in range(5)]), np.array([0, 3, 1, 4, 2])
    bench.domain_of = np.array(["even", "odd", "even", "odd", "even"])
    return bench


@pytest.mark.parametrize("labels", [True, False])
def test_batches_generate_what_the_pipeline_generates(bench, labels):
    box = (2, 3, 7, 6)
    pixels_n, labels_n = bench.test
    settings = bench.pipe.sampling.settings(steps=3)
    made = bench.fill(pixels_n, labels_n if labels else None, box_mask((8, 8), box), settings)
    mask = Image.fromarray(box_mask((8, 8), box).astype(np.uint8) * 255)
    for i, pixels in enumerate(made):
        class_ = int(labels_n[i]) if labels else None
        (alone,) = bench.pipe.inpaint(Image.fromarray(pixels_n[i]), mask, class_, seed=i, steps=3, feather=0)
        assert abs(np.asarray(alone).astype(int) - pixels).max() <= 1


def test_what_is_outside_the_middle_is_not_seen(bench):
    """Outpainting starts from the middle alone: other pixels around it change nothing."""
    pixels, labels = bench.test
    box = zero_shot.middle(8, 0.5)
    assert box == (2, 2, 6, 6)
    mask, settings = ~box_mask((8, 8), box), bench.pipe.sampling.settings(steps=3)
    padded = zero_shot.repeat_border(pixels, box)
    for i in range(len(pixels)):
        inner = Image.fromarray(pixels[i, 2:6, 2:6])
        assert np.array_equal(Canvas.extend(inner, (2, 2, 2, 2), grid=(4, 4), stride=2).image, padded[i])
    made = bench.fill(pixels, labels, mask, settings, padded)
    other = np.where(mask[..., None], 255 - pixels, pixels)
    assert np.array_equal(bench.fill(other, labels, mask, settings, zero_shot.repeat_border(other, box)), made)
    assert np.array_equal(made[:, 2:6, 2:6], pixels[:, 2:6, 2:6])


def test_boxes_are_parts_of_the_side():
    assert [zero_shot.middle(size, 0.8) for size in (96, 128)] == [(9, 9, 86, 86), (13, 13, 115, 115)]
    assert zero_shot.middle(96, 0.5) == (24, 24, 72, 72)


def test_classification_is_that_of_the_pipeline(bench, monkeypatch):
    pixels, labels = bench.test
    monkeypatch.setattr(zero_shot, "predict", lambda classifier, pixels: np.zeros(len(pixels), int))
    bench.classifier = None
    found = np.array([int(bench.pipe.classify(Image.fromarray(each)).argmin()) for each in pixels])
    result = bench.classify()
    assert result["images"] == 5
    assert result["rows"]["likelihood"]["right"] == pytest.approx((found == labels).mean())
    odd = labels % 2 == 1
    assert result["rows"]["likelihood"]["right, odd"] == pytest.approx((found == labels)[odd].mean())
    assert result["rows"]["classifier"]["right"] == 0.2
    bench.options.classify_images = 3
    assert bench.classify()["images"] == 3
    bench.options.classify_seconds = 0.0
    assert bench.classify()["images"] == 1, "it stops when the time is over"


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
    assert zero_shot.detail(flat) == 0
    board = np.indices((8, 8)).sum(0) % 2 * 200
    assert zero_shot.detail(np.repeat(board[None, ..., None], 3, -1).astype(np.uint8)) == pytest.approx(100)
    blocks = board[:4, :4].repeat(2, 0).repeat(2, 1)
    assert zero_shot.detail(np.repeat(blocks[None, ..., None], 3, -1).astype(np.uint8)) == 0


@pytest.mark.parametrize("world", [16], indirect=True)  # LPIPS takes 16 pixels or more, also of the box
def test_parts_are_kept_and_resumed(world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zero_shot, "predict", lambda classifier, pixels: np.arange(len(pixels)) % 5)
    Classifier(ClassifierConfig(num_classes=5)).save(tmp_path / "classifier")
    out = tmp_path / "out"
    command = ["zero-shot", *world, "--classifier", str(tmp_path / "classifier"), "--out", str(out)]
    command += ["--edits", "4", "--expand-images", "2", "--batch-size", "3"]
    assert main([*command, "--minutes", "0"]) == 0
    assert "no time is left for inpaint" in capsys.readouterr().out
    assert main([*command, "--parts", "outpaint", "edit"]) == 0
    first = json.loads((out / "zero-shot.json").read_text())
    assert set(first) == {"model", "set", "device", "precision", "sampling", "limit", "outpaint", "edit"}
    assert first["outpaint"]["rows"]["the originals"]["LPIPS"] == 0
    assert first["outpaint"]["rows"]["its class, block-wise"]["LPIPS"] > 0
    assert first["edit"]["rows"]["guidance 3"]["seen as the new class interval"][0] >= 0
    assert main(command) == 0
    whole = json.loads((out / "zero-shot.json").read_text())
    assert set(whole) == {*first, "inpaint", "classify", "expand"}
    assert whole["outpaint"] == first["outpaint"]
    assert whole["expand"]["rows"]["bicubic"]["LPIPS to the enlarged input"] == 0
    assert whole["expand"]["size"] == [64, 64]
    assert sorted(path.stem for path in out.glob("*.webp")) == ["edit", "expand", "inpaint", "outpaint"]
    text = (out / "zero-shot.md").read_text()
    assert "### inpaint" in text
    assert " ± " in text
    assert main([*command, "--limit", "3"]) == 2
    assert "is of another limit (None, not 3)" in capsys.readouterr().err
    defaults = dataclasses.replace(Pipeline.from_pretrained().sampling, order="raster")  # as search-settings --write
    monkeypatch.setattr(Pipeline.from_pretrained(), "sampling", defaults)
    assert main(command) == 2
    assert "is of another sampling" in capsys.readouterr().err
