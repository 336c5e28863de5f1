"""The score of control on photographs: what its numbers mean, its rows, and that kinds are kept."""

import argparse
import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from arpg import Pipeline
from arpg.evaluation.classifier import Classifier, ClassifierConfig
from experiments import control_images, control_photos
from experiments.control_photos import CEILING, CONTROL, NEAREST, PLAIN, REAL, follow
from experiments.meadow.__main__ import main
from support.features import Eye
from support.shapes import shapes
from support.small import small_model


def test_conditions_follow_themselves():
    maps = np.random.default_rng(0).integers(0, 256, (4, 16, 16), np.uint8)
    best = {"canny": ("F1", 1), "soft": ("SSIM", 1), "depth": ("RMSE", 0)}
    for kind, (name, value) in best.items():
        assert follow(kind, maps, maps)[name] == pytest.approx(value, abs=1e-6)
        worse = follow(kind, maps, np.roll(maps, 8, 0) // 2 if kind != "canny" else np.zeros_like(maps))
        assert abs(worse[name] - value) > 0.1
        low, high = worse[f"{name} interval"]
        assert low <= worse[name] <= high


def test_depth_errors_are_parts_of_the_range():
    black, white = np.zeros((1, 4, 4), np.uint8), np.full((1, 4, 4), 255, np.uint8)
    half = white.copy()
    half[:, :2] = 0
    assert follow("depth", black, white)["RMSE"] == 1
    assert follow("depth", black, half)["RMSE"] == pytest.approx(0.5**0.5)


@pytest.mark.parametrize("world", [16], indirect=True)
def test_kinds_are_scored_and_kept(world, tmp_path, monkeypatch, capsys):
    """With a generator that returns its condition: control follows the edges, and what ignores them does not."""
    monkeypatch.setattr(control_photos, "predict", lambda classifier, pixels: np.arange(len(pixels)) % 5)
    monkeypatch.setattr(control_photos, "extract", fake_extract)
    pipe, generate = Pipeline.from_pretrained("m"), Pipeline.generate
    asked = []

    def fake_generate(self, classes, *, control=None, **options):
        asked.append(classes)
        made = generate(self, classes, **options)
        if control is None:
            return made
        return [c.image.convert("RGB") if c.strength else image for c, image in zip(control, made, strict=True)]

    monkeypatch.setattr(Pipeline, "generate", fake_generate)
    Classifier(ClassifierConfig(num_classes=5)).save(tmp_path / "classifier")
    out = tmp_path / "out"
    command = ["control-score", *world, "--classifier", str(tmp_path / "classifier"), "--out", str(out)]
    command += ["--num", "4", "--batch-size", "3", "--nearest", "3", "--base", "m"]
    assert main([*command, "--parts", "canny", "--guidance", "1.5"]) == 0
    first = json.loads((out / "control-score.json").read_text())
    rows = first["canny"]["rows"]
    assert list(rows) == [CONTROL, PLAIN, f"{CONTROL}, guidance 1.5", control_images.BASE, CEILING, REAL, NEAREST]
    assert rows[f"{CONTROL}, guidance 1.5"]["F1"] == 1
    assert rows[CONTROL]["F1"] == rows[REAL]["F1"] == 1
    assert rows[PLAIN]["F1"] < 1
    assert rows[PLAIN]["F1"] < rows[NEAREST]["F1"] < 1
    assert rows[NEAREST]["images"] == 3
    assert {key: value for key, value in rows[PLAIN].items() if key != "seconds"} == {
        key: value for key, value in rows[control_images.BASE].items() if key != "seconds"
    }
    assert first["canny"]["strength 0 is no control"]
    assert all(label is not None for classes in asked[:2] for label in classes), "the class is given, too"
    assert rows[CONTROL]["FID, train"] > 0
    assert rows[REAL]["FID, test"] < rows[CONTROL]["FID, test"]
    assert main([*command, "--depth-model", "someone/depth"]) == 0
    both = json.loads((out / "control-score.json").read_text())
    assert both["canny"] == first["canny"]
    assert both["depth"]["depth model"] == "someone/depth"
    assert both["depth"]["rows"][CONTROL]["RMSE"] == 0
    assert 0 < both["depth"]["rows"][NEAREST]["RMSE"] <= both["depth"]["rows"][PLAIN]["RMSE"]
    assert "soft" not in both, "the model does not take it"
    assert sorted(path.stem for path in out.glob("*.webp")) == ["canny", "depth"]
    assert "### depth" in (out / "control-score.md").read_text()
    shutil.rmtree(out)
    assert main([*command, "--parts", "canny", "--nearest", "0"]) == 0
    assert NEAREST not in json.loads((out / "control-score.json").read_text())["canny"]["rows"]
    assert main([*command, "--parts", "soft"]) == 2
    assert "takes canny, depth; choose one of them" in capsys.readouterr().err
    assert pipe.model.config.control is not None


def test_classes_by_a_real_classifier_and_fid_of_all_images():
    """Against features of the very images, FID is zero; a part of them has none."""
    pixels, labels = shapes(6, size=64), np.zeros(6, np.int64)
    options = argparse.Namespace(fid=True)
    bench = control_photos.ControlScore(SimpleNamespace(model=small_model()), None, None, options)
    bench.classifier, bench.inception = Classifier(ClassifierConfig(3, 8)).eval(), Eye()
    bench.fid_references = {"train": control_photos.collect(Eye(), [pixels])}
    tests = control_photos.Conditions("canny", None, pixels, labels, lambda made, index: {"n": len(made)}, None)
    row = bench.measure(pixels, tests, np.arange(6))
    assert row["n"] == 6
    assert row["FID, train"] == pytest.approx(0, abs=1e-6)
    assert row["recognised"] in [i / 6 for i in range(7)]
    assert bench.measure(pixels[:3], tests, np.arange(3)).keys() == {"n", "recognised", "recognised interval"}
    without = dataclasses.replace(tests, labels_n=None)
    assert bench.measure(pixels, without, np.arange(6)) == {"n": 6}


def fake_extract(kind, image, *, depth=None):
    """Bright pixels; they are the same in an image of the condition."""
    assert depth in (None, "someone/depth")
    return image.convert("L").point(lambda value: 255 * (value > 127))


def test_real_extractors(tmp_path):
    bench = control_photos.ControlScore(None, None, tmp_path, type("Options", (), {"depth_model": None}))
    maps = bench.conditions("canny", shapes(3))
    assert maps.shape == (3, 32, 32)
    assert set(np.unique(maps)) == {0, 255}
    assert np.array_equal(maps[1], np.asarray(control_photos.extract("canny", Image.fromarray(shapes(3)[1]))))
