"""Long runs: they start without the extras, stop in time, continue, and write their results as pieces."""

import argparse
import io
import subprocess
import sys
import time
import zipfile
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch

from arpg import InputError, load_model
from arpg.checkpoint import store_folder
from arpg.config import ModelConfig
from arpg.data.tokens import TokenWriter
from arpg.train import report
from arpg.train.model import ModelTraining
from arpg.train.recipe import ModelRecipe, OptimRecipe, RunRecipe, TokenData
from experiments import staged_run
from experiments.garden.__main__ import VERBS
from experiments.meadow.__main__ import VERBS as MEADOW
from experiments.paper.__main__ import VERBS as PAPER
from experiments.verbs import module_of
from support.paths import ROOT

BLOCKED = """
import importlib.machinery as machinery, sys
names = "typer rich fastapi pydantic transformers tokenizers onnxruntime matplotlib tensorboard huggingface_hub".split()
found = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.split(".")[0] in names else found(name, *rest)
)
import importlib
for module in sys.argv[1:]:
    importlib.import_module(module)
print(*sorted(set(names) & set(sys.modules)))
"""


def test_they_need_no_extra():
    every = {"garden": VERBS, "meadow": MEADOW, "paper": PAPER}
    verbs = [(name, where) for name, each in every.items() for where, _ in each.values()]
    modules = sorted({module_of(*each)[0] for each in verbs})
    command = [sys.executable, "-c", BLOCKED, *modules, "benchmarks.text_speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_stages_are_run_until_one_is_not_finished(tmp_path, caplog):
    caplog.set_level("INFO")
    seen = []

    class Run(staged_run.StagedRun):
        stages: ClassVar = {
            "made-before": staged_run.Stage("made.txt"),
            "one": staged_run.Stage(),
            "two": staged_run.Stage(),
            "long": staged_run.Stage("long.txt", seconds=300.0),
        }

        def made_before(self):
            seen.append("made-before")

        def one(self):
            seen.append("one")

        def two(self):
            seen.append("two")
            return len(seen) > 2

        def long(self):
            seen.append("long")

    def run(minutes, *stages, pieces=None):
        caplog.clear()
        options = {"work": tmp_path / "work", "out": tmp_path / "out", "device": "cpu", "pieces": pieces}
        Run(argparse.Namespace(**options, minutes=minutes, stages=stages or tuple(Run.stages))).run()
        return [record.message for record in caplog.records if not record.message.endswith(" 0 s")]

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "made.txt").write_text("made")
    assert run(10, pieces=tmp_path / "pieces") == ["two is not finished; run this again"]
    assert seen == ["one", "two"]
    with zipfile.ZipFile(tmp_path / "pieces" / "results.zip.000") as archive:
        assert archive.namelist() == ["made.txt"]
    assert run(4) == ["long is not finished; run this again"]  # the rest of the time is too short for it
    assert run(4, "two", "one") == ["done"]
    assert seen == ["one", "two", "one", "two", "one", "two"]
    assert run(10) == ["done"]
    assert seen[-1] == "long"


@pytest.mark.parametrize("sizes", [(70, 45), (10,)])
def test_results_come_in_pieces_that_make_one_zip(tmp_path, sizes):
    results, target = tmp_path / "results", tmp_path / "shipped"
    (results / "model").mkdir(parents=True)
    target.mkdir()
    (target / "results.zip.009").write_bytes(b"of an earlier call")
    written = {}
    for i, size in enumerate(sizes):
        written[f"model/{i}.bin"] = bytes(range(size)) * 3
        (results / f"model/{i}.bin").write_bytes(written[f"model/{i}.bin"])
    staged_run.write_pieces(results, target, piece=100)
    pieces = sorted(target.iterdir())
    assert all(piece.stat().st_size <= 100 for piece in pieces)
    with zipfile.ZipFile(io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == written
    staged_run.join_pieces(target, tmp_path / "back")
    for name, data in written.items():
        assert (tmp_path / "back" / name).read_bytes() == data
    (target / "results.zip.000").rename(target / "results.zip.007")
    with pytest.raises(InputError, match="some of them are missing"):
        staged_run.join_pieces(target, tmp_path / "back")
    with pytest.raises(InputError, match=r"has no results.zip"):
        staged_run.join_pieces(tmp_path, tmp_path / "back")


@pytest.fixture
def recipe(tmp_path):
    writer = TokenWriter(tmp_path / "tokens", grid=(2, 2), vocab_size=8, classes=("a", "b"), views=1)
    writer.add(np.random.default_rng(0).integers(8, size=(16, 1, 4)), np.arange(16) % 2)
    writer.close()
    return ModelRecipe(
        model=ModelConfig(32, 2, 1, 1, vocab_size=8, num_classes=2, grid=(2, 2)),
        data=TokenData(str(tmp_path / "tokens")),
        optim=OptimRecipe(1e-2, ema=0.5),
        run=RunRecipe(steps=40, batch_size=4, precision="float32", log_every=5, save_every=40),
    )


def test_training_is_cut_by_the_deadline_and_goes_on(recipe, tmp_path, monkeypatch):
    """Each call leaves metrics and the weights so far, in 8 bits; the calls together are one run."""
    monkeypatch.setattr(report, "plot_losses", lambda folder: None)
    monkeypatch.setattr(staged_run, "SHORTEST", 0.0)
    step = ModelTraining.step

    def slow(self, index):
        time.sleep(0.02)
        return step(self, index)

    work, results = tmp_path / "work", tmp_path / "results"
    with monkeypatch.context() as patch:
        patch.setattr(ModelTraining, "step", slow)
        calls = 0
        while not staged_run.train_until(
            time.monotonic() + 0.4, recipe, work, results, device="cpu", store=partial(store_folder, form="int8")
        ):  # at most 20 steps a call
            calls += 1
            weights = load_model(results / "model", dtype=torch.float32).state_dict()
    assert 1 <= calls <= 40
    assert (results / "metrics.jsonl").read_bytes() == (work / "metrics.jsonl").read_bytes()
    assert staged_run.train_until(time.monotonic() - 1, recipe, work, results, device="cpu")  # nothing is left to do
    whole = tmp_path / "whole"
    assert staged_run.train_until(time.monotonic() + 100, recipe, whole, tmp_path / "other", device="cpu")
    a, b = (load_model(folder / "model").state_dict() for folder in (work, whole))
    assert all(torch.equal(a[key], b[key]) for key in a)
    last = load_model(results / "model", dtype=torch.float32).state_dict()
    assert (last["head.weight"] - a["head.weight"]).abs().max() < 0.01 * a["head.weight"].abs().max()
    assert not torch.equal(last["head.weight"], weights["head.weight"])
    assert not staged_run.train_until(time.monotonic() - 1, recipe, tmp_path / "late", results, device="cpu")
