"""Estimates of training on many GPUs: against the measured step, counted parameters and collectives by hand."""

import json
import math

import pytest

from arpg.config import MODELS
from arpg.device import GPU_SPECS
from arpg.errors import InputError
from arpg.tables import fill_page
from arpg.train.cost import STATE_BYTES, STRATEGIES, Cluster, num_parameters, step_cost
from support.paths import ROOT

H200 = GPU_SPECS["H200"]


def cluster(gpus, **more):
    return Cluster(gpus, H200.bf16_flops, H200.bandwidth, **more)


def cost(gpus, strategy="ddp", name="arpg-l", batch=1024, **more):
    return step_cost(MODELS[name], cluster(gpus, **more), strategy, batch_size=batch, mfu=0.49)


def test_parameters_are_those_of_the_paper():
    assert [round(num_parameters(MODELS[name]) / 1e6, 2) for name in ("arpg-l", "arpg-xl", "arpg-xxl")] == [
        319.85,
        719.00,
        1302.45,
    ]


def test_one_gpu_is_the_measured_step():
    """Speed within 1% and memory within 2% of the record that the constants come from."""
    record = json.loads((ROOT / "benchmarks/results/train-arpg-l.json").read_text())
    found = cost(1, batch=record["batch_size"])
    assert found.images_per_second == pytest.approx(record["images/s"], rel=0.01)
    assert found.memory / 2**30 == pytest.approx(record["peak GiB"], rel=0.02)
    assert (cluster(1).scatter_seconds(1e9), found.sent) == (0, 0)
    assert {strategy: cost(1, strategy, batch=256).seconds for strategy in STRATEGIES} == dict.fromkeys(
        STRATEGIES, pytest.approx(found.seconds)
    )


def test_collectives_follow_the_ring_model():
    size, slow = 1e9, cluster(64, node_bandwidth=100e9, network_bandwidth=1e9, latency=0.0)
    assert slow.scatter_seconds_in_node(size) == pytest.approx(size * 7 / 8 / 100e9)
    assert slow.scatter_seconds_between_nodes(size) == pytest.approx(size * 7 / 8 / 1e9)
    assert slow.scatter_seconds(size) == pytest.approx(size * 63 / 64 / 8e9)  # eight cards of 1 GB/s leave a node
    hops = cluster(64, latency=1.0)
    assert hops.scatter_seconds(0, calls=3) == pytest.approx(3 * math.log2(64))


def test_sharding_divides_the_state_and_moves_more():
    parameters = num_parameters(MODELS["arpg-xxl"])
    by_strategy = {strategy: cost(64, strategy, "arpg-xxl") for strategy in STRATEGIES}
    state = STATE_BYTES * parameters
    assert by_strategy["ddp"].memory - by_strategy["fsdp"].memory == pytest.approx(state * 63 / 64, rel=0.03)
    assert by_strategy["ddp"].memory - by_strategy["hsdp"].memory == pytest.approx(state * 7 / 8, rel=0.03)
    weights = 4 * parameters
    assert by_strategy["ddp"].sent == pytest.approx(2 * weights * 63 / 64)
    assert by_strategy["fsdp"].sent == pytest.approx(3 * weights * 63 / 64)
    assert by_strategy["hsdp"].sent == pytest.approx(3 * weights * 7 / 8 + 2 * weights / 8 * 7 / 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_gpus_are_faster_together_and_not_better_than_linear(strategy):
    costs = [cost(gpus, strategy, "arpg-xl") for gpus in (1, 8, 64, 512)]
    rates = [found.images_per_second for found in costs]
    assert rates == sorted(rates)
    # A sharded optimizer has less to do on each GPU: at most the 1% that it takes.
    assert all(found.images_per_second / found.gpus <= 1.02 * rates[0] for found in costs)
    assert [found.fills_gpu for found in costs] == [True, True, False, False]


def test_a_faster_network_exposes_less():
    slow, fast = cost(512, network_bandwidth=5e9), cost(512, network_bandwidth=40e9)
    assert slow.exposed > fast.exposed
    assert slow.compute == fast.compute


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 1000}, "batch_size is 1000; expected a multiple of the 64 GPUs"),
        ({"gpus": 12}, "gpus is 12; expected full nodes of 8"),
        ({"strategy": "zero"}, "strategy is 'zero'; expected one of ddp, fsdp, hsdp"),
        ({"network_bandwidth": 0}, "network_bandwidth is 0; expected more than 0"),
    ],
)
def test_bad_input_is_one_line(change, message):
    with pytest.raises(InputError, match=message):
        cost(**{"gpus": 64, **change})


def test_the_page_has_the_tables_of_the_command(run):
    names = ("imagenet-256-l", "imagenet-256-xl", "imagenet-256-xxl")
    page = (ROOT / "docs/performance/training-cost.md").read_text()
    printed = {name: run("train-cost", ROOT / f"recipes/{name}.toml")[1] for name in names}
    tables = {name: text[: text.index("\n\n") + 1] for name, text in printed.items()}
    assert fill_page(page, tables) == page
    assert "512 GPUs are left out: the batch of 768 images" in printed["imagenet-256-xl"]
