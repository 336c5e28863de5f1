"""The simulation of the server: against sums by hand, the M/D/1 queue, and the server's own merging rule."""

import pytest

pytest.importorskip("simpy", reason="needs the extra dev")
from arpg.tables import fill_page
from benchmarks.serving_model import ServiceTimes, gpu_times, page_tables, replicas_needed, simulate
from support.paths import ROOT

TIMES = ServiceTimes(steps=((0.0, 0.010), (100.0, 0.030)), pixels=0.005, request=0.002)
SIZES = (2, 4, 10)


def test_step_times_are_linear_between_points_and_beyond():
    assert [TIMES.step(tokens) for tokens in (0, 50, 100, 200)] == pytest.approx([0.010, 0.020, 0.030, 0.050])


def test_one_client_takes_the_sum_of_the_parts():
    expected = 0.01 + sum(TIMES.step(size) for size in SIZES) + TIMES.pixels + TIMES.request
    found = simulate(TIMES, SIZES, clients=1)
    assert found["p50 s"] == pytest.approx(expected, abs=1e-4)
    assert found["p99 s"] == pytest.approx(expected, abs=1e-4)
    assert found["images/s"] == pytest.approx(1 / expected, rel=0.02)


def test_without_batching_it_is_the_m_d_1_queue():
    """Mean time in the system: s + rho s / (2 (1 - rho))."""
    service, rho = 0.010, 0.7
    times = ServiceTimes(steps=((0.0, service), (1.0, service)), pixels=0.0, request=0.0)
    found = simulate(times, (1,), rate=rho / service, max_batch=1, max_wait=0.0, seconds=400, seed=1)
    assert found["mean s"] == pytest.approx(service + rho * service / (2 * (1 - rho)), rel=0.05)


def test_batches_share_steps():
    """Steps that cost the same for any number of rows: 8 clients get nearly 8 times the images of one."""
    flat = ServiceTimes(steps=((0.0, 0.010), (1000.0, 0.010)), pixels=0.0, request=0.0)
    one, eight = (simulate(flat, (4,) * 8, clients=clients, max_wait=0.0) for clients in (1, 8))
    assert eight["images/s"] == pytest.approx(8 * one["images/s"], rel=0.15)
    alone = simulate(flat, (4,) * 8, clients=8, max_wait=0.0, max_batch=1)
    assert alone["images/s"] == pytest.approx(one["images/s"], rel=0.02)


def test_more_load_takes_longer_and_more_replicas_help():
    latencies = [simulate(TIMES, SIZES, clients=clients)["p50 s"] for clients in (1, 4, 16, 64)]
    assert latencies == sorted(latencies)
    few, many = (simulate(TIMES, SIZES, clients=64, replicas=replicas)["p99 s"] for replicas in (1, 8))
    assert many < few / 4


def test_the_number_of_replicas_is_the_smallest_that_is_enough():
    options = {"seconds": 20.0, "warmup": 5.0}
    found = replicas_needed(TIMES, SIZES, rate=200.0, p99=0.3, **options)
    assert found > 1
    assert simulate(TIMES, SIZES, rate=200.0, replicas=found, **options)["p99 s"] <= 0.3
    assert simulate(TIMES, SIZES, rate=200.0, replicas=found - 1, **options)["p99 s"] > 0.3


def test_gpu_times_are_those_of_the_record():
    times = gpu_times(
        ROOT / "benchmarks/results/scaling-arpg-l-h200.json", steps=32, tokens=256, pixels_per_second=1000
    )
    assert 32 * times.step(64 * 256 / 32) == pytest.approx(64 / 1035, rel=0.01)


def test_the_page_has_the_tables_of_the_records():
    page = (ROOT / "docs/performance/serving-cost.md").read_text()
    assert fill_page(page, page_tables(ROOT / "benchmarks/results")) == page
