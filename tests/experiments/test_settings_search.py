"""Search by halves against all measurements, and the card and the search of a small model on made-up photographs."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from arpg import InputError, Pipeline
from arpg.checkpoint import read_folder
from arpg.evaluation.features import Features
from arpg.settings import SamplingDefaults
from experiments import model_card, photos
from experiments.meadow.__main__ import main
from experiments.settings_search import AXES, halving, recommend, shortened


def test_the_better_half_goes_on_with_twice_as_many_samples():
    rng = np.random.default_rng(0)
    quality = rng.random(10)
    asked = []

    def measure(settings, num):
        asked.append((settings, num))
        return quality[settings] + 1 / num  # more samples, less bias: the same for all

    lines = halving(range(10), measure, first=4, last=32)
    assert lines[0][0] == quality.argmin()
    assert [sum(num == n for _, num in asked) for n in (4, 8, 16, 32)] == [10, 5, 3, 2]
    assert {settings for settings, num in asked if num == 8} == set(np.argsort(quality)[:5].tolist())
    assert lines[0] == (lines[0][0], measure(lines[0][0], 32), 32)
    assert halving([3], measure, first=4, last=32) == [(3, quality[3] + 0.25, 4)]
    with pytest.raises(InputError, match="first is 8 and last 4"):
        halving([3], measure, first=8, last=4)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_search_is_measured_once(world, tmp_path):
    out = tmp_path / "settings"
    grid = ["--steps", "2", "--guidance", "1.5", "--order", "random", "raster", "--schedule", "arccos"]
    grid += ["--temperature", "0.9", "1"]
    command = ["search-settings", *world, *grid, "--guidance-schedule", "linear", "--first", "8", "--last", "16"]
    assert main([*command, "--out", str(out)]) == 0
    best = json.loads((out / "best.json").read_text())["2"]
    lines = [json.loads(line) for line in (out / "samples-16" / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert best["fid"] == min(line["fid"] for line in lines)
    assert [line["samples"] for line in best["searched"]] == [16, 16, 8, 8, 8, 8]
    assert {(line["order"], line["temperature"]) for line in best["searched"]} == {
        (order, temperature) for order in ("random", "raster") for temperature in (0.9, 1.0)
    }
    before = {path: path.read_bytes() for path in out.rglob("*.jsonl")}
    assert main([*command, "--out", str(out)]) == 0
    assert {path: path.read_bytes() for path in out.rglob("*.jsonl")} == before


def test_defaults_share_all_but_the_guidance():
    """Settings that are best at one number of steps only lose against those that are good at both."""
    other = {"guidance_schedule": "linear", "order": "halton", "schedule": "arccos", "top_p": 1.0}

    def line(fid, guidance, temperature, samples):
        return {**other, "fid": fid, "guidance": guidance, "temperature": temperature, "samples": samples}

    few = [line(20.0, 5.0, 0.9, 8), line(21.0, 4.0, 1.0, 8), line(22.0, 3.0, 1.0, 8), line(15.0, 3.0, 0.8, 4)]
    many = [line(12.0, 2.0, 0.9, 8), line(10.0, 2.5, 1.0, 8), line(5.0, 2.5, 0.8, 4)]
    found = recommend({24: many, 12: few})
    assert set(other) | {"guidance", "temperature"} == set(AXES)
    assert (found.steps, found.temperature, found.order) == (24, 1.0, "halton")
    assert found.guidance_by_steps == ((12, 4.0), (24, 2.5))
    assert recommend({12: few, 24: many[2:]}).temperature == 0.8  # the only one with as many samples for both
    alike = [{**each, "guidance": 4.0} for each in many]
    assert recommend({24: alike, 12: few}).guidance_by_steps == ((24, 4.0),)


@pytest.mark.parametrize(
    ("table", "short"),
    [
        (((8, 9.5), (12, 9.5), (16, 9.5), (24, 9.5)), ((24, 9.5),)),
        (((8, 5.0), (12, 5.0), (24, 3.0)), ((12, 5.0), (24, 3.0))),
        (((8, 5.0), (12, 3.0), (24, 3.0)), ((8, 5.0), (12, 3.0))),
        (((4, 5.0), (8, 4.0), (16, 3.0)), ((4, 5.0), (16, 3.0))),  # on a line over log(steps)
        (((8, 4.0), (12, 3.0), (24, 4.0)), ((8, 4.0), (12, 3.0), (24, 4.0))),
        (((24, 3.0),), ((24, 3.0),)),
    ],
)
def test_entries_that_follow_from_the_others_are_left_out(table, short):
    assert shortened(table) == short
    whole, left = (SamplingDefaults(guidance_by_steps=each) for each in (table, short))
    assert [left.guidance_for(n) for n in range(1, 65)] == [whole.guidance_for(n) for n in range(1, 65)]


@pytest.mark.parametrize("world", [4], indirect=True)
def test_features_of_real_photographs_are_computed_once(world, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    Pipeline.from_pretrained("m").save_pretrained(folder)
    grid = ["--steps", "2", "--guidance", "1.5", "--order", "random", "--schedule", "arccos"]
    command = [
        "search-settings",
        *world,
        "--model",
        str(folder),
        *grid,
        "--guidance-schedule",
        "linear",
        "--first",
        "8",
        "--last",
        "8",
    ]
    command += ["--features", str(tmp_path / "features"), "--write"]
    assert main([*command, "--out", str(tmp_path / "a")]) == 0
    monkeypatch.setattr(photos, "center_crops", None)
    assert main([*command, "--out", str(tmp_path / "b")]) == 0
    found = [json.loads((tmp_path / name / "best.json").read_text())["2"]["fid"] for name in "ab"]
    assert found[0] == found[1]
    (kept,) = (tmp_path / "features").iterdir()
    dataclasses.replace(Features.load(kept), network="other weights").save(kept)
    with pytest.raises(TypeError):  # they are not taken: the photographs are read again
        main([*command, "--out", str(tmp_path / "c")])
    assert read_folder(folder).sampling.guidance_by_steps == ((2, 1.5),)


@pytest.mark.slow
@pytest.mark.parametrize("world", [32], indirect=True)  # the classifier takes 64 pixels or more
def test_a_card_is_measured_part_by_part(world, tmp_path):
    out = tmp_path / "card"
    command = ["model-card", *world, "--num", "2", "--fid-num", "40", "--batch-size", "16", "--out", str(out)]
    command += ["--classifier", str(tmp_path / "c"), "--classifier-steps", "2", "--fid-steps", "2", "3"]
    assert main([*command, "--parts", "tokenizer", "accuracy"]) == 0
    first = json.loads((out / "card.json").read_text())
    assert {"tokenizer", "accuracy"} == set(first) & set(model_card.PARTS)
    assert main(command) == 0
    card = json.loads((out / "card.json").read_text())
    assert set(model_card.PARTS) <= set(card)
    assert {part: card[part] for part in ("tokenizer", "accuracy")} == {p: first[p] for p in ("tokenizer", "accuracy")}
    assert card["accuracy"]["samples per class"] == 2
    with Image.open(out / card["classes"]["file"]) as sheet:
        assert sheet.width > 5 * 64  # an image of each of the five classes in a row
    assert set(card["nearest"]) == {"samples", "real test images"}
    assert card["diversity"]["share of real"] > 0
    assert set(card["fid"]) == {"2 steps", "3 steps"}
    fid = card["fid"]["3 steps"]
    assert fid["settings"]["steps"] == 3
    assert fid["train"]["fid"]["samples"] == 40
    low, high = fid["test"]["fid"]["interval"]
    assert low <= fid["test"]["fid"]["value"] <= high
    assert card["tokenizer"]["pets"]["psnr"] > 0
    again = (out / "card.json").read_bytes()
    assert main(command) == 0
    assert (out / "card.json").read_bytes() == again
