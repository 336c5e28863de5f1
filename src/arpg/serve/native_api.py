"""The routes under /v1/arpg: every task with every setting, as JSON or as a stream of previews."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

import arpg
from arpg.checkpoint import bundled_folder, read_folder
from arpg.extractors import can_extract
from arpg.serve.answers import EventStream, Named, encoded, json_response, result_of
from arpg.serve.choices import choices, kinds
from arpg.serve.house import House
from arpg.serve.jobs import Event, Job, Preview, Result
from arpg.serve.orders import Ordered
from arpg.serve.problem import Problem
from arpg.serve.schemas import (
    Answer,
    Classes,
    Common,
    Edit,
    Error,
    Expand,
    Extract,
    Extracted,
    Generate,
    Info,
    Inpaint,
    Outpaint,
)
from arpg.serve.studio import png

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "Something in the request is wrong; the message says what."},
    401: {"model": Error, "description": "An API key is needed."},
    413: {"model": Error, "description": "Too many bytes or pixels."},
    429: {"model": Error, "description": "The queue is full; Retry-After says when to come back."},
    500: {"model": Error, "description": "ImageTask failed on the server."},
    503: {"model": Error, "description": "The server is loading or shutting down."},
    504: {"model": Error, "description": "Not finished before the deadline."},
}
EVENTS = (
    'event: queued\ndata: {"id": "req_0123", "position": 0}\n\n'
    'event: step\ndata: {"step": 1, "steps": 8, "window": 0, "windows": 1, "previews": ["iVBORw0..."], "grid": [2, 2], '
    '"decoded_at": [[0, -1, -1, 0]]}\n\n'
    'event: done\ndata: {"id": "req_0123", "created": 0, "seconds": 0.7, "settings": {}, "images": []}\n\n'
)


def event_schema(*names: str) -> dict[str, Any]:
    """The schema of one server-sent event."""
    data = {"type": "string", "contentMediaType": "application/json"}
    return {
        "type": "object",
        "required": ["event", "data"],
        "properties": {"event": {"type": "string", "enum": list(names)}, "data": data},
    }


DRAWS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Answer,
        "description": "The images; with `stream`, server-sent events: queued, step (schema Stepped), done or error.",
        "content": {
            "text/event-stream": {"schema": event_schema("queued", "step", "done", "error"), "example": EVENTS}
        },
    },
    **ERRORS,
}
THUMBNAILS = {"size": 48, "columns": 17}


def native_routes(house: House) -> APIRouter:
    router = APIRouter(prefix="/v1/arpg", tags=["arpg"])

    async def draw(request: Request, body: Common, order: Callable[[Any], Ordered]) -> Response:
        job = house.job(request, previews=body.stream)
        position = house.studio.batcher.waiting
        house.studio.start(job, lambda: order(body))
        if body.stream:
            return EventStream(job, [("queued", {"id": job.id, "position": position})], _namer(job))
        return json_response(_answer(job, await result_of(job, request)))

    @router.get("/info", response_model=Info, responses={k: ERRORS[k] for k in (401, 503)})
    async def info() -> dict[str, Any]:
        """The model, its defaults, what can be chosen, and the limits."""
        pipe, sampling = house.pipeline, house.pipeline.sampling
        config, stride = pipe.model.config, pipe.tokenizer.config.stride
        return {
            "model": house.name,
            "version": arpg.__version__,
            "classes": config.num_classes,
            "takes": house.studies.takes,
            "prompt_tokens": None if config.text is None else config.text.max_tokens,
            "control": None
            if config.control is None
            else {
                "kinds": kinds(config.control.kinds),
                "extracts": [kind for kind in config.control.kinds if can_extract(kind)],
            },
            "image_size": (config.grid[1] * stride, config.grid[0] * stride),
            "grid": config.grid,
            "stride": stride,
            "defaults": dataclasses.asdict(sampling.settings()),
            "guidance_by_steps": sampling.guidance_by_steps,
            "choices": choices(),
            "limits": dataclasses.asdict(house.limits),
        }

    @router.get("/classes", response_model=Classes, responses={k: ERRORS[k] for k in (401, 503)})
    async def classes() -> dict[str, Any]:
        """All classes by id; none where the model takes text."""
        names = house.pipeline.classes
        has = thumbnails_file(house) is not None
        return {
            "classes": [{"id": i, "name": names.name(i)} for i in range(len(names))],
            "thumbnails": {"url": "/v1/arpg/thumbnails.webp", **THUMBNAILS} if has else None,
        }

    @router.get(
        "/thumbnails.webp",
        response_class=FileResponse,
        responses={200: {"content": {"image/webp": {}}}, 401: ERRORS[401], 404: {"model": Error}, 503: ERRORS[503]},
    )
    async def thumbnails() -> FileResponse:
        """One small picture of each class, side by side; the file is in the model's folder."""
        file = thumbnails_file(house)
        if file is None:
            raise Problem(404, "this model has no thumbnails")
        return FileResponse(file, media_type="image/webp")

    @router.post("/generate", responses=DRAWS)
    async def generate(request: Request, body: Generate) -> Response:
        """Images of a class or a prompt."""
        return await draw(request, body, house.studies.generate)

    @router.post("/inpaint", responses=DRAWS)
    async def inpaint(request: Request, body: Inpaint) -> Response:
        """Fill the white of a mask; every other pixel stays as it is."""
        return await draw(request, body, house.studies.inpaint)

    @router.post("/edit", responses=DRAWS)
    async def edit(request: Request, body: Edit) -> Response:
        """Put another class or prompt into a box."""
        return await draw(request, body, house.studies.edit)

    @router.post("/outpaint", responses=DRAWS)
    async def outpaint(request: Request, body: Outpaint) -> Response:
        """Continue a picture beyond its sides."""
        return await draw(request, body, house.studies.outpaint)

    @router.post("/expand", responses=DRAWS)
    async def expand(request: Request, body: Expand) -> Response:
        """A picture, or one that is drawn first, at a larger size."""
        return await draw(request, body, house.studies.expand)

    @router.post("/condition", response_model=Extracted, responses=ERRORS)
    async def condition(request: Request, body: Extract) -> Response:
        """The edges or the depth of a picture, as a condition image of the model's size. Nothing is drawn."""
        image, kind = await house.studio.aside(lambda: house.studies.extract(body))
        made = {"png": encoded(png(image)), "kind": kind, "width": image.width, "height": image.height}
        return json_response(made)

    return router


def thumbnails_file(house: House) -> Path | None:
    """The folder's own; where it holds differences from a model in the box, that one's: the classes are the same."""
    if house.folder is None:
        return None
    base = read_folder(house.folder).base
    folders = [house.folder, *([] if base is None else [bundled_folder(base)])]
    return next((file for folder in folders if (file := folder / "thumbnails.webp").is_file()), None)


def _answer(job: Job, result: Result) -> dict[str, Any]:
    return {
        "id": job.id,
        "created": int(job.created),
        "seconds": round(result.seconds, 3),
        "settings": result.settings,
        "images": [
            {"png": encoded(png), "seed": seed, "width": image.width, "height": image.height}
            for png, image, seed in zip(result.pngs, result.images, result.seeds, strict=True)
        ],
    }


def _namer(job: Job) -> Callable[[Event], Iterable[Named]]:
    def name(event: Event) -> Iterable[Named]:
        if isinstance(event, Preview):
            data = {
                field: getattr(event, field) for field in ("step", "steps", "window", "windows", "grid", "decoded_at")
            }
            yield "step", {**data, "previews": [encoded(png) for png in event.pngs]}
        elif isinstance(event, Result):
            yield "done", _answer(job, event)
        else:
            yield "error", event.body()

    return name
