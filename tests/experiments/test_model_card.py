"""Diversity: LPIPS of pairs and of nearest images, against brute force."""

import itertools

import numpy as np
import pytest

from arpg.errors import InputError
from experiments.model_card import mean_pairwise_lpips, nearest_lpips
from support.lpips import distance


def test_pairwise_lpips_over_all_pairs(textures, lpips):
    pixels, labels = textures
    found = mean_pairwise_lpips(pixels, labels, lpips, pairs_per_class=100, seed=0, batch_size=16)
    expected = {}
    for label in (0, 5):
        members = pixels[labels == label]
        expected[label] = np.mean([distance(lpips, a, b) for a, b in itertools.combinations(members, 2)])
    assert found["per_class"] == pytest.approx(expected, rel=1e-4)
    assert found["mean"] == pytest.approx(np.mean(list(expected.values())), rel=1e-4)


def test_pairwise_lpips_of_sampled_pairs(textures, lpips):
    pixels, labels = textures
    settings = {"pairs_per_class": 4, "seed": 1}
    found = mean_pairwise_lpips(pixels, labels, lpips, **settings)
    assert found == mean_pairwise_lpips(pixels, labels, lpips, **settings)
    alone = mean_pairwise_lpips(pixels[labels == 5], labels[labels == 5], lpips, **settings)
    assert alone["per_class"][5] == pytest.approx(found["per_class"][5], rel=1e-4)
    possible = [distance(lpips, a, b) for a, b in itertools.combinations(pixels[labels == 0], 2)]
    single = mean_pairwise_lpips(pixels, labels, lpips, pairs_per_class=1, seed=1)["per_class"][0]
    assert np.min(np.abs(np.array(possible) - single)) < 1e-6
    copies = mean_pairwise_lpips(pixels[[3, 3, 3]], labels[:3], lpips, **settings)
    assert copies["mean"] == 0
    with pytest.raises(InputError, match="no class has two images"):
        mean_pairwise_lpips(pixels[-1:], labels[-1:], lpips, **settings)


def test_nearest_lpips_against_brute_force(textures, lpips):
    references, labels_r = textures
    rng = np.random.default_rng(8)
    queries = rng.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    queries[2] = references[10]  # class 5: a copy of a reference of its class
    queries[3] = references[10]  # class 0: a copy, but of another class
    labels_q = np.array([5, 0, 5, 0, 9])
    by_class = {"labels_q": labels_q, "labels_r": labels_r}
    found = nearest_lpips(queries, references, lpips, **by_class, candidates=50, batch_size=7)
    table = np.array([[distance(lpips, q, r) for r in references] for q in queries])
    expected = np.where(labels_q[:, None] == labels_r, table, np.inf).min(1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)
    assert found[2] == 0
    assert found[3] > 0

    # With two candidates: LPIPS of the two nearest as thumbnails (16x16: the mean of 2x2 pixels here).
    small_q, small_r = (x.reshape(len(x), 16, 2, 16, 2, 3).mean((2, 4)) for x in (queries / 255, references / 255))
    apart = ((small_q[:, None] - small_r) ** 2).sum((2, 3, 4))
    apart[labels_q[:, None] != labels_r] = np.inf
    two = np.argsort(apart, axis=1)[:, :2]
    two[4] = 19  # its class has only this one
    found = nearest_lpips(queries, references, lpips, **by_class, candidates=2)
    np.testing.assert_allclose(found, np.take_along_axis(table, two, 1).min(1), rtol=1e-4, atol=1e-7)


def test_nearest_lpips_names_what_is_wrong(textures, lpips):
    pixels, labels = textures
    with pytest.raises(InputError, match="no reference image has class 9"):
        nearest_lpips(pixels, pixels[:5], lpips, labels_q=labels, labels_r=np.array([0, 0, 0, 5, 5]))
    with pytest.raises(InputError, match="resize them to one size"):
        nearest_lpips(pixels, pixels[:, :16], lpips, labels_q=labels, labels_r=labels)
    with pytest.raises(InputError, match=r"labels_q are int64 \[19\]"):
        nearest_lpips(pixels, pixels, lpips, labels_q=labels[1:], labels_r=labels)
