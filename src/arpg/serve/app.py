"""The FastAPI application: routes, the page, health, metrics and error responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

import arpg
from arpg.serve.api_error import ApiError, shorten
from arpg.serve.middleware import RequestMiddleware
from arpg.serve.native import native_routes
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
        opening = asyncio.ensure_future(asyncio.to_thread(_open_or_exit, service))
        yield
        await opening
        await asyncio.to_thread(service.close)

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
        metrics=service.metrics,
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
        return await asyncio.to_thread(service.metrics.response)


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
