"""Known truths: FID grows with blur and noise, precision falls with noise, recall with dropped classes.

Once as measured with Inception on real images (the committed result), and once here, with a small network.
"""

import itertools
import json

import numpy as np
import pytest

from arpg.tables import fill_page
from experiments.garden.measurements import metric_truths
from support.features import Tiny

SIDE = 20


def striped():
    """Twenty classes of 65 images: stripes of the class's colours and width, at any place and angle."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:SIDE, :SIDE]
    images, labels = [], []
    for label in range(20):
        colours = random.uniform(30, 225, (2, 3))
        width = random.uniform(0.5, 1.5)
        for _ in range(65):
            angle, place = random.uniform(0, np.pi), random.uniform(0, 2 * np.pi)
            share = np.sin(width * (np.cos(angle) * x + np.sin(angle) * y) + place)[..., None] / 2 + 0.5
            images.append(share * colours[0] + (1 - share) * colours[1] + random.normal(0, 3, 3))
            labels.append(label)
    return np.clip(images, 0, 255).astype(np.uint8), np.array(labels)


@pytest.fixture(scope="module")
def here():
    images, labels = striped()
    return list(metric_truths.measure(Tiny(), lambda chosen: images[list(chosen)], labels))


@pytest.fixture(scope="module")
def recorded():
    return json.loads(metric_truths.RESULT.read_text())


def falls(values):
    """Two of the 100 samples may go the other way."""
    return all(b <= a + 0.02 for a, b in itertools.pairwise(values)) and values[-1] < 0.7 * values[0]


@pytest.mark.parametrize("place", ["here", "recorded"])
def test_truths(place, request):
    lines = request.getfixturevalue(place)
    lines = lines["lines"] if place == "recorded" else lines
    of = {change: [line for line in lines if line["change"] == change] for change in ("blur", "noise", "classes")}
    assert [line["level"] for line in of["blur"]] == list(metric_truths.BLUR)
    assert [line["level"] for line in of["noise"]] == list(metric_truths.NOISE)
    assert [line["level"] for line in of["classes"]] == list(metric_truths.KEPT)
    for change in of:
        fids = [line["fid"] for line in of[change]]
        assert all(b > a for a, b in itertools.pairwise(fids)), (change, fids)
        kids = [line["kid"] for line in of[change]]
        assert all(b > a for a, b in itertools.pairwise(kids)), (change, kids)
    assert falls([line["precision"] for line in of["noise"]])
    assert falls([line["precision"] for line in of["blur"]])
    assert falls([line["recall"] for line in of["classes"]])
    kept = [line["precision"] for line in of["classes"]]
    assert min(kept) > 0.8 * kept[0]  # what is left is as real as before


def test_samples_are_other_images_and_as_many_for_every_number_of_classes():
    labels = np.repeat(np.arange(23), 70)
    reference, samples = metric_truths.choose(labels)
    assert len(reference) == len(set(reference)) == 300
    for kept, chosen in samples.items():
        assert len(chosen) == len(set(chosen)) == 100
        assert len(set(labels[chosen])) == kept
        assert set(labels[chosen]) <= set(labels[reference])
        assert not set(chosen) & set(reference)


def test_the_page_shows_what_was_measured(recorded):
    page = metric_truths.PAGE.read_text()
    assert fill_page(page, {"truths": metric_truths.table(recorded)}) == page
