"""The score of control of garden: what is generated and resumed, the depth network, the rows of edges and depth."""

import argparse
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError, Pipeline
from arpg.evaluation.classifier import Classifier, ClassifierConfig
from experiments import control_photos, photos
from experiments.control_images import (
    BASE,
    CEILING,
    CONTROL,
    NEAREST,
    PLAIN,
    choose_evenly,
    edge_maps,
    generate_missing,
    generate_pixels,
    nearest_by_depth,
    strength_zero_is_plain,
)
from experiments.control_photos import REAL
from experiments.garden import control_model
from experiments.garden.control_score import GardenControlScore
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
from support.small import controlled_model, noise, small_tokenizer

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
        if not strength:
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
    caplog.clear()
    assert np.array_equal(generate_missing(generator, conditions, labels, None, kind="canny", seed=10), first)
    assert not caplog.records


def test_strength_zero_is_compared_pixel_by_pixel():
    assert strength_zero_is_plain(ConditionGenerator(), size=32, kind="canny")

    def other(conditions, labels, *, kind, seeds, strength):
        pixels = ConditionGenerator()(conditions, labels, kind=kind, seeds=seeds, strength=strength)
        pixels[3, 1, 1] += strength is None
        return pixels

    assert not strength_zero_is_plain(other, size=32, kind="canny")


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


# The command line


@pytest.fixture
def data(tmp_path):
    """The folder of garden: figures of a class of fruits and a class of flowers."""
    for split, count in (("train", 12), ("test", 6)):
        for domain in ("fruits", "flowers"):
            folder = tmp_path / "data" / f"{domain}.zip" / domain / split / f"class {int(domain == 'flowers')}"
            folder.mkdir(parents=True)
            for i, image in enumerate(shapes(count, len(domain) + count)):
                Image.fromarray(image).save(folder / f"{i:02d}.png")
    return tmp_path / "data"


@pytest.fixture
def arguments(world, data, sets, tmp_path, monkeypatch):
    """Those of evaluate-control, with a model that returns its conditions and ignores them at strength 0."""
    monkeypatch.setitem(photos.PHOTO_SETS, "garden", dataclasses.replace(photos.GARDEN, size=32))
    monkeypatch.setattr("experiments.garden.control_score.scene_sources", lambda data, split: sets)
    generate = Pipeline.generate

    def fake_generate(self, classes=None, *, control=None, **options):
        made = generate(self, classes, **options)
        if control is None:
            return made
        return [c.image.convert("RGB") if c.strength else image for c, image in zip(control, made, strict=True)]

    monkeypatch.setattr(Pipeline, "generate", fake_generate)
    monkeypatch.setattr(control_photos, "predict", lambda classifier, pixels: np.arange(len(pixels)) % 2)
    Classifier(ClassifierConfig(5, 8)).save(tmp_path / "classifier")
    DepthNet(DepthNetConfig(8)).save(tmp_path / "net")
    folders = ["--data", data, "--classifier", tmp_path / "classifier", "--out", tmp_path / "out"]
    return ["evaluate-control", "--model", "m", "--base", "m", "--device", "cpu", *folders, "--num", 6]


@pytest.mark.parametrize("world", [16], indirect=True)
def test_evaluate_control(run, arguments, sets, tmp_path):
    both = ["--fruits", sets[0], "--emoji", sets[1]]
    small = ["-n", 8, "--steps", 2, "--batch-size", 4, "--width", 8, "--processes", 0, "--fresh", 4]
    code, text, err = run("train-depth", *both, *small, "-o", tmp_path / "net")
    assert code == 0, err
    assert "on 4 new scenes; a blank image has" in text
    assert isinstance(DepthNet.load(tmp_path / "net"), DepthNet)
    arguments += ["--images", tmp_path / "images", "--depth-net", tmp_path / "net", "--train-scenes", 5]
    code, _, err = run(*arguments, "--reference", 10)
    assert code == 0, err
    found = json.loads((tmp_path / "out" / "control-score.json").read_text())
    rows = found["canny"]["rows"]
    assert list(rows) == [CONTROL, PLAIN, BASE, CEILING, REAL, NEAREST]
    assert rows[CONTROL]["F1"] > 0.9  # both sides of a line are edges, one pixel from it
    assert rows[CONTROL]["F1"] > 2 * rows[PLAIN]["F1"]
    assert rows[PLAIN]["F1"] == rows[BASE]["F1"]
    assert rows[PLAIN]["F1"] < rows[NEAREST]["F1"] <= 1
    low, high = rows[PLAIN]["F1 interval"]
    assert low < rows[PLAIN]["F1"] < high
    assert {"recognised", "FID, train"} <= rows[NEAREST].keys()  # it is of all images
    assert found["canny"]["strength 0 is no control"]
    depth = found["depth"]["rows"]
    assert list(depth) == [CONTROL, PLAIN, CEILING, "scenes themselves", NEAREST]
    assert depth["scenes themselves"]["RMSE"] == found["depth"]["depth network"]["rmse"]
    assert "recognised" not in depth[CONTROL]  # scenes have no class
    with Image.open(tmp_path / "images" / "depth" / CONTROL / "0002.png") as image:
        assert image.size == (32, 32)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "images").rglob("*.png")}
    assert len(before) == 5 * 6
    (tmp_path / "out" / "control-score.json").unlink()  # cut off before it was written: no image is made again
    assert run(*arguments, "--reference", 10)[0] == 0
    again = json.loads((tmp_path / "out" / "control-score.json").read_text())["canny"]["rows"]
    assert [row["F1"] for row in again.values()] == [row["F1"] for row in rows.values()]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "images").rglob("*.png")}
    check_error(run(*arguments, "--seed", 1), "holds results of something else", program="garden")


@pytest.mark.parametrize("world", [16], indirect=True)
def test_fid_against_some_of_the_training_images(run, arguments, tmp_path, monkeypatch):
    """Chosen as the test images are, so that classes are as frequent in both; never more than there are."""
    seen, real = [], control_photos.reference_features

    def features(inception, images, *rest, **kept):
        seen.append(np.bincount(images.labels).tolist())
        return real(inception, images, *rest, **kept)

    monkeypatch.setattr(control_photos, "reference_features", features)
    for number in (4, 5000):
        code, _, err = run(*arguments, "--parts", "canny", "--reference", number, "--out", tmp_path / str(number))
        assert code == 0, err
    code, _, err = run(*arguments, "--parts", "canny", "--no-fid", "--out", tmp_path / "without")
    assert code == 0, err
    assert seen == [[2, 2], [12, 12]]
    rows = json.loads((tmp_path / "without" / "control-score.json").read_text())["canny"]["rows"]
    assert not any("FID" in name for row in rows.values() for name in row)


@pytest.mark.parametrize("world", [16], indirect=True)
def test_rows_of_depth(scenes, arguments, tmp_path, monkeypatch):
    """With a network that reads the depth off the pixels: images of the depth are right, others are not."""
    shown = DepthScenes(np.repeat(scenes.near_nHW[..., None], 3, -1), scenes.near_nHW)
    tests = DepthScenes(shown.pixels_nHW3[:9], shown.near_nHW[:9])

    class Reader(DepthNet):
        def estimate(self, pixels_nHW3, *, batch_size=256):
            return to_depth(pixels_nHW3[..., 0])

        @staticmethod
        def load(folder, *, device):
            return Reader(DepthNetConfig(8))

    monkeypatch.setattr("experiments.garden.control_score.DepthNet", Reader)
    monkeypatch.setattr(
        "experiments.garden.control_score.compose_depth_scenes", lambda sets, *, num, **_: tests if num == 9 else shown
    )
    values = {"depth_net": None, "num": 9, "train_scenes": 40, "nearest": 9, "seed": 0, "guidance": [], "base": "m"}
    values |= {"images": None, "batch_size": 4, "out": tmp_path}
    pipe = Pipeline.from_pretrained("m")
    bench = GardenControlScore(pipe, photos.PHOTO_SETS["garden"], tmp_path, argparse.Namespace(**values))
    rows = bench.depth()["rows"]
    assert [rows[name]["RMSE"] for name in (CONTROL, NEAREST, "scenes themselves")] == [0, 0, 0]
    assert rows[PLAIN]["RMSE"] > 0.1
    assert rows[CEILING]["RMSE"] > 0
    near = np.random.default_rng(0).integers(0, 256, (20, 6, 6), np.uint8)
    distance = np.square(near[:5, None].astype(float) - near[None, 5:].astype(float)).sum((2, 3))
    assert nearest_by_depth(near[:5], near[5:]).tolist() == distance.argmin(1).tolist()


@pytest.mark.parametrize("world", [16], indirect=True)
def test_bad_evaluations(run, arguments, tmp_path):
    for more, message in (
        ([], "depth needs --depth-net"),
        (["--parts", "canny", "--data", tmp_path / "none"], "does not exist"),
        (["--parts", "canny", "--batch-size", 0], "batch_size is 0"),
        (["--parts", "soft"], "takes canny, depth; choose one of them"),
    ):
        check_error(run(*arguments, *more), message, program="garden")


@pytest.mark.parametrize("world", [16], indirect=True)
def test_the_run_of_garden_control_scores_itself(arguments, tmp_path, monkeypatch):
    """By the command, without FID, with its images kept; what is finished is not scored again."""
    (tmp_path / "out").mkdir()
    for name in ("classifier", "net"):
        (tmp_path / name).rename(tmp_path / "out" / {"net": "depth-net"}.get(name, name))
    options = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    options += ["--num", "4", "--device", "cpu", "--stages", "score"]
    control_model.main(options)
    path = tmp_path / "out" / "control-score.json"
    found = json.loads(path.read_text())
    assert {"canny", "depth"} <= found.keys()
    assert BASE in found["canny"]["rows"]
    assert (tmp_path / "work" / "score" / "canny" / CONTROL / "0003.png").exists()
    before = path.stat().st_mtime_ns
    control_model.main(options)
    assert path.stat().st_mtime_ns == before


def test_images_are_those_of_the_pipeline():
    """A condition image for each label; -1 is no class."""
    pipe = Pipeline(controlled_model(), small_tokenizer())
    grey = [noise(8, 8, seed=seed).convert("L") for seed in range(3)]
    conditions, labels, seeds = np.stack([np.asarray(image) for image in grey]), np.array([1, -1, 4]), [7, 8, 9]
    found = generate_pixels(pipe, conditions, labels, kind="depth", seeds=seeds, strength=0.5, steps=3)
    for i, label in enumerate([1, None, 4]):
        (alone,) = pipe.control(grey[i], label, kind="depth", strength=0.5, seed=seeds[i], steps=3)
        assert np.array_equal(found[i], np.asarray(alone))
