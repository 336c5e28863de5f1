"""The JSON of /v1/arpg: limits, request bodies, responses and `/info`. The OpenAPI schema is made of these.

The sampling settings come from `arpg.settings.SETTINGS`. The other fields of a body carry the names of the keyword
arguments of the matching `pipe.*_task` method: `build_task` passes them on by name.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model, field_validator

import arpg
from arpg.config import ModelConfig, TokenizerConfig
from arpg.extractors import can_extract
from arpg.serve.server_config import Limits
from arpg.settings import CONTROL_KINDS, EXPAND_METHODS, SETTINGS, TASK_SETTINGS, SamplingDefaults, Setting
from arpg.tasks.control_input import BINARY_KINDS
from arpg.tasks.stages import MAX_TOKENS

MAX = Limits()  # what the schema promises; a server may be configured to accept less
TINY_PNG = (  # a grey square, so that the examples are requests that work
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGElEQVR42mNoaGggCTGMahjVMKph5GogEQEAtzd/AXmXJJ8AAAAASUVORK5CYII="
)

Method: TypeAlias = Literal[EXPAND_METHODS]  # type: ignore[valid-type]
Kind: TypeAlias = Literal[CONTROL_KINDS]  # type: ignore[valid-type]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
ModelName = Annotated[str, Field(max_length=200, description="One of /v1/models; null: the first.")]
ClassName = Annotated[str, Field(max_length=200)] | int
Text = Annotated[str, Field(max_length=MAX.prompt)]
Base64 = Annotated[str, Field(min_length=1, max_length=MAX.bytes, description="A PNG, JPEG or WebP file in base64.")]
Feather = Annotated[int, Field(ge=0, le=TASK_SETTINGS["feather"].maximum, description=TASK_SETTINGS["feather"].help)]
Side = Annotated[int, Field(ge=0, le=MAX.side, description="Pixels to add on this side.")]
Size = Annotated[list[Annotated[int, Field(ge=1, le=MAX.side)]], Field(min_length=2, max_length=2)]
Positions = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_TOKENS)]
StepSizes = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=MAX.steps)]
_LISTS: Mapping[str, Any] = {"order": Positions, "schedule": StepSizes}  # what these take besides names


class StrictModel(BaseModel):
    """Refuses unknown fields and text where a number is expected, so that no misspelt setting is ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False, allow_inf_nan=False)


def _field(setting: Setting) -> tuple[Any, Any]:
    """Return type and default of a setting as a field of a pydantic model."""
    kind: Any = Literal[setting.names] if setting.choices else setting.kind
    if setting.name in _LISTS:
        kind = kind | _LISTS[setting.name]
    if setting.minimum is not None:
        bounds: Any = {"gt" if setting.above_minimum else "ge": setting.minimum, "le": setting.maximum}
        kind = Annotated[kind, Field(**bounds)]
    return kind | None, Field(None, description=setting.help)


_fields: Any = {name: _field(setting) for name, setting in SETTINGS.items()}
_SettingFields = create_model("_SettingFields", __base__=StrictModel, **_fields)


class Sampling(_SettingFields):  # type: ignore[valid-type,misc]
    """The sampling settings. A setting that is missing or null has the value that the model recommends."""

    def given(self) -> dict[str, Any]:
        """Return the settings that are not left to the model."""
        values = {name: getattr(self, name) for name in SETTINGS}
        return {name: value for name, value in values.items() if value is not None}


class ControlImage(StrictModel):
    """A condition image: edges are white on black, near is white and far is black."""

    image: Base64
    kind: Kind | None = Field(None, description="One of the model's kinds; null: its first.")
    strength: Annotated[float, Field(ge=0, le=MAX.strength)] = Field(1.0, description=TASK_SETTINGS["strength"].help)
    from_image: bool = Field(False, description="Extract the edges or the depth of the image first.")


class TaskParams(Sampling):
    """The parameters of all tasks."""

    model: ModelName | None = None
    class_: ClassName | None = Field(None, alias="class", description="Name or id of a class; names ignore case.")
    prompt: Text | None = Field(None, description="Instead of a class, for models that take text.")
    negative: Text | None = Field(None, description="A prompt that guidance leads away from.")
    control: ControlImage | None = Field(None, description="An image to follow, for models that take condition images.")
    num: int = Field(1, ge=1, le=MAX.images, description=TASK_SETTINGS["num_images"].help)
    seed: Seed | None = Field(0, description="Image i has seed + i * best_of; null: a random one, see the response.")
    best_of: int = Field(1, ge=1, le=MAX.best_of, description=TASK_SETTINGS["best_of"].help)
    stream: bool = Field(False, description="Server-sent events: one for each step, with previews.")
    previews: Annotated[int, Field(ge=0, le=MAX.steps)] | None = Field(
        None, description="Previews of a stream, at evenly spread steps; null: as many as are read."
    )
    preview_size: Annotated[int, Field(ge=8, le=MAX.side)] | None = Field(
        None, description="Pixels of the longer side of a preview; null: the size of the image."
    )

    @field_validator("seed")
    @classmethod
    def _choose_seed(cls, seed: int | None) -> int:
        return secrets.randbelow(2**32) if seed is None else seed


def _example(*examples: dict[str, Any]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": list(examples)})


class Generate(TaskParams):
    """Generate images of a class, or of a prompt where the model takes text."""

    model_config = _example({"class": 3, "num": 2, "steps": 12, "seed": 7}, {"class": 0, "stream": True})


class Inpaint(TaskParams):
    """Fill the white of the mask; every other pixel stays as it is."""

    model_config = _example({"image": TINY_PNG, "mask": TINY_PNG, "class": 3, "steps": 8})
    image: Base64
    mask: Base64
    feather: Feather = TASK_SETTINGS["feather"].default


class Edit(TaskParams):
    """Replace the box by another class or prompt."""

    model_config = _example({"image": TINY_PNG, "box": [4, 4, 12, 12], "class": 3, "steps": 8})
    image: Base64
    box: Annotated[list[int], Field(min_length=4, max_length=4, description="Left, top, right, bottom in pixels.")]
    feather: Feather = TASK_SETTINGS["feather"].default


class Outpaint(TaskParams):
    """Continue an image beyond its sides."""

    model_config = _example({"image": TINY_PNG, "right": 8, "class": 3, "steps": 8})
    image: Base64
    left: Side = 0
    top: Side = 0
    right: Side = 0
    bottom: Side = 0


class Expand(TaskParams):
    """Make an image, or one of the class or prompt that is generated first, larger."""

    model_config = _example({"size": [128, 128], "class": 3, "method": "windows", "steps": 8})
    image: Base64 | None = None
    size: Size = Field(description="Width, height.")
    method: Method | None = Field(
        None,
        validation_alias=AliasChoices("method", *TASK_SETTINGS["method"].aliases),
        description=TASK_SETTINGS["method"].help,
    )


TASKS: Mapping[str, type[TaskParams]] = {
    schema.__name__.lower(): schema for schema in (Generate, Inpaint, Edit, Outpaint, Expand)
}


class ExtractCondition(StrictModel):
    """Extract a condition image from the centre of an image, at the shape and size requested."""

    model_config = _example({"image": TINY_PNG, "kind": "canny"})
    model: ModelName | None = None
    image: Base64
    kind: Kind | None = Field(None, description="One of the model's kinds; null: its first.")
    size: Size | None = Field(None, description="Width, height; null: the model's.")


class ConditionResponse(BaseModel):
    """A condition image that was extracted from an image."""

    png: str = Field(description="Base64; grey.")
    kind: str
    width: int
    height: int


class Upscale(StrictModel):
    """Make a small image four times as large by a super-resolution network, for display."""

    model_config = _example({"image": TINY_PNG})
    image: Base64


class UpscaleResponse(BaseModel):
    """The larger image."""

    png: str = Field(description="Base64.")
    width: int
    height: int


class ImageEntry(BaseModel):
    """One image of a result."""

    png: str = Field(description="Base64; its text chunk `arpg` holds the settings.")
    seed: int
    width: int
    height: int


class TaskResponse(BaseModel):
    """The result of a task."""

    id: str
    created: int = Field(description="Seconds since 1970.")
    seconds: float = Field(description="From the request to the last image.")
    settings: dict[str, Any] = Field(description="All settings, as they were resolved.")
    images: list[ImageEntry]


class Choice(BaseModel):
    """A named value of a setting, and one line about it."""

    name: str
    about: str


class SettingInfo(BaseModel):
    """One sampling setting, or another number of a request, as a form shows it."""

    name: str
    type: Literal["int", "float", "str"]
    default: Any = Field(description="What the model recommends; null: none.")
    help: str
    choices: list[Choice] | None = Field(description="null: a number.")
    minimum: float | None
    maximum: float | None
    slider: tuple[float, float, float] | None = Field(description="Lowest and highest useful value, and the step.")
    advanced: bool


class Thumbnails(BaseModel):
    """One image with a square thumbnail of each class, row by row in the order of their ids."""

    url: str
    size: int
    columns: int


class ClassEntry(BaseModel):
    """A class of the model."""

    id: int
    name: str


class Classes(BaseModel):
    """All classes of the model."""

    classes: list[ClassEntry]
    thumbnails: Thumbnails | None


class ControlInfo(BaseModel):
    """The condition images that a model takes."""

    kinds: list[Choice]
    extracts: list[str] = Field(description="The kinds that this server can extract from an image.")
    binary_kinds: list[str] = Field(description="The kinds that are white lines on black and nothing between.")


class ServedModelEntry(BaseModel):
    """One of the models of a server."""

    name: str
    takes: Literal["classes", "prompts"]
    control: bool = Field(description="Whether it takes condition images.")
    default: bool = Field(description="Whether it is the model of requests that name none.")
    weight_bytes: int = Field(description="Memory of its weights.")


class Info(BaseModel):
    """The model, the settings with their defaults and choices, and the limits of the server."""

    model: str
    version: str
    about: str = Field(description="What the model knows; empty: its folder does not say.")
    examples: list[str] = Field(description="Classes or prompts to try.")
    classes: int
    takes: Literal["class", "text"]
    prompt_tokens: int | None = Field(description="A prompt is cut after this many tokens; null: takes classes.")
    control: ControlInfo | None = Field(description="The condition images that the model takes; null: none.")
    image_size: tuple[int, int]
    grid: tuple[int, int]
    stride: int
    defaults: dict[str, Any]
    guidance_by_steps: list[tuple[int, float]]
    settings: list[SettingInfo]
    task_settings: list[SettingInfo] = Field(description="Numbers that only some tasks take: feather and strength.")
    choices: dict[str, list[Choice]]
    limits: dict[str, int]
    upscales: bool = Field(False, description="Whether this server has a super-resolution network.")
    models: list[ServedModelEntry] = Field(default_factory=list, description="All models of this server.")


class ErrorDetail(BaseModel):
    """What is wrong, and with which parameter of the request."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    nearest: list[str] | None = None


class Error(BaseModel):
    """An error, in the form of the OpenAI API."""

    error: ErrorDetail


def model_info(
    name: str,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    sampling: SamplingDefaults,
    limits: Limits,
    *,
    about: str = "",
    examples: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the body of `/v1/arpg/info`: the model, its defaults, all settings and choices, and the limits."""
    defaults = dataclasses.asdict(sampling.settings())
    method, kinds = TASK_SETTINGS["method"], TASK_SETTINGS["kind"].choices
    best_of, feather, strength = (TASK_SETTINGS[name] for name in ("best_of", "feather", "strength"))
    control = model.control
    return {
        "model": name,
        "version": arpg.__version__,
        "about": about,
        "examples": list(examples),
        "classes": model.num_classes,
        "takes": "class" if model.text is None else "text",
        "prompt_tokens": None if model.text is None else model.text.max_tokens,
        "control": None
        if control is None
        else {
            "kinds": _choices({kind: kinds[kind] for kind in control.kinds}),
            "extracts": [kind for kind in control.kinds if can_extract(kind)],
            "binary_kinds": [kind for kind in control.kinds if kind in BINARY_KINDS],
        },
        "image_size": (model.grid[1] * tokenizer.stride, model.grid[0] * tokenizer.stride),
        "grid": model.grid,
        "stride": tokenizer.stride,
        "defaults": defaults,
        "guidance_by_steps": sampling.guidance_by_steps,
        "settings": [
            *(_setting_info(setting, limits, defaults[setting.name]) for setting in SETTINGS.values()),
            _setting_info(best_of, limits, best_of.default),
        ],
        "task_settings": [_setting_info(each, limits, each.default) for each in (feather, strength)],
        "choices": {
            **{setting.name: _choices(setting.choices) for setting in SETTINGS.values() if setting.choices},
            **{name: _choices(method.choices) for name in (method.name, *method.aliases)},
        },
        "limits": dataclasses.asdict(limits),
    }


def _choices(help: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "about": about} for name, about in help.items()]


def _setting_info(setting: Setting, limits: Limits, default: Any) -> dict[str, Any]:
    return {
        "name": setting.name,
        "type": setting.kind.__name__,
        "default": default,
        "help": setting.help,
        "choices": _choices(setting.choices) if setting.choices else None,
        "minimum": setting.minimum,
        "maximum": getattr(limits, setting.name, setting.maximum),
        "slider": setting.slider,
        "advanced": setting.advanced,
    }
