"""The same application on Ray Serve: a front that lets requests in, and painters (one model each) that answer them.

The front keeps every request it has let in until it is answered. A request whose painter dies is given to another; a
picture depends on its seed alone, so the second try draws the same one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.handle import DeploymentHandle

from arpg.errors import require
from arpg.serve.gate import App, ClientGoneError, Door, Gate, Message, Receive, Scope, Send
from arpg.serve.house import ServeSettings, check_engine
from arpg.serve.keys import Keys, read_keys
from arpg.serve.logs import log_json
from arpg.serve.metrics import Metrics
from arpg.serve.problem import Problem

log = logging.getLogger(__name__)

NAME = "arpg"
PAINTER = "Painter"
TRIES = 8
TASKS = ("generate", "inpaint", "edit", "outpaint", "expand")
ROUTES = {
    "/v1/arpg/condition",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/models",
    *(f"/v1/arpg/{task}" for task in TASKS),
}
PASSED = ("method", "path", "raw_path", "query_string", "headers", "client", "scheme", "http_version")


class Painter:
    """A replica: a whole application of its own, asked by messages instead of sockets."""

    def __init__(self, model: str, settings: ServeSettings, device: str, dtype: str, engine: str = "auto") -> None:
        from arpg.serve.app import create_app
        from arpg.serve.server import house

        log_json()
        self.house = house(model, keys=Keys(), settings=settings, device=device, dtype=dtype, engine=engine)
        self.house.open()
        self.app = create_app(self.house)

    def check_health(self) -> None:
        """Ray calls this and replaces a replica that raises."""
        if not self.house.studio.alive:
            raise RuntimeError("a thread of the studio has died")

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """The messages of the answer, as they are made. When nobody takes them any more, the drawing stops."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=16)
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if first:
                return first.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            await self.app({**scope, "type": "http", "asgi": {"version": "3.0"}}, receive, messages.put)
            await messages.put(None)

        task = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                yield dict(message)
        finally:
            gone.set()
            task.cancel()


class Front:
    """An ASGI application that passes requests on, and again if need be."""

    def __init__(self, door: Door, metrics: Metrics) -> None:
        self.door, self.metrics = door, metrics
        self._painters: DeploymentHandle[Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["path"] == "/healthz":
            await _say(send, b'{"status": "ok"}', "application/json")
        elif scope["path"] == "/metrics":
            await _say(send, self.metrics.text(), self.metrics.CONTENT_TYPE)
        else:
            if scope["path"] in ROUTES:
                scope["route"] = SimpleNamespace(path=scope["path"])  # what the metrics call it
            await self._relay(scope, receive, send)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        passed = {name: scope[name] for name in PASSED if name in scope} | {"state": {"id": scope["state"]["id"]}}
        gone = asyncio.ensure_future(_gone(receive))
        begun = False
        try:
            for number in range(TRIES):
                try:
                    async for message in self._ask(passed, body, gone):
                        if message["type"] == "http.response.start" and begun:
                            continue  # the stream of the second try goes on where the first one broke off
                        begun = True
                        await send(message)
                    return
                except RayActorError:
                    log.warning("a painter died; trying another", extra={"id": scope["state"]["id"], "try": number})
                    await asyncio.sleep(min(5.0, 0.1 * 2**number))
            raise Problem(503, "no painter is left to answer; try again in a moment", code="no_painter", retry_after=5)
        finally:
            gone.cancel()

    async def _ask(self, scope: Scope, body: bytes, gone: asyncio.Future[None]) -> AsyncIterator[Message]:
        if self._painters is None:
            self._painters = serve.get_deployment_handle(PAINTER, app_name=NAME)
        answer: Any = self._painters.options(stream=True).answer.remote(scope, body)
        messages = answer.__aiter__()
        try:
            while True:
                turn = asyncio.ensure_future(messages.__anext__())
                watched: set[asyncio.Future[Any]] = {turn, gone}
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                if not turn.done():
                    turn.cancel()
                    raise ClientGoneError
                try:
                    yield turn.result()
                except StopAsyncIteration:
                    return
        except (ClientGoneError, GeneratorExit, asyncio.CancelledError):
            answer.cancel()
            raise
        except TaskCancelledError:
            raise ClientGoneError from None
        except RayError as error:
            if isinstance(error, RayActorError):
                raise
            raise RuntimeError("a painter failed") from error


def front(settings: ServeSettings, keys: Keys, hosts: frozenset[str] | None) -> App:
    """What clients talk to: the same gate as on one machine, with the painters behind it."""
    log_json()
    metrics = Metrics()
    door = Door(settings.queue, metrics, wait=lambda: 5.0)
    metrics.watch("arpg_queue_depth", "Requests inside, waiting or being drawn", lambda: door.inside)
    return Gate(
        Front(door, metrics),
        door=door,
        keys=keys,
        limits=settings.limits,
        metrics=metrics,
        hosts=hosts,
        patience=settings.patience,
    )


def application(
    model: str,
    *,
    keys: Keys,
    settings: ServeSettings,
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "auto",
    replicas: int = 1,
    max_replicas: int | None = None,
    gpus: float = 0,
    hosts: frozenset[str] | None = None,
) -> serve.Application:
    """The deployments. More painters are started when those that run have more than a batch each to do."""
    check_engine(engine)
    require(replicas >= 1, f"replicas is {replicas}; expected 1 or more")
    most = replicas if max_replicas is None else max_replicas
    require(most >= replicas, f"max_replicas is {most}; expected at least replicas ({replicas})")
    scale = {"min_replicas": replicas, "max_replicas": most, "target_ongoing_requests": settings.max_batch}
    painter = serve.deployment(
        name=PAINTER,
        max_ongoing_requests=settings.queue,
        num_replicas=replicas if most == replicas else None,
        autoscaling_config=scale if most > replicas else None,
        ray_actor_options={"num_gpus": gpus, "num_cpus": 1 if gpus else 0.5},
        graceful_shutdown_timeout_s=settings.deadline,
        health_check_period_s=5,
    )(Painter).bind(model, settings, device, dtype, engine)
    ingress = serve.ingress(lambda: front(settings, keys, hosts))

    class Ingress:
        def __init__(self, painters: Any) -> None:
            """Only so that the painters belong to the application; the front finds them by name."""

    return serve.deployment(
        name="Front",
        max_ongoing_requests=10 * settings.queue,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=settings.deadline,
    )(ingress(Ingress)).bind(painter)


def build(arguments: dict[str, str]) -> serve.Application:
    """For `serve run` and KubeRay: the options of `arpg serve` as strings; keys come from the environment."""
    known = {
        "model",
        "device",
        "precision",
        "dtype",
        "engine",
        "replicas",
        "max_replicas",
        "gpus",
        "max_batch",
        "queue",
        "deadline",
    }
    unknown = sorted(set(arguments) - known)
    require(not unknown, f"unknown argument {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    settings = ServeSettings(
        max_batch=int(arguments.get("max_batch", 16)),
        queue=int(arguments.get("queue", 64)),
        deadline=float(arguments.get("deadline", 120)),
    )
    most = arguments.get("max_replicas")
    return application(
        arguments.get("model", "garden"),
        keys=read_keys(None, os.environ.get("ARPG_API_KEYS")),
        settings=settings,
        device=arguments.get("device", "auto"),
        dtype=arguments.get("precision", arguments.get("dtype", "auto")),
        engine=arguments.get("engine", "auto"),
        replicas=int(arguments.get("replicas", 1)),
        max_replicas=None if most is None else int(most),
        gpus=float(arguments.get("gpus", 0)),
    )


def start(app: serve.Application, *, host: str, port: int) -> None:
    """Deploy it on the cluster of $RAY_ADDRESS, or on one that is started here; returns when it answers."""
    ray.init(include_dashboard=False, log_to_driver=False, ignore_reinit_error=True, configure_logging=False)
    serve.start(http_options={"host": host, "port": port})
    serve.run(app, name=NAME, route_prefix="/")


def run(app: serve.Application, *, host: str, port: int) -> None:
    """Until a signal; then Ray lets the replicas finish what they have."""
    start(app, host=host, port=port)
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


async def _say(send: Send, body: bytes, kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
