"""The score of control: its rows, the depth network, what is generated and resumed."""

import dataclasses
import json
import math
import re
import types

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError, Pipeline
from arpg.data.images import open_images
from arpg.evaluation.classifier import Classifier, ClassifierConfig
from experiments.control_images import (
    BASE,
    CEILING,
    CONTROL,
    NEAREST,
    PLAIN,
    choose_evenly,
    edge_maps,
    generate_missing,
    nearest_by_depth,
    strength_zero_is_plain,
    with_control,
)
from experiments.garden.control_score import EdgeScorers, compare, depth_score, edge_score, score_edges, table
from experiments.garden.depth_net import (
    DepthNet,
    DepthNetConfig,
    DepthScenes,
    compose_depth_scenes,
    depth_error,
    rmse,
    to_depth,
    train_depth_net,
)
from support.command import check_error
from support.scene_sets import write_sets
from support.shapes import shapes
from support.small import SMALL, controlled_model, noise, small_model, small_tokenizer

# Images


def test_images_are_chosen_evenly():
    labels = np.repeat(np.arange(5), (3, 40, 40, 1, 40))
    chosen = choose_evenly(labels, 34)
    assert np.bincount(labels[chosen]).tolist() == [3, 10, 10, 1, 10]
    within = chosen[labels[chosen] == 1] - 3
    assert within.tolist() == [2, 6, 10, 14, 18, 22, 26, 30, 34, 38]
    assert np.array_equal(choose_evenly(labels, 34), chosen)
    assert len(set(choose_evenly(labels, 123).tolist())) == 123
    assert sorted(choose_evenly(labels, 124)) == list(range(124))
    assert np.bincount(labels[choose_evenly(labels, 2)], minlength=5).sum() == 2
    for wrong in (0, 125):
        with pytest.raises(InputError, match=f"the number of images is {wrong}; expected 1 to 124"):
            choose_evenly(labels, wrong)


class ConditionGenerator:
    """Returns the condition itself, thickened; at strength 0 a figure that follows from the seed. Counts its images."""

    def __init__(self):
        self.calls = []

    def __call__(self, conditions_BHW, labels_B, *, kind, seeds, strength):
        self.calls.append((kind, strength, list(seeds), labels_B.tolist()))
        if strength == 0:
            return np.concatenate([shapes(1, seed, conditions_BHW.shape[1]) for seed in seeds])
        return np.repeat(np.where(conditions_BHW > 0, 255, 0).astype(np.uint8)[..., None], 3, -1)


def test_generation_continues_where_it_stopped(tmp_path, caplog):
    caplog.set_level("INFO")
    conditions = (edge_maps(shapes(7)) * 255).astype(np.uint8)
    labels = np.arange(7)
    generator = ConditionGenerator()
    first = generate_missing(generator, conditions, labels, tmp_path, kind="canny", seed=10, batch_size=4)
    assert [seeds for _, _, seeds, _ in generator.calls] == [[10, 11, 12, 13], [14, 15, 16]]
    (tmp_path / "0002.png").unlink()
    (tmp_path / "0005.png").unlink()
    generator.calls = []
    caplog.clear()
    again = generate_missing(generator, conditions, labels, tmp_path, kind="canny", seed=10)
    assert generator.calls == [("canny", 1.0, [12, 15], [2, 5])]
    assert [record.message.split(": ")[1] for record in caplog.records] == ["7 of 7"]
    assert np.array_equal(first, again)


@pytest.fixture
def classes(tmp_path):
    """Two classes of figures for training and for testing."""
    for split, count, seed in (("train", 12, 0), ("test", 6, 50)):
        for c in range(2):
            (tmp_path / split / f"class {c}").mkdir(parents=True)
            for i, image in enumerate(shapes(count, seed + c, size=8 if split == "never" else 32)):
                Image.fromarray(image).save(tmp_path / split / f"class {c}" / f"{i:02d}.png")
    return tmp_path / "train", tmp_path / "test"


def test_rows_of_edges(classes, tmp_path):
    train, test = (open_images(path) for path in classes)
    scorers = EdgeScorers(types.SimpleNamespace())
    predicted = []

    def fake(classifier, pixels):
        predicted.append(len(pixels))
        return np.array([3, 4] * (len(pixels) // 2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.garden.control_score.predict", fake)
        rows = edge_score(
            ConditionGenerator(),
            test,
            [3, 4],
            tmp_path / "out",
            size=32,
            num=8,
            training=train,
            tokenizer=small_tokenizer(),
            scorers=scorers,
            base=ConditionGenerator(),
        )
    assert list(rows) == [CONTROL, PLAIN, BASE, NEAREST, CEILING]
    assert rows[CONTROL]["f1"] > 0.9  # both sides of a line are edges, one pixel from it
    assert rows[CONTROL]["f1"] > 2 * rows[PLAIN]["f1"]
    assert rows[PLAIN] == rows[BASE]
    assert rows[PLAIN]["f1"] < rows[NEAREST]["f1"] <= 1
    assert rows[CONTROL]["accuracy"] == 0.5
    low, high = rows[PLAIN]["f1 interval"]
    assert low < rows[PLAIN]["f1"] < high
    assert len(list((tmp_path / "out" / "canny" / "condition").iterdir())) == 8
    text = table(rows, title="canny").splitlines()
    assert text[0].split() == ["canny", "F1", "precision", "recall", "accuracy", "images"]
    assert len(text) == 6
    compared = compare({"canny": rows})
    assert compared[f"f1, control by {PLAIN}"] == rows[CONTROL]["f1"] / rows[PLAIN]["f1"]
    rows[BASE]["accuracy"] = 0.75
    assert compare({"canny": rows})[f"accuracy, control less {BASE}"] == -0.25


def test_rows_have_fid_where_there_is_a_reference(classes):
    """Against features of the very images, FID is zero."""
    pixels = shapes(6)
    features = torch.randn(6, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    from arpg.evaluation.features import Features
    from arpg.evaluation.metrics import statistics

    real = Features(statistics(features), None, features.half(), None, "net")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.garden.control_score.collect", lambda inception, batches: real)
        row = score_edges(
            pixels,
            edge_maps(pixels),
            np.zeros(6, np.int64),
            EdgeScorers(None, types.SimpleNamespace(device="cpu"), real),
        )
    assert row["fid"] == pytest.approx(0, abs=1e-6)
    assert row["f1"] == 1
    assert "accuracy" not in row


def test_strength_zero_is_compared_pixel_by_pixel():
    assert strength_zero_is_plain(ConditionGenerator(), ConditionGenerator(), size=32, kind="canny")

    def other(conditions, labels, *, kind, seeds, strength):
        pixels = ConditionGenerator()(conditions, labels, kind=kind, seeds=seeds, strength=strength)
        pixels[3, 1, 1] += 1
        return pixels

    assert not strength_zero_is_plain(ConditionGenerator(), other, size=32, kind="canny")


# Depth


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return tuple(str(path) for path in write_sets(tmp_path_factory.mktemp("sets")))


@pytest.fixture(scope="module")
def scenes(sets):
    return compose_depth_scenes(sets, num=40, seed=3, size=32)


def test_rmse_of_each_image():
    a, b = np.zeros((2, 2, 2), np.float32), np.zeros((2, 2, 2), np.float32)
    b[0, 0, 0] = 1
    b[1] = 0.25
    assert rmse(a, b).tolist() == [0.5, 0.25]
    assert rmse(a, a).tolist() == [0, 0]
    random = np.random.default_rng(0).random((2, 3, 4, 5)).astype(np.float32)
    expected = [
        math.sqrt(sum((float(x) - float(y)) ** 2 for x, y in zip(p.flat, q.flat, strict=True)) / 20)
        for p, q in zip(random[0], random[1], strict=True)
    ]
    assert rmse(random[0], random[1]) == pytest.approx(expected)
    with pytest.raises(InputError, match="depths are"):
        rmse(a, b[:, :1])


def test_scenes_have_their_depth(sets, scenes):
    again = compose_depth_scenes(sets, num=40, seed=3, size=32)
    assert np.array_equal(scenes.pixels_nHW3, again.pixels_nHW3)
    assert np.array_equal(scenes.near_nHW, again.near_nHW)
    depth = scenes.depth()
    assert depth.dtype == np.float32
    assert (depth.max((1, 2)) == 1).all()  # the background
    assert (depth.min((1, 2)) < 1).all()
    assert np.array_equal(to_depth(np.array([255, 0], np.uint8)), [0, 1])


def test_a_network_learns_depth(scenes, tmp_path):
    """On a few scenes it comes to see them far better than one that sees nothing, and a saved one sees the same."""
    few = DepthScenes(scenes.pixels_nHW3[:8], scenes.near_nHW[:8])
    net = train_depth_net(few, DepthNetConfig(8), steps=60, batch_size=8, device="cpu", lr=1e-2)
    error = depth_error(net, few)
    assert error["rmse"] < 0.5 * error["blank"]
    assert error["rmse"] == pytest.approx(
        rmse(net.estimate(few.pixels_nHW3, batch_size=3), few.depth()).mean(), rel=1e-4
    )
    net.save(tmp_path)
    assert depth_error(DepthNet.load(tmp_path), few) == error
    with pytest.raises(InputError, match=r"holds no depth.*experiments.garden train-depth"):
        DepthNet.load(tmp_path / "none")
    with pytest.raises(InputError, match="multiples of 16"):
        net(torch.zeros(1, 3, 30, 32))
    with pytest.raises(InputError, match="width is 12"):
        DepthNetConfig(12)
    with pytest.raises(InputError, match="steps is 0"):
        train_depth_net(few, DepthNetConfig(8), steps=0, device="cpu")


def test_gradients_reach_the_whole_network():
    net = DepthNet(DepthNetConfig(8))
    for block in net.modules():  # blocks start as their shortcuts
        if hasattr(block, "norm2"):
            torch.nn.init.ones_(block.norm2.weight)
    net(torch.randn(2, 3, 32, 32)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_rows_of_depth(scenes, tmp_path):
    """With a network that reads the depth off the pixels: images of the depth are right, others are not."""

    class Reader(DepthNet):
        def estimate(self, pixels_nHW3, *, batch_size=256):
            return to_depth(pixels_nHW3[..., 0])

    def generate(conditions, labels, *, kind, seeds, strength):
        assert kind == "depth"
        assert (labels == -1).all()
        return np.repeat((conditions * (strength > 0)).astype(np.uint8)[..., None], 3, -1)

    shown = DepthScenes(np.repeat(scenes.near_nHW[..., None], 3, -1), scenes.near_nHW)
    tests, others = DepthScenes(shown.pixels_nHW3[:9], shown.near_nHW[:9]), shown
    rows = depth_score(
        generate, tests, Reader(DepthNetConfig(8)), tmp_path, training=others, tokenizer=small_tokenizer(), batch_size=4
    )
    assert list(rows) == [CONTROL, PLAIN, NEAREST, CEILING, "scenes themselves"]
    assert [rows[name]["rmse"] for name in (CONTROL, NEAREST, "scenes themselves")] == [0, 0, 0]
    blank = rmse(np.ones((9, 32, 32), np.float32), tests.depth()).mean()
    assert rows[PLAIN]["rmse"] == pytest.approx(blank)
    assert compare({"depth": rows})[f"rmse, control by {PLAIN}"] == 0
    near = np.random.default_rng(0).integers(0, 256, (20, 6, 6), np.uint8)
    distance = np.square(near[:5, None].astype(float) - near[None, 5:].astype(float)).sum((2, 3))
    assert nearest_by_depth(near[:5], near[5:]).tolist() == distance.argmin(1).tolist()


# The command line


@pytest.fixture
def controlled(tmp_path, monkeypatch):
    """A saved pipeline of 32x32 pixels that takes conditions: it returns them, and ignores them at strength 0."""
    model = small_model(dataclasses.replace(SMALL, grid=(16, 16)))
    Pipeline(model, small_tokenizer(), license="MIT").save_pretrained(tmp_path / "model")
    generate = Pipeline.generate

    class ControlInput:
        def __init__(self, image, kind, strength):
            self.image, self.kind, self.strength = image, kind, strength

    def fake_generate(self, classes=None, *, control=None, **options):
        made = generate(self, classes, **options)
        if control is None:
            return made
        return [c.image.convert("RGB") if c.strength else image for c, image in zip(control, made, strict=True)]

    monkeypatch.setattr("experiments.control_images.ControlInput", ControlInput)
    monkeypatch.setattr(Pipeline, "generate", fake_generate)
    return tmp_path / "model"


def test_evaluate_control(run, controlled, classes, sets, tmp_path):
    both = ["--fruits", sets[0], "--emoji", sets[1]]
    small = ["-n", 8, "--steps", 2, "--batch-size", 4, "--width", 8, "--processes", 0, "--fresh", 4]
    code, text, err = run("train-depth", *both, *small, "-o", tmp_path / "net")
    assert code == 0, err
    assert "on 4 new scenes; a blank image has" in text
    assert isinstance(DepthNet.load(tmp_path / "net"), DepthNet)
    arguments = ["evaluate-control", "--model", controlled, "--steps", 2, "--device", "cpu", "-o", tmp_path / "out"]
    arguments += ["--test", classes[1], "--train", classes[0], "-n", 6, "--no-fid", "--base", controlled]
    code, text, err = run(*arguments, "--json", tmp_path / "r.json")
    assert code == 0, err
    assert all(name in text for name in (CONTROL, PLAIN, BASE, NEAREST, CEILING, "strength 0 is no control: yes"))
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["canny"][PLAIN] == report["canny"][BASE]
    assert report["canny"][CONTROL]["f1"] > report["canny"][PLAIN]["f1"]
    assert report["compared"][f"f1, control by {PLAIN}"] > 1
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.png")}
    code, again, _ = run(*arguments)
    assert code == 0
    tables = [line for line in text.splitlines()[:-1] if not re.search(r": \d+ of \d+$", line)]
    assert again.splitlines() == tables
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.png")}
    check_error(run(*arguments, "--seed", 1), "holds results of something else", program="garden")
    check_error(run(*arguments, "--reference", -1), "--reference is -1; expected 0 (all)", program="garden")


def test_fid_against_some_of_the_training_images(run, controlled, classes, tmp_path, monkeypatch):
    """Chosen as the test images are, so that classes are as frequent in both; 0: all; never more than there are."""
    from arpg.evaluation.inception import Inception

    seen = []
    monkeypatch.setattr(Inception, "load", lambda *a, **k: object())

    def reference(network, images, size, **kept):
        seen.append(images.labels)

    monkeypatch.setattr("experiments.garden.control_score.reference_features", reference)
    arguments = ["evaluate-control", "--model", controlled, "--steps", 2, "--device", "cpu", "-o", tmp_path / "out"]
    arguments += ["--test", classes[1], "--train", classes[0], "-n", 2]
    for number in (2, 0, 5000):
        code, _, err = run(*arguments, "--reference", number)
        assert code == 0, err
    assert len(seen[0]) == 2
    assert len(seen[0]) < len(seen[1]) == len(seen[2])
    assert len(set(seen[0])) == 2


def test_evaluate_depth(run, controlled, sets, tmp_path):
    DepthNet(DepthNetConfig(8)).save(tmp_path / "net")
    arguments = ["evaluate-control", "--model", controlled, "--steps", 2, "--device", "cpu", "-o", tmp_path / "out"]
    arguments += ["--fruits", sets[0], "--emoji", sets[1], "--depth-net", tmp_path / "net", "--scenes", 3]
    arguments += ["--train-fruits", sets[0], "--train-scenes", 5, "--json", tmp_path / "r.json"]
    code, text, err = run(*arguments)
    assert code == 0, err
    report = json.loads((tmp_path / "r.json").read_text())
    assert list(report["depth"]) == [CONTROL, PLAIN, NEAREST, CEILING, "scenes themselves"]
    assert report["depth"]["scenes themselves"]["rmse"] == report["depth network"]["rmse"]
    assert "canny" not in report
    assert "RMSE" in text
    with Image.open(tmp_path / "out" / "depth" / "condition" / "0002.png") as image:
        assert (image.mode, image.size) == ("L", (32, 32))


def test_bad_evaluations(run, folder, photos, tmp_path):
    arguments = ["evaluate-control", "--model", folder, "--device", "cpu", "-o", tmp_path / "out"]
    for more, message in (
        ([], "nothing to evaluate"),
        (["--fruits", "x"], "all or none"),
        (["--test", tmp_path / "none"], "does not exist"),
        (["--test", photos, "--batch-size", 0], "--batch-size is 0"),
    ):
        check_error(run(*arguments, *more), message, program="garden")


def test_accuracy_by_a_real_classifier():
    pixels = shapes(4, size=64)
    classifier = Classifier(ClassifierConfig(3, 8)).eval()
    row = score_edges(pixels, edge_maps(pixels), np.zeros(4, np.int64), EdgeScorers(classifier))
    assert row["accuracy"] in (0, 0.25, 0.5, 0.75, 1)


def test_images_are_those_of_the_pipeline():
    """A condition image for each label; -1 is no class."""
    pipe = Pipeline(controlled_model(), small_tokenizer())
    grey = [noise(8, 8, seed=seed).convert("L") for seed in range(3)]
    conditions, labels, seeds = np.stack([np.asarray(image) for image in grey]), np.array([1, -1, 4]), [7, 8, 9]
    found = with_control(pipe, {"steps": 3})(conditions, labels, kind="depth", seeds=seeds, strength=0.5)
    for i, label in enumerate([1, None, 4]):
        (alone,) = pipe.control(grey[i], label, kind="depth", strength=0.5, seed=seeds[i], steps=3)
        assert np.array_equal(found[i], np.asarray(alone))
