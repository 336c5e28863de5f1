"""The OpenAI Images API: generations, edits, variations, models, as the official client calls them; our settings."""

from __future__ import annotations

import io
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from arpg.image import to_rgb
from arpg.serve.api_error import ApiError, check, shorten
from arpg.serve.build_task import BuiltTask, TaskBuilder
from arpg.serve.job import Accepted, ImageFiles, JobStream, PreviewOptions, Result, StepEvent
from arpg.serve.native import ERRORS, task_responses
from arpg.serve.request_body import JsonRoute, read_form
from arpg.serve.responses import SseEvent, respond, to_base64, to_png
from arpg.serve.schemas import MAX, Feather, ModelName, Sampling, Seed, TaskParams, Text
from arpg.serve.service import ImageService
from arpg.settings import TASK_SETTINGS

QUALITY_FACTORS = {  # of the steps
    "low": 0.5,
    "medium": 1.0,
    "standard": 1.0,
    "auto": 1.0,
    "high": 2.0,
    "hd": 2.0,
    "xhigh": 3.0,
    "max": 4.0,
}
STANDARD_SIZES = frozenset(  # of OpenAI's models: what a client may send by default; mapped to what the model can do
    {"256x256", "512x512", "1024x1024", "1536x1024", "1024x1536", "1792x1024", "1024x1792"}
)
RESAMPLED_SHARE = 0.75  # of the patches of an image that is varied, or edited without a mask


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
        None,
        description="auto (the model's own) or WIDTHxHEIGHT; a larger one is made as by /v1/arpg/expand. Standard "
        "sizes of OpenAI's models that this one cannot make become the nearest that it can.",
    )
    quality: Literal[tuple(QUALITY_FACTORS)] | None = Field(  # type: ignore[valid-type]
        None, description="Steps: low 1/2, medium 1, high 2, xhigh 3, max 4 times the model's."
    )
    response_format: Literal["b64_json", "url"] | None = Field(None, description="url: fetch it within ten minutes.")
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = Field(None, description="Quality of JPEG, WebP.")
    background: Literal["auto", "opaque"] | None = Field(None, description="Images are opaque.")
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = Field(None, description="Returned as safety_identifier.")
    safety_identifier: Annotated[str, Field(max_length=512)] | None = Field(None, description="Returned; not used.")
    moderation: Literal["auto", "low"] | None = Field(None, description="Not used.")
    complexity: Literal["low", "medium", "high"] | None = Field(None, description="Not used.")
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, description="Not used."
    )
    store: bool | None = Field(None, description="Not used.")
    frame_count: Annotated[int, Field(ge=1, le=1)] | None = Field(None, description="One: there are no animations.")
    frame_duration_ms: Annotated[int, Field(ge=0, le=60000)] | None = Field(None, description="Not used.")
    seed: Seed | None = Field(None, description="Ours: image i has this seed + i; null: a random one.")
    best_of: Annotated[int, Field(ge=1, le=MAX.best_of)] | None = Field(None, description="Ours.")

    @property
    def file_format(self) -> str:
        """The format of the image files."""
        return self.output_format or "png"


class GenerationParams(ImagesParams):
    """Generate images of a prompt, or of the class that it names."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "3", "n": 2, "seed": 7, "steps": 12}]})
    style: Literal["vivid", "natural"] | None = Field(None, description="Not used.")


class EditParams(ImagesParams):
    """The fields of the form besides its files."""

    model_config = ConfigDict(strict=False)
    feather: Feather = TASK_SETTINGS["feather"].default
    input_fidelity: Literal["high", "low"] | None = Field(None, description="Not used: kept pixels stay as they are.")


class VariationParams(EditParams):
    """The fields of the form besides its file."""

    prompt: Annotated[str, Field(min_length=1, max_length=32000)] | None = Field(  # type: ignore[assignment]
        None, description="Ours: text, or the name or id of a class."
    )


class ImageData(BaseModel):
    """One image of a response."""

    b64_json: str | None = None
    url: str | None = Field(None, description="With response_format url.")
    seed: int = Field(description="Ours.")


class UsageDetails(BaseModel):
    """Tokens by kind."""

    image_tokens: int
    text_tokens: int


class UsageInfo(BaseModel):
    """Tokens of a request: of its prompt or class and of the kept part of its image, and those of the result."""

    input_tokens: int
    input_tokens_details: UsageDetails
    output_tokens: int
    output_tokens_details: UsageDetails
    total_tokens: int


class ImagesResponse(BaseModel):
    """The images of a request."""

    created: int
    data: list[ImageData]
    background: Literal["opaque"]
    output_format: str
    quality: str
    size: str = Field(description="The real one.")
    usage: UsageInfo
    safety_identifier: str | None = None


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
        "description": "As large as the image; its transparent pixels are edited. Without one, those of the image; "
        "where there are none, most of its patches.",
    },
}


def _form_schema(params: type[ImagesParams], *files: str, required: list[str]) -> dict[str, Any]:
    """Return the schema of a form, files included; a field that may be null is left out of a form instead."""
    fields = {}
    for name, field in params.model_json_schema()["properties"].items():
        kinds = [kind for kind in field.pop("anyOf", []) if kind != {"type": "null"}]
        field.pop("default", None)
        fields[name] = {**field, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})}
    properties = {**{name: FORM_FILES[name] for name in files}, **fields}
    schema = {"type": "object", "required": required, "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def openai_routes(service: ImageService) -> APIRouter:
    """Return the routes of the OpenAI Images API, and that of the images it has returned as URLs."""
    router = APIRouter(tags=["openai"], route_class=JsonRoute)
    started = int(time.time())
    store = ImageStore(max_bytes=service.settings.url_bytes, seconds=service.settings.url_seconds)

    def entry_of(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "arpg"}

    async def run_task(
        call: Request, params: ImagesParams, build: Callable[[TaskBuilder], BuiltTask], kind: str
    ) -> Response:
        check(
            params.response_format != "url" or store.max_bytes > 0,
            "response_format is 'url', which this server does not offer; use b64_json",
            param="response_format",
        )

        def to_url(data: bytes, media_type: str) -> str:
            address = (service.settings.public_url or str(call.base_url)).rstrip("/")
            return f"{address}/images/{store.add(data, media_type)}"

        form = ResponseFormat(params, kind, to_url)
        model = service.find_for(params.model, params.prompt)
        job = service.start(
            call,
            model,
            build,
            reads_files=kind == "image_edit",
            stream=bool(params.stream),
            previews=form.previews,
            encode=partial(_encode, params=params),
        )
        return await respond(job, call, to_body=form.body, to_sse=form.events)

    @router.get("/v1/models", response_model=ModelList, responses={401: ERRORS[401]})
    async def models() -> dict[str, Any]:
        """All models that are served, the default first."""
        return {"object": "list", "data": [entry_of(name) for name in service.names]}

    @router.get(
        "/v1/models/{model}", response_model=ModelEntry, responses={status: ERRORS[status] for status in (401, 404)}
    )
    async def model(model: str) -> dict[str, Any]:
        """A served model, by its name."""
        return entry_of(service.check_name(model))

    @router.post("/v1/images/generations", responses=IMAGES_RESPONSES)
    async def generations(call: Request, body: GenerationParams) -> Response:
        """Images of the prompt, or of the class that it names."""
        return await run_task(call, body, partial(_build_generation, params=body), "image_generation")

    async def run_edit(call: Request, schema: type[EditParams], *, masked: bool) -> Response:
        body, files = await _read_form(call, schema)
        check(masked or "mask" not in files, "a variation has no mask; send only an image", param="mask")

        build = partial(_build_edit, params=body, files=files, masked=masked)
        return await run_task(call, body, build, "image_edit")

    edit_form = _form_schema(EditParams, "image", "mask", required=["image", "prompt"])

    @router.post("/v1/images/edits", responses=IMAGES_RESPONSES, openapi_extra=edit_form)
    async def edits(call: Request) -> Response:
        """Fill the transparent part of the mask with the prompt, or the class that it names."""
        return await run_edit(call, EditParams, masked=True)

    variation_form = _form_schema(VariationParams, "image", required=["image"])

    @router.post("/v1/images/variations", responses=IMAGES_RESPONSES, openapi_extra=variation_form)
    async def variations(call: Request) -> Response:
        """Images that share a quarter of the patches with an image; the others are sampled again."""
        return await run_edit(call, VariationParams, masked=False)

    # Outside /v1: the name is the secret, no key is needed.
    @router.get(
        "/images/{name}", response_class=Response, responses={200: {"content": {"image/*": {}}}, 404: ERRORS[404]}
    )
    async def stored_image(name: str) -> Response:
        """An image that was requested with response_format url; no key is needed."""
        image = store.find(name)
        if image is None:
            raise ApiError(404, "there is no such image; URLs are valid for a short time, request it again")
        return Response(image.data, media_type=image.media_type, headers={"cache-control": "no-store"})

    return router


class StoredImage(NamedTuple):
    """An image file, its media type, and when it expires."""

    data: bytes
    media_type: str
    expires: float


class ImageStore:
    """Image files in memory under names that cannot be guessed. Used on the event loop alone.

    At most `max_bytes` are kept, for at most `seconds`; the oldest go first.
    """

    def __init__(self, *, max_bytes: int, seconds: float) -> None:
        self.max_bytes, self.seconds, self.num_bytes = max_bytes, seconds, 0
        self._images: OrderedDict[str, StoredImage] = OrderedDict()

    def add(self, data: bytes, media_type: str) -> str:
        """Keep a file and return its name; what is expired, and the oldest files in its way, are dropped."""
        self._drop_expired()
        while self._images and self.num_bytes + len(data) > self.max_bytes:
            self._drop_oldest()
        name = f"{secrets.token_urlsafe(32)}.{media_type.split('/')[1]}"
        self._images[name] = StoredImage(data, media_type, time.monotonic() + self.seconds)
        self.num_bytes += len(data)
        return name

    def find(self, name: str) -> StoredImage | None:
        """Return a file that is not expired."""
        self._drop_expired()
        return self._images.get(name)

    def _drop_expired(self) -> None:
        while self._images and next(iter(self._images.values())).expires <= time.monotonic():
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, image = self._images.popitem(last=False)
        self.num_bytes -= len(image.data)


def random_patches(size: tuple[int, int], grid: tuple[int, int], seed: int | None) -> Image.Image:
    """Return a mask of (width, height) that is white in most patches of the model's grid, chosen at random."""
    chosen = np.random.default_rng(seed).permutation(grid[0] * grid[1]) < RESAMPLED_SHARE * grid[0] * grid[1]
    cells = Image.fromarray(np.where(chosen.reshape(grid), 255, 0).astype(np.uint8))
    return cells.resize(size, Image.Resampling.NEAREST)


def transparent_part(image: Image.Image) -> Image.Image:
    """Return a mask that is white where an image is fully transparent: what the OpenAI API edits."""
    return Image.fromarray(np.where(np.asarray(image.getchannel("A")) == 0, 255, 0).astype(np.uint8))


def _build_generation(builder: TaskBuilder, *, params: GenerationParams) -> BuiltTask:
    """Build the task of `generations`."""
    common, label = _task_params(builder, params), builder.label_of(params.prompt, params.negative)
    size = _result_size(params, builder)
    if size == builder.image_size:
        return builder.build("generate", label, common)
    return builder.build("expand", label, common, size=size)


def _build_edit(builder: TaskBuilder, *, params: EditParams, files: dict[str, bytes], masked: bool) -> BuiltTask:
    """Build the task of `edits` (`masked`) or `variations`."""
    common = _task_params(builder, params)
    label = {} if params.prompt is None else builder.label_of(params.prompt, params.negative)
    image = builder.read_image(files["image"], param="image", alpha=masked)
    mask = None
    if masked:
        sent = builder.read_image(files["mask"], param="mask", alpha=True) if "mask" in files else image
        mask = transparent_part(sent)
    if mask is None or mask.getextrema() == (0, 0):
        check("mask" not in files, "mask has no transparent pixel; the transparent ones are edited", param="mask")
        mask = random_patches(image.size, builder.pipeline.model.config.grid, common.seed)
    _check_kept_size(params, image.size)
    return builder.build("inpaint", label, common, image=to_rgb(image), mask=mask, feather=params.feather)


def _encode(image: Image.Image, settings: dict[str, Any], *, params: ImagesParams) -> bytes:
    """Return the file of an image: in base64, unless it is fetched by its URL."""
    if params.file_format == "png":
        data = to_png(image, settings)
    else:
        file, compression = io.BytesIO(), params.output_compression
        quality = 95 if compression is None else min(95, max(1, compression))
        image.save(file, format=params.file_format, quality=quality)
        data = file.getvalue()
    return data if params.response_format == "url" else to_base64(data)


def _task_params(builder: TaskBuilder, params: ImagesParams) -> TaskParams:
    """Return the parameters of all tasks, from the fields of this API."""
    given = params.given()
    if params.quality is not None and "steps" not in given and not isinstance(params.schedule, list):
        steps = round(builder.pipeline.sampling.steps * QUALITY_FACTORS[params.quality])
        given["steps"] = max(1, min(builder.limits.steps, steps))
    return TaskParams(num=params.n or 1, seed=params.seed, best_of=params.best_of or 1, **given)


def _result_size(params: ImagesParams, builder: TaskBuilder) -> tuple[int, int]:
    """Return the (width, height) to generate.

    A standard size of OpenAI's models becomes the largest one of the model's shape that fits into it and the limits.
    """
    own, most = builder.image_size, builder.limits.side
    if params.size in (None, "auto"):
        return own
    width, height = map(int, str(params.size).split("x"))
    scale = min(width / own[0], height / own[1], most / max(own))
    nearest = (round(own[0] * scale), round(own[1] * scale)) if scale > 1 else own
    if params.size in STANDARD_SIZES:
        return nearest
    largest = tuple(round(side * most / max(own)) for side in own)
    check(
        (width, height) == nearest,
        f"size is {params.size}; this model makes {own[0]}x{own[1]} (or auto), larger ones of that shape up to "
        f"{largest[0]}x{largest[1]}, and for {', '.join(sorted(STANDARD_SIZES))} the nearest of these",
        param="size",
    )
    return width, height


def _check_kept_size(params: ImagesParams, size: tuple[int, int]) -> None:
    """Check the requested size of an edit, which is as large as its image; standard sizes stand for any."""
    allowed = {None, "auto", f"{size[0]}x{size[1]}", *STANDARD_SIZES}
    check(params.size in allowed, f"size is {params.size}; an edit is as large as its image", param="size")


async def _read_form(call: Request, params: type[EditParams]) -> tuple[EditParams, dict[str, bytes]]:
    """Read the fields and the files of a multipart form; each may be there once."""
    fields: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for name, value in await read_form(call):
        name = name.removesuffix("[]")
        shown = shorten(name)
        several = " (the model takes no reference images)" if name == "image" else ""
        check(name not in {**fields, **files}, f"{shown} is given more than once; expected one{several}", param=name)
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
        return params.model_validate(fields), files
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


class ResponseFormat:
    """The images and previews of one job in the format of the API.

    `kind` starts the names of events; `to_url` stores a file of a media type and returns its URL.
    """

    def __init__(self, params: ImagesParams, kind: str, to_url: Callable[[bytes, str], str]) -> None:
        self.params, self.kind, self.to_url = params, kind, to_url
        self.previews = PreviewOptions(params.partial_images) if params.stream and params.partial_images else None
        self._num_sent = 0

    def body(self, job: JobStream, made: ImageFiles) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        return {"created": int(job.created), "data": self._images(made), **self._about(made.result)}

    def events(self, job: JobStream, event: Accepted | StepEvent | ImageFiles) -> Iterable[SseEvent]:
        """Return the server-sent events of a preview (at most one) or of the result (one per image)."""
        created = {"created_at": int(job.created)}
        if isinstance(event, ImageFiles):
            name = f"{self.kind}.completed"
            for image in self._images(event):
                yield name, {"type": name, **image, **self._about(event.result), **created}
        elif isinstance(event, StepEvent) and event.previews:
            name = f"{self.kind}.partial_image"
            image = {"b64_json": event.previews[0], "partial_image_index": self._num_sent}
            about = {"size": "auto", "output_format": "png", "background": "opaque", "quality": self._quality}
            yield name, {"type": name, **image, **about, **created}
            self._num_sent += 1

    def _images(self, made: ImageFiles) -> list[dict[str, Any]]:
        images = zip(made.files, made.result.seeds, strict=True)
        if self.params.response_format == "url":
            return [
                {"url": self.to_url(file, f"image/{self.params.file_format}"), "seed": seed} for file, seed in images
            ]
        return [{"b64_json": file, "seed": seed} for file, seed in images]

    @property
    def _quality(self) -> str:
        """The quality in the words of a response, which has neither auto nor those of older models."""
        given = self.params.quality or "auto"
        return {"auto": "medium", "standard": "medium", "hd": "high"}.get(given, given)

    def _about(self, result: Result) -> dict[str, Any]:
        """Return what a response says besides the images."""
        (width, height), usage = result.size, result.usage
        tokens = usage.text_tokens + usage.image_tokens
        about: dict[str, Any] = {
            "background": "opaque",
            "output_format": self.params.file_format,
            "quality": self._quality,
            "size": f"{width}x{height}",
            "usage": {
                "input_tokens": tokens,
                "input_tokens_details": {"image_tokens": usage.image_tokens, "text_tokens": usage.text_tokens},
                "output_tokens": usage.output_tokens,
                "output_tokens_details": {"image_tokens": usage.output_tokens, "text_tokens": 0},
                "total_tokens": tokens + usage.output_tokens,
            },
        }
        who = self.params.safety_identifier or self.params.user
        return {**about, "safety_identifier": who} if who else about
