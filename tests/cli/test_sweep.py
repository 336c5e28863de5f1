"""Sweeps: every combination once, measured as the metrics alone would, and continued where they stopped."""

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError, SamplingSettings, cli
from arpg.data.images import open_images
from arpg.evaluation import features, metric_report, metrics, sweep
from arpg.evaluation.features import reference_features
from arpg.evaluation.sample import PixelBatches, balanced_labels, json_settings
from arpg.evaluation.sweep import (
    RESULTS,
    Results,
    Scorers,
    best_of,
    combinations,
    draw_curves,
    format_number,
    generate_features,
    measure,
    read_lines,
    table,
)
from arpg.settings import SamplingDefaults
from arpg.tables import markdown_table
from support.small import noise


@pytest.fixture
def scorers(eye, photos):
    return Scorers(eye, reference_features(eye, open_images(photos), 8))


def settings(**given):
    return SamplingSettings(steps=3, **given)


def test_combinations():
    defaults = SamplingDefaults(guidance_by_steps=((8, 5.0), (32, 3.0)))
    found = combinations(defaults, {"steps": [8, 32], "order": ["raster", "halton"]})
    assert [(s.order, s.steps, s.guidance) for s in found] == [
        ("raster", 8, 5.0),
        ("raster", 32, 3.0),
        ("halton", 8, 5.0),
        ("halton", 32, 3.0),
    ]
    unguided = combinations(defaults, {"guidance": [1.0, 2.0, 2.0], "guidance_schedule": ["linear", "none"]})
    assert [(s.guidance_schedule, s.guidance) for s in unguided] == [("linear", 1.0), ("linear", 2.0), ("none", 1.0)]
    assert [s.top_k for s in combinations(defaults, {"top_k": [3, 5]})] == [3, 5]
    assert combinations(defaults, {}) == [defaults.settings()]
    with pytest.raises(InputError, match="colour cannot be swept over"):
        combinations(defaults, {"colour": [3]})
    with pytest.raises(InputError, match="order is 'zigzag'"):
        combinations(defaults, {"order": ["zigzag"]})


def test_a_measurement_is_what_the_metrics_say_of_the_images(pipeline, scorers):
    """Against the images as one array, whatever the batches were; class accuracy counted by hand."""
    labels = balanced_labels(40, 5)
    calls = []

    class AlwaysTwo:
        device = torch.device("cpu")

        def __call__(self, image_B3HW):
            calls.append(len(image_B3HW))
            return torch.eye(5)[torch.full((len(image_B3HW),), 2)]

    scorers = Scorers(scorers.inception, scorers.reference, AlwaysTwo())
    line = measure(generate_features(pipeline, settings(), scorers, labels=labels, batch_size=7, seed=3), scorers)
    seeds = range(3, 43)
    pixels = torch.cat(list(PixelBatches(pipeline, labels, settings(), seeds=seeds, batch_size=40)))
    whole = features.collect(scorers.inception, [pixels])
    expected = metric_report.evaluate(whole, scorers.reference, metrics=("fid", "kid", "precision", "recall"))
    for name in ("fid", "kid", "precision", "recall"):
        assert line[name] == pytest.approx(expected[name]["value"], rel=2e-3, abs=1e-5)
    assert line["fid interval"] == pytest.approx(expected["fid"]["interval"], rel=5e-3)
    assert line["accuracy"] == 0.2
    assert sum(calls) == 40
    assert line["images/s"] > 0


@pytest.mark.parametrize(("mode", "rate"), [("eager", 2.0), ("graph", 4.0)])
def test_the_rate_leaves_out_what_warms_up_and_the_capture_of_a_graph(mode, rate):
    pipe = SimpleNamespace(engine=SimpleNamespace(mode=mode))
    batches = PixelBatches(pipe, balanced_labels(4, 2), settings(), seeds=range(4), batch_size=1)
    batches.times = [(4, 9.0), (4, 4.0), (4, 1.0), (4, 1.0)]
    assert batches.rate == rate
    batches.times = batches.times[:2]
    assert batches.rate == 1.0


def test_images_against_themselves(pipeline, eye):
    labels = balanced_labels(30, 5)
    pixels = torch.cat(list(PixelBatches(pipeline, labels, settings(), seeds=range(30), batch_size=30)))
    scorers = Scorers(eye, features.collect(eye, [pixels]))
    line = measure(generate_features(pipeline, settings(), scorers, labels=labels), scorers)
    assert line["fid"] < 1e-3
    assert (line["precision"], line["recall"]) == (1.0, 1.0)
    statistics = Scorers(eye, dataclasses.replace(scorers.reference, pool_MF=None, gain_M=None))
    alone = measure(generate_features(pipeline, settings(), statistics, labels=labels), statistics)
    assert "fid" in alone
    assert not {"precision", "recall", "kid"} & set(alone)  # statistics alone do not allow them


def test_only_what_is_missing_is_measured(pipeline, scorers, tmp_path):
    labels = balanced_labels(10, 5)
    run = {"labels": labels, "about": {"reference": "photos"}, "batch_size": 4}
    first = combinations(pipeline.sampling, {"steps": [2, 3]})
    scorers.inception.seen = 0
    lines = sweep.sweep(pipeline, scorers, tmp_path, combos=first, **run)
    assert scorers.inception.seen == 20
    assert [line["settings"]["steps"] for line in lines] == [2, 3]
    assert read_lines(tmp_path) == lines

    def stop(done, total):
        """Interrupt at the second combination."""
        assert total == 40
        if done == 20:
            raise KeyboardInterrupt

    more = combinations(pipeline.sampling, {"steps": [3, 2], "guidance": [2.0, 4.0]})
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(pipeline, scorers, tmp_path, combos=more, progress=stop, **run)
    assert scorers.inception.seen == 30  # what was finished is kept
    again = sweep.sweep(pipeline, scorers, tmp_path, combos=more, **run)
    assert scorers.inception.seen == 40  # one more; guidance 4 was there as the default
    assert again[1] == lines[1]
    assert len(read_lines(tmp_path)) == 4
    with pytest.raises(InputError, match=r"holds results of something else \(seed 0, not 1"):
        sweep.sweep(pipeline, scorers, tmp_path, combos=first, seed=1, **run)
    with pytest.raises(InputError, match="reference 'photos', not 'others'"):
        sweep.sweep(pipeline, scorers, tmp_path, combos=first, **{**run, "about": {"reference": "others"}})


def test_a_line_from_before_a_setting_existed_is_found(tmp_path):
    settings = SamplingSettings(steps=7)
    Results(tmp_path, {}).add(settings, 5, {"fid": 1.0})
    text = (tmp_path / RESULTS).read_text()
    (tmp_path / RESULTS).write_text(text.replace('"decode": "steps", ', ""))
    later = Results(tmp_path, {})
    assert "decode" not in later.lines[0]["settings"]
    assert later.find(settings, 5) is not None
    assert later.find(dataclasses.replace(settings, attention="causal", decode="exact"), 5) is None


def test_the_reference_is_kept(eye, photos, tmp_path):
    first = reference_features(eye, open_images(photos), 8, keep=tmp_path)
    seen = eye.seen
    again = reference_features(eye, open_images(photos), 8, keep=tmp_path)
    assert eye.seen == seen == first.n == again.n == 9
    assert metrics.frechet_distance(first.pool, again.pool) < 1e-6
    reference_features(eye, open_images(photos), 6, keep=tmp_path)
    assert eye.seen == 2 * seen  # another size is another reference
    changed = noise(30, 26, seed=99)
    changed.save(photos / "pear" / "0.png")  # the same names, another image
    other = reference_features(eye, open_images(photos), 8, keep=tmp_path)
    assert eye.seen == 3 * seen
    assert metrics.frechet_distance(first.pool, other.pool) > 1e-3


def line(fid, rate, **given):
    chosen = SamplingDefaults().settings(**given)
    return {
        "num": 5,
        "settings": json_settings(chosen),
        "fid": fid,
        "fid interval": [fid - 1, fid + 1],
        "images/s": rate,
    }


def test_table_and_curves(tmp_path):
    lines = [
        line(20.0, 100.0, steps=8, guidance=2.0),
        line(14.126, 99.0, steps=8, guidance=3.0),
        line(12.0, 50.0, steps=16, guidance=2.0),
    ]
    assert table(lines) == markdown_table(
        ["steps", "guidance", "FID", "images/s"],
        [["8", "2", "20.00", "100.0"], ["8", "3", "14.13", "99.0"], ["16", "2", "12.00", "50.0"]],
    )
    assert table(lines).splitlines()[3] == "| 8 | 3 | 14.13 | 99.0 |"
    assert format_number(lines[0], "fid", interval=True) == "20.00 ± 1.00"
    assert format_number(lines[0], "recall") is None
    assert [(x["settings"]["steps"], x["fid"]) for x in best_of(lines)] == [(8, 14.126), (16, 12.0)]
    written = draw_curves(lines, tmp_path)
    assert [path.name for path in written] == ["steps.png", "speed.png"]
    for path in written:
        with Image.open(path) as image:
            assert min(image.size) > 300
            assert len(set(image.convert("RGB").resize((64, 64)).tobytes())) > 10
    assert draw_curves([], tmp_path) == []


def test_command(folder, eye, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("arpg.evaluation.inception.Inception.load", lambda path, device: eye)

    def run(*arguments, reference=photos):
        command = ["arpg", "sweep", "-m", str(folder), "--device", "cpu", "-r", str(reference), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as exited:
            cli.main()
        captured = capsys.readouterr()
        return exited.value.code or 0, captured.out, captured.err

    target = tmp_path / "sweep"
    options = ["--num", "6", "--steps", "2,3", "--attention", "block, causal", "-o", str(target)]
    code, said, err = run(*options)
    assert code == 0, err
    assert "| attention | steps | FID | KID x 1000 | precision | recall | images/s |" in said
    assert len(read_lines(target)) == 4
    assert {"about.json", "results.jsonl", "table.md", "steps.png", "speed.png"} <= {p.name for p in target.iterdir()}
    seen = eye.seen
    assert run(*options)[1] == said
    assert eye.seen == seen  # nothing is measured twice
    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "home"))
    np.savez(tmp_path / "real.npz", np.random.default_rng(0).integers(256, size=(9, 8, 8, 3), dtype=np.uint8))
    assert run("--num", "6", "--steps", "2", "-o", str(tmp_path / "b"), reference=tmp_path / "real.npz")[0] == 0
    assert read_lines(tmp_path / "b")[0]["fid"] != read_lines(target)[0]["fid"]
    for arguments, part in (
        (["--steps", "2,x"], "steps is '2,x'"),
        (["--order", "zigzag"], "order is 'zigzag'"),
        (["--num", "3"], "expected 4 or more"),
        (["--seed", "5", "--num", "6"], "results of something else"),
    ):
        code, _, err = run(*arguments, "-o", str(target))
        assert code == 2
        assert part in err
        assert err.count("\n") == 1


def test_images_of_any_size_are_cropped(eye, tmp_path):
    (tmp_path / "a").mkdir()
    for i, (width, height) in enumerate([(30, 20), (16, 16), (9, 25)]):
        noise(width, height, seed=i).save(tmp_path / "a" / f"{i}.png")
    assert reference_features(eye, open_images(tmp_path), 8).n == 3
