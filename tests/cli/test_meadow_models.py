"""Photographs of meadow, meadow-256 and meadow-control have the class, and the edges, that they are given."""

import numpy as np
import pytest

from arpg import ControlInput, Pipeline
from arpg.checkpoint import read_folder
from arpg.config import DEFAULT_MODEL
from arpg.decode.likelihood import image_bits
from arpg.evaluation.classifier import Classifier
from arpg.hub import resolve
from arpg.tasks import label_condition
from experiments.control_images import agreement, edge_maps
from experiments.scorer_training import predict
from support.distribution import require_model
from support.paths import ROOT

NAMES = ["siamese cat", "sunflower"]
STEPS = {"steps": 6, "seed": 1}


@pytest.fixture(scope="module")
def pipe():
    require_model("meadow-control")
    return Pipeline.from_pretrained("meadow-control", device="cpu")


@pytest.fixture(scope="module")
def photographs(pipe):
    """Images of the base model, to take conditions from."""
    return Pipeline.from_pretrained(DEFAULT_MODEL, device="cpu").generate(NAMES, steps=6, seed=0)


@pytest.fixture(scope="module")
def plain(pipe):
    return pipe.generate(NAMES, **STEPS)


def test_photographs_are_recognised():
    """The classifier of the measurements, which has seen real photographs only, finds most classes among 225."""
    classifier = Classifier.load(ROOT / "experiments" / "meadow" / "classifier")
    pipe = Pipeline.from_pretrained(DEFAULT_MODEL, device="cpu")
    names = [*NAMES, "golden retriever", "water lily", "puffin", "church"]
    images = pipe.generate(names, steps=12, seed=0)
    found = predict(classifier, np.stack([np.asarray(image) for image in images]))
    assert sum(pipe.classes.name(int(label)) == name for label, name in zip(found, names, strict=True)) >= 4


def followed(images, photographs):
    """Return the F1 of the edges of each image with those of the photograph."""
    wanted, found = (edge_maps(np.stack([np.asarray(image) for image in some])) for some in (photographs, images))
    return agreement(wanted, found).f1_n


def test_edges_are_followed(pipe, photographs, plain):
    edges = [pipe.extract_control(image, "canny") for image in photographs]
    led = followed(pipe.generate(NAMES, control=edges, **STEPS), photographs)
    assert led.min() > 0.7 > followed(plain, photographs).max()


def test_depth_is_followed(pipe, photographs, plain):
    """What is bright is near, so edges of the photograph are edges of the depth."""
    depth = [ControlInput(image.convert("L"), "depth") for image in photographs]
    led = followed(pipe.generate(NAMES, control=depth, **STEPS), photographs)
    assert (led > followed(plain, photographs)).all()


def test_strength_zero_is_the_model_without_control(pipe, plain, photographs):
    off = [ControlInput(image.convert("L"), "depth", 0.0) for image in photographs]
    assert [image.tobytes() for image in pipe.generate(NAMES, control=off, **STEPS)] == [i.tobytes() for i in plain]


@pytest.mark.parametrize("name", ["meadow-256", "meadow-control"])
def test_it_shares_what_it_can_with_its_base(name):
    require_model(name)
    ours, base = (read_folder(resolve(each)) for each in (name, DEFAULT_MODEL))
    assert (ours.base, ours.tokenizer_of, ours.tokenizer) == (DEFAULT_MODEL, DEFAULT_MODEL, None)
    assert ours.classes.lines == base.classes.lines
    assert "research use" in ours.license


def test_photographs_of_256_pixels_are_of_their_class():
    """They have 1,024 tokens, and each is more likely under its class than under another."""
    require_model("meadow-256")
    pipe = Pipeline.from_pretrained("meadow-256", device="cpu")
    images = pipe.generate(NAMES, steps=8, seed=0)
    assert [image.size for image in images] == [(256, 256)] * 2
    labels = label_condition(pipe.model, [pipe.classes.find(name) for name in NAMES])
    for number, image in enumerate(images):
        bits = image_bits(pipe.model, pipe.tokenizer, image, labels, orders=1, order="random", seed=0)
        assert bits.mean((1, 2, 3)).argmin() == number
