"""From an HTTP call to an `ImageTask`: its parameters are checked against the limits and passed on by name."""

from __future__ import annotations

import io
import math
import re
import struct
from typing import Any, cast

import pybase64
from PIL import Image

from arpg.errors import InputError
from arpg.extractors import can_extract
from arpg.image import to_rgb, to_rgba
from arpg.pipeline import Pipeline
from arpg.serve.api_error import ApiError, check, shorten
from arpg.serve.schemas import TASKS, ControlImage, ExtractCondition, TaskParams, Upscale
from arpg.serve.server_config import Limits
from arpg.serve.upscaler import load_upscaler
from arpg.settings import EXPAND_METHODS
from arpg.tasks.control_input import ControlInput
from arpg.tasks.task import ImageTask

OWN_FIELDS = {  # what a task takes besides the parameters of all tasks
    task: [name for name in schema.model_fields if name not in TaskParams.model_fields]
    for task, schema in TASKS.items()
}
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")  # Pillow reads many more, which would only be a larger surface to attack

BuiltTask = tuple[ImageTask, dict[str, Any]]  # and what else than settings its response and PNG files list
FilteredImage = tuple[Image.Image, dict[str, Any]]  # an image that is not sampled, and what its response says of it


class TaskBuilder:
    """Builds the tasks of one model. Reads images and prompts with networks: not for the event loop's thread."""

    def __init__(self, pipeline: Pipeline, name: str, limits: Limits) -> None:
        self.pipeline, self.name, self.limits = pipeline, name, limits
        self.takes_text = pipeline.prompts is not None
        self.image_size = pipeline.image_size

    def from_params(self, task: str, params: TaskParams) -> BuiltTask:
        """Build a task from the body of a call of /v1/arpg."""
        needs_label = task == "edit" or (task == "generate" and params.control is None)
        needs_label |= task == "expand" and params.image is None
        label = self._label(params, required=needs_label)
        own: dict[str, Any] = {}
        for name in OWN_FIELDS[task]:
            value = getattr(params, name)
            if value is None:
                continue
            if name in ("image", "mask"):
                value = self.read_base64(value, name)
            own[name] = tuple(value) if isinstance(value, list) else value
        return self.build(task, label, params, **own)

    def build(self, task: str, label: dict[str, Any], params: TaskParams, **own: Any) -> BuiltTask:
        """Build `pipe.TASK_task(...)`; `label` is what `label_of` returns, `own` the parameters of this task alone."""
        if task == "expand":
            own = {"image": None, **own}
            own.setdefault("method", EXPAND_METHODS[0])
        result_size = self._check_sizes(task, own)
        options = self._options(params)
        if params.control is not None:
            options["control"] = self._control_input(params.control, result_size)
        arguments = {"class_": None, **label, **own, **options}
        if task == "generate":
            arguments["classes"] = arguments.pop("class_")
        built: ImageTask = getattr(self.pipeline, f"{task}_task")(**arguments)
        tokens = max(math.prod(stage.grid) for stage in built.stages)
        self.limits.check_tokens(tokens, stride=self.pipeline.tokenizer.config.stride)
        shown = {"prompt": None, **label} if self.takes_text else {"class": label.get("class_")}
        for name, value in own.items():
            if name not in ("image", "mask", "feather"):
                key = "way" if name == "method" else name  # the metadata of images has the old name
                shown[key] = list(value) if isinstance(value, tuple) else value
        for each in built.spec.controls:
            shown["control"] = {"kind": each.kind, "strength": each.strength}
        return built, {"model": self.name, "task": task, **shown}

    def extract_condition(self, params: ExtractCondition) -> FilteredImage:
        """Return the condition image of an image, and its kind; without a size, at the model's."""
        control = ControlImage(image=params.image, kind=params.kind, strength=1.0, from_image=True)
        size = self.image_size if params.size is None else (params.size[0], params.size[1])
        self._check_side(size)
        found = self._control_input(control, size, param="image")
        return found.image, {"kind": found.kind}

    def upscale(self, params: Upscale) -> FilteredImage:
        """Return a small image four times as large."""
        return load_upscaler().upscale(self.read_base64(params.image, "image")), {}

    def label_of(self, prompt: str, negative: str | None) -> dict[str, Any]:
        """Return the label of a call of the OpenAI API: its prompt, or the class that it names."""
        texts = self._texts(prompt, negative)
        if self.takes_text:
            return texts
        self._refuse("negative", negative)
        return {"class_": self._find_class(prompt, param="prompt")}

    def read_image(self, data: bytes, *, param: str, alpha: bool = False) -> Image.Image:
        """Decode an image as RGB, or RGBA with `alpha`. Its size is checked before any pixel is decoded."""
        try:
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                width, height = image.size
                pixels, side = self.limits.pixels, self.limits.input_side
                check(
                    width * height <= pixels and max(width, height) <= side,
                    f"{param} has {width}x{height} pixels; at most {pixels}, and {side} along a side, are accepted, "
                    "make it smaller",
                    param=param,
                    code="too_large",
                    status=413,
                )
                return to_rgba(image) if alpha else to_rgb(image)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise ApiError(
                413, f"{param} has too many pixels; make it smaller", param=param, code="too_large"
            ) from None
        except (OSError, SyntaxError, ValueError, TypeError, EOFError, OverflowError, struct.error):
            raise ApiError(
                400, f"{param} cannot be read as an image; expected a whole PNG, JPEG or WebP file", param=param
            ) from None

    def read_base64(self, text: str, param: str, *, alpha: bool = False) -> Image.Image:
        """Decode an image in base64, see `read_image`."""
        return self.read_image(decode_base64(text, param=param), param=param, alpha=alpha)

    def _label(self, params: TaskParams, *, required: bool) -> dict[str, Any]:
        """Return the class or the texts as keyword arguments, whichever the model takes; none given: no condition."""
        if self.takes_text:
            self._refuse("class", params.class_)
            label, name = self._texts(params.prompt, params.negative), "prompt"
        else:
            self._refuse("prompt", params.prompt)
            self._refuse("negative", params.negative)
            label, name = {}, "class_"
            if params.class_ is not None:
                label = {"class_": self._find_class(params.class_, param="class")}
        public = name.rstrip("_")
        check(not required or name in label, f"no {public} is given; this task needs one", param=public)
        return label

    def _texts(self, prompt: str | None, negative: str | None) -> dict[str, Any]:
        texts = {name: text for name, text in (("prompt", prompt), ("negative", negative)) if text is not None}
        for name, text in texts.items():
            check(
                len(text) <= self.limits.prompt,
                f"{name} has {len(text)} characters; at most {self.limits.prompt} are accepted, make it shorter",
                param=name,
                code="too_long",
            )
        return texts

    def _find_class(self, class_: str | int, *, param: str) -> int:
        """Return the id of a class; the error for an unknown one lists the nearest names."""
        classes = self.pipeline.classes
        try:
            return classes.find(class_)
        except InputError as error:
            nearest = [classes.name(i) for i in classes.nearest(str(class_))]
            raise ApiError(400, str(error), param=param, code="unknown_class", nearest=nearest) from None

    def _refuse(self, name: str, value: str | int | None) -> None:
        """Refuse what belongs to the other kind of model."""
        if value is None:
            return
        other = "prompts; give a prompt instead" if self.takes_text else "classes; give one of /v1/arpg/classes"
        code = "takes_text" if self.takes_text else "takes_class"
        raise ApiError(400, f"{name} is {shorten(value)}, but the model takes {other}", param=name, code=code)

    def _options(self, params: TaskParams) -> dict[str, Any]:
        """Return the options of all tasks; numbers and settings are checked here, before any work."""
        limits, num, best_of = self.limits, params.num, params.best_of
        for name, value, most, what in (
            ("num", num, limits.images, "images per request"),
            ("best_of", best_of, limits.best_of, "candidates per image"),
            ("num * best_of", num * best_of, limits.candidates, "candidates per request"),
        ):
            check(value <= most, f"{name} is {value}; at most {most} {what}", param=name.split()[-1])
        given = params.given()
        steps = self.pipeline.sampling.settings(**given).steps
        check(steps <= limits.steps, f"steps is {steps}; at most {limits.steps} are accepted", param="steps")
        return {"num_images": num, "seed": params.seed, "best_of": best_of, "batch_size": num * best_of, **given}

    def _check_sizes(self, task: str, own: dict[str, Any]) -> tuple[int, int]:
        """Check image sizes before any work; return the (width, height) of the result."""
        image: Image.Image | None = own.get("image")
        if task == "expand":
            size: tuple[int, int] = own["size"]
            self._check_side(size)
            return size
        if image is None:
            return self.image_size
        mask: Image.Image = own.get("mask", image)
        check(
            mask.size == image.size,
            f"mask is {mask.width}x{mask.height} pixels, image is {image.width}x{image.height}; expected the same size",
            param="mask",
        )
        width = image.width + own.get("left", 0) + own.get("right", 0)
        height = image.height + own.get("top", 0) + own.get("bottom", 0)
        most = self.limits.pixels
        check(width * height <= most, f"the result would have {width}x{height} pixels; at most {most}")
        return width, height

    def _check_side(self, size: tuple[int, int]) -> None:
        check(
            max(size) <= self.limits.side,
            f"the result would have {size[0]}x{size[1]} pixels; at most {self.limits.side} along a side",
            param="size",
            code="too_large",
        )

    def _control_input(self, control: ControlImage, size: tuple[int, int], *, param: str = "control") -> ControlInput:
        """Read a condition image, or extract it at `size` from an image."""
        config = self.pipeline.model.config.control
        if config is None:
            raise ApiError(
                400,
                f"{param} is given, but the model takes no condition images; leave it out",
                param=param,
                code="no_control",
            )
        kind = cast(str, control.kind or config.kinds[0])
        check(kind in config.kinds, f"kind is {kind!r}; the model takes {', '.join(config.kinds)}", param=param)
        if not control.from_image:
            return ControlInput(self.read_base64(control.image, param, alpha=True), kind, control.strength)
        check(
            can_extract(kind),
            f"this server cannot extract {kind} from an image; send a ready-made condition image",
            param=param,
            code="no_extractor",
        )
        return ControlInput.from_image(self.read_base64(control.image, param), kind, control.strength, size=size)


def decode_base64(text: str, *, param: str) -> bytes:
    """Decode a field or a data: URL. Nothing is ever fetched."""
    text = re.sub(r"^data:image/[a-z+.-]{1,20};base64,", "", text)
    is_url = re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", text[:64]) is not None
    check(not is_url, f"{param} is a URL; nothing is fetched here, send the image itself in base64", param=param)
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError:
        raise ApiError(400, f"{param} is not base64; send a PNG, JPEG or WebP file in base64", param=param) from None
