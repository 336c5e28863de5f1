"""The application: routes, the page, health, metrics, and every error as one clear line."""

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
from arpg.serve.answers import json_response
from arpg.serve.gate import Gate
from arpg.serve.house import House
from arpg.serve.native_api import native_routes
from arpg.serve.openai_api import openai_routes
from arpg.serve.problem import Problem

log = logging.getLogger(__name__)
STATIC = Path(__file__).parent / "static"


def create_app(house: House, *, hosts: frozenset[str] | None = None) -> FastAPI:
    """The whole server. It loads the model when it starts up, in another thread, and closes the house at the end."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        opening = asyncio.get_running_loop().run_in_executor(None, _open, house)
        yield
        await opening
        await asyncio.get_running_loop().run_in_executor(None, house.close)

    app = FastAPI(
        title="ARPG",
        version=arpg.__version__,
        summary="Images from classes or prompts, drawn in any order and many at a time.",
        lifespan=lifespan,
        docs_url=None,  # Swagger's page would load scripts from elsewhere; the schema is at /openapi.json
        redoc_url=None,
        servers=[{"url": "/"}],
    )
    app.include_router(native_routes(house))
    app.include_router(openai_routes(house))
    _health(app, house)
    _page(app)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(
        Gate,
        door=house.door,
        keys=house.keys,
        limits=house.limits,
        metrics=house.metrics,
        hosts=hosts,
        patience=house.settings.patience,
    )
    if len(house.keys):
        _document_keys(app)
    return app


def _open(house: House) -> None:
    try:
        house.open()
    except Exception:  # a server without a model is of no use; whoever started it sees why, and that it has ended
        log.exception("the model could not be loaded")
        os._exit(1)


def _health(app: FastAPI, house: House) -> None:
    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"], responses={503: {"description": "Loading, shutting down, or broken."}})
    async def readyz() -> Response:
        """Work is taken."""
        response = json_response({"status": "ok" if house.ready else "not ready"})
        response.status_code = 200 if house.ready else 503
        return response

    @app.get("/metrics", tags=["health"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(house.metrics.text(), media_type=house.metrics.CONTENT_TYPE)


def _page(app: FastAPI) -> None:
    if not (STATIC / "index.html").is_file():
        return
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/", include_in_schema=False)
    async def index() -> FileResponse:
        return FileResponse(STATIC / "index.html")


def _document_keys(app: FastAPI) -> None:
    made = app.openapi

    def openapi() -> dict[str, Any]:
        schema = made()
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


async def _problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return Response(error.encoded(), error.status, headers=error.headers(), media_type="application/json")


async def _invalid(request: Request, error: Exception) -> Response:
    """The first thing that is wrong, with its name and a short value."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"].startswith("json") or not where:
        return await _problem(request, Problem(400, "the body is not what was expected; send a JSON object"))
    if where[0] == "control":  # a thing with fields of its own
        where = [".".join(where[:2])]
    if first["type"] == "extra_forbidden":
        return await _problem(request, Problem(400, f"unknown field {where[0]!r}; see /openapi.json", param=where[0]))
    value = "" if first["type"] == "missing" else f" is {_short(first.get('input'))}"
    return await _problem(request, Problem(400, f"{where[0]}{value}: {first['msg']}", param=where[0]))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is nothing at this address", 405: "this address does not take that method"}
    response = await _problem(request, Problem(error.status_code, messages.get(error.status_code, str(error.detail))))
    response.headers.update(error.headers or {})
    return response


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
