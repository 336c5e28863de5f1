"""A short soak test: with injected faults, all valid requests are answered, and no resources leak."""

import pytest

from benchmarks.soak import soak


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_is_left():
    report = soak(requests=80, clients=12, seed=3, share=0.03)
    assert report["wrong"] == []
    assert report["faults_injected"] >= 1
    assert report["server_stopped"]
    assert {"good", "stream", "bad", "drop"} <= set(report["kinds"])
    for left in report["left_after_each_quarter"]:
        assert (left["inside"], left["rows_running"], left["rows_waiting"]) == (0, 0, 0)
    first, *_, last = report["left_after_each_quarter"]
    assert last["threads"] <= first["threads"] + 4
    assert last["files"] <= first["files"] + 8
    assert last["tensors"] <= first["tensors"] + 20
