"""The table of the engine: its rows measured small, written one by one, kept, failed and rendered."""

import json
import os
import subprocess
import sys

import pytest
import torch

from arpg.bench.roofline import Limits
from arpg.device import peak_bytes
from arpg.files import write_json
from arpg.tables import fill_page
from benchmarks import engine as table
from support.paths import ROOT
from support.small import small_model


def measured(**values):
    rows = {name.replace("_", " "): {"value": value} for name, value in values.items()}
    return {"where": {"device": "NVIDIA H200", "torch": "2.13"}, "rows": rows}


@pytest.mark.skipif(peak_bytes(torch.device("cpu")) == 0, reason="the platform does not say the peak memory")
def test_all_rows_small(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(table, "device_limits", lambda *_: Limits(1e9, 1e9))
    out, page = tmp_path / "small.json", tmp_path / "page.md"
    page.write_text("# Speed\n<!-- engine: begin -->\nold\n<!-- engine: end -->\nrest\n")
    options = ["--device", "cpu", "--like", str(folder), "--repeats", "1", "--out", str(out)]
    table.main([*options, "--rows", "L, 32 steps", "VQ-16"])  # a whole name, and the beginning of another
    first = json.loads(out.read_text())
    assert set(first["rows"]) == {"L, 32 steps", "VQ-16 decode, 256 px"}
    table.main([*options, "--write", "--page", str(page)])
    found = json.loads(out.read_text())
    measured_rows = [row for row in table.ROWS if not row.of]
    assert list(found["rows"]) != [row.name for row in measured_rows]  # in the order in which they were measured
    assert {row.name for row in measured_rows} == set(found["rows"])
    assert found["rows"]["L, 32 steps"] == first["rows"]["L, 32 steps"]  # not measured again
    assert found["rows"]["L, 32 steps, fp8 with fp8 cache"]["settings"]["kv_cache_dtype"] == "fp8"
    for row in measured_rows:
        each = found["rows"][row.name]
        assert each["value"] > 0, each
        assert (each["bar"], each["goal"]) == (row.bar, row.goal)
    assert found["rows"]["XL, 512 px, 64 steps"]["settings"]["tokens"] == 64  # twice the side of the others
    assert "L, 32 steps: in the file already" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("# Speed\n<!-- engine: begin -->\nCPU, torch")
    assert text.endswith("<!-- engine: end -->\nrest\n")
    assert text.count("\n| ") == 1 + len(table.ROWS)


def test_a_row_that_fails_is_reported_and_tried_again(tmp_path, monkeypatch):
    path, rows = tmp_path / "a.json", table.ROWS[:3]
    bench = table.Bench("cpu", 1)
    asked = []

    def measure(row):
        asked.append(row.name)
        if row == rows[1] and len(asked) == 2:
            raise RuntimeError("CUDA error: out of something\nand a lot more")
        return {"value": 2.0}

    monkeypatch.setattr(bench, "measure", measure)
    table.run(rows, bench, path, minutes=1, again=False)
    found = json.loads(path.read_text())["rows"]
    assert found[rows[1].name]["error"] == "RuntimeError: CUDA error: out of something"
    assert f"CUDA error: out of something | {rows[1].bar}" in table.table({"rows": found})
    table.run(rows, bench, path, minutes=1, again=False)
    assert asked == [row.name for row in (*rows, rows[1])]
    table.run(rows, bench, path, minutes=-1, again=True)
    assert len(asked) == 4


@pytest.mark.skipif(peak_bytes(torch.device("cpu")) == 0, reason="the platform does not say the peak memory")
def test_a_row_with_a_switch_off_and_on(folder, tmp_path, monkeypatch):
    """Each is measured under its own kernel policy, in a pipeline of its own."""
    from arpg.kernels import dispatch

    seen, own = [], table.open_pipeline
    monkeypatch.setattr(table, "device_limits", lambda *_: Limits(1e9, 1e9))
    monkeypatch.setattr(table, "open_pipeline", lambda *a, **k: seen.append(dispatch._policy.get()) or own(*a, **k))
    out = tmp_path / "switch.json"
    options = ["--device", "cpu", "--like", str(folder), "--repeats", "1", "--switch", "pixel_graphs"]
    table.main([*options, "--rows", "L, 64 steps", "--out", str(out)])
    assert list(json.loads(out.read_text())["rows"]) == ["L, 64 steps, without pixel_graphs", "L, 64 steps"]
    assert [policy.pixel_graphs for policy in seen] == [False, True]


def test_what_is_reached():
    record = measured(**{"L, 32 steps": 1430.0, "L, batch 1, 32 steps: latency": 16.0})
    record["rows"]["L, 32 steps"] |= {"peak GiB": 2.0, "reserved GiB": 4.0, "roofline": 2860.0}
    lines = table.table(record).splitlines()
    assert lines[2] == "| L, 32 steps | **1,430** images/s | 1300 | 110% | 1550 | 92% | 50% |"
    assert "| L, batch 1, 32 steps: latency | 16 ms | 11 | 69% | 8 | 50% |  |" in lines
    assert "| L, 32 steps: peak memory | **2** GiB | 2.5 | 125% | 2.3 | 115% |  |" in lines
    assert "| L, 32 steps: reserved memory | 4 GiB | 3.2 | 80% |  |  |  |" in lines
    assert "| XXL, 32 steps | - | 380 |  | 430 |  |  |" in lines
    before = measured(**{"L, 32 steps": 1300.0, "L, batch 1, 32 steps: latency": 24.0, "XXL, 32 steps": 300.0})
    compared = table.comparison(before, record).splitlines()
    assert compared[2] == "| L, 32 steps, images/s | 1,300 | 1,430 | 1.100 |"
    assert "| L, batch 1, 32 steps: latency, ms | 24 | 16 | 1.500 |" in compared
    assert "| XXL, 32 steps, images/s | 300 | - | - |" in compared
    assert "| L, 32 steps: peak memory, GiB | - | 2 | - |" in compared
    found = {"roofline token images/s": 2721.0, "roofline pixel images/s": 3126.0}
    to_pixels = next(row for row in table.ROWS if row.pixels)
    assert table._roofline(to_pixels, found) == pytest.approx(1455, abs=1)


def test_the_time_of_the_host():
    found = table.host_times(small_model(), 3, 1)
    assert list(found) == ["request", "plan", "check", "cursor", "state", "graph key", "all"]
    assert found.pop("all") == pytest.approx(sum(found.values()))


def test_another_machine_gets_another_file(tmp_path):
    write_json(tmp_path / "a.json", measured(**{"L, 32 steps": 1.0}))
    with pytest.raises(SystemExit, match="is from NVIDIA H200, this is CPU"):
        table.run(table.ROWS, table.Bench("cpu", 1), tmp_path / "a.json", minutes=1, again=False)


@pytest.mark.parametrize(
    "arguments", [["--device", "cpu"], ["--rows", "M, 3 steps"], ["--device", "cpu", "--like", "x"]]
)
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as exited:
        table.main(arguments)
    assert exited.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_page_has_a_place_for_it():
    page = (ROOT / "docs" / "performance" / "results.md").read_text()
    record = table.read(table.RESULTS)
    assert fill_page(page, {"engine": table.page_part(record)}) == page, "run benchmarks/engine.py --table --write"


def test_it_needs_little():
    """Every speed benchmark imports with torch, Triton, numpy, Pillow and safetensors alone, run in either form."""
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib', 'huggingface_hub', 'cv2', 'scipy', 'transformers', 'fastapi'):\n"
        "    sys.modules[name] = None\n"
        "from benchmarks import attention_tiles, cpu_speed, engine, fused_gemm, pixels, precision\n"
        "from benchmarks import text_speed, train_speed\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    for form in (["benchmarks/engine.py"], ["-m", "benchmarks.engine"]):
        environment["PYTHONPATH"] = str(ROOT / "src")
        subprocess.run([sys.executable, *form, "--table"], check=True, env=environment, cwd=ROOT, capture_output=True)
