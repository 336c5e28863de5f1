"""`python -m experiments.garden`: every verb has help, errors are one line, and moved verbs of `arpg` say so."""

import re
import sys

import pytest

from arpg import cli
from experiments.garden.__main__ import VERBS
from experiments.meadow.__main__ import VERBS as MEADOW
from experiments.paper.__main__ import VERBS as PAPER
from experiments.verbs import run_verb
from support.command import check_error

ALL = {"garden": VERBS, "meadow": MEADOW, "paper": PAPER}


@pytest.mark.parametrize(("name", "verb"), [(name, verb) for name, verbs in ALL.items() for verb in verbs])
def test_every_verb_has_help(name, verb, capsys):
    with pytest.raises(SystemExit) as exited:
        run_verb(name, ALL[name], [verb, "--help"])
    assert exited.value.code == 0
    assert re.search(rf"usage: experiments(\.{name})? {verb}", capsys.readouterr().out)


def test_verbs_are_listed(run):
    code, text, _ = run()
    assert code == 0
    assert all(verb in text for verb in VERBS)


def test_errors_are_one_line(run, tmp_path):
    check_error(run("sing"), "unknown verb 'sing'", program="garden")
    check_error(run("compose", "--fruits", tmp_path, "--emoji", tmp_path), "nothing to write", program="garden")


@pytest.mark.parametrize("verb", ["compose", "train-detector", "evaluate-text", "train-depth", "evaluate-control"])
@pytest.mark.parametrize("more", [[], ["--out", "x", "-n", "3"], ["--help"]])
def test_moved_verbs_say_where_they_went(verb, more, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["arpg", verb, *more])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    captured = capsys.readouterr()
    check_error(
        (exited.value.code, captured.out, captured.err),
        f"arpg {verb} moved to `python -m experiments.garden {verb}` in the repository",
    )
