"""`python -m experiments.garden` in this process, and a small model of made-up photographs."""

import dataclasses
import zipfile

import pytest

from arpg import Pipeline, SamplingDefaults
from arpg.classes import ClassNames
from arpg.evaluation.inception import Inception
from arpg.tokenizer.losses import LPIPS
from experiments import photos
from experiments.garden.__main__ import main
from support.features import Eye
from support.lpips import small_lpips
from support.small import CONTROL, SMALL, controlled_model, noise, small_tokenizer


@pytest.fixture
def run(capsys):
    """A function that runs a verb: exit code, stdout, stderr."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exited:  # argparse
            code = exited.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def world(request, tmp_path, monkeypatch):
    """A model of some tokens per side, two pixels each, photographs, and stand-ins for Inception and LPIPS."""
    names = tuple(f"class {i}" for i in range(SMALL.num_classes))
    config = dataclasses.replace(SMALL, grid=(request.param, request.param), control=CONTROL)
    model = controlled_model(config)
    pipe = Pipeline(model, small_tokenizer(), classes=ClassNames(names), sampling=SamplingDefaults(steps=2))
    tiny = photos.PhotoSet("meadow", ("pets",), "meadow-{domain}.zip/{split}", 2 * request.param)
    monkeypatch.setitem(photos.PHOTO_SETS, "meadow", tiny)
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda *_, **__: pipe)
    monkeypatch.setattr(Inception, "load", lambda *_, **__: Eye())
    monkeypatch.setattr(LPIPS, "load", lambda *_: small_lpips())
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data" / "meadow-pets.zip", "w") as archive:
        for i in range(3 * len(names)):
            noise(40, 40, seed=i).save(tmp_path / "image.png")
            archive.write(tmp_path / "image.png", f"{'test' if i % 3 == 0 else 'train'}/{names[i // 3]}/{i}.png")
    return ["--model", "m", "--data", str(tmp_path / "data"), "--device", "cpu"]
