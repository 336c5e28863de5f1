"""Ray Serve: replicas are added, removed, killed and replaced under load, and every admitted request is answered."""

import base64
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from PIL import Image

from arpg.errors import InputError
from support.http import ask
from support.paths import ROOT

ray = pytest.importorskip("ray", reason="needs the extra ray")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, about pydantic and sockets
KEY = "a-key-for-the-cluster"


@pytest.fixture
def cluster(folder, monkeypatch):
    """A function that deploys the small model on a local cluster with the options of `application`."""
    from arpg.serve import ray_serve
    from arpg.serve.auth import ApiKeys
    from arpg.serve.server_config import ServeSettings

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(ray_serve, "UPSCALE_DELAY_S", 0.5)
    monkeypatch.setattr(ray_serve, "DOWNSCALE_DELAY_S", 2.0)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def deploy(*, settings=None, **options):
        settings = ServeSettings(**(settings or {}))
        app = ray_serve.application([str(folder)], keys=ApiKeys([KEY]), settings=settings, **options)
        ray_serve.start(app, host="127.0.0.1", port=port)
        return f"http://127.0.0.1:{port}"

    yield deploy
    ray_serve.serve.shutdown()
    ray.shutdown()


def call(address, body, path="/v1/arpg/generate"):
    request = urllib.request.Request(
        address + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def replicas():
    """The names of the living replicas."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted((actor["name"], actor["namespace"]) for actor in named if "#Replica#" in actor["name"])


def wait_until(condition, *, seconds=300):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "not reached"
        time.sleep(0.2)


class Clients:
    """Threads that send the bodies of a list in turn, and collect what is answered."""

    def __init__(self, address, bodies, *, num):
        self.address, self.left, self.found, self.wrong = address, iter(enumerate(bodies)), {}, []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.work) for _ in range(num)]
        for thread in self.threads:
            thread.start()

    def work(self):
        while True:
            with self.lock:
                number, body = next(self.left, (None, None))
            if number is None:
                return
            try:
                self.found[number] = call(self.address, body)["images"]
            except Exception as error:
                self.wrong.append(f"{number}: {error}")

    def wait_for(self, count):
        wait_until(lambda: len(self.found) + len(self.wrong) >= count, seconds=600)

    def join(self):
        for thread in self.threads:
            thread.join(600)


@pytest.mark.slow
def test_two_thousand_requests_survive_scaling_a_kill_and_an_update(cluster):
    """From one replica up to several under load, one killed, all replaced by an update, then back to one."""
    options = {"replicas": 1, "max_replicas": 3, "target_queue_s": 0.01}
    address = cluster(settings={"max_batch": 4}, **options)
    assert len(replicas()) == 1
    bodies = [{"class": i % 5, "seed": i, "steps": 2 + i % 7, "num": 1 + i % 3} for i in range(2000)]
    clients = Clients(address, bodies, num=16)
    wait_until(lambda: len(replicas()) >= 2)  # scaled up

    clients.wait_for(600)
    name, namespace = replicas()[0]
    ray.kill(ray.get_actor(name, namespace=namespace))

    clients.wait_for(1000)
    before = set(replicas())
    cluster(settings={"max_batch": 5}, **options)  # other settings: every replica is replaced, one after the other
    wait_until(lambda: not before & set(replicas()))
    clients.join()
    assert clients.wrong == []
    assert len(clients.found) == len(bodies)
    wait_until(lambda: len(replicas()) == 1)  # scaled down

    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(urllib.request.Request(f"{address}/v1/models"), timeout=60)
    for number in (0, 700, 1999):  # by one replica and by several, before and after the update: the same images
        assert call(address, bodies[number])["images"] == clients.found[number]


def test_replicas_are_added_by_queue_time():
    from arpg.serve.ray_serve import QUEUE_SECONDS, QueueTimePolicy

    policy = QueueTimePolicy(target_s=1.0, max_batch=16)

    def wanted(current, requests, *waits):
        metrics = {QUEUE_SECONDS: dict(enumerate(waits))}
        context = SimpleNamespace(aggregated_metrics=metrics, total_num_requests=requests, current_num_replicas=current)
        return policy(context)[0]

    assert wanted(2, 8, 0.0, 0.0) == 0.5  # half a batch: the limits make one replica of it
    assert wanted(2, 40, 0.9, 0.2) == 2.5  # nobody waits too long: as many as hold the requests in batches
    assert wanted(2, 20, 1.5, 0.2) == 3.0  # one and a half times as long as wanted
    assert wanted(2, 20, 60.0, 0.0) == 4.0  # at most twice as many at once
    assert policy(SimpleNamespace(aggregated_metrics=None, total_num_requests=0, current_num_replicas=1))[0] == 0


@pytest.mark.parametrize(("gpus", "given", "batch"), [(0, None, 16), (1, None, 128), (1, 32, 32)])
def test_replicas_are_counted_by_the_batches_they_hold(gpus, given, batch, monkeypatch):
    from arpg.serve import ray_serve
    from arpg.serve.auth import ApiKeys
    from arpg.serve.server_config import ServeSettings

    made = {}
    deploy = ray_serve.serve.deployment

    def record(**about):
        made[about["name"]] = about
        return deploy(**about)

    monkeypatch.setattr(ray_serve.serve, "deployment", record)
    settings, keys = ServeSettings(max_batch=given), ApiKeys([f"alice {KEY}"])
    ray_serve.application(["m"], keys=keys, settings=settings, max_replicas=2, gpus=gpus)
    assert made[ray_serve.REPLICA]["autoscaling_config"]["policy"]["policy_kwargs"]["max_batch"] == batch


def test_the_ingress_refuses_before_it_forwards(monkeypatch):
    from arpg.serve import ray_serve
    from arpg.serve.auth import ApiKeys
    from arpg.serve.server_config import ServeSettings

    forwarded = []

    async def replica(self, scope, body, disconnected):
        forwarded.append((scope["path"], body))
        yield {"type": "http.response.start", "status": 200, "headers": []}
        yield {"type": "http.response.body", "body": b"ok", "more_body": False}

    monkeypatch.setattr(ray_serve.Ingress, "_call_replica", replica)
    monkeypatch.setattr(ray_serve, "configure_logging", lambda: None)
    keys = ApiKeys([f"alice {KEY}", "alice another-key-of-alice"])
    app = ray_serve.ingress_app(ServeSettings(), keys, None)
    assert app.admission.keys.num_tenants == 1
    host, key, long = (b"host", b"x"), (b"authorization", f"Bearer {KEY}".encode()), b" " * 300_000
    for headers, path, status in (
        ([host], "/v1/arpg/generate", 401),
        ([host, host, key], "/v1/arpg/generate", 400),
        ([host, key], "/v1/images/generations", 413),
        ([host, key], "/v1/nowhere", 200),
        ([host, key], "/v1/arpg/generate", 200),
    ):
        assert ask(app, *headers, method="POST", path=path, body=long)[0] == status
    assert forwarded == [("/v1/nowhere", b""), ("/v1/arpg/generate", long)]  # the replica answers what it does not know


def test_a_response_whose_replica_died_is_that_of_another(monkeypatch):
    """Headers are held back until there is a body: those of the dead replica belong to another body."""
    from arpg.serve import ray_serve
    from arpg.serve.auth import ApiKeys
    from arpg.serve.server_config import ServeSettings

    tries = []

    async def replica(self, scope, body, disconnected):
        tries.append(body)
        yield {"type": "http.response.start", "status": 200 if len(tries) == 1 else 400, "headers": []}
        if len(tries) == 1:
            raise ray.exceptions.RayActorError
        yield {"type": "http.response.body", "body": b"no", "more_body": False}

    monkeypatch.setattr(ray_serve.Ingress, "_call_replica", replica)
    monkeypatch.setattr(ray_serve, "configure_logging", lambda: None)
    app = ray_serve.ingress_app(ServeSettings(), ApiKeys([f"alice {KEY}"]), None)
    headers = ((b"host", b"x"), (b"authorization", f"Bearer {KEY}".encode()))
    assert ask(app, *headers, method="POST", path="/v1/arpg/generate", body=b"{}") == (400, b"no")
    assert tries == [b"{}", b"{}"]


def test_ray_serve_needs_keys(monkeypatch):
    from arpg import InputError
    from arpg.serve import ray_serve
    from arpg.serve.auth import KEYS_VARIABLE

    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    monkeypatch.setattr(ray_serve, "application", lambda models, **arguments: arguments["keys"])
    with pytest.raises(InputError, match="there are no API keys"):
        ray_serve.build({"replicas": "2"})
    assert len(ray_serve.build({"insecure": "true"})) == 0
    monkeypatch.setenv(KEYS_VARIABLE, KEY)
    assert len(ray_serve.build({})) == 1


def test_arguments_of_ray_serve_are_settings(monkeypatch):
    from arpg.serve import ray_serve
    from arpg.serve.server_config import ServeSettings

    monkeypatch.setattr(ray_serve, "application", lambda models, **arguments: (models, arguments["settings"]))
    given = {"model": "a,b", "lora": "one.safetensors,two.safetensors:0.5", "max_batch": "8", "queue": "3"}
    models, settings = ray_serve.build({**given, "deadline": "9", "insecure": True})
    assert models == ["a", "b"]
    lora = ("one.safetensors", "two.safetensors:0.5")
    assert settings == ServeSettings(lora=lora, max_batch=8, max_pending_requests=3, deadline=9.0)


def test_replicas_have_no_worker_process():
    from arpg.serve import ray_serve
    from arpg.serve.auth import ApiKeys
    from arpg.serve.server_config import ServeSettings

    with pytest.raises(InputError, match="worker_process is for one server"):
        ray_serve.application(keys=ApiKeys(), settings=ServeSettings(worker_process=True))
    with pytest.raises(InputError, match="unknown argument worker_process"):
        ray_serve.build({"worker_process": "true"})


@pytest.mark.slow
def test_a_local_cluster_requires_the_token_of_ray(folder, tmp_path):
    """`arpg serve --ray` with two models: without the token nobody gets into the cluster; a signal ends it."""
    second = shutil.copytree(folder, tmp_path / "second")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path), "ARPG_API_KEYS": KEY}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "arpg", "serve", "--ray", "--port", str(port)]
    command += ["--model", str(folder), "--model", str(second)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: is_ready(f"http://127.0.0.1:{port}"))
            assert (tmp_path / ".ray" / "auth_token").is_file()
            address, body = f"http://127.0.0.1:{port}", {"class": 1, "seed": 5}
            found = [call(address, {**body, "model": name})["images"][0]["png"] for name in (folder.name, "second")]
            images = [Image.open(io.BytesIO(base64.b64decode(png))) for png in found]
            assert [json.loads(image.text["arpg"])["model"] for image in images] == [folder.name, "second"]
            assert images[0].tobytes() == images[1].tobytes()  # the same weights
            with pytest.raises(urllib.error.HTTPError, match="404"):
                call(address, {**body, "model": "third"})
            intruder = "import ray; ray.init('auto', log_to_driver=False, configure_logging=False)"
            without = {**environment, "HOME": str(tmp_path / "elsewhere")}
            denied = subprocess.run([sys.executable, "-c", intruder], env=without, capture_output=True, text=True)
            assert denied.returncode != 0
            assert "token" in denied.stderr
        finally:
            server.terminate()
        assert server.wait(120) == 0


def is_ready(address):
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False
