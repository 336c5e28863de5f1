"""The classifier learns coloured squares, is a function of its seed, and counts its hits."""

import math

import numpy as np
import pytest
import torch

from arpg.errors import InputError
from arpg.evaluation.classifier import Classifier, ClassifierConfig
from arpg.image import to_images
from experiments.photos import load_or_train_classifier
from experiments.scorer_training import accuracy, augment, predict, train_classifier

COLOURS = np.array([[220, 40, 40], [40, 200, 40], [40, 40, 220], [220, 210, 40]])


def squares(n, seed):
    """Grey noise with one square; its colour is the class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, n)
    pixels = rng.integers(90, 160, (n, 64, 64, 3))
    for image, label in zip(pixels, labels, strict=True):
        x, y = rng.integers(0, 36, 2)
        image[y : y + 28, x : x + 28] = COLOURS[label] + rng.integers(-20, 20, 3)
    return pixels.clip(0, 255).astype(np.uint8), labels


@pytest.fixture(scope="module")
def trained():
    calls = []
    pixels, labels = squares(200, seed=0)
    settings = {"num_classes": 4, "width": 8, "batch_size": 16, "device": "cpu"}
    classifier = train_classifier(pixels, labels, steps=60, progress=lambda *c: calls.append(c), **settings)
    return classifier, calls


def test_classifier_learns_coloured_squares(trained):
    classifier, calls = trained
    assert [step for step, _ in calls] == [50, 60]
    pixels, labels = squares(200, seed=1)
    found = accuracy(classifier, pixels, labels)
    assert found["top1"] > 0.95
    assert found["per_class"].min() > 0.9
    assert found["n"] == 200
    assert not classifier.training


def test_training_is_a_function_of_the_seed_and_weights_choose_images():
    pixels, labels = squares(24, seed=0)
    before = torch.random.get_rng_state()
    settings = {"num_classes": 4, "width": 8, "batch_size": 4, "device": "cpu", "steps": 2}

    def head(**more):
        return train_classifier(pixels, labels, **settings, **more).head.weight.detach()

    assert torch.equal(head(), head())
    assert not torch.equal(head(), head(seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)
    # Images with weight 0 are never seen, so what they show makes no difference.
    weights = np.where(np.arange(24) < 12, 1.0, 0.0)
    seen = head(weights=weights)
    pixels[12:] = 0
    assert torch.equal(head(weights=weights), seen)
    assert not torch.equal(head(), seen)


def test_classifier_saves_and_loads_exactly(trained, tmp_path):
    classifier, _ = trained
    classifier.save(tmp_path / "folder")
    again = Classifier.load(tmp_path / "folder")
    images = to_images(squares(5, seed=2)[0])
    assert again.config == classifier.config
    with torch.no_grad():
        assert torch.equal(again(images), classifier(images))
    with pytest.raises(InputError, match="holds no classifier"):
        Classifier.load(tmp_path)
    (tmp_path / "folder" / "classifier.json").write_text('{"num_classes": 5, "width": 8}')
    with pytest.raises(InputError, match=r"head\.weight is \[4, 64\], not \[5, 64\]"):
        Classifier.load(tmp_path / "folder")


def test_accuracy_is_counted(trained):
    classifier, _ = trained
    pixels, _ = squares(7, seed=3)
    guesses = predict(classifier, pixels, batch_size=3)
    labels = guesses.copy()
    labels[:2] = (labels[:2] + 1) % 4
    found = accuracy(classifier, pixels, labels, batch_size=2)
    assert found["top1"] == pytest.approx(5 / 7)
    for label in range(4):
        rows = [g == y for g, y in zip(guesses, labels, strict=True) if y == label]
        expected = sum(rows) / len(rows) if rows else math.nan
        assert found["per_class"][label] == pytest.approx(expected, nan_ok=True)


def test_classifier_has_the_intended_size_and_takes_other_image_sizes():
    config = ClassifierConfig(num_classes=136)
    with torch.device("meta"):
        assert 2e6 < sum(p.numel() for p in Classifier(config).parameters()) < 3e6
    small = Classifier(ClassifierConfig(num_classes=3, width=8))
    assert small(torch.zeros(1, 3, 64, 100)).shape == (1, 3)
    with pytest.raises(InputError, match="64 or more"):
        small(torch.zeros(1, 3, 32, 100))


def test_augment_crops_and_flips():
    images = to_images(squares(2, seed=5)[0])
    # No random number moves or recolours: whole image (scale 1), no flip, factors in the middle of their ranges.
    still = torch.tensor([[1.0, 0.5, 0.5, 0.9, 0.5, 0.5, 0.5]]).expand(2, -1).clone()
    torch.testing.assert_close(augment(images, still), images, rtol=0, atol=1e-4)
    still[:, 3] = 0.1
    torch.testing.assert_close(augment(images, still), images.flip(3), rtol=0, atol=1e-4)
    corner = torch.tensor([[0.0, 0.0, 0.0, 0.9, 0.5, 0.5, 0.5]]).expand(2, -1)
    ramp = torch.linspace(-1, 1, 65)[:-1].expand(2, 3, 64, 64) + 1 / 64
    seen = augment(ramp, corner)  # the left 70 %
    torch.testing.assert_close(seen[0, 0, 0, [0, -1]], torch.tensor([-0.989, 0.389]), rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.array([0, 1, 4])}, "labels run from 0 to 4; expected 0 to 3"),
        ({"labels": np.array([0, 1])}, r"expected whole numbers \[3\]"),
        ({"pixels": np.zeros((3, 64, 64), np.uint8)}, r"uint8 \[3, 64, 64\]; expected"),
        ({"weights": np.zeros(3)}, "weights must be 3 numbers"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_bad_training_input_is_named(change, message):
    pixels, labels = np.zeros((3, 64, 64, 3), np.uint8), np.zeros(3, np.int64)
    arguments = {"pixels": pixels, "labels": labels, "num_classes": 4, "steps": 1, "device": "cpu", "width": 8}
    with pytest.raises(InputError, match=message):
        train_classifier(**{**arguments, **change})


def test_a_classifier_whose_folder_was_left_half_written_is_trained_again(tmp_path):
    pixels, labels = squares(16, seed=0)
    settings = {"num_classes": 2, "steps": 1, "device": torch.device("cpu"), "batch_size": 2}
    asked = []

    def read():
        asked.append(1)
        return pixels, labels % 2

    load_or_train_classifier(tmp_path / "a", read, **settings)
    (tmp_path / "a" / "classifier.json").unlink()  # killed after the weights
    load_or_train_classifier(tmp_path / "a", read, **settings)
    load_or_train_classifier(tmp_path / "a", read, **settings)
    assert len(asked) == 2
