"""Tokens, text states, samples and features made on Ray: the same bytes as from one process, whatever dies."""

import time
from functools import partial

import numpy as np
import pytest

from arpg.config import TextConfig
from arpg.data import open_images, tokenize
from arpg.data.dataset import write_text_states
from arpg.errors import InputError
from arpg.evaluation.features import read_features
from arpg.evaluation.sample import balanced_labels, sample_images
from arpg.executor import RayOptions, open_workers
from arpg.pipeline import load_with_adapters
from arpg.storage import LEASE, list_files
from support.ray_work import Deadly, FakeEncoder, MovableTiny, Square
from support.small import noise, small_tokenizer

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.filterwarnings("ignore")]  # Ray's own warnings
TWO = RayOptions(workers=2)


def same_files(ours, theirs):
    assert sorted(list_files(ours)) == sorted(list_files(theirs))
    for name in list_files(ours):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


@pytest.mark.slow
def test_results_come_in_order_and_dead_workers_are_replaced(tmp_path):
    seen = []
    with open_workers(partial(Square, tmp_path, deadly=(3, 11)), TWO) as workers:
        assert list(workers.map(range(20), on_progress=seen.append)) == [n * n for n in range(20)]
        assert list(workers.map([5])) == [25]  # the same workers do more
    assert seen[-1] == 20
    assert sorted(seen) == seen
    pids = {path.name.rpartition("-")[2] for path in tmp_path.glob("[0-9]*-[0-9]*")}
    assert len(pids) == 4  # two workers, and one for each that died


@pytest.mark.slow
def test_a_job_that_always_ends_its_worker_is_given_up(tmp_path):
    refused = pytest.raises(InputError, match=r"job 1 ended 3 workers .*run the command again")
    with open_workers(partial(Square, tmp_path, always=(1,)), TWO) as workers, refused:
        list(workers.map(range(3)))


@pytest.mark.slow
def test_errors_of_a_worker_arrive(tmp_path):
    with open_workers(partial(Square, tmp_path), TWO) as workers, pytest.raises(InputError, match="-1 is negative"):
        list(workers.map([1, -1]))


@pytest.fixture
def many(tmp_path):
    """Forty images of two classes, with captions."""
    root = tmp_path / "many"
    for i in range(40):
        (root / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
        noise(24, 20 + i % 5, seed=i).save(root / f"c{i % 2}" / f"{i:02d}.png")
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    (root / "captions.json").write_text("{" + ", ".join(f'"{n}": "caption {n}"' for n in names) + "}")
    return root


SETTINGS = {"size": 16, "views": 2, "shard_size": 6, "batch_size": 4}


def test_token_sets_are_the_same_bytes(many, tmp_path):
    """Also with a worker that is killed inside a shard, and after an interrupted run."""
    images = open_images(many)
    tokenize(small_tokenizer(), images, tmp_path / "one", **SETTINGS)
    tokenizer = small_tokenizer()
    tokenizer.encode = Deadly(tokenizer.encode, tmp_path / "died", after=5)
    tokenize(tokenizer, images, tmp_path / "killed", ray=TWO, device="cpu", **SETTINGS)
    assert (tmp_path / "died").exists()
    same_files(tmp_path / "one", tmp_path / "killed")
    for name in (
        "tokens.json",
        "labels-00002.npy",
        "ids-00005.npy",
        "captions-00000.json",
    ):  # as a stopped run leaves it
        (tmp_path / "killed" / name).unlink()
    tokenize(small_tokenizer(), images, tmp_path / "killed", ray=TWO, device="cpu", **SETTINGS)
    same_files(tmp_path / "one", tmp_path / "killed")


def test_a_second_job_is_refused(many, tmp_path):
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / LEASE).write_text(f'{{"owner": "x", "host": "elsewhere", "pid": 1, "time": {time.time()}}}')
    with pytest.raises(InputError, match="is being written by process 1 on elsewhere"):
        tokenize(small_tokenizer(), open_images(many), tmp_path / "tokens", ray=TWO, **SETTINGS)
    assert list_files(tmp_path / "tokens") == [LEASE]


def test_text_states_are_the_same_bytes(many, tmp_path):
    config = TextConfig("fake", 8, 7)
    for name, options in {"one": {}, "ray": {"ray": TWO, "load": FakeEncoder}}.items():
        tokens = tokenize(small_tokenizer(), open_images(many), tmp_path / name, **SETTINGS)
        write_text_states(tokens, config, FakeEncoder(), shard_size=7, **options)
    same_files(tmp_path / "one", tmp_path / "ray")


def test_samples_are_the_same_bytes(pipeline, tmp_path):
    pipeline.save_pretrained(tmp_path / "model")
    labels = balanced_labels(22, len(pipeline.classes))
    settings = {"labels": labels, "seed": 3, "batch_size": 2, "steps": 3}
    load = partial(load_with_adapters, str(tmp_path / "model"), (), device="cpu")
    sample_images(load(), tmp_path / "one.npz", **settings)
    done = []
    sample_images(
        None, tmp_path / "ray.npz", ray=TWO, load=load, progress=lambda *counts: done.append(counts), **settings
    )
    assert (tmp_path / "ray.npz").read_bytes() == (tmp_path / "one.npz").read_bytes()
    assert done[-1] == (22, 22)
    assert not (tmp_path / "ray.npz.parts").exists()


def test_features_are_the_same_bytes(many, pipeline, tmp_path):
    sample_images(pipeline, tmp_path / "x.npz", labels=balanced_labels(30, len(pipeline.classes)), steps=2)
    for source, size in ((many, 16), (tmp_path / "x.npz", None)):
        for name, options in {"one": None, "ray": TWO}.items():
            found = read_features(source, MovableTiny(), size=size, batch_size=8, ray=options)
            found.save(tmp_path / f"{name}.npz")
        assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "ray.npz").read_bytes()
    with pytest.raises(InputError, match="give a size to crop to"):
        read_features(many, MovableTiny(), batch_size=8, ray=TWO)


@pytest.mark.slow
def test_the_command_line_runs_on_ray(run, folder, many, tmp_path):
    for name, options in {"one": [], "ray": ["--ray", "--workers", "2"]}.items():
        code, out, err = run(
            "tokenize", many, "-t", folder, "--size", 16, "--shard-size", 9, "-o", tmp_path / name, *options
        )
        assert code == 0, err
        assert "40 images" in out
        code, _, err = run("sample", "-m", folder, "-n", 6, "--steps", 2, "-o", tmp_path / f"{name}.npz", *options)
        assert code == 0, err
    same_files(tmp_path / "one", tmp_path / "ray")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "ray.npz").read_bytes()
    code, _, err = run("tokenize", many, "-t", folder, "--size", 16, "-o", tmp_path / "x", "--workers", 2)
    assert code == 2
    assert "--workers is 2, which needs --ray" in err
    assert np.load(tmp_path / "ray.npz")["arr_0"].shape[0] == 6
