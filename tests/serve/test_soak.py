"""A short soak test: with injected faults, all valid requests are answered, and no resources leak."""

import pytest

from benchmarks.soak import FAULTS, problems, soak


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_is_left():
    report = soak(requests=160, clients=12, seed=1, share=0.03)
    assert problems(report) == []
    assert report["faults_injected"] >= 1
    assert {"good", "stream"} <= set(report["kinds"])
    assert {"drop", "silent", *FAULTS} >= set(report["faults"])
    assert len(report["faults"]) >= 12
    assert len(FAULTS) >= 12


def test_a_problem_is_reported():
    quarter = dict.fromkeys(("inside", "rows_running", "rows_waiting", "body_bytes", "threads", "files", "tensors"), 0)
    report = {"wrong": [], "server_stopped": True, "left_after_each_quarter": [{**quarter, "memory_mb": 300.0}] * 4}
    assert problems(report) == []
    grown = [*report["left_after_each_quarter"][:3], {**quarter, "inside": 1, "memory_mb": 400.0}]
    assert len(problems({**report, "wrong": ["x"], "server_stopped": False, "left_after_each_quarter": grown})) == 4
