"""The metrics against independent formulas, other people's numbers (golden/metrics.json) and known truths."""

import dataclasses
import json
import math

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from scipy.spatial.distance import cdist

from arpg.errors import InputError
from arpg.evaluation.features import Features
from arpg.evaluation.metric_report import evaluate, table
from arpg.evaluation.metrics import (
    Moments,
    RunningGains,
    Statistics,
    bootstrap,
    frechet_distance,
    frechet_influence,
    gains,
    inception_score,
    kernel_distance,
    precision_recall,
    statistics,
    wilson,
)
from support.make_metrics import random_logits, random_sets
from support.paths import GOLDEN

OTHERS = json.loads((GOLDEN / "metrics.json").read_text())


def sets(name):
    """Two sets of features, in float64."""
    if name == "random":
        return random_sets()
    with np.load(GOLDEN / "inception_features.npz") as file:
        real, fake = (file[key].astype(np.float64) for key in ("real", "fake"))
    return (real[:, :32], fake[:, :32]) if "32" in name else (real, fake)


NAMES = ("random", "real", "real, 32 features")


def fid(a, b):
    return frechet_distance(statistics(torch.from_numpy(a)), statistics(torch.from_numpy(b)))


def fid_by_singular_values(a, b):
    """tr sqrt(AB) is the nuclear norm of the product of the centred sets: no root of a matrix, singular or not."""
    x, y = a - a.mean(0), b - b.mean(0)
    x, y = x / math.sqrt(len(a) - 1), y / math.sqrt(len(b) - 1)
    shared = np.linalg.svd(x @ y.T, compute_uv=False).sum()
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + (x**2).sum() + (y**2).sum() - 2 * shared


@pytest.mark.parametrize("name", NAMES)
def test_fid(name):
    a, b = sets(name)
    ours = fid(a, b)
    assert ours == pytest.approx(fid_by_singular_values(a, b), rel=1e-9)
    assert ours == pytest.approx(fid(b, a), rel=1e-9)
    for package in ("torch-fidelity", "torchmetrics"):
        assert ours == pytest.approx(OTHERS[name][f"{package} fid"], rel=1e-6)
    if name != "real":  # the root of a singular product is where scipy gives up
        root = scipy.linalg.sqrtm(np.cov(a.T) @ np.cov(b.T)).real
        apart = a.mean(0) - b.mean(0)
        assert ours == pytest.approx(apart @ apart + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_fid_of_a_set_with_itself_is_0(name):
    for x in sets(name):
        assert fid(x, x) < 1e-3
        assert fid(x, x[::-1].copy()) < 1e-3
        assert fid(x, x + 1) == pytest.approx(x.shape[1], rel=1e-6)  # moved by 1 in every direction


def test_fid_where_covariances_are_singular():
    random = np.random.default_rng(0)
    few, many = random.normal(size=(9, 40)), random.normal(size=(500, 40))
    flat = many * (np.arange(40) < 7)  # 33 directions without any spread, and enough samples not to expect it
    twice = np.repeat(random.normal(size=(30, 40)), 2, axis=0)  # half as many as they seem
    two, constant, other = many[:2], np.full((50, 40), 3.0), np.full((20, 40), 1.0)
    every = (few, many, flat, twice, two, constant, other)
    for a in every:
        assert fid(a, a) < 1e-3
        for b in every:
            assert fid(a, b) == pytest.approx(fid_by_singular_values(a, b), rel=1e-3, abs=1e-6)
    assert fid(constant, other) == pytest.approx(160)
    assert fid(constant, many) == pytest.approx(((many.mean(0) - 3) ** 2).sum() + np.trace(np.cov(many.T)))


def test_what_has_no_fid_is_refused():
    one = torch.zeros(1, 4)
    with pytest.raises(InputError, match="there are 1 images; a covariance needs 2 or more"):
        statistics(one)
    with pytest.raises(InputError, match="4 and 5 dimensions"):
        fid(np.zeros((3, 4)), np.zeros((3, 5)))
    with pytest.raises(InputError, match="not finite"):
        statistics(torch.tensor([[1.0], [math.nan], [2.0]]))
    with pytest.raises(InputError, match=r"a mean \[2\] and a covariance \[3, 3\]"):
        Statistics(torch.zeros(2), torch.zeros(3, 3), 5)
    with pytest.raises(InputError, match="features hold numbers that are not finite"):
        Features(statistics(torch.ones(3, 2)), None, torch.tensor([[math.inf]]), None, "")


def test_moments_are_those_of_all_samples_at_once():
    x = np.random.default_rng(1).normal(size=(100, 6)) * 0.01 + 50  # far from 0, where sums of squares lose digits
    moments = Moments()
    for part in np.split(x, [1, 2, 50, 93]):
        moments.add(torch.from_numpy(part))
    found = moments.statistics()
    np.testing.assert_allclose(found.mean_F, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.cov_FF, np.cov(x.T), rtol=1e-5, atol=1e-10)
    assert found.n == 100


@pytest.mark.parametrize("name", NAMES)
def test_kid(name):
    a, b = sets(name)
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    others = OTHERS[name]
    found = kernel_distance(x, y, subsets=20, size=50, seed=2020)
    assert found.mean == pytest.approx(others["torch-fidelity kid"], rel=1e-3)
    assert found.std == pytest.approx(others["torch-fidelity kid std"], rel=1e-3)
    n = min(len(a), len(b))
    whole = kernel_distance(x[:n], y[:n])
    assert (whole.subsets, whole.size, whole.std) == (1, n, 0.0)
    assert whole.mean == pytest.approx(others["torchmetrics kid of the first samples of both"], rel=1e-3)


def test_kid_by_hand():
    """All pairs, one after the other."""
    random = np.random.default_rng(2)
    a, b = random.normal(size=(5, 3)), random.normal(size=(5, 3)) + 0.5
    kernel = lambda u, v: (u @ v / 3 + 1) ** 3  # noqa: E731
    within = [sum(kernel(x[i], x[j]) for i in range(5) for j in range(5) if i != j) / 20 for x in (a, b)]
    across = sum(kernel(u, v) for u in a for v in b) / 25
    found = kernel_distance(torch.from_numpy(a), torch.from_numpy(b))
    assert found.mean == pytest.approx(sum(within) - 2 * across, rel=1e-9)
    same = random.normal(size=(2000, 8)).astype(np.float32)
    one, other = (torch.from_numpy(same[i::2]) for i in range(2))
    assert abs(kernel_distance(one, other).mean) < 0.01 < kernel_distance(one, other + 0.5).mean
    with pytest.raises(InputError, match="KID needs 2 or more of each"):
        kernel_distance(torch.zeros(1, 3), torch.zeros(9, 3))
    with pytest.raises(InputError, match="of one network"):
        kernel_distance(torch.zeros(9, 3), torch.zeros(9, 4))


def shares(real, fake, k=3):
    """Precision and recall from full tables of distances."""

    def near(x, centres):
        radius = np.sort(cdist(centres, centres), axis=1)[:, k]
        return (cdist(x, centres) <= radius * (1 + 1e-6)).any(1).mean()

    return near(fake, real), near(real, fake)


def precision_and_recall(real, fake):
    return tuple(near_M.double().mean().item() for near_M in precision_recall(real, fake))


@pytest.mark.parametrize("name", NAMES)
def test_precision_and_recall(name, monkeypatch):
    real, fake = sets(name)
    x, y = torch.from_numpy(real), torch.from_numpy(fake)
    assert precision_and_recall(x, y) == pytest.approx(shares(real, fake))
    others = [OTHERS[name][f"torch-fidelity {which}"] for which in ("precision", "recall")]
    found = precision_and_recall(x, y)
    assert found == pytest.approx(others, rel=1e-3)
    assert precision_and_recall(x, x) == precision_and_recall(y, y) == (1.0, 1.0)
    monkeypatch.setattr("arpg.evaluation.metrics.BLOCK", 7)
    assert precision_and_recall(x, y) == found


def test_precision_and_recall_of_what_is_all_the_same():
    same, apart = torch.full((6, 3), 2.0), torch.full((5, 3), 8.0)
    for other, expected in ((same[:5], 1.0), (apart, 0.0)):
        assert precision_and_recall(same, other) == (expected, expected)
    with pytest.raises(InputError, match="k = 3 needs 4 or more of each"):
        precision_recall(same[:3], apart)


def test_inception_score():
    logits = random_logits()
    ours = inception_score(torch.cat([gains(torch.from_numpy(part)) for part in np.split(logits, 4)]), split=50)
    assert ours.splits == 4
    assert ours.mean == pytest.approx(OTHERS["logits"]["torch-fidelity is"], rel=1e-6)
    assert ours.std == pytest.approx(OTHERS["logits"]["torch-fidelity is std"], rel=1e-6)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    each = [(part * np.log(part / part.mean(0))).sum(1).mean() for part in np.split(p, 4)]
    assert ours.mean == pytest.approx(np.exp(each).mean(), rel=1e-9)
    running = RunningGains(split=50)
    for part in np.split(logits, [3, 3, 77, 150, 199]):
        running.add(torch.from_numpy(part))
    assert inception_score(running.gains(), split=50).mean == pytest.approx(ours.mean, rel=1e-12)


def test_inception_score_of_extremes():
    sure = 200 * torch.eye(7).repeat(3, 1)
    assert inception_score(gains(sure)).mean == pytest.approx(7)  # sure of every image, all classes alike
    assert inception_score(gains(sure[:1].repeat(9, 1))).mean == pytest.approx(1)  # a single class
    assert inception_score(gains(torch.zeros(9, 7))).mean == pytest.approx(1)  # images that look like nothing
    assert inception_score(gains(torch.randn(1, 7))).mean == pytest.approx(1)  # a single image
    assert math.isfinite(inception_score(gains(1e6 * torch.randn(9, 7))).mean)


def test_wilson_interval():
    for hits, n in ((0, 10), (3, 10), (10, 10), (700, 1000)):
        expected = scipy.stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
        assert wilson(hits, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_bootstrap_is_the_noise_of_the_mean():
    x = np.random.default_rng(3).normal(size=4000)
    low, high = bootstrap(7.0, x)
    assert (high - low) / 2 == pytest.approx(1.96 * x.std() / math.sqrt(4000), rel=0.1)
    assert low < 7 < high
    assert bootstrap(7.0, x, seed=1) != (low, high)


def test_influence_is_the_derivative():
    """By finite differences of the distance with one sample's weight raised."""
    a, b = sets("random")
    ours, theirs = (statistics(torch.from_numpy(x)) for x in (a, b))
    found = frechet_influence(ours, theirs, torch.from_numpy(a)).numpy()
    assert abs(found.mean()) < 1e-9

    def weighted(w):
        mean = w @ a
        cov = (w[:, None] * (a - mean)).T @ (a - mean) * 300 / 299
        return frechet_distance(Statistics(torch.from_numpy(mean), torch.from_numpy(cov), 300), theirs)

    even, step = np.full(300, 1 / 300), 1e-5
    for i in (0, 17, 250):
        towards = np.eye(300)[i] - even
        slope = (weighted(even + step * towards) - weighted(even - step * towards)) / (2 * step)
        assert found[i] == pytest.approx(slope, rel=2e-2, abs=0.05)


def features(x, *, spatial=None, logits=None, network="net"):
    x = torch.from_numpy(np.asarray(x, np.float32))
    return Features(
        statistics(x),
        None if spatial is None else statistics(torch.from_numpy(spatial)),
        x.half(),
        None if logits is None else gains(torch.from_numpy(logits)),
        network,
    )


def test_report_has_every_metric():
    real, fake = sets("real")
    spatial = np.random.default_rng(4).normal(size=(2, 96, 20)) * np.array([1.0, 1.5])[:, None, None]
    ours = features(fake, spatial=spatial[0], logits=random_logits()[:96])
    theirs = features(real, spatial=spatial[1])
    report = evaluate(ours, theirs)
    assert list(report) == ["fid", "sfid", "is", "precision", "recall", "kid", "skipped", "warnings"]
    assert report["fid"]["value"] == pytest.approx(fid_by_singular_values(fake, real), rel=1e-3)
    assert report["sfid"]["value"] == pytest.approx(fid_by_singular_values(*spatial), rel=1e-3)
    assert (report["precision"]["value"], report["recall"]["value"]) == pytest.approx(shares(real, fake))
    whole = kernel_distance(torch.from_numpy(fake), torch.from_numpy(real)).mean
    assert report["kid"]["value"] == pytest.approx(whole, rel=1e-3)
    p = scipy.special.softmax(random_logits()[:96], axis=1)
    assert report["is"]["value"] == pytest.approx(math.exp((p * np.log(p / p.mean(0))).sum(1).mean()), rel=1e-6)
    for metric in ("fid", "is", "precision", "recall"):
        low, high = report[metric]["interval"]
        assert low < report[metric]["value"] < high
    assert all(report[metric]["samples"] == 96 for metric in list(report)[:6])
    json.dumps(report, allow_nan=False)
    text = table(report)
    assert f"{report['fid']['value']:.3f}  " in text.split("FID")[1]
    assert text.count("96") >= 10


def test_few_images_come_with_a_warning_and_the_bias():
    """Two sets of one Gaussian: FID should be 0, and what it is instead is the bias."""
    random = np.random.default_rng(5)
    reference = features(random.normal(size=(10000, 16)))
    report = evaluate(features(random.normal(size=(200, 16))), reference, metrics=["fid"])
    assert report["warnings"] == [
        "200 samples are no more than the 2048 features: the covariance is singular, FID is biased up"
    ]
    assert 0.5 * report["fid"]["value"] < report["fid"]["bias"] <= report["fid"]["value"]
    assert "because the samples are few" in table(report)
    many = evaluate(features(random.normal(size=(5000, 16))), reference, metrics=["fid"])
    assert many["fid"]["value"] < report["fid"]["value"] / 10
    assert "5000 samples are few: FID is biased up; published numbers use 50,000" in many["warnings"]
    assert evaluate(reference, reference, metrics=["fid"])["warnings"] == []
    assert "interval" not in evaluate(features(random.normal(size=(9, 16))), reference, metrics=["fid"])["fid"]


def test_what_cannot_be_computed_is_skipped_or_refused():
    real, fake = sets("real, 32 features")
    ours, theirs = features(fake), features(real)
    report = evaluate(ours, theirs)
    files = "inception-2015-12-05.pt or pt_inception-2015-12-05-6726825d.pth"
    assert report["skipped"]["is"] == f"these Inception weights have no logits; give {files} with --inception"
    assert f"is: skipped: these Inception weights have no logits; give {files}" in table(report)
    with pytest.raises(InputError, match="is cannot be computed: these Inception weights have no logits"):
        evaluate(ours, theirs, metrics=["is"])
    alone = dataclasses.replace(theirs, pool_MF=None)
    report = evaluate(ours, alone)
    assert report["fid"]["value"] == pytest.approx(evaluate(ours, theirs)["fid"]["value"])
    assert set(report["skipped"]) == {"sfid", "is", "precision", "recall", "kid"}
    assert "statistics only, without features" in report["skipped"]["kid"]
    assert "3 images; 4 or more are needed" in evaluate(features(fake[:3]), theirs)["skipped"]["recall"]
    with pytest.raises(InputError, match="metric is 'fidd'"):
        evaluate(ours, theirs, metrics=["fidd"])
    with pytest.raises(InputError, match="come from network net"):
        evaluate(ours, features(real, network="other"))


def test_images_that_are_all_the_same():
    """A single class at its most extreme: every number is right, none is NaN."""
    same, logits = np.ones((40, 16)), np.zeros((40, 5))
    random = np.random.default_rng(6).normal(size=(60, 16))
    report = evaluate(features(same, spatial=same, logits=logits), features(random, spatial=random))
    assert report["fid"]["value"] == pytest.approx(fid_by_singular_values(same, random), rel=1e-3)
    assert report["is"]["value"] == pytest.approx(1)
    assert report["precision"]["value"] in (0.0, 1.0)
    json.dumps(report, allow_nan=False)
    report = evaluate(features(same, spatial=same, logits=logits), features(same, spatial=same))
    values = [report[metric]["value"] for metric in ("fid", "sfid", "is", "precision", "recall", "kid")]
    assert values == pytest.approx([0, 0, 1, 1, 1, 0], abs=1e-3)
