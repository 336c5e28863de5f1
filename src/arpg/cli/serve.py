"""`arpg serve`: the server, on this machine or on many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg import config as configs
from arpg.cli.options import DeviceOption, EngineOption, PrecisionOption, err
from arpg.errors import InputError


def serve(
    model: Annotated[
        str, typer.Option("--model", "-m", help="garden, a folder, a published name or a hub id.")
    ] = configs.DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to bind; others than this machine need keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    keys_file: Annotated[Path | None, typer.Option(help="API keys, one on each line; also $ARPG_API_KEYS.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Bind any address without keys.")] = False,
    max_batch: Annotated[int, typer.Option(help="Images drawn together.")] = 16,
    max_wait_ms: Annotated[float, typer.Option(help="How long an idle server waits for company.")] = 10.0,
    queue: Annotated[int, typer.Option(help="Requests waiting or being drawn; more get a 429.")] = 64,
    deadline: Annotated[float, typer.Option(help="Seconds for one request.")] = 120.0,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of a step; none: as many as there are cores.")
    ] = None,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
    engine: EngineOption = "auto",
    ray: Annotated[bool, typer.Option("--ray", help="Deploy on Ray Serve, on this machine or a cluster.")] = False,
    replicas: Annotated[int, typer.Option(help="With --ray: copies of the model to start with.")] = 1,
    gpus: Annotated[float | None, typer.Option(help="With --ray: of each copy; none: 1 if there is one.")] = None,
    max_replicas: Annotated[int | None, typer.Option(help="With --ray: grow to as many under load.")] = None,
) -> None:
    """Serve a model over HTTP: the OpenAI Images API, our own routes, and the page at /."""
    try:
        from arpg.serve import server
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error.name} is not installed; pip install 'arpg[serve]' brings what the server needs"
        ) from None
    from arpg.serve.house import ServeSettings
    from arpg.serve.keys import VARIABLE, check_exposure, read_keys

    keys = read_keys(keys_file, os.environ.get(VARIABLE))
    check_exposure(host, keys, insecure=insecure)
    settings = ServeSettings(
        max_batch=max_batch, max_wait_ms=max_wait_ms, queue=queue, deadline=deadline, threads=threads
    )
    where: dict[str, Any] = {"device": device, "dtype": dtype, "engine": engine}
    if ray:
        scale = {"replicas": replicas, "max_replicas": max_replicas, "gpus": gpus}
        _serve_on_ray(model, keys, settings, host=host, port=port, where=where, scale=scale)
        return
    house = server.house(model, keys=keys, settings=settings, **where)
    bound = server.bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    err.print(f"serving {house.name} at http://{shown}:{bound.getsockname()[1]}/ (stop with Ctrl+C)", markup=False)
    server.run(house, bound)


def _serve_on_ray(
    model: str,
    keys: Any,
    settings: Any,
    *,
    host: str,
    port: int,
    where: dict[str, Any],
    scale: dict[str, Any],
) -> None:
    try:
        from arpg.serve import ray_app
        from arpg.serve.gate import allowed_hosts
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed; pip install 'arpg[ray]' brings Ray Serve") from None
    from arpg.hub import resolve
    from arpg.pipeline import choose_device

    resolve(model)  # fetch it once, before every replica looks for it
    if scale["gpus"] is None:
        scale["gpus"] = 1 if choose_device(where["device"]).type == "cuda" else 0
    scale["hosts"] = allowed_hosts(host, keys)
    app = ray_app.application(model, keys=keys, settings=settings, **where, **scale)
    err.print(f"serving {model} on Ray at http://{host}:{port}/ (stop with Ctrl+C)", markup=False)
    ray_app.run(app, host=host, port=port)
