"""The bundled folder: its files, and a card that says what the records say."""

import json

import pytest

from arpg import Pipeline, checkpoint
from arpg.checkpoint import read_folder
from arpg.evaluation.sample import fingerprint
from arpg.settings import SamplingDefaults
from experiments.meadow import bundle
from experiments.meadow.__main__ import main
from support.paths import ROOT


def report(fid):
    interval = [fid - 1, fid + 1]
    return {
        "fid": {"value": fid, "samples": 10_000, "interval": interval},
        "precision": {"value": 0.5, "samples": 10_000},
    }


RECORD = {
    "device": "a GPU",
    "precision": "bfloat16",
    "tokenizer": {
        "pets": {"psnr": 24.5, "ssim": 0.71, "lpips": 0.155, "usage": 0.999},
        "rfid, test images": 6.25,
        "images": 5310,
        "device": "another GPU",
    },
    "accuracy": {
        "real test images": 0.8,
        "samples": 0.6,
        "share of real": 0.75,
        "interval": [0.59, 0.61],
        "samples per class": 20,
        "classes never recognised": ["class 1"],
        "classes under 50%": {"class 1": 0.0, "class 3": 0.25},
    },
    "diversity": {"samples": 0.6, "real training images": 0.625, "share of real": 0.96},
    "nearest": {name: {"mean": 0.4, "closest 1%": 0.2} for name in ("samples", "real test images")},
    "fid": {"24 steps": {"settings": {}, "images/s": 1.0, "train": report(18.5), "test": report(21.25)}},
}


def bundle_command(tmp_path, model, out):
    """Return the arguments of `bundle`, with the record and the limits in `tmp_path`."""
    paths = [str(model), str(tmp_path / "card.json"), str(out), "--data", str(tmp_path / "data")]
    return ["bundle", *paths, "--training", "3 steps on a CPU", "--limits", str(tmp_path / "limits.md")]


@pytest.mark.parametrize("world", [4], indirect=True)
def test_the_card_says_what_the_records_say(world, tmp_path, monkeypatch, capsys):
    Pipeline.from_pretrained("m").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(bundle, "EXAMPLES", ("class 2", "class 4"))
    (tmp_path / "card.json").write_text(json.dumps(RECORD))
    (tmp_path / "limits.md").write_text("- Eyes are uneven.\n")
    out = tmp_path / "meadow"
    command = bundle_command(tmp_path, tmp_path / "model", out)
    assert main(command) == 0
    described = read_folder(out)
    assert described.examples == ("class 2", "class 4")
    assert described.about.startswith("5 classes")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes()
    text = " ".join((out / "README.md").read_text().split())
    for part in (
        "# meadow",
        "5 classes of cats",
        "8 x 8 pixels (4 x 4 = 16 tokens)",
        "15 photographs, 10 of them in the training split",
        "| training | 4,900 steps of 256 images, 19 minutes of steps on one NVIDIA H200 | 3 steps on a CPU |",
        "| defaults | | 2 steps, `random` order, `arccos` schedule, linear guidance 4 |",
        "| FID | 18.50 (17.50 to 19.50) | 21.25 (20.25 to 22.25) |",
        "| precision | 0.500 | 0.500 |",
        "The tokenizer has rFID 6.25 on 5,310 test photographs (another GPU).",
        "| pets | 24.50 dB | 0.710 | 0.155 | 99.9% |",
        "between two samples of a class is 0.600, between two real training photographs of a class 0.625.",
        "| samples | 0.400 | 0.200 |",
        "recognises 60.0% of the samples (20 per class, 95% interval 59.0% to 61.0%) and 80.0%",
        "Classes without a recognised sample (1): class 1.",
        "samples recognised (1): class 3 25%.",
        "- Eyes are uneven.",
        "CUB-200-2011: non-commercial research",
        "research use",
    ):
        assert part in text, part
    assert max(map(len, (line for line in (out / "README.md").read_text().splitlines() if "|" not in line))) <= 120
    (tmp_path / "card.json").write_text(json.dumps({name: RECORD[name] for name in ("device", "tokenizer")}))
    assert main(command) == 2
    assert "the record has no fid" in capsys.readouterr().err
    (tmp_path / "card.json").write_text(
        json.dumps({k: v for k, v in RECORD.items() if k not in ("accuracy", "nearest", "diversity")})
    )
    assert main([*command, "--tokenizer", str(tmp_path / "model")]) == 0
    text = " ".join((out / "README.md").read_text().split())
    for part in ("the share of samples that a classifier", "the LPIPS between samples", "the LPIPS to the nearest"):
        assert part in text.split("Not measured yet: ")[1]
    assert "recognised (" not in text


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_fine_tune_is_bundled_as_differences(world, tmp_path, monkeypatch):
    """The folder has no tokenizer of its own, and the card says whose it uses."""
    monkeypatch.setattr(bundle, "EXAMPLES", ("class 2", "class 4"))
    monkeypatch.setattr(checkpoint, "installed_folder", lambda name, **_: tmp_path / name)
    Pipeline.from_pretrained("m").save_pretrained(tmp_path / "base")
    sampling = SamplingDefaults(guidance_by_steps=((12, 5.0), (24, 4.0)))
    checkpoint.write_folder(tmp_path / "base", checkpoint.FolderConfig(sampling=sampling))
    checkpoint.write_difference(tmp_path / "base", tmp_path / "tuned", base="base", form="int6")
    (tmp_path / "card.json").write_text(json.dumps(RECORD))
    (tmp_path / "limits.md").write_text("- Eyes are uneven.\n")
    out = tmp_path / "meadow-256"
    assert main(bundle_command(tmp_path, tmp_path / "tuned", out)) == 0
    described = read_folder(out)
    assert (described.base, described.tokenizer_of, described.tokenizer) == ("base", "base", None)
    assert described.examples == ("class 2", "class 4")
    assert not (out / "tokenizer.safetensors").exists()
    text = " ".join((out / "README.md").read_text().split())
    assert "linear guidance (5 at 12 steps, 4 at 24 steps) |" in text
    assert "fine-tuned from `base` by this project. It uses the tokenizer of `base`." in text
    assert "| stored as | that of `base` | differences from `base`, 0." in text


def test_the_card_was_measured_with_the_bundled_weights():
    record = json.loads((ROOT / "experiments" / "meadow" / "results" / "meadow.json").read_text())
    pipe = Pipeline.from_pretrained("meadow", device="cpu", precision=record["precision"])
    assert record["model"] == fingerprint(pipe)
    fid = record["fid"][f"{pipe.sampling.steps} steps"]
    for name in ("order", "schedule", "guidance_schedule"):
        assert fid["settings"][name] == getattr(pipe.sampling, name)
    for measured in record["fid"].values():
        assert measured["settings"]["guidance"] == pipe.sampling.guidance_for(measured["settings"]["steps"])
    card = (ROOT / "src" / "arpg" / "assets" / "meadow" / "README.md").read_text()
    report = fid["train" if "train" in fid else "test"]
    assert f"| FID | {report['fid']['value']:.2f} (" in card
