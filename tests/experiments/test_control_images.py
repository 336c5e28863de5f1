"""Edges of images: their agreement against naive formulas, and the nearest image by it."""

import numpy as np
import pytest
import torch
from scipy.ndimage import distance_transform_edt

from arpg import InputError
from experiments.control_images import agreement, edge_maps, nearest, thicken
from experiments.garden.scene_sets import depth_map
from support.shapes import shapes


def random_edges(n, share, seed=0, size=23):
    return np.random.default_rng(seed).random((n, size, size + 4)) < share


def naive(wanted, found, tolerance):
    """Precision, recall and F1 by the distance of every pixel to the nearest edge of the other."""

    def share(these, others):
        if not these.any():
            return 1.0 if not others.any() else 0.0
        if not others.any():
            return 0.0
        return (distance_transform_edt(~others)[these] <= tolerance).mean()

    precision, recall = share(found, wanted), share(wanted, found)
    return precision, recall, 0.0 if precision + recall == 0 else 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize("tolerance", [0, 1, 2, 5])
def test_agreement_is_that_of_distances(tolerance):
    wanted = np.concatenate([random_edges(4, 0.02), random_edges(2, 0.3, 1), random_edges(2, 0)])
    found = np.concatenate(
        [random_edges(4, 0.05, 2), random_edges(2, 0.01, 3), random_edges(1, 0.1), random_edges(1, 0)]
    )
    ours = agreement(wanted, found, tolerance=tolerance)
    theirs = np.array([naive(w, f, tolerance) for w, f in zip(wanted, found, strict=True)])
    assert np.stack([ours.precision_n, ours.recall_n, ours.f1_n], 1) == pytest.approx(theirs)


def test_known_agreements():
    line = np.zeros((1, 40, 40), bool)
    line[0, 5:35, 20] = True
    f1 = [agreement(line, np.roll(line, shift, 2)).f1_n[0] for shift in range(5)]
    assert f1[:3] == [1, 1, 1]
    assert f1[3:] == [0, 0]
    half = line.copy()
    half[0, 20:] = False  # 15 of 30 pixels, and 2 more within reach of its end
    found = agreement(line, half)
    assert (found.precision_n[0], found.recall_n[0]) == (1, pytest.approx(17 / 30))
    nothing, everything = np.zeros_like(line), np.ones_like(line)
    assert agreement(nothing, nothing).f1_n == 1
    for a, b in ((nothing, line), (line, nothing), (nothing, everything)):
        assert agreement(a, b).f1_n == 0
    assert agreement(line, everything).recall_n == 1
    assert agreement(line, everything).f1_n < 0.25  # edges everywhere do not pay
    diagonal = np.zeros((1, 5, 5), bool)
    diagonal[0, 0, 0] = True
    assert thicken(torch.from_numpy(diagonal))[0].nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0]]


def test_bad_edges():
    with pytest.raises(InputError, match=r"edges are \[1, 4, 4\] and \[1, 4, 5\]"):
        agreement(np.zeros((1, 4, 4), bool), np.zeros((1, 4, 5), bool))
    with pytest.raises(InputError, match="tolerance is -1"):
        agreement(np.zeros((1, 4, 4), bool), np.zeros((1, 4, 4), bool), tolerance=-1)
    with pytest.raises(InputError, match="no images"):
        nearest(np.zeros((1, 4, 4), bool), [])


def test_the_nearest_image_is_itself_where_it_is_there():
    images = shapes(30)
    wanted = edge_maps(images[[4, 17, 28]])
    index, f1 = nearest(wanted, np.array_split(images, 4))
    assert np.array_equal(edge_maps(images[index]), wanted)
    assert f1.tolist() == [1, 1, 1]
    # And without it, that with the greatest F1 of all.
    rest, new = images[:25], edge_maps(shapes(4, seed=9))
    index, f1 = nearest(new, np.array_split(rest, 3))
    every = np.array([[naive(w, f, 2)[2] for f in edge_maps(rest)] for w in new])
    assert index.tolist() == every.argmax(1).tolist()
    assert f1 == pytest.approx(every.max(1))
    with pytest.raises(InputError, match="images are 16x16 pixels, conditions 32x32"):
        nearest(new, [np.zeros((1, 16, 16, 3), np.uint8)])


def test_blank_conditions_have_blank_neighbours():
    images = np.concatenate([shapes(3), np.full((1, 32, 32, 3), 90, np.uint8)])
    index, f1 = nearest(np.zeros((1, 32, 32), bool), [images])
    assert (index.tolist(), f1.tolist()) == ([3], [1])


def test_known_depth_is_white_where_it_is_near():
    assert depth_map(np.array([[0.0, 0.5, 1.0]], np.float32)).tolist() == [[255, 128, 0]]
    for wrong in (-0.1, 1.5, np.nan):
        with pytest.raises(InputError, match="outside of 0 to 1"):
            depth_map(np.array([[0.5, wrong]], np.float32))
