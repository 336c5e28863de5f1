"""The paper's tables: lines that survive a cut, rows that train and decode, verdicts and pages from made-up lines."""

import dataclasses
import json
import shutil
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch

from arpg import InputError, SamplingSettings
from arpg.checkpoint import FolderConfig, installed_folder, read_folder, write_folder
from arpg.config import ModelConfig
from arpg.data.dataset import read_orders
from arpg.data.tokens import TokenWriter, open_tokens
from arpg.evaluation.features import Features
from arpg.evaluation.sample import json_settings
from arpg.train import report as training_report
from experiments import photos, staged_run
from experiments.paper import bench, engine, queue, report
from experiments.paper.__main__ import main
from experiments.paper.engine import RowEngine
from experiments.paper.lines import OutOfTimeError, Queue, read_lines
from experiments.paper.report import (
    AGREES,
    CONTRADICTS,
    MISSING,
    NARROWLY,
    ONE_TRAINING,
    UNSURE,
    Estimate,
    verdict,
)
from experiments.paper.rows import designs, peers, sizes
from support.features import Eye
from support.small import noise, small_model, small_tokenizer


def test_a_cut_off_line_is_measured_again(tmp_path):
    asked = []

    def measure(value):
        return lambda: (asked.append(value), {"value": value})[1]

    lines = Queue(tmp_path, {}, deadline=time.monotonic() + 100)
    for value in range(3):
        assert lines.line({"row": value}, measure(value))["value"] == value
    (path,) = tmp_path.iterdir()
    path = path.rename(tmp_path / "earlier.jsonl")  # what came back from another machine
    path.write_text(path.read_text()[:-9])  # the last line is cut
    assert [line["row"] for line in read_lines(tmp_path)] == [0, 1]
    again = Queue(tmp_path, {}, deadline=time.monotonic() + 100)
    for value in range(3):
        again.line({"row": value}, measure(value))
    assert asked == [0, 1, 2, 2]
    assert sorted(line["row"] for line in read_lines(tmp_path)) == [0, 1, 2]
    late = Queue(tmp_path, {}, deadline=time.monotonic() - 1)
    assert late.line({"row": 1}, measure(9))["value"] == 1
    with pytest.raises(OutOfTimeError):
        late.line({"row": 3}, measure(3))
    same = late.line({"row": 4}, measure(4), same={"row": 1, "value": 1})  # measured for another table
    assert (same["row"], same["value"]) == (4, 1)
    everything = read_lines(tmp_path)
    shutil.copy(path, tmp_path / "collected.jsonl")
    assert read_lines(tmp_path) == everything  # each once
    (tmp_path / "collected.jsonl").unlink()
    path.write_text("{\n" + path.read_text())
    with pytest.raises(InputError, match="line 1 is not valid JSON"):
        read_lines(tmp_path)


def test_a_measurement_that_was_made_twice_counts_once(tmp_path):
    for name, fid in (("first", 20.0), ("second", 20.5)):  # on two machines that did not know of each other
        made = {"fid": fid, "fid interval": [fid - 1, fid + 1], "settings": {"guidance": fid}}
        lines = Queue(tmp_path / name, {}, deadline=time.monotonic() + 100)
        for seed in range(2):
            lines.line({"row": "a", "seed": seed}, lambda made=made: made)
        lines.line({"row": "b", "seed": 0}, lambda: {}, same={"row": "a", "seed": 0})
        (path,) = (tmp_path / name).iterdir()
        shutil.copy(path, tmp_path / f"{name}.jsonl")
    found = read_lines(tmp_path)
    assert [(line["row"], line["seed"], line["fid"]) for line in found] == [
        ("a", 0, 20.0),
        ("a", 1, 20.0),
        ("b", 0, 20.0),
    ]
    mean = report.mean_of([line for line in found if line["row"] == "a"], "fid")
    assert mean.high - mean.value == pytest.approx(1 / np.sqrt(2))


def test_options_that_a_line_does_not_have_are_not_compared(tmp_path):
    """Lines of a bundled model have no options of training, and go with rows of any training."""
    for name, shared in (("model", {"num": 8}), ("rows", {"num": 8, "steps": 2})):
        lines = Queue(tmp_path, shared, deadline=time.monotonic() + 100)
        lines.path = tmp_path / f"{name}.jsonl"
        lines.line({"row": name}, dict)
    with pytest.raises(InputError, match="steps 2, not 3"):
        Queue(tmp_path, {"num": 8, "steps": 3}, deadline=0.0)
    with pytest.raises(InputError, match="num 8, not 9"):
        Queue(tmp_path, {"num": 9}, deadline=0.0)


def test_collected_lines_are_stored_once(tmp_path):
    """Every call returns all lines it knows: their files would grow with the square of the number of calls."""
    machine, home = tmp_path / "machine", tmp_path / "home"
    for call in range(3):
        lines = Queue(machine, {}, deadline=time.monotonic() + 100)
        lines.path = machine / f"{call}.jsonl"
        for seed in range(2):
            lines.line({"row": call, "seed": seed}, lambda: {"fid": 1.0})
            returned = tmp_path / f"call{call}-{seed}"
            shutil.copytree(machine, returned)
            (returned / "attention.png").touch()
            assert main(["collect", str(returned), "--out", str(home)]) == 0  # in the middle, too
    assert read_lines(home / "lines") == read_lines(machine)
    assert sum(len(path.read_text().splitlines()) for path in (home / "lines").iterdir()) == 6
    assert (home / "attention.png").exists()
    assert main(["collect", str(tmp_path), "--out", str(home)]) == 2  # no lines


def test_lines_of_other_options_are_not_mixed(world, tmp_path, capsys):
    assert main(["steps", *world]) == 0
    (path,) = (tmp_path / "out" / "lines").iterdir()
    path.rename(path.with_name("sent-back.jsonl"))  # lines know their options on another machine, too
    for option, value in (("--steps", "3"), ("--num", "32"), ("--limit", "4"), ("--set", "garden")):
        assert main(["steps", *world, option, value]) == 2
        assert f"lines of other options ({option[2:]} " in capsys.readouterr().err
    assert main(["steps", *world]) == 0
    path = path.with_name("sent-back.jsonl")
    path.write_text(path.read_text().replace('"precision": "float32"', '"precision": "bfloat16"'))
    assert main(["steps", *world]) == 2
    assert "lines of other options (precision bfloat16, not float32)" in capsys.readouterr().err


def test_weights_of_another_training_are_refused(world, tmp_path, capsys):
    """A row whose measurement was cut off has no lines yet, which would name its options."""
    run = ["designs", *world, "--rows", "2+2", "--only", "quality"]
    assert main(run) == 0
    shutil.rmtree(tmp_path / "out" / "lines")
    assert main([*run, "--steps", "3"]) == 2
    assert "2-2-32-rope-seed0 was trained with other options (steps 2, not 3)" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out" / "weights")
    assert main([*run, "--batch-size", "2"]) == 2  # nor is a run resumed
    shutil.rmtree(tmp_path / "work")
    assert main([*run, "--batch-size", "2"]) == 0


def test_the_guidance_that_is_searched_covers_the_papers():
    papers = [row["guidance"] for row in report.QUOTED["table 8: parallel decoding"]]
    assert bench.SCALES[0] < min(papers)
    assert max(papers) < bench.SCALES[-1] <= bench.GUIDANCE_RANGE[1]
    pair = {"table": "block-causal", "row": report.SUBJECT, "measure": "paired", "steps": 8, "guidance block": 9.5}
    settings = json_settings(SamplingSettings())
    searches = [
        {"table": "block-causal", "measure": "search", "settings": {**settings, "guidance": scale}}
        for scale in (9.5, 4.5)
    ]
    page = report.measured_table([{**pair, "guidance causal": 4.5}, *searches], "block-causal")
    assert "| 9.5 (largest searched) | 4.5 |" in page
    assert "searched" not in report.measured_table([{**pair, "guidance causal": 4.5}], "block-causal")


def test_speed_alone_trains_nothing_and_needs_no_tokens(world, tmp_path):
    shutil.rmtree(tmp_path / "tokens")
    assert main(["designs", *world, "--rows", "2+2", "--only", "speed"]) == 0
    lines = read_lines(tmp_path / "out" / "lines")
    assert [(line["measure"], line["batch"]) for line in lines] == [("speed", 64), ("speed", 1)]
    assert not (tmp_path / "out" / "weights").exists()


def test_few_steps_search_the_settings_that_are_best_for_meadow():
    best = read_folder(installed_folder("meadow")).sampling
    assert best.order in queue.ORDERS
    assert best.schedule in queue.SCHEDULES
    assert best.guidance_schedule in queue.SHAPES


def test_the_best_of_few_steps_become_the_defaults_of_a_folder(world, tmp_path):
    folder = tmp_path / "tok"
    write = ["defaults", str(folder), "--out", str(tmp_path / "out")]
    assert main(write) == 2  # nothing was searched
    plain = json_settings(SamplingSettings())
    found = [
        *((steps, "raster", "linear", scale, fid) for steps, scale, fid in ((8, 9.5, 20.0), (8, 13.5, 19.0))),
        *((steps, "random", "constant", 3.0, 18.0 if steps == 8 else 25.0) for steps in (8, 24)),
        (24, "raster", "linear", 9.5, 15.0),
        *((steps, "confident, noise 2", "linear", 9.5, 1.0) for steps in (8, 24)),
    ]
    lines = [
        {"table": "few-steps", "row": str(folder), "measure": "search", "steps": steps, "samples": 2000, "fid": fid}
        | {"settings": {**plain, "order": order, "guidance_schedule": shape, "guidance": scale}}
        for steps, order, shape, scale, fid in found
    ]
    (tmp_path / "out" / "lines").mkdir(parents=True)
    (tmp_path / "out" / "lines" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(write) == 0
    best = read_folder(folder).sampling
    assert (best.steps, best.order, best.guidance_schedule) == (24, "raster", "linear")
    assert best.guidance_by_steps == ((8, 13.5), (24, 9.5))


def test_the_reference_of_a_trial_run_is_not_that_of_a_run(world, tmp_path, monkeypatch):
    def images(*more):
        assert main(["reference", *world, *more]) == 0
        return {path.name: Features.load(path).n for path in (tmp_path / "out").glob("*.npz")}

    assert images("--limit", "4") == {"reference-meadow-4.npz": 4}
    assert images() == {"reference-meadow-4.npz": 4, "reference-meadow.npz": 8}
    before = (tmp_path / "out" / "reference-meadow.npz").stat().st_mtime_ns
    images()
    assert (tmp_path / "out" / "reference-meadow.npz").stat().st_mtime_ns == before
    monkeypatch.setattr(Eye, "identity", "another")
    images()
    assert Features.load(tmp_path / "out" / "reference-meadow.npz").network == "another"


def test_peak_memory_includes_what_only_graphs_can_use(world, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "peak_bytes", lambda device: 2**30)
    monkeypatch.setattr(bench, "idle_graph_bytes", lambda graphs: graphs)
    init = RowEngine.__init__

    def with_graphs(self, *args, **options):
        init(self, *args, **options)
        self.graphs = SimpleNamespace(clear=lambda: None, captured={"a": 2**30, "b": 2**29})

    monkeypatch.setattr(RowEngine, "__init__", with_graphs)
    assert main(["steps", *world]) == 0
    assert {line["GiB"] for line in read_lines(tmp_path / "out" / "lines")} == {2.5}


def test_every_timed_batch_is_planned(world, monkeypatch):
    """Also where an earlier row had the same seeds, steps and order."""
    planned, clock = [], time.perf_counter
    make_plan = engine.make_plan
    monkeypatch.setattr(engine, "make_plan", lambda *args: (planned.append(args), make_plan(*args))[1])
    counts = []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: (counts.append(len(planned)), clock())[1])
    assert main(["steps", *world, "--repeats", "3"]) == 0
    assert len(counts) > 12
    assert {after - before for before, after in zip(counts[::2], counts[1::2], strict=True)} == {1}


def test_rows_are_those_of_the_paper():
    found = {row.name: row for row in designs()}
    assert list(found) == [
        *("12+12", "cosine positions", "unshared KV", "18+6", "6+18", "0+24"),
        *("24+0, random orders", "24+0, raster order"),
    ]
    assert found["0+24"].model.pass1_layers == 0
    assert found["24+0, raster order"].steps == (256,)
    assert len({row.trained_as for row in designs()}) == 8
    assert {row.steps for row in designs()[:6]} == {(64,)}
    shared = {row.name: row.trained_as for row in peers()}
    assert shared["masked, confidence"] == shared["masked, Halton"]
    assert shared["ARPG"] == found["12+12"].trained_as  # trained once for both tables
    assert shared["raster AR"] == found["24+0, raster order"].trained_as
    assert [row.model.width for row in sizes()] == [192, 384, 576]
    table = {row["layers"]: row for row in report.QUOTED["table 5: designs"]}
    assert table["0+24"]["fid"] == 4.57
    assert (len(report.QUOTED["table 2: peers"]), len(report.QUOTED["table 8: parallel decoding"])) == (34, 18)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Tokens of 4 x 4, a tokenizer, eight photographs, a stand-in for Inception; tiny models, two training steps."""
    monkeypatch.setattr(training_report, "plot_losses", lambda folder: None)
    monkeypatch.setattr(staged_run, "SHORTEST", 0.0)
    monkeypatch.setattr(bench, "BASE", ModelConfig(32, 1, 2, 2))
    monkeypatch.setattr(bench.Inception, "load", lambda *_, **__: Eye())
    monkeypatch.setattr(bench, "SCALES", (1.5, 3.0))
    monkeypatch.setattr(queue, "SCALES", (1.5, 3.0))
    monkeypatch.setattr(queue, "SHAPES", {"linear": (3.0, 5.0), "constant": (2.0,)})
    monkeypatch.setattr(queue, "ORDERS", ("random", "raster"))
    monkeypatch.setattr(queue, "CONFIDENCES", (1.0,))
    tokenizer = small_tokenizer()
    size = 4 * tokenizer.config.stride
    tiny = photos.PhotoSet("meadow", ("pets",), "meadow-{domain}.zip/{split}", size)
    monkeypatch.setitem(photos.PHOTO_SETS, "meadow", tiny)
    write_folder(tmp_path / "tok", FolderConfig(tokenizer=tokenizer.config), tokenizer=tokenizer.state_dict())
    with zipfile.ZipFile(tmp_path / "meadow-pets.zip", "w") as archive:
        for i in range(8):
            noise(20, 20, seed=i).save(tmp_path / "image.png")
            archive.write(tmp_path / "image.png", f"train/{'ab'[i % 2]}/{i}.png")
    writer = TokenWriter(tmp_path / "tokens", grid=(4, 4), vocab_size=24, classes=("a", "b"), views=1)
    writer.add(np.random.default_rng(0).integers(24, size=(8, 1, 16)), np.arange(8) % 2)
    writer.close()
    options = [
        "--tokens",
        tmp_path / "tokens",
        "--validation",
        tmp_path / "tokens",
        "--tokenizer",
        tmp_path / "tok",
        "--data",
        tmp_path,
        "--device",
        "cpu",
    ]
    options += ["--width", 32, "--layers", 4, "--steps", 2, "--batch-size", 4, "--num", 16, "--sample-batch", 16]
    options += ["--repeats", 1, "--seeds", 1, "--small", "--work", tmp_path / "work", "--out", tmp_path / "out"]
    return [str(option) for option in options]


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SLOW = ("designs", "peers", "few-steps")


@pytest.mark.parametrize("table", [pytest.param(t, marks=pytest.mark.slow) if t in SLOW else t for t in queue.TABLES])
def test_every_table_runs_and_continues(world, tmp_path, table):
    out = tmp_path / "out"
    world = [*world, "--quality-seeds", "2"] if table == "scaling" else world
    assert main([table, *world]) == 0
    lines = read_lines(out / "lines")
    assert bool(lines) == (table != "reference")
    assert {line["table"] for line in lines} <= {table}
    for line in lines:
        if "fid" in line and line["measure"] != "search":
            assert line["fid interval"][0] <= line["fid"] <= line["fid interval"][1]
    before = files(out)
    assert main([table, *world]) == 0  # nothing is measured twice
    assert files(out) == before
    assert main(["report", "--lines", str(out / "lines"), "--out", str(tmp_path / "page.md")]) == 0
    assert "Not measured yet" in (tmp_path / "page.md").read_text()


def test_each_attention_is_measured_at_its_own_best_guidance(world, tmp_path, monkeypatch):
    best, seen = {"block": 1.5, "causal": 3.0}, []

    def features(self, engine, settings, num, *, seed):
        seen.append((settings.steps, settings.attention, settings.guidance, num, seed))
        return SimpleNamespace(pool=SimpleNamespace(to=lambda device: settings)), {}

    def distance(settings, reference):
        return 10 + abs(settings.guidance - best[settings.attention]) + (settings.attention == "block")

    def fid(self, found):
        return distance(found.pool.to("cpu"), None), np.linspace(-1, 1, 16)

    monkeypatch.setattr(bench.Bench, "features", features)
    monkeypatch.setattr(bench.Bench, "fid", fid)
    monkeypatch.setattr(bench, "frechet_distance", distance)
    monkeypatch.setattr(queue, "BLOCK_CAUSAL_STEPS", (8, 16))
    assert main(["block-causal", *world, "--num", "100", "--seeds", "2"]) == 0
    lines = {(line["steps"], line["seed"]): line for line in read_lines(tmp_path / "out" / "lines") if "seed" in line}
    for seed in range(2):
        found = lines[8, seed]
        assert (found["guidance block"], found["guidance causal"]) == (1.5, 3.0)
        assert (found["fid block"], found["fid causal"], found["difference"]) == (11.0, 10.0, 1.0)
    searched = [each for each in seen if each[4] == 10**6]
    assert {each[3] for each in searched} == {5, 10}
    # Together as many samples as one search of a row: two scales, then the better one.
    assert sum(each[3] for each in searched if each[0] == 8) == 2 * 10 + 20
    # With as many steps as tokens both are one computation, which is sampled once.
    assert {each[1] for each in seen if each[0] == 16} == {"block"}
    assert lines[16, 0]["difference"] == 0.0
    assert lines[16, 0]["difference interval"] == [0.0, 0.0]
    page = report.page([{**line, "row": report.SUBJECT} for line in read_lines(tmp_path / "out" / "lines")], {})
    assert "| steps | difference | trainings |" in page
    assert "| steps | attention | 1.5 | 3.0 |\n|---|---:|---:|---:|\n| 8 | block | 11.0 | 12.5 |\n" in page


def test_block_causal_samples_several_trainings(world, tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "BLOCK_CAUSAL_STEPS", (8, 4))
    assert main(["block-causal", *world, "--training-seeds", "2"]) == 0
    assert len(list((tmp_path / "out" / "weights").iterdir())) == 2
    paired = [line for line in read_lines(tmp_path / "out" / "lines") if line["measure"] == "paired"]
    # All trainings of one number of steps before the next: what is cut off is what matters least.
    assert [(line["steps"], line["training seed"]) for line in paired] == [(8, 0), (8, 1), (4, 0), (4, 1)]


def test_block_wise_and_causal_attention_agree_with_one_token_per_step():
    decoder = RowEngine(small_model())
    made = [
        decoder.generate([1, 3], [0, 1], SamplingSettings(steps=steps, attention=attention, guidance=2.0))
        for steps in (16, 4)
        for attention in ("block", "causal")
    ]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[2], made[3])


def test_surest_orders_are_training_orders(world, tmp_path):
    assert main(["designs", *world, "--rows", "2+2", "--only", "quality"]) == 0
    (weights,) = (tmp_path / "out" / "weights").iterdir()
    path = tmp_path / "orders.npy"
    arguments = [
        "--model",
        weights,
        "--tokens",
        tmp_path / "tokens",
        "--batch-size",
        3,
        "--device",
        "cpu",
        "--out",
        path,
    ]
    assert main(["surest-orders", *map(str, arguments)]) == 0
    assert read_orders(path, open_tokens(tmp_path / "tokens")).shape == (8, 1, 16)


def test_the_fine_tune_on_own_orders_is_compared_with_as_much_training(world, tmp_path, monkeypatch):
    assert main(["designs", *world, "--rows", "2+2", "--only", "quality"]) == 0
    recipes, train_until = [], bench.train_until

    def record(deadline, recipe, *args, **options):
        recipes.append(recipe)
        return train_until(deadline, recipe, *args, **options)

    monkeypatch.setattr(bench, "train_until", record)
    assert main(["orders", *world]) == 0
    random, own = recipes
    assert (random.data.orders, own.data.orders is None) == (None, False)
    assert dataclasses.replace(own, data=random.data) == random
    lines = [
        {"table": "orders", "row": row, "measure": "inpainting", "fid": fid, "fid interval": [fid - 0.1, fid + 0.1]}
        for row, fid in (("random orders", 20.0), ("own orders", 20.5))
    ]
    inpaints = next(claim for claim in report.QUESTIONS if "inpaints" in claim.text)
    assert inpaints.row(lines)[2:] == ["0.5 (0.359 to 0.641)", AGREES + ONE_TRAINING]


def test_rows_are_trained_and_measured(world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(queue, "peers", lambda base: [row for row in peers(base) if row.peer in (None, "interleaved")])
    assert main(["peers", *world, "--rows", "MAR"]) == 2
    assert "row 'MAR' does not exist; peers has ARPG; interleaved positions" in capsys.readouterr().err
    out = tmp_path / "out"
    assert main(["peers", *world, "--minutes", "0"]) == 0
    assert read_lines(out / "lines") == []
    assert main(["peers", *world, "--only", "quality"]) == 0
    assert {line["measure"] for line in read_lines(out / "lines")} == {"search", "quality"}
    assert len(list((out / "weights").iterdir())) == 2
    shutil.rmtree(out / "weights")
    shutil.rmtree(tmp_path / "work")
    assert main(["peers", *world]) == 0
    assert not (out / "weights").exists()  # a row that is measured is not trained again
    lines = read_lines(out / "lines")
    searched = [line for line in lines if line["measure"] == "search"]
    assert len(searched) == 2 * (2 + 1)  # two rows: two scales, then the better one
    lines = [line for line in lines if line not in searched]
    assert {(line["row"], line["measure"]) for line in lines} == {
        (name, measure) for name in ("ARPG", "interleaved positions") for measure in ("quality", "speed")
    }
    quality = next(line for line in lines if line["measure"] == "quality")
    assert quality["steps"] == 16
    assert [samples for samples, _ in quality["losses"]["loss"]] == [4, 8]
    assert main(["report", "--lines", str(out / "lines"), "--out", str(tmp_path / "page.md")]) == 0
    assert "(page-peers.png)" in (tmp_path / "page.md").read_text()
    assert report.curves(lines, "peers")["ARPG"] == quality["losses"]["validation loss"]
    assert (tmp_path / "page-peers.png").exists()
    speed = next(line for line in lines if line["measure"] == "speed")
    assert speed["range"][0] <= speed["images/s"] <= speed["range"][1]


def test_verdicts_come_from_intervals():
    for low, high, expected in ((2.0, 3.0, AGREES), (-1.0, 3.0, UNSURE), (-3.0, -1.0, CONTRADICTS)):
        assert verdict(Estimate(0, low, high), at_least=0.0) == expected
        assert verdict(Estimate(0, -high, -low), at_most=0.0) == expected
    assert verdict(None, at_least=1.0) == MISSING


def made_up():
    def quality(table, row, fid, **more):
        key = {"table": table, "row": row, "measure": "quality", "steps": 64, "seed": 0}
        return {**key, "fid": fid, "fid interval": [fid - 1, fid + 1], **more}

    def speed(row, steps, rate, gib=2.0, **where):
        key = {"table": "peers", "row": row, "measure": "speed", "steps": steps, "batch": 64, **where}
        found = {"images/s": rate, "range": [0.9 * rate, 1.1 * rate], "seconds per batch": key["batch"] / rate}
        return {**key, **found, "GiB": gib, "GiB reserved": gib + 1}

    def pair(seed, difference):
        key = {"table": "block-causal", "row": report.SUBJECT, "measure": "paired", "steps": 16, "seed": seed}
        return {**key, "difference": difference, "difference interval": [difference - 0.3, difference + 0.3]}

    losses = [[[100, 5.0], [200, 4.0]], [[100, 4.9], [200, 3.6]], [[100, 4.95], [200, 3.24]]]
    settings = {**json_settings(SamplingSettings()), "guidance": 2.0, "schedule": "linear"}
    lines = [
        quality("designs", "12+12", 20.0, settings=settings),
        quality("designs", "0+24", 30.0),
        quality("designs", "18+6", 20.5),
    ]
    lines += [
        speed("ARPG", 32, 400.0),
        speed("raster AR", 256, 10.0, 4.0),
        speed("interleaved positions", 64, 200.0, 1.0),
    ]
    lines += [speed("ARPG", 32, 80.0, batch=1)]
    for attention, pixels in (("block", False), ("causal", False), ("block", True)):
        rate = 1000.0 if attention == "block" else 900.0
        where = {"table": "steps", "attention": attention, "pixels": pixels}
        lines.append(speed("arpg-l", 32, rate / 2 if pixels else rate, 3.0, **where))
    lines += [pair(0, -0.5), pair(1, -0.4), pair(2, -0.45)]
    for i, curve in enumerate(losses):
        lines.append(quality("scaling", f"width {i}", 10.0, parameters=10**i, losses={"loss": curve}))
    return lines


def test_the_interval_of_several_trainings_has_the_variance_between_them():
    def paired(training_seed, seed, difference):
        (line,) = [line for line in made_up() if line["measure"] == "paired" and line["seed"] == seed]
        ends = [difference - 0.3, difference + 0.3]
        return {**line, "training seed": training_seed, "difference": difference, "difference interval": ends}

    claim = next(claim for claim in report.CLAIMS if claim.text == "block-wise attention is better at 16 steps")
    differences = {0: [-0.5, -0.4, -0.45], 1: [-0.9, -1.0, -1.1], 2: [-0.1, -0.2, -0.3]}
    lines = [paired(t, s, value) for t, values in differences.items() for s, value in enumerate(values)]
    found = report.paired(lines, 16)
    interval = scipy.stats.t.interval(0.95, 2, np.mean([-0.45, -1.0, -0.2]), scipy.stats.sem([-0.45, -1.0, -0.2]))
    assert found.trainings == 3
    assert (found.low, found.high) == pytest.approx(interval, abs=1e-3)
    assert claim.row(lines)[3] == UNSURE  # of sampling noise alone it would agree
    one, two = ([line for line in lines if line["training seed"] < number] for number in (1, 2))
    assert claim.row(one)[3] == AGREES + ONE_TRAINING
    two = report.paired(two, 16)
    assert two.high - two.value == pytest.approx(12.706 * 0.275, abs=1e-3)
    # Trainings that happen to agree do not make the interval narrower than the noise of sampling.
    alike = report.paired([paired(t, 0, -0.5) for t in range(2)], 16)
    assert alike.high - alike.value == pytest.approx(0.3 / np.sqrt(2))
    for count, quantile in enumerate(report.STUDENT_95, start=1):
        assert quantile == pytest.approx(scipy.stats.t.ppf(0.975, count), abs=1e-3)


def test_the_page_of_made_up_lines(tmp_path):
    rows = {claim.text: claim.row(made_up()) for claim in report.CLAIMS}
    assert rows["no Pass 1 (0+24) is worse than 12+12"][3] == AGREES + ONE_TRAINING
    assert rows["fewer Pass-2 layers (18+6) are worse than 12+12"][3] == UNSURE + ONE_TRAINING
    assert rows["without Pass 2, random orders fail"][3] == MISSING
    assert rows["30 times as fast as raster AR (32 steps against 256)"][2:] == ["40 (32.7 to 48.9)", AGREES + NARROWLY]
    assert next(row for text, row in rows.items() if "as parallel peers" in text)[3] == CONTRADICTS
    assert rows["less memory than raster AR (32 steps against 256)"][2:] == ["0.5 (0.5 to 0.5)", AGREES]
    assert next(row for text, row in rows.items() if "than parallel peers" in text)[3] == CONTRADICTS
    assert rows["block-wise attention is better at 16 steps"][2:] == ["-0.45 (-0.623 to -0.277)", AGREES + ONE_TRAINING]
    other = [{**line, "row": "weights/other", "difference": 9.0} for line in made_up() if line["measure"] == "paired"]
    assert report.paired([*made_up(), *other], 16) == report.paired(made_up(), 16)
    assert rows["block-wise attention is better at 32 steps"][3] == MISSING
    assert rows["a larger model has a lower loss at every step"][2:] == ["0.5 (0.5 to 0.5)", CONTRADICTS + ONE_TRAINING]
    assert report.exponent(made_up()) == pytest.approx(np.log(0.9) / np.log(10))
    assert report.larger_is_better(made_up()[:-1]) is None  # two of three sizes
    assert report.exponent(made_up()[:-1]) is None
    path = tmp_path / "lines"
    path.mkdir()
    (path / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made_up()))
    assert main(["report", "--lines", str(path), "--out", str(tmp_path / "page.md")]) == 0
    text = (tmp_path / "page.md").read_text()
    assert "| 12+12 | 64 | 0 | 20 (19 to 21) | guidance 2.0, schedule linear |" in text
    seeds = [{**line, "seed": 1, "fid": 22.0, "fid interval": [21.0, 23.0]} for line in made_up()[:1]]
    difference = report.fid_difference([*made_up()[:3], *seeds], "0+24", "12+12")  # 30 less the mean of 20 and 22
    assert (difference.value, difference.high - 9.0) == (9.0, pytest.approx(np.hypot(1.0, np.sqrt(0.5))))
    assert "| LlamaGen-XXL | 256 | 1400.0 | 576 | 1.58 |" in text
    assert "Not measured yet (`python -m experiments.paper few-steps`)" in text
    missing = "cosine positions; unshared KV; 6+18; 24+0, random orders; 24+0, raster order"
    assert f"Not measured yet: {missing} (`python -m experiments.paper designs`)" in text
    assert "8 of 23 claims and questions are answered; not measured yet: few-steps, orders, guidance" in text
    assert "| row | steps | images/s | one image, ms | GiB | GiB reserved |" in text
    assert "| ARPG | 32 | 400 | 12.5 | 2 | 3 |\n| raster AR | 256 | 10 |  | 4 | 5 |" in text
    assert "| arpg-l | 32 | 1,000 | 900 | 3 | 4 | 500 |  | 3 | 4 |" in text
    empty = report.page([], {})
    assert all(f"experiments.paper {table}" in empty for table in queue.TABLES if table != "reference")
    assert empty.count(f"| {MISSING} |") == len(report.CLAIMS) + len(report.QUESTIONS)
    assert "Nothing has been measured yet." in empty
    searched = [
        {
            "table": "few-steps",
            "row": report.SUBJECT,
            "measure": "search",
            "steps": steps,
            "samples": samples,
            "fid": fid,
        }
        | {"settings": {**settings, "order": order, "guidance": guidance}}
        for steps, samples, order, guidance, fid in (
            (8, 1000, "random", 9.5, 41.0),
            (12, 1000, "random", 9.5, 31.0),
            (8, 1000, "halton", 9.5, 40.0),
            (8, 2000, "halton", 9.5, 38.0),
            (8, 1000, "halton", 4.0, 39.0),
        )
        for settings in [json_settings(SamplingSettings())]
    ]
    others = [{**line, "row": "weights/other", "samples": 9, "fid": 1.0} for line in searched]
    assert report.searched_table([*others, *searched]) == report.searched_table(searched)
    page = report.page(searched, {})
    assert "| order | schedule | 8 | 12 |\n|---|---:|---:|---:|\n| random | arccos | 41.0 | 31.0 |\n" in page
    assert "| halton | arccos | 40.0 |  |" in page
    assert "Not measured yet (`python -m experiments.paper few-steps`)" in page
