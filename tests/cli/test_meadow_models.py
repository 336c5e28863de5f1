"""Photographs of meadow, meadow-256 and meadow-control have the class, and the edges, that they are given."""

import numpy as np
import pytest
from PIL import Image

from arpg import ControlInput, Pipeline
from arpg.checkpoint import read_folder
from arpg.config import DEFAULT_MODEL
from arpg.evaluation.classifier import Classifier
from arpg.hub import resolve
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


@pytest.mark.parametrize("model", [DEFAULT_MODEL, "meadow-256"])
def test_photographs_are_recognised(model):
    """The classifier of the measurements, which has seen real photographs only, finds most classes among 225."""
    require_model(model)
    classifier = Classifier.load(ROOT / "experiments" / "meadow" / "classifier")
    pipe = Pipeline.from_pretrained(model, device="cpu")
    names = [*NAMES, "water lily", "pug", "english marigold", "church"]
    images = pipe.generate(names, steps=12, seed=0)
    side = pipe.tokenizer.config.stride * pipe.model.config.grid[0]
    assert [image.size for image in images] == [(side, side)] * len(names)
    small = np.stack([np.asarray(image.resize((128, 128), Image.Resampling.BOX)) for image in images])
    found = [pipe.classes.name(int(label)) for label in predict(classifier, small)]
    assert sum(label == name for label, name in zip(found, names, strict=True)) >= 4, found


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
