"""`arpg sample`: the same file from any number of processes and any batch size, also after a kill."""

import json
import os
import subprocess
import sys
import threading
import time
import zipfile

import numpy as np
import pytest
from PIL import Image

from arpg import InputError, Pipeline, cli
from arpg.data.images import open_images
from arpg.evaluation.sample import Share, balanced_labels, count_classes, labels_like, sample_images

SETTINGS = {"steps": 3, "guidance": 2.0}


def test_balanced_labels():
    for num, classes in ((50, 10), (7, 5), (3, 136), (5000, 136)):
        labels = balanced_labels(num, classes)
        counts = np.bincount(labels, minlength=classes)
        assert len(labels) == num
        assert np.ptp(counts) <= 1
    assert balanced_labels(6, 3).tolist() == [0, 1, 2, 0, 1, 2]
    assert sorted(balanced_labels(4, 8)) == [0, 2, 4, 6]  # the rest at even distances
    # Any stretch is balanced too: splits of a file are comparable.
    for part in np.split(balanced_labels(1000, 10), 10):
        assert np.bincount(part, minlength=10).tolist() == [10] * 10


def test_labels_in_proportion():
    labels = labels_like([140, 540, 0, 20], 70)
    assert np.bincount(labels).tolist() == [14, 54, 0, 2]
    halves = [np.bincount(part, minlength=4) for part in np.split(labels, 2)]
    assert np.abs(halves[0] - halves[1]).max() <= 1
    assert len(labels_like([1, 1, 1], 10)) == 10
    with pytest.raises(InputError, match="no image of any class"):
        labels_like([0, 0], 3)


def test_counting_the_classes_of_a_set(pipeline, tmp_path):
    for name, count in (("class 3", 2), ("class 0", 1)):
        (tmp_path / name).mkdir()
        for i in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{i}.png")
    assert count_classes(open_images(tmp_path), pipeline.classes).tolist() == [1, 0, 0, 2, 0]


def write(pipeline, path, *, num=11, **options):
    sample_images(pipeline, path, labels=balanced_labels(num, 5), seed=7, **SETTINGS, **options)
    return path.read_bytes()


def test_the_file_holds_the_images_of_generate(pipeline, tmp_path):
    write(pipeline, tmp_path / "a.npz", batch_size=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz"]
    with np.load(tmp_path / "a.npz") as file:
        pixels, labels = file["arr_0"], file["arr_1"]
    assert labels.tolist() == balanced_labels(11, 5).tolist()
    assert pixels.shape == (11, 8, 8, 3)
    for i, label in enumerate(labels.tolist()):
        image = pipeline.generate(label, seed=7 + i, **SETTINGS)[0]
        off = np.asarray(image).astype(int) - pixels[i]
        assert np.abs(off).max() <= 1  # pixels of one image alone may be rounded differently
        assert (off != 0).mean() < 0.02


def test_one_process_two_processes_other_batches(pipeline, tmp_path):
    one = write(pipeline, tmp_path / "one.npz", batch_size=4)
    other = threading.Thread(
        target=lambda: write(pipeline, tmp_path / "two.npz", batch_size=4, share=Share(0, 2)), daemon=True
    )
    other.start()  # waits for the parts of process 1
    time.sleep(0.3)
    assert not (tmp_path / "two.npz").exists()
    sample_images(
        pipeline,
        tmp_path / "two.npz",
        labels=balanced_labels(11, 5),
        seed=7,
        batch_size=4,
        share=Share(1, 2),
        **SETTINGS,
    )
    other.join(timeout=20)
    assert (tmp_path / "two.npz").read_bytes() == one
    assert write(pipeline, tmp_path / "three.npz", batch_size=64) == one
    assert write(pipeline, tmp_path / "four.npz", batch_size=1) == one


def test_interrupted_and_continued_with_another_batch_size(pipeline, tmp_path, monkeypatch):
    whole = write(pipeline, tmp_path / "whole.npz", batch_size=4)

    def stop(done, total):
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(pipeline, tmp_path / "cut.npz", batch_size=4, progress=stop)
    assert [path.name for path in sorted((tmp_path / "cut.npz.parts").glob("*.npy"))] == ["00000000-00000004.npy"]
    with pytest.raises(InputError, match=r"cut.npz.parts was made with other settings \(steps 3, not 4"):
        sample_images(pipeline, tmp_path / "cut.npz", labels=balanced_labels(11, 5), seed=7, steps=4, guidance=2.0)
    seen = []
    assert write(pipeline, tmp_path / "cut.npz", batch_size=3, progress=lambda *p: seen.append(p)) == whole
    assert seen[0] == (3, 11)  # the first batch of three was there
    assert seen[-1] == (11, 11)

    calls = []
    monkeypatch.setattr(pipeline.engine, "decode", lambda *a: calls.append(a))
    assert write(pipeline, tmp_path / "cut.npz", batch_size=3) == whole  # nothing to do
    assert not calls
    with pytest.raises(InputError, match=r"made with other settings.*num 11, not 12"):
        write(pipeline, tmp_path / "cut.npz", num=12)


def test_files_that_are_something_else(pipeline, tmp_path):
    np.savez(tmp_path / "a.npz", np.zeros(3))
    with pytest.raises(InputError, match="was not made here"):
        write(pipeline, tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a whole npz"):
        write(pipeline, tmp_path / "b.npz")
    with pytest.raises(InputError, match=r"does not end in \.npz"):
        write(pipeline, tmp_path / "c.zip")
    write(pipeline, tmp_path / "d.npz")
    with zipfile.ZipFile(tmp_path / "d.npz") as archive:
        assert archive.testzip() is None
        assert json.loads(archive.comment)["steps"] == 3

    def damage(done, total):
        for path in (tmp_path / "e.npz.parts").glob("*.npy"):
            path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(InputError, match="delete it and run"):
        write(pipeline, tmp_path / "e.npz", progress=damage)


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """`arpg sample` in this process, with the folder's model; returns exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["arpg", "sample", "-m", str(folder), "--device", "cpu", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        captured = capsys.readouterr()
        return exited.value.code or 0, captured.out, captured.err

    return run


def test_a_killed_process_and_two_more(run, folder, tmp_path, monkeypatch):
    """SIGKILL in the middle, then two processes that know their rank as torchrun tells it."""
    options = ["--num", "40", "--steps", "3", "--guidance", "2", "--seed", "7", "--batch-size", "2"]
    command = [sys.executable, "-m", "arpg", "sample", "-m", folder, "--device", "cpu", *options]
    command += ["-o", tmp_path / "a.npz"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    parts = tmp_path / "a.npz.parts"
    while len(list(parts.glob("0*.npy"))) < 2 and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert 2 <= len(list(parts.glob("0*.npy"))) < 20
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        code, said, _ = run(*options, "-o", tmp_path / "a.npz")
        assert code == 0
        assert ("40 images in" in said) == (rank == "0")
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    sample_images(pipe, tmp_path / "b.npz", labels=balanced_labels(40, 5), seed=7, **SETTINGS)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_command_errors_and_classes_like_those_of_a_set(run, tmp_path):
    for arguments, part in (
        (["--num", "0"], "number of images is 0"),
        (["--num", "3", "--batch-size", "0"], "batch_size is 0"),
        (["--num", "3", "--like", str(tmp_path / "x")], "does not exist"),
    ):
        code, _, err = run(*arguments, "-o", tmp_path / "a.npz")
        assert code == 2
        assert part in err
        assert err.count("\n") == 1
    (tmp_path / "images" / "class 3").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "class 3" / "0.png")
    assert run("--num", 3, "--steps", 2, "--like", tmp_path / "images", "-o", tmp_path / "a.npz")[0] == 0
    with np.load(tmp_path / "a.npz") as file:
        assert file["arr_1"].tolist() == [3, 3, 3]
