"""The ablations: measured in the order of importance, stopped and continued; the page says what the lines say."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import Pipeline
from arpg.evaluation.sample import json_settings
from arpg.evaluation.sweep import read_lines
from arpg.settings import ORDERS, SamplingDefaults
from experiments.garden.measurements import ablation_report, ablations
from experiments.garden.measurements.ablations import Measured
from support.features import Eye
from support.small import noise, small_model, small_tokenizer, write_zip


@pytest.mark.parametrize("name", list(ablation_report.tables(Measured())))
def test_the_page_is_what_the_command_prints(name):
    parts = ablation_report.tables(ablations.read(ablation_report.RESULTS))
    page = ablation_report.PAGE.read_text()
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    assert page.count(begin) == page.count(end) == 1
    assert page.split(begin)[1].split(end)[0] == parts[name]


def test_the_page_shows_every_figure_that_is_plotted():
    page = ablation_report.PAGE.read_text()
    for path in ablation_report.IMAGES.glob("ablations-*.png"):
        assert f"images/{path.name}" in page


def fake_lines():
    """Block-wise is best at guidance 3, causal at 5; FID falls with steps; the spiral is bad."""
    lines = []

    def add(num, fid, **settings):
        chosen = SamplingDefaults().settings(**settings)
        more = {"fid interval": [fid - 0.5, fid + 0.5], "kid": 0.01, "precision": 0.6, "recall": 0.5, "accuracy": 0.9}
        line = {"num": num, "settings": json_settings(chosen), "fid": fid}
        lines.append(line | (more if num == ablations.FINAL else {}))

    for steps in (12, 24):
        for attention, best in (("block", 3.0), ("causal", 5.0)):
            for guidance in (2.0, 3.0, 5.0):
                fid = 10 + 48 / steps * (attention == "causal") + abs(guidance - best)
                add(2000, fid, steps=steps, attention=attention, guidance=guidance)
            add(5000, 9 + 48 / steps * (attention == "causal"), steps=steps, attention=attention, guidance=best)
    add(5000, 30.0, steps=12, order="spiral-out", guidance=3.0)
    add(5000, 99.0, steps=12, order="raster", guidance=4.0)  # not at the shared guidance: it does not count
    return lines


def fake_speed():
    """Another guidance than the lines have: it costs the same. The spiral was not timed."""
    lines = [
        {"settings": json_settings(SamplingDefaults().settings(steps=s, guidance=1.5)), "images/s": 1000.0 / s}
        for s in (12, 24)
    ]
    about = {"device": "abacus", "torch": "2", "precision": "float32", "batches timed": 2, "batch size": 5}
    return {"about": about, "lines": lines}


def test_tables():
    baselines = {"real": {"num": 9, "fid": 1.0, "recall": 0.7}}
    lines = fake_lines()
    about = {"defaults": next(x["settings"] for x in lines if x["num"] == 5000)}
    about |= dict.fromkeys(("device", "torch", "precision", "batch size", "reference", "inception"), "x")
    parts = ablation_report.tables(Measured(lines, baselines, about, fake_speed()))
    assert (
        "Speed: abacus, torch 2, float32, 2 batches of 5 after three that warm up or are recorded.\n"
        in parts["conditions"]
    )
    assert parts["baselines"].splitlines()[2:] == [
        "| real | 9 | 1.00 |  |  | 0.700 |  |",
        "| samples, all defaults (12 steps, guidance 3) | 5000 | 9.00 ± 0.50 | 10.00 | 0.600 | 0.500 | 0.900 |",
    ]
    for name in ("steps", "speed"):
        assert f"](../images/ablations-{name}.png)" in parts["steps"]
    assert "ablations-orders.png" in parts["orders"]
    some = [x for x in lines if x["settings"]["order"] == "random" and x["settings"]["steps"] == 12]
    alone = ablation_report.tables(Measured(some, baselines, about, fake_speed()))
    assert "ablations-steps.png" not in alone["steps"]  # one number of steps and one order: nothing to compare
    assert "ablations-orders.png" not in alone["orders"]
    rows = parts["steps"].splitlines()[2:]
    assert rows[0] == "| 12 | block | 3 | 9.00 ± 0.50 | 10.00 | 0.600 | 0.500 | 0.900 | 83 |"
    assert rows[1] == "| 12 | causal | 5 | 13.00 ± 0.50 | 10.00 | 0.600 | 0.500 | 0.900 |  |"
    assert parts["gap"].splitlines()[2:] == [
        "| 12 | +4.00 ± 0.71 | +44.4 ± 7.9% |  |",
        "| 24 | +2.00 ± 0.71 | +22.2 ± 7.9% |  |",
        "",
        "In the search (2,000 images; the same scale, fewer than 144 steps) causal is higher in 5 of 6 pairs, "
        "by 3.67 on average.",
    ]
    orders = parts["orders"].split("\n\n")[0].splitlines()[2:]
    assert orders[0] == "| random | 9.00 ± 0.50 (0.600 / 0.500 / 0.900) | 9.00 ± 0.50 (0.600 / 0.500 / 0.900) |  | 42 |"
    assert orders[1] == "| spiral-out | 30.00 ± 0.50 (0.600 / 0.500 / 0.900) |  |  |  |"
    assert [row.split("|")[1].strip() for row in orders] == ["random", "spiral-out"]
    assert parts["guidance"].splitlines()[2].startswith("| linear | 12 | 3 | 9.00")
    assert parts["differences"].splitlines()[2:] == ["| order spiral-out, not random | **+21.00 ± 0.71** |  |  |"]
    assert parts["bits"] == "Not measured yet.\n"


def test_bits_of_the_orders(tmp_path, monkeypatch):
    """A model that has learnt nothing knows as much in every order; what an order costs is taken image by image."""
    for domain in ("fruits", "flowers"):
        for name in ("class 0", "class 1"):
            (tmp_path / domain / "test" / name).mkdir(parents=True)
            for i in range(2):
                noise(40, 36, seed=i).save(tmp_path / domain / "test" / name / f"{i}.png")
        write_zip(tmp_path / domain, tmp_path / f"{domain}.zip", prefix=f"{domain}/")
    pipe = Pipeline(small_model(), small_tokenizer())
    torch.nn.init.zeros_(pipe.model.head.weight)
    monkeypatch.setattr(ablations.Pipeline, "from_pretrained", lambda name: pipe)
    ablations.order_bits(["--data", str(tmp_path), "--num", "5", "--out", str(tmp_path)])
    found = json.loads((tmp_path / ablations.BITS).read_text())
    assert (found["images"], list(found["orders"])) == (5, list(ORDERS))
    even = round(float(np.log2(pipe.model.config.vocab_size)), 4)
    assert all(order["bits"] == pytest.approx(even, abs=2e-4) for order in found["orders"].values())

    bits = {"random": np.array([[1.0, 2, 3], [3, 4, 5]]), "raster": np.array([[2.0, 2, 3], [3, 5, 7]])}
    raster = ablations.summary(bits)["raster"]
    assert raster == {"bits": 3.6667, "thirds": [2.5, 3.5, 5.0], "above random": [0.6667, 0.6533]}
    table = ablation_report.tables(Measured(bits={"images": 2, "orders": ablations.summary(bits)}))["bits"]
    assert table.splitlines()[2:4] == [
        "| random | 3.000 |  | 2.00 / 3.00 / 4.00 |",
        "| raster | 3.667 | +0.667 ± 0.653 | 2.50 / 3.50 / 5.00 |",
    ]


def test_verdicts(monkeypatch):
    monkeypatch.setattr(ablation_report, "STEPS", (24, 12))
    lines = fake_lines()
    gap = ablation_report.tables(Measured(lines))["gap"].splitlines()
    assert gap[2].endswith("| +0.00 ± 0.71 |")
    assert gap[3].endswith("|  |")
    verdicts = ablation_report.tables(Measured(lines))["verdicts"].splitlines()[2:]
    # The intervals are 1 wide, so those of a difference 1.41.
    assert verdicts == [
        "| With few steps block-wise is better than causal "
        "| causal less block-wise is at most +4.00 ± 0.71, at 12 steps | yes |",
        "| Fewer steps hurt causal decoding more than block-wise "
        "| +4.00 ± 0.71 at 12 steps, +2.00 ± 0.71 at 24 steps | yes |",
        "| With one token per step (24) both are the same | +2.00 ± 0.71 at 24 steps | no |",
        "| The best guidance falls with the number of steps | 3 at 12 steps, 3 at 24 | no |",
        "| Block-wise, some steps are better than one token per step | 9.00 at 12 steps, 9.00 at 24 | no |",
    ]
    for order, fid in (
        ("raster", 9.5),
        ("spiral-in", 14.0),
        ("spiral-out", 13.0),
        ("z-curve", 8.5),
        ("alternate", 10.0),
    ):
        settings = SamplingDefaults().settings(steps=24, order=order, guidance=3.0)
        interval = [fid - 0.5, fid + 0.5]
        lines.append({"num": 5000, "settings": json_settings(settings), "fid": fid, "fid interval": interval})
    ranked = "z-curve 8.50, random 9.00, raster 9.50, alternate 10.00, spiral-out 13.00, spiral-in 14.00"
    assert ablation_report.tables(Measured(lines))["verdicts"].splitlines()[7:] == [
        f"| No order is better than random (24 steps) | {ranked} | yes |",
        f"| Spirals are worst (24 steps) | {ranked} | yes |",
    ]
    lines[-2]["fid"] = 6.0
    verdicts = ablation_report.tables(Measured(lines))["verdicts"].splitlines()[7:]
    assert [row.split("|")[-2].strip() for row in verdicts] == ["no", "yes"]


def test_figures_and_filling_the_page(tmp_path):
    measured = Measured(fake_lines(), {"real": {"num": 9, "fid": 8.0}}, {}, fake_speed())
    written = ablation_report.draw_figures(measured, tmp_path)
    assert [path.name for path in written] == [f"ablations-{n}.png" for n in ("steps", "speed", "guidance", "orders")]
    for path in written:
        with Image.open(path) as image:
            assert min(image.size) > 300
    assert ablation_report.draw_figures(Measured(), tmp_path) == []
    without_speed = ablation_report.draw_figures(Measured(fake_lines()), tmp_path)
    assert [path.stem for path in without_speed] == [f"ablations-{n}" for n in ("steps", "guidance", "orders")]


def distance(best, scale):
    return abs(scale - best)


def test_guidance_is_walked_downhill():
    class Recorded(ablations.Bench):
        def line(self, settings, num):
            line = {"num": num, "settings": json_settings(settings), "fid": fid(settings.guidance)}
            self.results.lines.append(line)
            return line

    settings = SamplingDefaults().settings(steps=5)

    def walk(start, known=()):
        """The scale that is found, and how many were tried."""
        results = SimpleNamespace(lines=list(known))
        best = Recorded(None, None, results, None, 1, 0.0).best(settings, start)
        assert best == dataclasses.replace(settings, guidance=best.guidance)
        return best.guidance, len({line["settings"]["guidance"] for line in results.lines})

    fid = partial(distance, 4.2)
    for start, most in ((3.0, 4), (10.0, 6), (1.0, 8)):
        found, tried = walk(start)
        assert found == 4.0
        assert tried <= most

    fid = partial(distance, 0.0)
    assert walk(2.5)[0] == 1.0
    # What another process found, elsewhere, and what is of other settings.
    better = {"num": 2000, "settings": json_settings(dataclasses.replace(settings, guidance=8.0)), "fid": 0.5}
    other = {"num": 2000, "settings": json_settings(dataclasses.replace(settings, guidance=6.0, steps=6)), "fid": 0.1}
    assert walk(2.5, [better, other])[0] == 8.0


@pytest.fixture
def small_world(monkeypatch, tmp_path, eye):
    """Two zip files of images of five classes, a tiny model, few steps, and a stand-in for Inception."""
    for domain, names in (("fruits", ["class 0", "class 1", "class 2"]), ("flowers", ["class 3", "class 4"])):
        for split in ("train", "test"):
            for c, name in enumerate(names):
                folder = tmp_path / "images" / domain / split / name
                folder.mkdir(parents=True)
                for i in range(3):
                    noise(40, 36, seed=10 * c + i).save(folder / f"{i}.png")
        (tmp_path / "data").mkdir(exist_ok=True)
        write_zip(tmp_path / "images" / domain, tmp_path / "data" / f"{domain}.zip", prefix=f"{domain}/")
    pipe = Pipeline(small_model(), small_tokenizer())
    monkeypatch.setattr(ablations.Pipeline, "from_pretrained", lambda name: pipe)
    monkeypatch.setattr(ablations.Inception, "load", lambda path, device: eye)
    monkeypatch.setattr(ablations, "SCALES", (1.0, 2.0, 4.0))
    monkeypatch.setattr(ablations, "LOOK_AGAIN", 0.01)
    for module in (ablations, ablation_report):
        monkeypatch.setattr(module, "STEPS", (3, 2), raising=False)
        monkeypatch.setattr(module, "ORDER_STEPS", (3,), raising=False)
        monkeypatch.setattr(module, "FEW_STEPS", (3,), raising=False)
        monkeypatch.setattr(module, "SPEED_STEPS", 3, raising=False)
    monkeypatch.setattr(Eye, "source", "eye", raising=False)
    monkeypatch.setattr(ablations, "load_or_train_classifier", lambda *_, **__: None)

    def run(*options, out="out", work=".", parts="quality"):
        out, work = tmp_path / out, tmp_path / work
        data = tmp_path / "data"
        ablations.main(
            ["--parts", parts, *options, "--limit", "30", "--data", str(data), "--work", str(work), "--out", str(out)]
        )
        return read_lines(out), ablations.read(out)

    return run


def test_everything_is_measured_once_and_the_time_is_kept(small_world, eye):
    lines, measured = small_world("--minutes", "0")
    assert lines == []
    assert list(measured.baselines) == [
        "real test images",
        "training images through the tokenizer",
        "all of them (rFID)",
    ]
    assert measured.about["reference"] == "training split, 15 images"
    lines, measured = small_world()
    parts = ablation_report.tables(measured)
    parts = {name: text.split("\n\n")[0] for name, text in parts.items()}
    assert len(parts["baselines"].splitlines()) == 2 + 4
    assert len(parts["steps"].splitlines()) == 2 + 4
    assert len(parts["gap"].splitlines()) == 2 + 2
    assert len(parts["orders"].splitlines()) == 2 + len(ORDERS)
    assert len(parts["schedules"].splitlines()) == 2 + 3
    assert len(parts["guidance"].splitlines()) == 2 + 3
    # The most important comes first: the model as it comes, then the search of the first number of steps.
    assert (lines[0]["settings"], lines[0]["num"]) == (measured.about["defaults"], 5000)
    assert (lines[1]["settings"]["steps"], lines[1]["num"]) == (3, 2000)
    first = [line for line in lines if line["num"] == 5000][1]
    assert (first["settings"]["steps"], first["settings"]["attention"]) == (3, "block")
    assert np.isfinite([line["fid"] for line in lines]).all()
    assert not any("images/s" in line for line in lines)
    seen = eye.seen
    assert small_world()[0] == lines
    assert eye.seen == seen


def test_processes_share_the_work(small_world, tmp_path):
    """One after the other, each with its own file; a later one finds what the first has measured."""
    alone, _ = small_world(out="alone")
    small_world("--share", "1/2", "--minutes", "0")  # nothing is prepared yet, and it does not wait longer than it may
    assert not (tmp_path / "out").exists()
    small_world("--share", "0/2")
    first = (tmp_path / "out" / "results.jsonl").read_text()
    lines, measured = small_world("--share", "1/2")
    assert (tmp_path / "out" / "results.jsonl").read_text() == first
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "about.json",
        "baselines.json",
        "results-1.jsonl",
        "results.jsonl",
    ]

    def key(line):
        return json.dumps([line["num"], line["settings"]])

    fids = {key(line): line["fid"] for line in lines}
    assert len(fids) == len(lines)  # nothing twice
    finals = [line for line in alone if line["num"] == 5000]
    assert {key(line): line["fid"] for line in finals}.items() <= fids.items()
    assert small_world()[0] == lines  # a process alone finds nothing left to do
    assert ablation_report.tables(measured)["steps"].count("\n|") >= 4


def test_speed_is_measured_apart(small_world, tmp_path, eye, monkeypatch):
    timed = []
    whole = ablations.PixelBatches

    def counted(pipe, labels, settings, **more):
        timed.append((len(labels), settings))
        return whole(pipe, labels, settings, **more)

    monkeypatch.setattr(ablations, "PixelBatches", counted)
    options = ("--speed-batch", "3", "--speed-repeats", "2")
    small_world(*options, "--minutes", "0", parts="speed")
    assert not (tmp_path / "out").exists()
    timed.clear()
    lines, measured = small_world(*options, parts="speed")
    assert (lines, eye.seen) == ([], 0)  # no quality, no judge
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["speed.json"]
    assert [images for images, _ in timed] == [6, 9] * 11  # two to warm up; then one more, and two that are timed
    assert len(measured.speed["lines"]) == 4 + 2 + 3 + 2
    for line in measured.speed["lines"]:
        assert len(line["batches"]) == 2
        assert min(line["batches"]) * 0.99 <= line["images/s"] <= max(line["batches"]) * 1.01
        settings = {**line["settings"], "guidance": 7.5}
        assert measured.rate(settings) == line["images/s"]
    assert measured.rate({**settings, "order": "spiral-in"}) is None
    timed.clear()
    assert small_world(*options, parts="speed")[1] == measured
    assert timed == []
    small_world("--speed-batch", "2", "--speed-repeats", "1", parts="speed")
    assert len(timed) == 22  # other batches: nothing is mixed
    measured = small_world("--speed-batch", "2", "--speed-repeats", "1", parts="quality,speed")[1]
    rows = ablation_report.tables(measured)["steps"].splitlines()[2:6]
    assert all(row.split("|")[-2].strip() for row in rows)
    with pytest.raises(SystemExit):
        small_world(parts="quantity")
