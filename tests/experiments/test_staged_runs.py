"""Long runs: they start without the extras, stop in time, continue, and write their results as pieces."""

import io
import subprocess
import sys
import time
import zipfile

import pytest

from experiments.garden import staged_run
from experiments.garden.__main__ import VERBS
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
    modules = sorted({f"experiments.garden.{where.split(':')[0]}" for where, _ in VERBS.values()})
    command = [sys.executable, "-c", BLOCKED, *modules, "benchmarks.text_speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_steps_are_taken_until_one_is_not_finished(tmp_path, caplog):
    caplog.set_level("INFO")
    seen = []

    def step(name, finished):
        return lambda: (seen.append(name), finished)[1]

    later = time.monotonic() + 1000
    steps = {"one": step("one", True), "two": step("two", False), "three": step("three", True)}
    staged_run.run_stages(steps, later, tmp_path, None)
    assert seen == ["one", "two"]
    assert "two is not finished" in caplog.text
    assert "done" not in [record.message for record in caplog.records]
    staged_run.run_stages({"late": step("late", True)}, time.monotonic() - 1, tmp_path, None)
    assert "late" not in seen
    staged_run.run_stages({"last": step("last", True)}, later, tmp_path, None)
    assert caplog.records[-1].message == "done"


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
