"""The application on Ray Serve: an ingress that admits requests, and replicas (all models each) that answer them.

The ingress keeps every admitted request until it is answered. A request whose replica dies is sent to another; an image
depends on its seed alone, so the second try generates the same one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.config import AutoscalingContext
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arpg.config import DEFAULT_MODEL
from arpg.errors import require
from arpg.serve.admission import AdmissionLimiter
from arpg.serve.api_error import ApiError
from arpg.serve.app import create_app
from arpg.serve.auth import KEYS_VARIABLE, ApiKeys, check_exposure, read_keys
from arpg.serve.batcher import CPU_BATCH, GPU_BATCH
from arpg.serve.middleware import POST_ROUTES, ClientDisconnected, RequestMiddleware, replay, wait_for_disconnect
from arpg.serve.model_worker import ModelWorker
from arpg.serve.observability import HttpMetrics, configure_logging, tracer_from_environment
from arpg.serve.responses import json_response
from arpg.serve.server_config import ALIASES, ServeSettings
from arpg.serve.service import ImageService
from arpg.serve.workers import freeze_heap

log = logging.getLogger(__name__)

APP_NAME = "arpg"
REPLICA = "Replica"
QUEUE_SECONDS = "queue_seconds"  # the metric that replicas are scaled by
MAX_TRIES = 8
UPSCALE_DELAY_S = 2.0  # images have to wait this long before replicas are added
DOWNSCALE_DELAY_S = 60.0
OUTCOME = "arpg.outcome"  # the type of a message of ours: how a stream ended, for the metrics of the ingress
ROUTES = {*POST_ROUTES, "/v1/models"}  # what the metrics name; all other paths are "other"
SCALE_TYPES: dict[str, Any] = {
    "model": lambda names: names.split(","),
    "replicas": int,
    "max_replicas": int,
    "gpus": float,
    "target_queue_s": float,
    "insecure": lambda value: str(value).lower() == "true",
}  # of `build`
SETTING_TYPES: dict[str, Any] = {
    setting.name: int if setting.default is None else type(setting.default)
    for setting in dataclasses.fields(ServeSettings)
    if setting.name not in ("limits", "worker_process")
} | {"lora": lambda files: tuple(files.split(","))}
SCOPE_FIELDS = ("method", "path", "raw_path", "query_string", "headers", "client", "scheme", "http_version")


class Replica:
    """The application with all models, called with ASGI messages instead of over a socket."""

    def __init__(self, models: Sequence[str], settings: ServeSettings) -> None:
        configure_logging()
        # A URL could lead to another replica, and a replica has a process of its own.
        settings = dataclasses.replace(settings, url_bytes=0, worker_process=False)
        self.service = ImageService.from_pretrained(*models, keys=ApiKeys(), settings=settings)
        self.service.open()
        self.app = create_app(self.service)
        freeze_heap()

    def check_health(self) -> None:
        """Raise where Ray should replace this replica."""
        if not self.service.alive:
            raise RuntimeError("a thread of the service has died")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to Ray how long the oldest image has waited for a place in a batch, in seconds."""
        assert isinstance(self.service.worker, ModelWorker)
        models = self.service.worker.models.values()
        return {QUEUE_SECONDS: max(model.loaded.batcher.queue_seconds for model in models)}

    async def respond(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Yield the messages of the response as they are made. Generation stops when the caller stops reading."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=16)
        disconnected = asyncio.Event()

        async def receive() -> Message:
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            await self.app({**scope, "type": "http", "asgi": {"version": "3.0"}}, replay(body, receive), messages.put)
            if "outcome" in scope["state"]:
                await messages.put({"type": OUTCOME, "status": scope["state"]["outcome"]})
            await messages.put(None)

        task = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                yield dict(message)
        finally:
            disconnected.set()
            task.cancel()


class QueueTimePolicy:
    """Autoscaling by queue time: more replicas while images wait longer than `target_s` for a place in a batch.

    Fewer where the batches of fewer replicas have room for all requests. Ray applies its delays and limits to it.
    """

    def __init__(self, *, target_s: float, max_batch: int) -> None:
        self.target_s, self.max_batch = target_s, max_batch

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas that are wanted, and no state."""
        waits = (context.aggregated_metrics or {}).get(QUEUE_SECONDS, {})
        wait = max(waits.values(), default=0.0)
        wanted = context.total_num_requests / self.max_batch
        if wait > self.target_s:
            wanted = max(wanted, context.current_num_replicas * min(2.0, wait / self.target_s))
        return wanted, {}


class Ingress:
    """An ASGI application that forwards requests to the replicas, and again if a replica dies."""

    def __init__(self, metrics: HttpMetrics) -> None:
        self.metrics = metrics
        self._replicas: DeploymentHandle[Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["path"] == "/healthz":
            await json_response({"status": "ok"})(scope, receive, send)
        elif scope["path"] == "/metrics":
            await self.metrics.response()(scope, receive, send)
        else:
            if scope["path"] in ROUTES:
                scope["route"] = SimpleNamespace(path=scope["path"])  # its name in the metrics
            await self._forward(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        call_id = scope["state"]["id"]
        forwarded = {name: scope[name] for name in SCOPE_FIELDS if name in scope} | {
            "state": {"id": call_id, "tenant": scope["state"]["tenant"]}
        }
        continued = {name.encode(): value.encode() for name, value in scope["state"]["trace"].headers().items()}
        kept = [(name, value) for name, value in scope["headers"] if name.lower() not in continued]
        forwarded["headers"] = [*kept, *continued.items()]
        disconnected = asyncio.ensure_future(wait_for_disconnect(receive))
        started = False
        try:
            for number in range(MAX_TRIES):
                start = None
                try:
                    async for message in self._call_replica(forwarded, body, disconnected):
                        if message["type"] == OUTCOME:
                            scope["state"]["outcome"] = message["status"]
                            continue
                        if message["type"] == "http.response.start":
                            start = message  # sent with its body: until then another replica can answer
                            continue
                        if start is not None and not started:  # a second try goes on in a stream that has begun
                            await send(start)
                            started = True
                        await send(message)
                    return
                except RayActorError:
                    log.warning("a replica died; trying another", extra={"id": call_id, "try": number})
                    await asyncio.sleep(min(5.0, 0.1 * 2**number))
            raise ApiError(503, "no replica is available; try again in a moment", code="no_replica", retry_after=5)
        finally:
            disconnected.cancel()

    async def _call_replica(
        self, scope: Scope, body: bytes, disconnected: asyncio.Future[None]
    ) -> AsyncIterator[Message]:
        if self._replicas is None:
            self._replicas = serve.get_deployment_handle(REPLICA, app_name=APP_NAME)
        response: Any = self._replicas.options(stream=True).respond.remote(scope, body)
        messages = response.__aiter__()
        try:
            while True:
                pending = asyncio.ensure_future(messages.__anext__())
                watched: set[asyncio.Future[Any]] = {pending, disconnected}
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                if not pending.done():
                    pending.cancel()
                    raise ClientDisconnected
                try:
                    yield pending.result()
                except StopAsyncIteration:
                    return
        except (ClientDisconnected, GeneratorExit, asyncio.CancelledError):
            response.cancel()
            raise
        except TaskCancelledError:
            raise ClientDisconnected from None
        except RayError as error:
            if isinstance(error, RayActorError):
                raise
            raise RuntimeError("a replica failed") from error


def ingress_app(settings: ServeSettings, keys: ApiKeys, hosts: frozenset[str] | None) -> ASGIApp:
    """Build what clients connect to: the same middleware as on one machine, around the ingress."""
    configure_logging()
    metrics = HttpMetrics()
    return RequestMiddleware(
        Ingress(metrics),
        admission=AdmissionLimiter(settings, keys, metrics),
        metrics=metrics,
        settings=settings,
        hosts=hosts,
        tracer=tracer_from_environment(),
    )


def application(
    models: Sequence[str] = (DEFAULT_MODEL,),
    *,
    keys: ApiKeys,
    settings: ServeSettings,
    replicas: int = 1,
    max_replicas: int | None = None,
    gpus: float = 0,
    target_queue_s: float = 1.0,
    hosts: frozenset[str] | None = None,
) -> serve.Application:
    """Build the deployments. More replicas are started while images wait longer than `target_queue_s` for a batch."""
    require(
        not settings.worker_process, "worker_process is for one server; on Ray, replicas are processes of their own"
    )
    require(target_queue_s > 0, f"target_queue_s is {target_queue_s}; expected more than 0 seconds")
    require(replicas >= 1, f"replicas is {replicas}; expected 1 or more")
    most = replicas if max_replicas is None else max_replicas
    require(most >= replicas, f"max_replicas is {most}; expected at least replicas ({replicas})")
    batch = settings.max_batch or (GPU_BATCH if gpus else CPU_BATCH)  # replicas on a GPU choose up to that many
    scale = {
        "min_replicas": replicas,
        "max_replicas": most,
        "metrics_interval_s": 1.0,
        "look_back_period_s": 2.0,
        "upscale_delay_s": UPSCALE_DELAY_S,
        "downscale_delay_s": DOWNSCALE_DELAY_S,
        "policy": {
            "policy_function": f"{__name__}:{QueueTimePolicy.__name__}",
            "policy_kwargs": {"target_s": target_queue_s, "max_batch": batch},
        },
    }
    replica = serve.deployment(
        name=REPLICA,
        max_ongoing_requests=settings.max_pending_requests,
        num_replicas=replicas if most == replicas else None,
        autoscaling_config=scale if most > replicas else None,
        ray_actor_options={"num_gpus": gpus, "num_cpus": 1 if gpus else 0.5},
        graceful_shutdown_timeout_s=settings.deadline,
        health_check_period_s=5,
    )(Replica).bind(tuple(models), settings)
    to_ingress = serve.ingress(lambda: ingress_app(settings, keys, hosts))

    class IngressDeployment:
        def __init__(self, replicas: Any) -> None:
            """Bind the replicas to the application; the ingress finds them by name."""

    return serve.deployment(
        name="Ingress",
        max_ongoing_requests=10 * settings.max_pending_requests,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=settings.deadline,
    )(to_ingress(IngressDeployment)).bind(replica)


def build(arguments: dict[str, str]) -> serve.Application:
    """For `serve run` and KubeRay: the options of `arpg serve` as strings (`model`, `lora`: separated by commas).

    Keys come from the environment; without them `insecure` has to be "true", since Ray's HTTP proxies may listen on all
    addresses.
    """
    given = {ALIASES.get(name, name): value for name, value in arguments.items()}
    known = {**SCALE_TYPES, **SETTING_TYPES}
    unknown = sorted(given.keys() - known)
    require(not unknown, f"unknown argument {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    parsed = {name: known[name](value) for name, value in given.items()}
    settings = ServeSettings(**{name: parsed.pop(name) for name in SETTING_TYPES if name in parsed})
    models, insecure = parsed.pop("model", [DEFAULT_MODEL]), parsed.pop("insecure", False)
    keys = read_keys(None, os.environ.get(KEYS_VARIABLE))
    check_exposure("that of Ray's HTTP proxies", keys, insecure=insecure)
    return application(models, keys=keys, settings=settings, **parsed)


def start(app: serve.Application, *, host: str, port: int) -> None:
    """Deploy on the cluster of $RAY_ADDRESS, or on a new local one without a dashboard; return when it answers."""
    ray.init(include_dashboard=False, log_to_driver=False, ignore_reinit_error=True, configure_logging=False)
    serve.start(http_options={"host": host, "port": port})
    serve.run(app, name=APP_NAME, route_prefix="/")


def run(app: serve.Application, *, host: str, port: int) -> None:
    """Serve until a signal; then Ray lets the replicas finish their requests."""
    start(app, host=host, port=port)
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()
