"""The OpenAI Images API: generations, edits and models, as the official client calls them; our settings as extras."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile

from arpg.config import EXPAND_METHODS
from arpg.serve.answers import EventStream, Named, encoded, json_response, result_of
from arpg.serve.house import House
from arpg.serve.jobs import Event, Job, Preview, Result
from arpg.serve.limits import read_picture
from arpg.serve.native_api import ERRORS, event_schema
from arpg.serve.orders import Ordered, alpha_mask
from arpg.serve.problem import Problem
from arpg.serve.schemas import MOST, Error, Sampling, Seed, Text

QUALITIES = {"low": 0.5, "medium": 1.0, "standard": 1.0, "auto": 1.0, "high": 2.0, "hd": 2.0}  # times the model's steps
KINDS = ("image_generation", "image_edit")
ENCODINGS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}


class Images(Sampling):
    """What both routes take: the API's own fields, and ours."""

    prompt: Annotated[str, Field(min_length=1, max_length=32000, description="Text, or the name or id of a class.")]
    negative: Text | None = Field(None, description="Ours: a prompt that guidance leads away from.")
    model: Annotated[str, Field(max_length=200)] | None = Field(None, description="As in /v1/models.")
    n: Annotated[int, Field(ge=1, le=MOST.images)] | None = None
    size: Annotated[str, Field(pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")] | None = Field(
        None, description="auto (the model's own) or WIDTHxHEIGHT; a larger one is drawn as an expansion."
    )
    quality: Literal[tuple(QUALITIES)] | None = Field(None, description="low and high: half and twice the steps.")  # type: ignore[valid-type]
    response_format: Literal["b64_json"] | None = Field(None, description="Addresses are not given out.")
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = Field(None, description="Quality of JPEG, WebP.")
    background: Literal["auto", "opaque"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = Field(None, description="Not used.")
    seed: Seed | None = Field(None, description="Ours: image i has this seed + i; null: a random one.")
    best_of: Annotated[int, Field(ge=1, le=MOST.best_of)] | None = Field(None, description="Ours.")


class Generations(Images):
    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "3", "n": 2, "seed": 7, "steps": 12}]})
    moderation: Literal["auto", "low"] | None = Field(None, description="Not used.")
    style: Literal["vivid", "natural"] | None = Field(None, description="Not used.")


class Edits(Images):
    """The fields of the form besides its files."""

    model_config = ConfigDict(strict=False)
    feather: Annotated[int, Field(ge=0, le=256)] = Field(0, description="Ours: blend so many pixels at the seam.")
    input_fidelity: Literal["high", "low"] | None = Field(None, description="Not used: what is kept is kept exactly.")


class Datum(BaseModel):
    b64_json: str
    seed: int = Field(description="Ours.")


class ImagesAnswer(BaseModel):
    created: int
    data: list[Datum]
    output_format: str
    size: str


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelEntry]


EVENT_NAMES = (*(f"{kind}.{what}" for kind in KINDS for what in ("partial_image", "completed")), "error")
DRAWS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ImagesAnswer,
        "description": "The images; with `stream`, server-sent events.",
        "content": {"text/event-stream": {"schema": event_schema(*EVENT_NAMES)}},
    },
    404: {"model": Error, "description": "Another model was asked for."},
    **ERRORS,
}
FILES = {
    "image": {"type": "string", "format": "binary", "description": "PNG, JPEG or WebP."},
    "mask": {
        "type": "string",
        "format": "binary",
        "description": "As large as the image; its transparent pixels are edited. Without one, those of the image.",
    },
}


def _form_schema() -> dict[str, Any]:
    """The fields of the form, files and all; what may be null is left out of a form instead."""
    fields = {}
    for name, field in Edits.model_json_schema()["properties"].items():
        kinds = [kind for kind in field.pop("anyOf", []) if kind != {"type": "null"}]
        field.pop("default", None)
        fields[name] = {**field, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})}
    schema = {"type": "object", "required": ["image", "prompt"], "properties": {**FILES, **fields}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def openai_routes(house: House) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["openai"])
    started = int(time.time())

    def entry() -> dict[str, Any]:
        return {"id": house.name, "object": "model", "created": started, "owned_by": "arpg"}

    async def draw(request: Request, body: Images, order: Callable[[], Ordered], kind: str) -> Response:
        if body.model is not None and body.model != house.name:
            raise Problem(
                404,
                f"model {body.model!r} is not served here; expected {house.name!r}",
                param="model",
                code="model_not_found",
            )
        partial = (body.partial_images or 0) if body.stream else 0
        job = house.job(request, previews=partial > 0)
        house.studio.start(job, order)
        if body.stream:
            return EventStream(job, [], _namer(job, body, kind, partial))
        result = await result_of(job, request)
        files = _files(result, body)
        data = [{"b64_json": encoded(file), "seed": seed} for file, seed in zip(files, result.seeds, strict=True)]
        return json_response({"created": int(job.created), "data": data, **_told(result, body)})

    @router.get("/models", response_model=ModelList, responses={401: ERRORS[401]})
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [entry()]}

    @router.get("/models/{model}", response_model=ModelEntry, responses={401: ERRORS[401], 404: {"model": Error}})
    async def model(model: str) -> dict[str, Any]:
        """It, by its name."""
        if model != house.name:
            raise Problem(404, f"model {model!r} is not served here; expected {house.name!r}", code="model_not_found")
        return entry()

    @router.post("/images/generations", responses=DRAWS)
    async def generations(request: Request, body: Generations) -> Response:
        """Images of the prompt, or of the class that it names."""

        def order() -> Ordered:
            studies, options = house.studies, _options(house, body)
            subject, size = studies.named(body.prompt, body.negative), _size(house, body)
            if size is not None:
                return studies.enlarge(None, subject, size, way=EXPAND_METHODS[0], options=options)
            return studies.draw(subject, options)

        return await draw(request, body, order, "image_generation")

    @router.post("/images/edits", responses=DRAWS, openapi_extra=_form_schema())
    async def edits(request: Request) -> Response:
        """Put the prompt, or the class that it names, where the mask is transparent."""
        body, files = await _form(request, house)

        def order() -> Ordered:
            studies, options = house.studies, _options(house, body)
            subject = studies.named(body.prompt, body.negative)
            image = read_picture(files["image"], house.limits, param="image", alpha=True)
            mask = alpha_mask(read_picture(files.get("mask", files["image"]), house.limits, param="mask", alpha=True))
            if mask.getextrema() == (0, 0):
                raise Problem(400, "nothing is transparent in the mask; that is what is edited", param="mask")
            if _size(house, body, image.size) is not None:
                raise Problem(400, f"size is {body.size}; an edit is as large as its image", param="size")
            return studies.fill(image.convert("RGB"), mask, subject, feather=body.feather, options=options)

        return await draw(request, body, order, "image_edit")

    return router


def _options(house: House, body: Images) -> dict[str, Any]:
    sampling = body
    if body.quality is not None and body.steps is None and not isinstance(body.schedule, list):
        steps = max(1, min(house.limits.steps, round(house.pipeline.sampling.steps * QUALITIES[body.quality])))
        sampling = body.model_copy(update={"steps": steps})
    return house.studies.options(sampling, num=body.n or 1, seed=body.seed, best_of=body.best_of or 1)


def _size(house: House, body: Images, own: tuple[int, int] | None = None) -> tuple[int, int] | None:
    """The size that was asked for; None: the model's (or the image's) own."""
    if own is None:
        grid, stride = house.pipeline.model.config.grid, house.pipeline.tokenizer.config.stride
        own = (grid[1] * stride, grid[0] * stride)
    match = re.fullmatch(r"(\d+)x(\d+)", body.size or "auto")
    asked = None if match is None else (int(match[1]), int(match[2]))
    return None if asked in (None, own) else asked


async def _form(request: Request, house: House) -> tuple[Edits, dict[str, bytes]]:
    """The fields and the files of a multipart form; each may be there once."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Problem(400, "expected a form (multipart/form-data) with an image and a prompt")
    fields: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    async with request.form(max_files=4, max_fields=64, max_part_size=house.limits.bytes) as form:
        for name, value in form.multi_items():
            name = name.removesuffix("[]")
            if name in fields or name in files:
                raise Problem(400, f"{name} is there more than once; one is taken", param=name)
            if isinstance(value, UploadFile):
                if name not in ("image", "mask"):
                    raise Problem(400, f"unexpected file {name!r}; expected image and mask", param=name)
                files[name] = await value.read()
            else:
                fields[name] = value
    if "image" not in files:
        raise Problem(400, "there is no image in the form; send it as a file", param="image")
    if "schedule" in fields and re.fullmatch(r"[\d,\s\[\]]+", fields["schedule"]):
        fields["schedule"] = json.loads(f"[{fields['schedule'].strip().strip('[]')}]")
    try:
        return Edits.model_validate(fields), files
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else None
        raise Problem(400, f"{param}: {first['msg']}", param=param) from None


def _files(result: Result, body: Images) -> list[bytes]:
    if body.output_format in (None, "png"):
        return list(result.pngs)
    return [_encode(image, body) for image in result.images]


def _encode(image: Image.Image, body: Images) -> bytes:
    file = io.BytesIO()
    compression = 100 if body.output_compression is None else body.output_compression
    image.save(file, format=ENCODINGS[body.output_format or "png"], quality=min(95, max(1, compression)))
    return file.getvalue()


def _told(result: Result, body: Images) -> dict[str, Any]:
    image = result.images[0]
    return {"output_format": body.output_format or "png", "size": f"{image.width}x{image.height}"}


def _namer(job: Job, body: Images, kind: str, partial: int) -> Callable[[Event], Iterable[Named]]:
    """Events as the API names them; of the previews only as many as were asked for, evenly spread."""
    sent = 0
    about = {"created_at": int(job.created), "background": "opaque", "quality": body.quality or "auto"}

    def name(event: Event) -> Iterable[Named]:
        nonlocal sent
        if isinstance(event, Preview):
            share = (event.window + event.step / max(1, event.steps or 1)) / event.windows
            if sent < partial and share * (partial + 1) >= sent + 1 and share < 1:
                data = {"b64_json": encoded(event.pngs[0]), "partial_image_index": sent, "output_format": "png"}
                yield f"{kind}.partial_image", {"type": f"{kind}.partial_image", "size": "auto", **data, **about}
                sent += 1
        elif isinstance(event, Result):
            usage: dict[str, Any] = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
            usage |= {"input_tokens_details": {"image_tokens": 0, "text_tokens": 0}}
            for file, seed in zip(_files(event, body), event.seeds, strict=True):
                data = {"b64_json": encoded(file), "seed": seed, "usage": usage, **_told(event, body)}
                yield f"{kind}.completed", {"type": f"{kind}.completed", **data, **about}
        else:
            yield "error", event.body()

    return name
