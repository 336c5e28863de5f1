"""The application: routes, the page, health, metrics and error responses; and the uvicorn server around it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

import arpg
from arpg.errors import InputError, require
from arpg.serve.api_error import ApiError, shorten
from arpg.serve.http_protocol import HttpProtocol
from arpg.serve.middleware import RequestMiddleware, allowed_hosts
from arpg.serve.native import native_routes
from arpg.serve.observability import configure_logging
from arpg.serve.openai import openai_routes
from arpg.serve.responses import json_response
from arpg.serve.service import ImageService

log = logging.getLogger(__name__)
STATIC = Path(__file__).parent / "static"


def create_app(service: ImageService, *, hosts: frozenset[str] | None = None) -> FastAPI:
    """Build the application. Its lifespan opens the service, in another thread, and closes it.

    `hosts`: accepted Host headers; None: any.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        opening = asyncio.get_running_loop().run_in_executor(None, _open_or_exit, service)
        yield
        await opening
        await asyncio.get_running_loop().run_in_executor(None, service.close)

    app = FastAPI(
        title="ARPG",
        version=arpg.__version__,
        summary="Images from classes or prompts, decoded in any order and many tokens at a time.",
        lifespan=lifespan,
        docs_url=None,  # Swagger's page would load scripts from another host; the schema is at /openapi.json
        redoc_url=None,
        servers=[{"url": "/"}],
    )
    app.include_router(native_routes(service))
    app.include_router(openai_routes(service))
    _add_health_routes(app, service)
    _add_page(app)
    for kind in (ApiError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(
        RequestMiddleware,
        admission=service.admission,
        keys=service.keys,
        settings=service.settings,
        hosts=hosts,
        tracer=service.tracer,
    )
    if len(service.keys):
        _document_keys(app)
    return app


def _open_or_exit(service: ImageService) -> None:
    try:
        service.open()
    except Exception:  # a server without a model is useless: log the reason and exit
        log.exception("the model could not be loaded")
        os._exit(1)


def _add_health_routes(app: FastAPI, service: ImageService) -> None:
    @app.get("/healthz", tags=["health"], responses={503: {"description": "A worker thread has died."}})
    async def healthz() -> Response:
        """The process is alive, and so are its worker threads."""
        return json_response({"status": "broken"}, 503) if service.broken else json_response({"status": "ok"})

    @app.get("/readyz", tags=["health"], responses={503: {"description": "Loading, shutting down, or broken."}})
    async def readyz() -> Response:
        """The server accepts work."""
        return json_response({"status": "ok"}) if service.ready else json_response({"status": "not ready"}, 503)

    @app.get("/metrics", tags=["health"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), media_type=service.metrics.CONTENT_TYPE)


def _add_page(app: FastAPI) -> None:
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/", include_in_schema=False)
    async def index() -> FileResponse:
        return FileResponse(STATIC / "index.html")


def _document_keys(app: FastAPI) -> None:
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make_schema()
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


async def _on_error(_: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = _first_invalid(error)
    elif isinstance(error, HTTPException):
        messages = {404: "there is nothing at this address", 405: "this address does not accept that method"}
        message = messages.get(error.status_code, str(error.detail))
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response
    assert isinstance(error, ApiError)
    return error.response()


def _first_invalid(error: RequestValidationError) -> ApiError:
    """Report the first invalid field, with its name and a short form of its value."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"].startswith("json") or not where:
        return ApiError(400, "the body is not valid; send a JSON object")
    if where[0] == "control":  # the one field that has fields of its own
        where = [".".join(where[:2])]
    if first["type"] == "extra_forbidden":
        message = f"unknown field {where[0]!r}; see /openapi.json"
    else:
        value = "" if first["type"] == "missing" else f" is {shorten(first.get('input'))}"
        message = f"{where[0]}{value}: {first['msg']}"
    return ApiError(400, message, param=where[0])


def bind(host: str, port: int) -> socket.socket:
    """Listen on an address, or raise an `InputError` with the reason, before anything is loaded."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot listen on {host} port {port} ({reason}); choose another with --port") from None


def tls_options(certfile: Path | None, keyfile: Path | None) -> dict[str, str]:
    """Return the options of a server for HTTPS; none without a certificate. An invalid one is an `InputError`."""
    require(
        (certfile is None) == (keyfile is None), "ssl_certfile and ssl_keyfile belong together; give both or neither"
    )
    if certfile is None or keyfile is None:
        return {}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise InputError(
            f"{certfile} and {keyfile} cannot be used ({reason}); expected a PEM certificate and its key, not encrypted"
        ) from None
    return {"ssl_certfile": str(certfile), "ssl_keyfile": str(keyfile)}


def run(service: ImageService, bound: socket.socket, **tls: str) -> None:
    """Serve until a signal; then finish the admitted requests, respond to new ones with 503, and exit.

    `tls`: see `tls_options`. Where a worker thread dies, the pending requests fail and the process exits with status 1,
    to be started again.
    """
    configure_logging()
    hosts = allowed_hosts(bound.getsockname()[0], service.keys)
    server = Server(service, hosts=hosts, **tls)
    server.run(sockets=[bound])
    if server.failed:
        raise SystemExit(1)


class Server(uvicorn.Server):
    """A uvicorn server that drains on the first signal, with open sockets until no request is left, and then exits.

    Draining is: not ready any more, and after `drain_delay_s`, when no load balancer sends requests any more, also no
    new requests. A second signal exits at once.
    """

    def __init__(self, service: ImageService, *, hosts: frozenset[str] | None = None, **options: Any) -> None:
        settings = service.settings
        config = uvicorn.Config(
            create_app(service, hosts=hosts),
            http=functools.partial(HttpProtocol, settings=settings),  # type: ignore[arg-type]  # it is only called
            loop="asyncio",
            ws="none",
            proxy_headers=False,  # who the client is, is not for the client to say
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]  # it goes to call_later
            timeout_graceful_shutdown=math.ceil(settings.io_timeout_s),
            **options,
        )
        super().__init__(config)
        self.service = service
        self.failed = False  # a worker thread has died
        self._drain_at = self._exit_by = math.inf

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals until the process ends: one that arrives while it exits must not print a traceback."""
        if threading.current_thread() is threading.main_thread():
            for sig in (signal.SIGINT, signal.SIGTERM):
                signal.signal(sig, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal; exit at once at the second, whatever is in progress."""
        service = self.service
        if service.stopping:
            try:
                log.warning("a second signal; exiting at once", extra={"admitted": service.admission.num_admitted})
            finally:
                os._exit(128 + sig)
        service.stopping = True
        log.info("not ready any more", extra={"admitted": service.admission.num_admitted})
        self._drain_at = time.monotonic() + service.settings.drain_delay_s
        self._exit_by = self._drain_at + service.settings.deadline + 5
        self._drain_if_due()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to exit; uvicorn calls this every 0.1 s."""
        admission = self.service.admission
        if self.service.broken and not self.failed:  # what was pending has failed; send the answers, then exit
            self.failed = admission.draining = True
            self._exit_by = time.monotonic() + 5
        self._drain_if_due()
        if admission.draining and (admission.num_admitted == 0 or time.monotonic() > self._exit_by):
            self.should_exit = True
        return await super().on_tick(counter)

    def _drain_if_due(self) -> None:
        admission = self.service.admission
        if not admission.draining and time.monotonic() >= self._drain_at:
            admission.draining = True
            log.info("draining", extra={"admitted": admission.num_admitted})
