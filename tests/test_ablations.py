"""The ablations: measured in the order of importance, stopped and continued; the page says what the lines say."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from arpg import Pipeline
from arpg.config import ORDERS, SamplingDefaults
from arpg.evaluation.results import plain, read_lines
from conftest import noise, small_model, small_tokenizer, write_zip
from test_sweep import Eye, eye  # noqa: F401

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import ablation_report  # noqa: E402
import ablations  # noqa: E402


@pytest.mark.parametrize("name", list(ablation_report.tables([], {}, {})))
def test_the_page_is_what_the_command_prints(name):
    parts = ablation_report.tables(*ablation_report.read(ablation_report.RESULTS))
    page = ablation_report.PAGE.read_text()
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    assert page.count(begin) == page.count(end) == 1
    assert page.split(begin)[1].split(end)[0] == parts[name]


def test_the_page_shows_every_figure_that_is_drawn():
    page = ablation_report.PAGE.read_text()
    for path in ablation_report.IMAGES.glob("ablations-*.png"):
        assert f"images/{path.name}" in page


def fake_lines():
    """Block-wise is best at guidance 3, causal at 5; FID falls with steps; the spiral is bad."""
    lines = []

    def add(num, fid, **settings):
        chosen = SamplingDefaults().settings(**settings)
        more = {"fid interval": [fid - 0.5, fid + 0.5], "kid": 0.01, "precision": 0.6, "recall": 0.5, "accuracy": 0.9}
        line = {"num": num, "settings": plain(chosen), "fid": fid, "images/s": 1000.0 / settings["steps"]}
        lines.append(line | (more if num == ablation_report.FINAL else {}))

    for steps in (12, 24):
        for attention, best in (("block", 3.0), ("causal", 5.0)):
            for guidance in (2.0, 3.0, 5.0):
                fid = 10 + 48 / steps * (attention == "causal") + abs(guidance - best)
                add(2000, fid, steps=steps, attention=attention, guidance=guidance)
            add(5000, 9 + 48 / steps * (attention == "causal"), steps=steps, attention=attention, guidance=best)
    add(5000, 30.0, steps=12, order="spiral-out", guidance=3.0)
    add(5000, 99.0, steps=12, order="raster", guidance=4.0)  # not at the shared guidance: it does not count
    return lines


def test_tables():
    parts = ablation_report.tables(fake_lines(), {"real": {"num": 9, "fid": 1.0, "recall": 0.7}}, {})
    assert parts["conditions"] == "Not measured yet.\n"
    assert parts["baselines"].splitlines()[2] == "| real | 9 | 1.00 |  |  | 0.700 |  |"
    assert "](images/ablations-steps.png)" in parts["steps"]
    rows = parts["steps"].splitlines()[2:]
    assert rows[0] == "| 12 | block | 3 | 9.00 ± 0.50 | 10.00 | 0.600 | 0.500 | 0.900 | 83.3 |"
    assert rows[1].startswith("| 12 | causal | 5 | 13.00 ± 0.50 |")
    assert parts["gap"].splitlines()[2:] == ["| 12 | +4.00 | +44% |", "| 24 | +2.00 | +22% |"]
    orders = parts["orders"].split("\n\n")[0].splitlines()[2:]
    assert orders[0] == "| random | 9.00 ± 0.50 (0.600 / 0.500 / 0.900) | 9.00 ± 0.50 (0.600 / 0.500 / 0.900) |  |"
    assert [row.split("|")[1].strip() for row in orders] == ["random", "spiral-out"]
    assert parts["guidance"].splitlines()[2].startswith("| linear | 12 | 3 | 9.00")


def test_figures_and_filling_the_page(tmp_path):
    written = ablation_report.draw(fake_lines(), {"real": {"num": 9, "fid": 8.0}}, tmp_path)
    assert [path.name for path in written] == [f"ablations-{n}.png" for n in ("steps", "speed", "guidance", "orders")]
    for path in written:
        with Image.open(path) as image:
            assert min(image.size) > 300
    assert ablation_report.draw([], {}, tmp_path) == []
    page = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
    assert ablation_report.fill(page, {"x": "new\n"}) == page.replace("old", "new")
    with pytest.raises(AssertionError, match="y has no place"):
        ablation_report.fill(page, {"y": "new\n"})


def test_guidance_is_walked_downhill():
    class Measured(ablations.Bench):
        def line(self, settings, num):
            asked.append(settings.guidance)
            return {"fid": abs(settings.guidance - 4.2)}

    bench = Measured(None, None, None, None, 1, 0.0)
    settings = SamplingDefaults().settings(steps=5)
    for start, most in ((3.0, 4), (10.0, 6), (1.0, 8)):
        asked = []
        assert bench.best(settings, start) == dataclasses.replace(settings, guidance=4.0)
        assert len(set(asked)) <= most
    Measured.line = lambda self, settings, num: {"fid": settings.guidance}
    assert bench.best(settings, 2.5).guidance == 1.0


@pytest.fixture
def small_world(monkeypatch, tmp_path, eye):  # noqa: F811
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
    monkeypatch.setattr(ablations, "SIZE", 8)
    monkeypatch.setattr(ablations, "SCALES", (1.0, 2.0, 4.0))
    for module in (ablations, ablation_report):
        monkeypatch.setattr(module, "STEPS", (3, 2))
        monkeypatch.setattr(module, "ORDER_STEPS", (3,))
        monkeypatch.setattr(module, "FEW_STEPS", (3,))
    monkeypatch.setattr(Eye, "source", "eye", raising=False)
    monkeypatch.setattr(ablations, "_classifier", lambda *_, **__: None)

    def run(*options):
        out = tmp_path / "out"
        ablations.main([*options, "--data", str(tmp_path / "data"), "--work", str(tmp_path), "--out", str(out)])
        return read_lines(out), ablation_report.read(out)

    return run


def test_everything_is_measured_once_and_the_time_is_kept(small_world, eye):  # noqa: F811
    lines, (_, baselines, about) = small_world("--limit", "30", "--minutes", "0")
    assert lines == []
    assert list(baselines) == ["real test images", "training images through the tokenizer"]
    assert about["reference"] == "training split, 15 images"
    lines, found = small_world("--limit", "30", "--batch-size", "1250")
    parts = ablation_report.tables(*found)
    parts = {name: text.split("\n\n")[0] for name, text in parts.items()}
    assert len(parts["steps"].splitlines()) == 2 + 4
    assert len(parts["gap"].splitlines()) == 2 + 2
    assert len(parts["orders"].splitlines()) == 2 + len(ORDERS)
    assert len(parts["schedules"].splitlines()) == 2 + 3
    assert len(parts["guidance"].splitlines()) == 2 + 3
    # The most important comes first: the search and the final line of the first number of steps.
    assert (lines[0]["settings"]["steps"], lines[0]["num"]) == (3, 2000)
    first = next(line for line in lines if line["num"] == 5000)
    assert (first["settings"]["steps"], first["settings"]["attention"]) == (3, "block")
    assert np.isfinite([line["fid"] for line in lines]).all()
    seen = eye.seen
    assert small_world("--limit", "30", "--batch-size", "1250")[0] == lines
    assert eye.seen == seen
