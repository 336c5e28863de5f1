"""`arpg demo` and `arpg selftest`."""

import pytest

from arpg import __version__
from arpg.cli import check
from support.command import check_error
from support.paths import ROOT


def test_selftest_reports_and_compares(run):
    code, out, err = run("selftest", "--device", "cpu")
    assert code == 0, err
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["arpg"] == __version__
    assert lines["device"].startswith("cpu, ")
    assert all(name in lines["extras"] for name in check.EXTRAS)
    assert "as recorded: this installation works" in lines["tokens"]


def test_selftest_fails_where_numbers_are_wrong(run, monkeypatch):
    monkeypatch.setattr(check, "SELFTEST_IDS", tuple(range(16)))
    check_error(run("selftest", "--device", "cpu"), "0 of 16 tokens are as recorded", "report")


def test_demo_checks_its_output_before_it_loads(run, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "load_pipeline", lambda *_, **__: pytest.fail("loaded"))
    check_error(run("demo", "-o", tmp_path), "is a folder")


def test_make_demo_is_the_verb():
    assert "$(BIN)/arpg demo" in (ROOT / "Makefile").read_text()
