"""Worker processes of the composer: their errors reach the user as one line, and Ctrl-C is not theirs."""

import signal

import pytest

from experiments.garden.scene_sets import compose_parts
from support.command import check_error
from support.distribution import require_model
from support.scene_sets import write_sets


@pytest.fixture
def sets(tmp_path):
    return write_sets(tmp_path)


SLOW = [pytest.param(verb, marks=pytest.mark.slow) for verb in ("train-detector", "train-depth")]


@pytest.mark.parametrize("verb", ["compose", *SLOW])
def test_errors_of_worker_processes_are_one_line(run, tmp_path, verb):
    require_model("garden")  # its tokenizer
    places = ["--fruits", tmp_path / "fruits", "--emoji", tmp_path / "emoji", "-o", tmp_path / "out"]
    result = run(verb, *places, "-n", 4, "--processes", 1)
    check_error(result, "fruits does not exist; expected a folder of images", program="garden")


def handler(_composer, _numbers):
    """Return how a worker process treats Ctrl-C."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_workers_leave_interrupts_to_their_parent(sets):
    before = signal.getsignal(signal.SIGINT)
    assert list(compose_parts(sets, handler, num=2, processes=1)) == [True]
    assert signal.getsignal(signal.SIGINT) is before
