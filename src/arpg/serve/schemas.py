"""What clients of /v1/arpg send and get. The OpenAPI schema is made of these, examples included."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from arpg.config import CONTROLS, EXPAND_METHODS
from arpg.serve.limits import Limits
from arpg.settings import ATTENTIONS, DECODES, GUIDANCE_SCHEDULES, ORDERS, SCHEDULES

MOST = Limits()  # what the schema promises; a server may be told to take less
TINY_PNG = (  # a grey square, so that examples are requests that work
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGElEQVR42mNoaGggCTGMahjVMKph5GogEQEAtzd/AXmXJJ8AAAAASUVORK5CYII="
)

Order: TypeAlias = Literal[ORDERS]  # type: ignore[valid-type]
Schedule: TypeAlias = Literal[SCHEDULES]  # type: ignore[valid-type]
GuidanceSchedule: TypeAlias = Literal[GUIDANCE_SCHEDULES]  # type: ignore[valid-type]
Attention: TypeAlias = Literal[ATTENTIONS]  # type: ignore[valid-type]
Decode: TypeAlias = Literal[DECODES]  # type: ignore[valid-type]
WayName: TypeAlias = Literal[EXPAND_METHODS]  # type: ignore[valid-type]
Kind: TypeAlias = Literal[CONTROLS]  # type: ignore[valid-type]
Sizes = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=1024)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
ClassName = Annotated[str, Field(max_length=200)] | int
ClassField = Annotated[ClassName | None, Field(alias="class", description="Name or id of a class; names ignore case.")]
Text = Annotated[str, Field(max_length=MOST.prompt)]
Base64 = Annotated[str, Field(min_length=1, max_length=MOST.bytes, description="A PNG, JPEG or WebP file in base64.")]
Feather = Annotated[int, Field(ge=0, le=256, description="Blend this many pixels inside the seam.")]
Side = Annotated[int, Field(ge=0, le=MOST.side, description="Pixels to add on this side.")]


class Strict(BaseModel):
    """No unknown field, and no text where a number is meant: a misspelt setting must not be ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False, allow_inf_nan=False)


class Sampling(Strict):
    """How it is drawn. What is not given (or null) is the model's own recommendation."""

    steps: Annotated[int, Field(ge=1, le=MOST.steps)] | None = Field(None, description="Decoding steps.")
    guidance: Annotated[float, Field(ge=0, le=100)] | None = Field(None, description="1 turns guidance off.")
    guidance_schedule: GuidanceSchedule | None = Field(None, description="How guidance grows.")
    order: Order | None = Field(None, description="In which order the tokens are filled.")
    schedule: Schedule | Sizes | None = Field(None, description="A name, or the number of tokens of each step.")
    attention: Attention | None = Field(None, description="Do the tokens of a step see each other?")
    decode: Decode | None = Field(None, description="exact and speculative need causal attention.")
    draft: Annotated[int, Field(ge=1, le=1024)] | None = Field(None, description="Tokens that these guess ahead.")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(None, description="0 is greedy.")
    top_k: Annotated[int, Field(ge=1, le=2**31)] | None = Field(None, description="Only the k most likely codes.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Only codes that reach this share.")

    def given(self) -> dict[str, Any]:
        """The settings that are not left to the model."""
        values = {name: getattr(self, name) for name in Sampling.model_fields}
        return {name: value for name, value in values.items() if value is not None}


class ControlImage(Strict):
    """A condition image: edges are white on black, near is white and far is black."""

    image: Base64
    kind: Kind | None = Field(None, description="One of the model's; null: its first.")
    strength: Annotated[float, Field(ge=0, le=MOST.strength)] = Field(1.0, description="0: no control; 1: as trained.")
    from_image: bool = Field(False, description="The image is a picture, of which edges or depth are taken.")


class Common(Sampling):
    class_: ClassField = None
    prompt: Text | None = Field(None, description="Instead of a class, where the model takes text.")
    negative: Text | None = Field(None, description="A prompt that guidance leads away from.")
    control: ControlImage | None = Field(None, description="What it shall follow, where the model takes such images.")
    num: int = Field(1, ge=1, le=MOST.images, description="How many images.")
    seed: Seed | None = Field(0, description="Image i has seed + i * best_of; null: a random one, told in the answer.")
    best_of: int = Field(1, ge=1, le=MOST.best_of, description="Draw so many of each, keep the most likely.")
    stream: bool = Field(False, description="Server-sent events with a preview after each step.")


def _example(*examples: dict[str, Any]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": list(examples)})


class Generate(Common):
    """Images of a class, or of a prompt where the model takes text."""

    model_config = _example({"class": 3, "num": 2, "steps": 12, "seed": 7}, {"class": 0, "stream": True})


class Inpaint(Common):
    """The white of the mask is filled; every other pixel stays as it is."""

    model_config = _example({"image": TINY_PNG, "mask": TINY_PNG, "class": 3, "steps": 8})
    image: Base64
    mask: Base64
    feather: Feather = 0


class Edit(Common):
    """The box is replaced by another class or prompt."""

    model_config = _example({"image": TINY_PNG, "box": [4, 4, 12, 12], "class": 3, "steps": 8})
    image: Base64
    box: Annotated[list[int], Field(min_length=4, max_length=4, description="Left, top, right, bottom in pixels.")]
    feather: Feather = 0


class Outpaint(Common):
    """The picture goes on beyond its sides."""

    model_config = _example({"image": TINY_PNG, "right": 8, "class": 3, "steps": 8})
    image: Base64
    left: Side = 0
    top: Side = 0
    right: Side = 0
    bottom: Side = 0


class Expand(Common):
    """A picture, or one of the class or prompt that is drawn first, at a larger size."""

    model_config = _example({"size": [128, 128], "class": 3, "way": "windows", "steps": 8})
    image: Base64 | None = None
    size: Annotated[
        list[Annotated[int, Field(ge=1, le=MOST.side)]], Field(min_length=2, max_length=2, description="Width, height.")
    ]
    way: WayName | None = Field(None, description="How the larger grid is filled.")


class Extract(Strict):
    """What a picture shows of a kind: its middle, of the shape and size that are asked for."""

    model_config = _example({"image": TINY_PNG, "kind": "canny"})
    image: Base64
    kind: Kind | None = Field(None, description="One of the model's; null: its first.")
    size: Annotated[list[Annotated[int, Field(ge=1, le=MOST.side)]], Field(min_length=2, max_length=2)] | None = Field(
        None, description="Width, height; null: the model's."
    )


class Extracted(BaseModel):
    png: str = Field(description="Base64; grey.")
    kind: str
    width: int
    height: int


class Picture(BaseModel):
    png: str = Field(description="Base64; its text chunk `arpg` holds the settings.")
    seed: int
    width: int
    height: int


class Answer(BaseModel):
    id: str
    created: int = Field(description="Seconds since 1970.")
    seconds: float = Field(description="From the request to the last image.")
    settings: dict[str, Any] = Field(description="All settings, as they were resolved.")
    images: list[Picture]


class Stepped(BaseModel):
    """The data of a `step` event."""

    step: int
    steps: int | None = Field(description="null where it is not known before the end (decode: exact).")
    window: int
    windows: int
    previews: list[str] = Field(description="Base64 PNG, one for each image; empty when the reader is too slow.")
    grid: tuple[int, int]
    decoded_at: list[list[int]] = Field(description="The step of each token; -1: not yet, -2: was known.")


class Choice(BaseModel):
    name: str
    about: str


class Thumbnails(BaseModel):
    url: str
    size: int
    columns: int


class ClassEntry(BaseModel):
    id: int
    name: str


class Classes(BaseModel):
    classes: list[ClassEntry]
    thumbnails: Thumbnails | None


class ControlInfo(BaseModel):
    kinds: list[Choice]
    extracts: list[str] = Field(description="The kinds that this server can take from a picture.")


class Info(BaseModel):
    model: str
    version: str
    classes: int
    takes: Literal["class", "text"]
    prompt_tokens: int | None = Field(description="What is beyond so many tokens of a prompt is cut; null: classes.")
    control: ControlInfo | None = Field(description="The condition images that the model takes; null: none.")
    image_size: tuple[int, int]
    grid: tuple[int, int]
    stride: int
    defaults: dict[str, Any]
    guidance_by_steps: list[tuple[int, float]]
    choices: dict[str, list[Choice]]
    limits: dict[str, int]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    nearest: list[str] | None = None


class Error(BaseModel):
    error: ErrorDetail
