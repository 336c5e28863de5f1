"""Ray Serve: two replicas, one is killed under load, and every admitted request is answered."""

import json
import os
import socket
import threading
import urllib.error
import urllib.request

import pytest

from support.paths import ROOT

ray = pytest.importorskip("ray", reason="needs the extra ray")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own, about pydantic and sockets
CLIENTS, EACH = 6, 6


@pytest.fixture
def cluster(folder, monkeypatch):
    from arpg.serve import ray_serve
    from arpg.serve.auth import ApiKeys
    from arpg.serve.server_config import ServeSettings

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    app = ray_serve.application(
        [str(folder)], keys=ApiKeys(["a-key-for-the-cluster"]), settings=ServeSettings(), replicas=2
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray_serve.start(app, host="127.0.0.1", port=port)
    yield f"http://127.0.0.1:{port}"
    ray_serve.serve.shutdown()
    ray.shutdown()


def call(address, body, path="/v1/arpg/generate"):
    request = urllib.request.Request(
        address + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json", "authorization": "Bearer a-key-for-the-cluster"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def test_a_killed_replica_loses_no_request(cluster, pipeline):
    bodies = [{"class": i % 5, "seed": i, "steps": 16, "num": 8} for i in range(CLIENTS * EACH)]
    found, wrong, started = {}, [], threading.Semaphore(0)

    def work(client):
        for i in range(client, len(bodies), CLIENTS):
            started.release()
            try:
                found[i] = call(cluster, bodies[i])["images"]
            except Exception as error:
                wrong.append(f"{i}: {error}")

    threads = [threading.Thread(target=work, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for _ in range(2 * CLIENTS):
        started.acquire()
    replicas = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "Replica" in actor["name"]]
    assert len(replicas) == 2
    ray.kill(ray.get_actor(replicas[0]["name"], namespace=replicas[0]["namespace"]))
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert len(found) == len(bodies)
    refused = urllib.request.Request(f"{cluster}/v1/models")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(refused, timeout=60)
    again = call(cluster, bodies[0])["images"]
    assert again == found[0]
