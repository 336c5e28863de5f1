"""`arpg bench`: arithmetic against numbers worked out by hand, made-up records and a made-up clock."""

import importlib
import json
import math
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from arpg import InputError, Pipeline, SamplingSettings
from arpg.bench import profile, record, throughput
from arpg.bench.case import Case, make_cases, open_pipeline, square_grid
from arpg.bench.profile import SPLIT_PARTS, kernel_group, split_time, summarize_kernels
from arpg.bench.record import commit, compare, read_record, write_record
from arpg.bench.roofline import Limits, token_floor
from arpg.bench.throughput import (
    MeasureOptions,
    fit_exponent,
    latency_percentiles,
    measure,
    measure_cold_start,
    measure_growing,
    summarize_scaling,
    time_batch,
    time_pipelined,
)
from arpg.cli import app
from arpg.device import peak_bytes
from arpg.settings import SamplingDefaults
from support.small import SMALL, small_model, small_tokenizer

ONE_STEP = SamplingSettings(steps=1, guidance=1.0)


def case(batch=2, steps=4, guidance=3.0, grid=(4, 4), **settings):
    return Case("small", batch, SamplingSettings(steps=steps, guidance=guidance, **settings), grid)


@pytest.fixture(scope="module")
def pipe():
    return Pipeline(small_model(), small_tokenizer())


# Cases


def test_a_grid_of_cases():
    given = {"steps": [2, 4], "guidance": [1.0], "order": []}
    cases = make_cases("m", SamplingDefaults(), grids=[(4, 4), (8, 8)], batches=[1, 3], settings=given)
    assert [(c.tokens, c.settings.steps, c.batch) for c in cases] == [
        (n, s, b) for n in (16, 64) for s in (2, 4) for b in (1, 3)
    ]
    assert {c.settings.guidance for c in cases} == {1.0}


def test_impossible_cases():
    with pytest.raises(InputError, match="batch is 0"):
        case(batch=0)
    with pytest.raises(InputError, match="only 16 tokens"):
        case(steps=17)
    with pytest.raises(InputError, match="tokens is 60; expected a square"):
        square_grid(60)
    assert square_grid(4096) == (64, 64)
    with pytest.raises(InputError, match="repeats is 0"):
        MeasureOptions(repeats=0)


def test_random_weights_need_no_download(folder):
    first, second = (open_pipeline(str(folder), random=True, device="cpu") for _ in range(2))
    assert first.model.config == SMALL
    weights = first.model.state_dict()["head.weight"]
    assert weights.abs().sum() > 0
    assert torch.equal(weights, second.model.state_dict()["head.weight"])
    trained = open_pipeline(str(folder), random=False, device="cpu")
    assert not torch.equal(weights, trained.model.state_dict()["head.weight"])


# Measuring


def test_the_split_adds_up_on_a_clock_that_ticks(pipe):
    """Every look at the clock is one second later. What each part must be then follows from who looks when."""
    looks = iter(range(10**6))
    parts = split_time(pipe, case(steps=4), seed=0, clock=lambda: float(next(looks)))
    steps = 4
    assert list(parts) == list(SPLIT_PARTS)
    assert parts["pass 1"] == steps  # the prefix and the tokens of all steps but the last
    assert parts["pass 2"] == steps * (3 - 1)  # its start and end stand around the head's, which does not count
    assert parts["head, sampling"] == steps * 2  # the head, and from the logits to the end of the step
    assert parts["pixels"] == 1
    assert sum(parts.values()) == next(looks) - 1  # from the first look to the last
    assert "encode" not in pipe.model.__dict__
    assert "forward" not in pipe.model.head.__dict__


def test_the_split_leaves_nothing_behind_when_it_fails(pipe, monkeypatch):
    monkeypatch.setattr(pipe.tokenizer, "decode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        split_time(pipe, case(), seed=0)
    assert "predict" not in pipe.model.__dict__
    assert "forward" not in pipe.model.head.__dict__


def test_a_row_fits_together(pipe, monkeypatch):
    module = importlib.import_module("arpg.bench.throughput")
    monkeypatch.setattr(module, "time_batch", lambda *_, **__: (0.25, 0.75))
    limits = Limits(1e6, 1e9)
    row = measure(pipe, case(batch=2), MeasureOptions(repeats=3, warmup=1, split=False), limits=lambda dtype: limits)
    assert row["images/s"] == 2.0
    assert row["token images/s"] == 8.0
    assert row["latency ms"] == {"p50": 1000.0, "p95": 1000.0, "p99": 1000.0}
    floor = token_floor(SMALL, case(batch=2), torch.float32, limits)
    assert row["roofline share"] == pytest.approx(floor / 0.25, rel=1e-2)
    assert (row["peak GiB"] > 0) == (peak_bytes(torch.device("cpu")) > 0)  # 0: the platform does not say
    assert row["settings"]["model"] == "small"
    assert row["settings"]["engine"] == "eager"
    assert "split ms" not in row
    assert "roofline share" not in measure(pipe, case(), MeasureOptions(split=False), limits=lambda dtype: None)


def test_it_generates_what_the_settings_say(pipe):
    """As many images, tokens and pixels as requested: the tokenizer sees them."""
    seen = []
    decode = pipe.tokenizer.decode
    pipe.tokenizer.decode = lambda ids, grid: seen.append((tuple(ids.shape), grid)) or decode(ids, grid)
    try:
        assert time_batch(pipe, case(batch=3, grid=(2, 4)), seed=0)[1] > 0
        assert time_batch(pipe, case(), seed=0, pixels=False)[1] == 0
    finally:
        del pipe.tokenizer.decode
    assert seen == [((3, 8), (2, 4))]


def test_kernels_are_summed_by_what_they_do():
    """A made-up trace: two streams, a gap of 2 ms, and things that do not run on the device."""

    def event(name, ts, dur, cat="kernel", ph="X"):
        return {"name": name, "ts": 1000.0 * ts, "dur": 1000.0 * dur, "cat": cat, "ph": ph}

    found = summarize_kernels(
        [
            event("nvjet_tst_128x64_h_bz_TNN", 0, 4),
            event("sm90_xmma_gemm_bf16bf16", 3, 2),  # beside the first
            event("_attend", 7, 1),
            event("_attend", 8, 2),
            event("Memcpy DtoD (Device -> Device)", 10, 0.5, "gpu_memcpy"),
            event("cudaLaunchKernel", 0, 99, "cuda_runtime"),
            {"name": "a stream", "ph": "M"},
        ]
    )
    assert found["kernels"] == 5
    expected = dict.fromkeys(profile.KERNEL_PARTS, 0.0) | {"matrix products": 6.0, "attention": 3.0, "gaps": 2.0}
    assert found["kernels ms"] == expected | {"copies, small": 0.5}
    assert found["top kernels"][1] == {"ms": 3.0, "launches": 2, "group": "attention", "kernel": "_attend"}
    assert summarize_kernels([])["kernels ms"] == dict.fromkeys(profile.KERNEL_PARTS, 0.0)
    profiled = {**row(), **found}
    assert "  6.0  " in record.render_kernels([profiled])
    assert "2 x attention: _attend" in record.render_top_kernels([profiled])
    assert record.render_kernels([row()]) == record.render_top_kernels([row()]) == ""


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_residual_norm_forward", "norms"),
        ("_swiglu_forward", "SwiGLU"),
        ("_rope_kernel", "rotation"),
        ("_rope_table", "rotation"),
        ("_sample", "sampling"),
        ("_int8_gemm", "matrix products"),
        ("_small_gemm", "matrix products"),
        ("_wgmma_gemm", "matrix products"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1", "norms"),
        ("void at::native::elementwise_kernel<128, 4>", "copies, small"),
    ],
)
def test_our_kernels_have_a_group(name, group):
    assert kernel_group(name) == group


def test_the_groups_know_the_names_of_our_kernels():
    """Kernels that decoding launches, found in their files: renamed ones would silently become `copies, small`."""
    source = Path(profile.__file__).parent.parent / "kernels"
    files = ("attention", "int8_gemm", "residual_norm", "fused_rope", "gumbel", "small_gemm", "swiglu", "wgmma_gemm")
    text = "".join((source / f"{file}.py").read_text() for file in files)
    launched = set(re.findall(r"^ +(_\w+)\[\(?", text, flags=re.M)) - {"_backward"}
    assert {"_attend", "_sample", "_residual_norm_forward", "_swiglu_forward", "_small_gemm", "_wgmma_gemm"} <= launched
    assert {name for name in launched if kernel_group(name) == profile.REST} == set()


def test_the_profile_is_of_the_graph_that_is_timed(pipe, monkeypatch):
    """With and without events of every step there are two graphs: the profile of one that was not captured yet would
    count an eager run, the capture and a replay.
    """

    class Recorder(nullcontext):
        def export_chrome_trace(self, path):
            Path(path).write_text('{"traceEvents": []}')

    seen, decode = [], pipe.engine.decode
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Recorder(Recorder()))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(pipe.engine, "decode", lambda *args, **how: seen.append(how) or decode(*args, **how))
    time_batch(pipe, case(), seed=0)
    assert profile.profile_tokens(pipe, case(), seed=0)["kernels"] == 0
    timed, profiled = seen
    assert timed == profiled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_row_of_a_gpu():
    on_gpu = Pipeline(small_model().to("cuda"), small_tokenizer().to("cuda"), engine="graph")
    found = measure(on_gpu, case(), MeasureOptions(repeats=2, warmup=0, top_kernels=True), limits=lambda dtype: None)
    assert found["settings"]["engine"] == "graph"
    assert found["kernels"] > 10
    assert sum(found["kernels ms"].values()) > 0
    assert found["capture"]["s"] > 0
    assert found["capture"]["GiB"] > 0
    assert found["images/s"] > 0
    assert found["top kernels"]
    assert len(on_gpu.engine.graphs.captured) == 1  # the profile is of the graph that was timed


def test_batches_one_after_the_other(pipe):
    """As many as requested, and one before them; each seed once."""
    seen = []
    decode = pipe.tokenizer.decode
    pipe.tokenizer.decode = lambda ids, grid: seen.append(ids.tolist()) or decode(ids, grid)
    try:
        assert time_pipelined(pipe, case(batch=1), 3, pixels=True) > 0
    finally:
        del pipe.tokenizer.decode
    assert len(seen) == 4
    assert len({str(ids) for ids in seen}) == 4


def test_percentiles():
    assert latency_percentiles([i / 1000 for i in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


# Scaling


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.7, 2.0])
def test_the_fit_recovers_the_exponent(exponent):
    sizes = [64, 256, 1024, 4096]
    assert fit_exponent(sizes, [0.003 * n**exponent for n in sizes]) == pytest.approx(exponent)
    with pytest.raises(InputError, match="two different ones"):
        fit_exponent([64, 64], [1.0, 2.0])


def made_up(batch, seconds, **settings):
    return {"settings": {"batch": batch, **settings}, "token images/s": batch / seconds}


def test_what_would_take_too_long_is_left_out():
    cases = [case(batch=n) for n in (1, 4, 16, 64)]
    rows, left = measure_growing(
        cases, lambda c: made_up(c.batch, c.batch * 1.0), size=lambda c: c.batch, max_seconds=20.0, batches=3
    )
    assert [row["settings"]["batch"] for row in rows] == [1, 4]  # 3 batches of 16 s are more than 20 s
    assert [c.batch for c in left] == [16, 64]
    found = summarize_scaling("batch", rows)
    assert (found["exponent"], found["last exponent"], found["seconds per batch"]) == (1.0, 1.0, [1.0, 4.0])
    assert "exponent" not in summarize_scaling("batch", rows[:1])
    text = record.render_scaling([{**found, "left out": [16, 64]}])
    assert "batch^1.0" in text
    assert "left out, too slow: 16, 64" in text


# Records


def row(batch=1, steps=8, speed=10.0, p50=100.0, gib=1.0, **settings):
    return {
        "settings": {"model": "m", "batch": batch, "steps": steps, **settings},
        "images/s": speed,
        "token images/s": 2 * speed,
        "latency ms": {"p50": p50, "p95": p50, "p99": p50},
        "peak GiB": gib,
        "pixels": True,
    }


def test_two_records_side_by_side():
    before = {"about": {"device": "H200", "torch": "1", "commit": "a"}, "rows": [row(1), row(2), row(4)]}
    after = {
        "about": {"device": "H200", "torch": "2", "commit": "b"},
        "rows": [row(1, speed=20.0, p50=50.0), row(2, speed=9.0, gib=1.02), row(8)],
    }
    found = compare(before, after, tolerance=0.05)
    assert [pair["ratios"]["images/s"] for pair in found["pairs"]] == [2.0, 0.9]
    assert found["pairs"][0]["ratios"]["p50 ms"] == 2.0  # half the time is twice as good
    assert [(s["batch"], name, ratio) for s, name, ratio in found["slower"]] == [
        (2, "images/s", 0.9),
        (2, "token images/s", 0.9),
    ]
    assert [s["batch"] for s in found["gone"]] == [4]
    assert [s["batch"] for s in found["new"]] == [8]
    assert found["differs"] == {"torch": ("1", "2")}
    text = record.render_comparison(found)
    assert "worse: images/s, 0.900 times as good (batch 2, steps 8)" in text
    assert "was '1', is '2'" in text
    assert "nothing got slower" in record.render_comparison(compare(before, before, tolerance=0.0))
    assert "no row is in both" in record.render_comparison(compare(before, {"rows": []}, tolerance=0.0))
    with pytest.raises(InputError, match=r"tolerance is 1\.5"):
        compare(before, after, tolerance=1.5)


def test_rows_with_and_without_pixels_are_not_compared():
    other = {**row(1), "pixels": False}
    assert compare({"rows": [row(1)]}, {"rows": [other]}, tolerance=0.05)["pairs"] == []


def test_records_from_before_there_were_engines():
    old, new = {"rows": [row(1)]}, {"rows": [row(1, engine="eager"), row(1, engine="graph")]}
    found = compare(old, new, tolerance=0.05)
    assert [pair["settings"]["engine"] for pair in found["pairs"]] == ["eager"]
    assert [settings["engine"] for settings in found["new"]] == ["graph"]


def test_records_there_and_back(tmp_path):
    path = tmp_path / "results" / "a.json"
    write_record(path, {"device": "CPU"}, [row()], scaling=[], cold=[{"import s": 1.0}])
    assert read_record(path) == {
        "format": "arpg-bench-1", "about": {"device": "CPU"}, "rows": [row()], "cold": [{"import s": 1.0}]
    }  # fmt: skip
    for text, message in (
        ("{", "not JSON"),
        ("[]", "not a record"),
        ('{"format": "arpg-bench-1", "rows": [1]}', "rows"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_record(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_record(tmp_path / "none.json")


def test_a_record_names_the_gemms_of_a_gpu(monkeypatch):
    properties = SimpleNamespace(name="H200", total_memory=2**37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(record, "working_gemms", lambda device: ["small_gemm"])
    found = record.environment(torch.device("cuda"))
    assert (found["device"], found["device GiB"], found["fused GEMMs"]) == ("H200", 128.0, ["small_gemm"])
    assert "fused GEMMs" not in record.environment(torch.device("cpu"))


def test_the_commit_is_that_of_the_code(tmp_path):
    assert commit(tmp_path) is None

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        run = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return run.stdout.strip()

    git("init", "-q")
    file = tmp_path / "__init__.py"
    file.write_text("")
    assert commit(tmp_path) is None  # there, but not tracked
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path) == head[:12]
    file.write_text("x = 1\n")
    assert commit(tmp_path) == head[:12] + "+"


def test_lines_of_the_plot():
    rows = [row(batch, steps, speed=batch / steps, guidance=float(steps)) for batch in (4, 1) for steps in (8, 2)]
    expected = {"batch 4": [(2, 2.0), (8, 0.5)], "batch 1": [(2, 0.5), (8, 0.125)]}
    assert record.plot_lines(rows, "steps", "batch") == expected
    assert list(record.plot_lines(rows[::-1], "steps", "batch")) == list(expected)  # the fastest first
    both = [row(1, 8, dtype=dtype) for dtype in ("float32", "bfloat16")]
    assert list(record.plot_lines(both, "batch", "steps")) == ["steps 8, dtype float32", "steps 8, dtype bfloat16"]


# The command line


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_the_command_measures_a_grid_and_compares(folder, tmp_path):
    out, plot = tmp_path / "a.json", tmp_path / "a.png"
    options = ["--model", folder, "--device", "cpu", "--repeats", 1, "--warmup", 0, "--threads", 1]
    result = run(*options, "--batch", "1,2", "--steps", "2,3", "--dtype", "float32,bfloat16", "-o", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    written = read_record(out)
    settings = [(r["settings"]["dtype"], r["settings"]["steps"], r["settings"]["batch"]) for r in written["rows"]]
    assert settings == [(d, s, b) for d in ("float32", "bfloat16") for s in (2, 3) for b in (1, 2)]
    assert written["about"]["device"] == "CPU"
    assert written["about"]["threads"] == 1
    for one in written["rows"]:
        assert set(one["split ms"]) == set(SPLIT_PARTS)
        assert one["roofline share"] > 0
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert "images/s" in result.output
    assert "8 rows in" in result.output
    same = run("compare", out, out, "--fail")
    assert same.exit_code == 0
    assert "nothing got slower" in same.output
    written["rows"][0]["images/s"] *= 2
    out.with_name("faster.json").write_text(json.dumps(written))
    worse = run("compare", out.with_name("faster.json"), out, "--fail")
    assert worse.exit_code == 1
    assert "worse: images/s, 0.500 times as good" in worse.output


def test_rows_are_kept_where_a_later_one_fails(folder, tmp_path, monkeypatch):
    def measure(pipe, case, options, *, limits):
        if case.batch == 4:
            raise MemoryError
        return {"settings": {"batch": case.batch}, "images/s": 1.0}

    monkeypatch.setattr(throughput, "measure", measure)
    out = tmp_path / "a.json"
    result = run("--model", folder, "--device", "cpu", "--batch", "1,2,4", "--steps", 2, "-o", out)
    assert isinstance(result.exception, MemoryError)
    assert [row["settings"]["batch"] for row in read_record(out)["rows"]] == [1, 2]


def test_the_command_lets_sizes_grow(folder, tmp_path):
    out = tmp_path / "scaling.json"
    options = [
        "--model",
        folder,
        "--random",
        "--device",
        "cpu",
        "--repeats",
        1,
        "--warmup",
        0,
        "--no-split",
        "--no-pixels",
    ]
    result = run(*options, "--scaling", "--tokens", "4,16", "--batch", "1,2", "--steps", 2, "--threads", 1, "-o", out)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert [(one["over"], one["sizes"]) for one in written["scaling"]] == [("tokens", [4, 16]), ("batch", [1, 2])]
    assert all(math.isfinite(one["exponent"]) for one in written["scaling"])
    assert "cost grows like tokens^" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "few"], "steps is 'few'"),
        (["--batch", "0"], "batch is 0"),
        (["--dtype", "float8"], "precision is 'float8'"),
        (["--engine", "eager,fast"], "engine is 'fast'"),
        (["--order", "zigzag"], "order is 'zigzag'"),
        (["--tokens", "50"], "tokens is 50"),
        (["--model", ""], "model is ''"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--max-seconds", "0"], "max-seconds is 0"),
        (["--most", "0"], "max-seconds is 0"),
        (["--threads", "0"], "number of threads is '0'"),
        (["--repeats", "0"], "repeats is 0"),
        (["--out", "/dev/null/such.json"], "/dev/null"),
        (["--out", "/dev"], "/dev is a folder"),
        (["--plot", "speed.doc"], "speed.doc does not end in one of .png"),
        (["compare", "a.json", "b.json"], "a.json cannot be read"),
    ],
)
def test_bad_input_is_named(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_fresh_process_says_how_long_each_part_took(folder, monkeypatch):
    options = {"random": False, "device": "cpu", "dtype": "float32", "threads": 1, "steps": 2}
    found = measure_cold_start(str(folder), **options)
    assert found["to the first image s"] == pytest.approx(
        found["import s"] + found["load s"] + found["first image s"], abs=0.005
    )
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nInputError: no-such-model is no model\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(InputError, match="the fresh process failed: InputError: no-such-model"):
        measure_cold_start("no-such-model", **options)
