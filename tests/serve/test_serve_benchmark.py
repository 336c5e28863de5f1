"""`benchmarks/serve.py`: the server that it starts, and the clients that measure it."""

import asyncio

from benchmarks.serve import measure_raw, running_server, wait_until_ready


def test_a_server_is_started_and_measured(folder):
    with running_server("--model", str(folder), "--device", "cpu") as (address, process):
        asyncio.run(wait_until_ready(address, clients=1))
        port = int(address.rsplit(":", 1)[1])
        row = asyncio.run(measure_raw(port, clients=1, seconds=60, most=2, process=process))
    assert row["images"] == 2
    assert row["bytes/image"] > 0
    assert row["images/step"] == 1.0
    assert row["ms/step"].keys() == {"admit", "launch", "device", "deliver", "pause"}
    assert row["ms/step"]["launch"] > 0
