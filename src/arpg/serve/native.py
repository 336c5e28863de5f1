"""The routes under /v1/arpg: every task with every setting, as JSON or as a stream of previews."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import methodcaller
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, Response

from arpg.serve.api_error import ApiError
from arpg.serve.build_task import FilteredImage, TaskBuilder
from arpg.serve.job import Accepted, ImageFiles, JobStream, PreviewOptions, Result, StepEvent
from arpg.serve.request_body import JsonRoute
from arpg.serve.responses import SseEvent, json_response, respond, wait_for_files
from arpg.serve.schemas import (
    TASKS,
    Classes,
    ConditionResponse,
    Error,
    ExtractCondition,
    Info,
    TaskParams,
    TaskResponse,
    Upscale,
    UpscaleResponse,
)
from arpg.serve.service import ImageService

ModelQuery = Annotated[str | None, Query(max_length=200, description="One of /v1/models; by default the first.")]
Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    400: {"model": Error, "description": "The request is not valid; the message names the parameter and the reason."},
    401: {"model": Error, "description": "An API key is needed."},
    404: {"model": Error, "description": "The model is not served here; the message lists those that are."},
    413: {"model": Error, "description": "Too many bytes or pixels."},
    429: {"model": Error, "description": "Too many pending requests; Retry-After says when to try again."},
    500: {"model": Error, "description": "Generation failed on the server."},
    503: {"model": Error, "description": "The server is loading or shutting down."},
    504: {"model": Error, "description": "Not finished before the deadline."},
}
EVENTS_EXAMPLE = (
    'event: queued\ndata: {"id": "req_0123", "position": 0}\n\n'
    'event: step\ndata: {"step": 1, "steps": 8, "window": 0, "windows": 1, "previews": ["iVBORw0..."], "grid": [2, 2], '
    '"decoded_at": [[0, -1, -1, 0]]}\n\n'
    'event: done\ndata: {"id": "req_0123", "created": 0, "seconds": 0.7, "settings": {}, "images": []}\n\n'
)
THUMBNAILS = {"url": "/v1/arpg/thumbnails.webp", "size": 48, "columns": 17}


def task_responses(model: type, description: str, events: Iterable[str], **more: Any) -> Responses:
    """Describe the responses of a route: images, or server-sent events of these names."""
    data = {"type": "string", "contentMediaType": "application/json"}
    schema = {
        "type": "object",
        "required": ["event", "data"],
        "properties": {"event": {"type": "string", "enum": list(events)}, "data": data},
    }
    content = {"text/event-stream": {"schema": schema, **more}}
    return {200: {"model": model, "description": description, "content": content}, **ERRORS}


def native_routes(service: ImageService) -> APIRouter:
    """Return the routes under /v1/arpg."""
    router = APIRouter(prefix="/v1/arpg", tags=["arpg"], route_class=JsonRoute)
    reading: Responses = {status: ERRORS[status] for status in (400, 401, 404, 503)}

    @router.get("/info", response_model=Info, responses=reading)
    async def info(model: ModelQuery = None) -> dict[str, Any]:
        """A model, its defaults, the settings and their choices, the limits, and the list of all models."""
        return service.info(model)

    @router.get("/classes", response_model=Classes, responses=reading)
    async def classes(model: ModelQuery = None) -> dict[str, Any]:
        """All classes by id; none where the model takes text."""
        found = service.find(model)
        names, is_default = found.classes, found.name == service.names[0]
        entries = [{"id": i, "name": names.name(i)} for i in range(len(names))]
        url = THUMBNAILS["url"] if is_default else f"{THUMBNAILS['url']}?{urlencode({'model': found.name})}"
        return {"classes": entries, "thumbnails": None if found.thumbnails is None else {**THUMBNAILS, "url": url}}

    @router.get(
        "/thumbnails.webp",
        response_class=FileResponse,
        responses={200: {"content": {"image/webp": {}}}, **reading},
    )
    async def thumbnails(model: ModelQuery = None) -> FileResponse:
        """One small image of each class, side by side; the file is in the model's folder."""
        file = service.find(model).thumbnails
        if file is None:
            raise ApiError(404, "this model has no thumbnails")
        return FileResponse(file, media_type="image/webp")

    for task, schema in TASKS.items():
        _add_task_route(router, service, task, schema)

    async def filter_image(call: Request, model: str | None, build: Callable[[TaskBuilder], FilteredImage]) -> Response:
        made = await wait_for_files(service.start_filter(call, service.find(model), build), call)
        return json_response({"png": made.files[0], **made.result.settings, **_sides(made.result)})

    @router.post("/condition", response_model=ConditionResponse, responses=ERRORS)
    async def condition(call: Request, body: ExtractCondition) -> Response:
        """The edges or the depth of an image, as a condition image of the model's size. Nothing is generated."""
        return await filter_image(call, body.model, methodcaller("extract_condition", body))

    @router.post("/upscale", response_model=UpscaleResponse, responses=ERRORS)
    async def upscale(call: Request, body: Upscale) -> Response:
        """A small image, four times as large, by a super-resolution network. It invents detail: for display only."""
        return await filter_image(call, None, methodcaller("upscale", body))

    return router


def _add_task_route(router: APIRouter, service: ImageService, task: str, schema: type[TaskParams]) -> None:
    async def run_task(call: Request, body: TaskParams) -> Response:
        previews = PreviewOptions(body.previews, body.preview_size) if body.stream else None

        reads_files = any(getattr(body, name, None) is not None for name in ("image", "mask", "control"))
        model, build = service.find(body.model), methodcaller("from_params", task, body)
        job = service.start(call, model, build, reads_files=reads_files, stream=body.stream, previews=previews)
        return await respond(job, call, to_body=_to_body, to_sse=_to_sse)

    run_task.__annotations__["body"] = schema
    description = f"The images; with `stream`, server-sent events: queued, step ({StepEvent.__name__}), done or error."
    events = ("queued", "step", "done", "error")
    router.add_api_route(
        f"/{task}",
        run_task,
        methods=["POST"],
        name=task,
        description=schema.__doc__,
        responses=task_responses(TaskResponse, description, events, example=EVENTS_EXAMPLE),
    )


def _to_body(job: JobStream, made: ImageFiles) -> dict[str, Any]:
    result = made.result
    return {
        "id": job.id,
        "created": int(job.created),
        "seconds": round(made.seconds, 3),
        "settings": result.settings,
        "images": [
            {"png": png, "seed": seed, **_sides(result)} for png, seed in zip(made.files, result.seeds, strict=True)
        ],
    }


def _to_sse(job: JobStream, event: Accepted | StepEvent | ImageFiles) -> Iterable[SseEvent]:
    if isinstance(event, Accepted):
        yield "queued", {"id": job.id, "position": event.position}
    elif isinstance(event, StepEvent):
        yield "step", vars(event)
    else:
        yield "done", _to_body(job, event)


def _sides(result: Result) -> dict[str, int]:
    return {"width": result.size[0], "height": result.size[1]}
