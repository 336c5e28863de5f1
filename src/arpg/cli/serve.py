"""`arpg serve`: an HTTP server, on this machine or on a Ray cluster."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from arpg.cli.options import (
    Command,
    DeviceOption,
    EngineOption,
    KvCacheOption,
    LoraOption,
    PrecisionOption,
    add_options,
    err,
    make_parameter,
)
from arpg.errors import InputError, require
from arpg.serve.server_config import ServeSettings

if TYPE_CHECKING:
    from arpg.serve.auth import ApiKeys


def with_serve_settings(command: Command) -> Command:
    """Give a command the options of a server; its parameter `settings` receives `ServeSettings`."""
    kinds, more = get_type_hints(ServeSettings), []
    for field in dataclasses.fields(ServeSettings):
        if "help" in field.metadata:
            name = field.name.removesuffix("_s").replace("_", "-")
            is_flag = kinds[field.name] == bool | None
            option = typer.Option(f"--{name}/--no-{name}" if is_flag else f"--{name}", help=field.metadata["help"])
            more.append(make_parameter(field.name, Annotated[kinds[field.name], option], field.default))
    return add_options(command, _read_settings, "settings", more=more)


def _read_settings(
    lora: LoraOption = None,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
    kv_cache_dtype: KvCacheOption = "auto",
    engine: EngineOption = "auto",
    **more: Any,
) -> ServeSettings:
    return ServeSettings(
        device=device,
        precision=dtype,
        kv_cache_dtype=kv_cache_dtype,
        engine=engine,
        lora=tuple(lora or ()),
        **more,
    )


@with_serve_settings
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="An installed name, a folder, a published name or a hub id; repeatable. By default all installed.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind; all but loopback addresses need keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve /metrics at a port of its own as well, without a key.")
    ] = None,
    keys_file: Annotated[Path | None, typer.Option(help="API keys, one per line; also $ARPG_API_KEYS.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Bind any address without keys.")] = False,
    ssl_certfile: Annotated[Path | None, typer.Option(help="PEM certificate (chain), for HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Deploy on Ray Serve, on this machine or a cluster.")] = False,
    replicas: Annotated[int, typer.Option(help="With --ray: replicas to start with.")] = 1,
    gpus: Annotated[float | None, typer.Option(help="With --ray: GPUs per replica; by default 1 if any.")] = None,
    max_replicas: Annotated[int | None, typer.Option(help="With --ray: scale up to this many under load.")] = None,
    target_queue_s: Annotated[
        float, typer.Option(help="With --ray: scale up while images wait longer than this for a batch, in seconds.")
    ] = 1.0,
    *,
    settings: ServeSettings,
) -> None:
    """Serve a model over HTTP: the OpenAI Images API, routes for all tasks, and a web page at /."""
    try:
        from arpg.serve import server
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error.name} is not installed; pip install 'arpg[serve]' brings what the server needs"
        ) from None
    from arpg.serve.auth import KEYS_VARIABLE, check_exposure, read_keys
    from arpg.serve.service import ImageService

    keys = read_keys(keys_file, os.environ.get(KEYS_VARIABLE))
    check_exposure(host, keys, insecure=insecure)
    models = model or _installed()
    tls = server.tls_options(ssl_certfile, ssl_keyfile)
    if ray:
        require(
            metrics_port is None, "metrics_port is for one server; on Ray, scrape /metrics of the ingress with a key"
        )
        require(not tls, "--ssl-certfile is given with --ray, which serves HTTP only; put a proxy with TLS before it")
        scale = {"replicas": replicas, "max_replicas": max_replicas, "gpus": gpus, "target_queue_s": target_queue_s}
        _serve_on_ray(models, keys, settings, host=host, port=port, scale=scale)
        return
    service = ImageService.from_pretrained(*models, keys=keys, settings=settings)
    bound = server.bind(host, port)
    if metrics_port is not None:
        service.metrics.serve(host, metrics_port)
    shown = f"[{host}]" if ":" in host else host
    err.print(
        f"serving {', '.join(service.names)} at {'https' if tls else 'http'}://{shown}:{bound.getsockname()[1]}/ "
        "(stop with Ctrl+C)",
        markup=False,
    )
    server.run(service, bound, **tls)


def _installed() -> list[str]:
    """Return the installed models that can be served; say which cannot."""
    from arpg.serve.served_model import default_models

    found = default_models()
    for name, problem in found.items():
        if problem:
            err.print(f"{name} is not served: {problem}", markup=False)
    return [name for name, problem in found.items() if not problem]


def _serve_on_ray(
    models: list[str], keys: ApiKeys, settings: ServeSettings, *, host: str, port: int, scale: dict[str, Any]
) -> None:
    if "RAY_ADDRESS" not in os.environ:
        # Ray opens ports of a local cluster on all addresses; with this they require its token. Read at import.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        from arpg.serve import ray_serve
        from arpg.serve.middleware import allowed_hosts
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed; pip install 'arpg[ray]' brings Ray Serve") from None
    from arpg.hub import resolve
    from arpg.pipeline import choose_device

    for model in models:
        resolve(model)  # download it once, before the replicas do
    if scale["gpus"] is None:
        scale["gpus"] = 1 if choose_device(settings.device).type == "cuda" else 0
    scale["hosts"] = allowed_hosts(host, keys)
    app = ray_serve.application(models, keys=keys, settings=settings, **scale)
    err.print(f"serving {', '.join(models)} on Ray at http://{host}:{port}/ (stop with Ctrl+C)", markup=False)
    ray_serve.run(app, host=host, port=port)
