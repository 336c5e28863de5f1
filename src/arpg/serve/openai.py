"""The OpenAI Images API: generations, edits and models, as the official client calls them, plus our own settings."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from arpg.image import to_rgb
from arpg.serve.api_error import ApiError, check, shorten
from arpg.serve.build_task import BuiltTask, TaskBuilder
from arpg.serve.native import ERRORS, task_responses
from arpg.serve.request_body import JsonRoute, read_form
from arpg.serve.responses import Job, Preview, PreviewOptions, Result, SseEvent, respond, to_base64
from arpg.serve.schemas import MAX, Feather, ModelName, Sampling, Seed, TaskParams, Text
from arpg.serve.service import ImageService

QUALITY_FACTORS = {"low": 0.5, "medium": 1.0, "standard": 1.0, "auto": 1.0, "high": 2.0, "hd": 2.0}  # of the steps


class ImagesParams(Sampling):
    """The fields of both routes: those of the OpenAI API, and our own."""

    prompt: Annotated[str, Field(min_length=1, max_length=32000, description="Text, or the name or id of a class.")]
    negative: Text | None = Field(None, description="Ours: a prompt that guidance leads away from.")
    model: ModelName | None = Field(
        None,
        description="One of /v1/models; null: the first, or for a prompt that is no class, one that takes prompts.",
    )
    n: Annotated[int, Field(ge=1, le=MAX.images)] | None = None
    size: Annotated[str, Field(pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")] | None = Field(
        None, description="auto (the model's own) or WIDTHxHEIGHT; a larger one is made as by /v1/arpg/expand."
    )
    quality: Literal[tuple(QUALITY_FACTORS)] | None = Field(None, description="low and high: half and twice the steps.")  # type: ignore[valid-type]
    response_format: Literal["b64_json"] | None = Field(None, description="URLs are not supported.")
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = Field(None, description="Quality of JPEG, WebP.")
    background: Literal["auto", "opaque"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = Field(None, description="Not used.")
    seed: Seed | None = Field(None, description="Ours: image i has this seed + i; null: a random one.")
    best_of: Annotated[int, Field(ge=1, le=MAX.best_of)] | None = Field(None, description="Ours.")


class GenerationParams(ImagesParams):
    """Generate images of a prompt, or of the class that it names."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "3", "n": 2, "seed": 7, "steps": 12}]})
    moderation: Literal["auto", "low"] | None = Field(None, description="Not used.")
    style: Literal["vivid", "natural"] | None = Field(None, description="Not used.")


class EditParams(ImagesParams):
    """The fields of the form besides its files."""

    model_config = ConfigDict(strict=False)
    feather: Feather = 0
    input_fidelity: Literal["high", "low"] | None = Field(None, description="Not used: kept pixels stay as they are.")


class ImageData(BaseModel):
    """One image of a response."""

    b64_json: str
    seed: int = Field(description="Ours.")


class ImagesResponse(BaseModel):
    """The images of a request, in base64."""

    created: int
    data: list[ImageData]
    output_format: str
    size: str


class ModelEntry(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """All models that are served."""

    object: Literal["list"]
    data: list[ModelEntry]


EVENT_NAMES = [f"image_{kind}.{what}" for kind in ("generation", "edit") for what in ("partial_image", "completed")]
IMAGES_RESPONSES = task_responses(
    ImagesResponse, "The images; with `stream`, server-sent events.", (*EVENT_NAMES, "error")
)
FORM_FILES = {
    "image": {"type": "string", "format": "binary", "description": "PNG, JPEG or WebP."},
    "mask": {
        "type": "string",
        "format": "binary",
        "description": "As large as the image; its transparent pixels are edited. Without one, those of the image.",
    },
}


def _form_schema() -> dict[str, Any]:
    """Return the schema of the form, files included; a field that may be null is left out of a form instead."""
    fields = {}
    for name, field in EditParams.model_json_schema()["properties"].items():
        kinds = [kind for kind in field.pop("anyOf", []) if kind != {"type": "null"}]
        field.pop("default", None)
        fields[name] = {**field, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})}
    schema = {"type": "object", "required": ["image", "prompt"], "properties": {**FORM_FILES, **fields}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def openai_routes(service: ImageService) -> APIRouter:
    """Return the routes of the OpenAI Images API."""
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=JsonRoute)
    started = int(time.time())

    def entry_of(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "arpg"}

    async def run_task(
        call: Request, params: ImagesParams, build: Callable[[TaskBuilder], BuiltTask], kind: str
    ) -> Response:
        form, model = ResponseFormat(params, kind), service.find_for(params.model, params.prompt)
        job = service.start(call, model, build, previews=form.previews)
        return await respond(job, call, stream=bool(params.stream), to_body=form.body, to_sse=form.events)

    @router.get("/models", response_model=ModelList, responses={401: ERRORS[401]})
    async def models() -> dict[str, Any]:
        """All models that are served, the default first."""
        return {"object": "list", "data": [entry_of(name) for name in service.models]}

    @router.get(
        "/models/{model}", response_model=ModelEntry, responses={status: ERRORS[status] for status in (401, 404)}
    )
    async def model(model: str) -> dict[str, Any]:
        """A served model, by its name."""
        return entry_of(service.find(model).name)

    @router.post("/images/generations", responses=IMAGES_RESPONSES)
    async def generations(call: Request, body: GenerationParams) -> Response:
        """Images of the prompt, or of the class that it names."""

        def build(builder: TaskBuilder) -> BuiltTask:
            params, label = _task_params(builder, body), builder.label_of(body.prompt, body.negative)
            size = _requested_size(body)
            if size in (None, builder.image_size):
                return builder.build("generate", label, params)
            return builder.build("expand", label, params, size=size)

        return await run_task(call, body, build, "image_generation")

    @router.post("/images/edits", responses=IMAGES_RESPONSES, openapi_extra=_form_schema())
    async def edits(call: Request) -> Response:
        """Fill the transparent part of the mask with the prompt, or the class that it names."""
        body, files = await _read_form(call)

        def build(builder: TaskBuilder) -> BuiltTask:
            params, label = _task_params(builder, body), builder.label_of(body.prompt, body.negative)
            image = builder.read_image(files["image"], param="image", alpha=True)
            mask = transparent_part(builder.read_image(files.get("mask", files["image"]), param="mask", alpha=True))
            anything = mask.getextrema() != (0, 0)
            check(anything, "mask has no transparent pixel; the transparent ones are edited", param="mask")
            same_size = _requested_size(body) in (None, image.size)
            check(same_size, f"size is {body.size}; an edit is as large as its image", param="size")
            return builder.build("inpaint", label, params, image=to_rgb(image), mask=mask, feather=body.feather)

        return await run_task(call, body, build, "image_edit")

    return router


def transparent_part(image: Image.Image) -> Image.Image:
    """Return a mask that is white where an image is fully transparent: what the OpenAI API edits."""
    return Image.fromarray(np.where(np.asarray(image.getchannel("A")) == 0, 255, 0).astype(np.uint8))


def _task_params(builder: TaskBuilder, params: ImagesParams) -> TaskParams:
    """Return the parameters of all tasks, from the fields of this API."""
    given = params.given()
    if params.quality is not None and "steps" not in given and not isinstance(params.schedule, list):
        steps = round(builder.pipeline.sampling.steps * QUALITY_FACTORS[params.quality])
        given["steps"] = max(1, min(builder.limits.steps, steps))
    return TaskParams(num=params.n or 1, seed=params.seed, best_of=params.best_of or 1, **given)


def _requested_size(params: ImagesParams) -> tuple[int, int] | None:
    """Return the requested (width, height); None: the model's (or the image's) own."""
    match = re.fullmatch(r"(\d+)x(\d+)", params.size or "auto")
    return None if match is None else (int(match[1]), int(match[2]))


async def _read_form(call: Request) -> tuple[EditParams, dict[str, bytes]]:
    """Read the fields and the files of a multipart form; each may be there once."""
    fields: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for name, value in await read_form(call):
        name = name.removesuffix("[]")
        shown = shorten(name)
        check(name not in {**fields, **files}, f"{shown} is given more than once; expected one", param=name)
        if isinstance(value, bytes):
            check(name in FORM_FILES, f"unexpected file {shown}; expected image and mask", param=name)
            files[name] = value
        else:
            fields[name] = value
    check("image" in files, "there is no image in the form; send it as a file", param="image")
    for name in ("order", "schedule"):
        if name in fields and re.fullmatch(r"[\d,\s\[\]]+", fields[name]):
            fields[name] = [number.strip() for number in fields[name].strip().strip("[]").split(",")]
    try:
        return EditParams.model_validate(fields), files
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else None
        raise ApiError(400, f"{param}: {first['msg']}", param=param) from None


class ResponseFormat:
    """The results and previews of one job in the format of the API; `kind` starts the names of events."""

    def __init__(self, params: ImagesParams, kind: str) -> None:
        self.params, self.kind = params, kind
        self.previews = PreviewOptions(params.partial_images) if params.stream and params.partial_images else None
        self._num_sent = 0

    def body(self, job: Job, result: Result) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        return {"created": int(job.created), "data": self._images(result), **self._format(result)}

    def events(self, job: Job, event: Preview | Result) -> Iterable[SseEvent]:
        """Return the server-sent events of a preview (at most one) or of a result (one per image)."""
        name, common = f"{self.kind}.completed", {"created_at": int(job.created), "background": "opaque"}
        common["quality"] = self.params.quality or "auto"
        if isinstance(event, Result):
            usage: dict[str, Any] = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
            usage |= {"input_tokens_details": {"image_tokens": 0, "text_tokens": 0}}
            for image in self._images(event):
                yield name, {"type": name, **image, "usage": usage, **self._format(event), **common}
            return
        name = f"{self.kind}.partial_image"
        if event.pngs:
            image = {"b64_json": to_base64(event.pngs[0]), "partial_image_index": self._num_sent}
            yield name, {"type": name, "size": "auto", **image, "output_format": "png", **common}
            self._num_sent += 1

    def _images(self, result: Result) -> list[dict[str, Any]]:
        files = list(result.pngs)
        if self.params.output_format not in (None, "png"):
            files = [self._encode(image) for image in result.images]
        return [{"b64_json": to_base64(file), "seed": seed} for file, seed in zip(files, result.seeds, strict=True)]

    def _encode(self, image: Image.Image) -> bytes:
        file, compression = io.BytesIO(), self.params.output_compression
        quality = 95 if compression is None else min(95, max(1, compression))
        image.save(file, format=self.params.output_format, quality=quality)
        return file.getvalue()

    def _format(self, result: Result) -> dict[str, str]:
        image = result.images[0]
        return {"output_format": self.params.output_format or "png", "size": f"{image.width}x{image.height}"}
