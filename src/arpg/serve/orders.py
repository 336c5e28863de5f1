"""What is ordered: each kind of request as the drawing that answers it, checked against the limits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from PIL import Image

from arpg.config import EXPAND_METHODS, ControlConfig
from arpg.errors import InputError
from arpg.extractors import can_extract
from arpg.pipeline import Pipeline
from arpg.serve.limits import Limits, decode_base64, read_picture
from arpg.serve.problem import Problem
from arpg.serve.schemas import Common, ControlImage, Edit, Expand, Extract, Generate, Inpaint, Outpaint, Sampling
from arpg.tasks.control_input import ControlInput
from arpg.tasks.task import ImageTask

Ordered = tuple[ImageTask, dict[str, Any]]  # and what to tell about it, with the settings


@dataclass(frozen=True)
class Subject:
    """What a picture shall show: a class or texts, whichever the model takes. Nothing at all: what fits."""

    class_: int | None = None
    prompt: str | None = None
    negative: str | None = None

    @property
    def texts(self) -> dict[str, Any]:
        """What the pipeline is given besides a class."""
        given = {"prompt": self.prompt, "negative": self.negative}
        return {name: text for name, text in given.items() if text is not None}


class Studies:
    """Orders for one model. Its methods read pictures and prompts with networks: not for the event loop's thread."""

    def __init__(self, pipeline: Pipeline, name: str, limits: Limits) -> None:
        self.pipeline, self.name, self.limits = pipeline, name, limits

    def generate(self, body: Generate) -> Ordered:
        subject = self._subject(body, needed=body.control is None)
        return self.draw(subject, self._options(body) | self._control(body.control, self.size))

    def draw(self, subject: Subject, options: dict[str, Any]) -> Ordered:
        return self._told("generate", subject, self.pipeline.generate_task(subject.class_, **subject.texts, **options))

    def inpaint(self, body: Inpaint) -> Ordered:
        subject = self._subject(body)
        image, mask = self._picture(body.image, "image"), self._picture(body.mask, "mask")
        options = self._options(body) | self._control(body.control, image.size)
        return self.fill(image, mask, subject, feather=body.feather, options=options)

    def fill(
        self,
        image: Image.Image,
        mask: Image.Image,
        subject: Subject,
        *,
        feather: int,
        options: dict[str, Any],
    ) -> Ordered:
        """White of the mask is filled."""
        if mask.size != image.size:
            raise Problem(
                400,
                f"the mask is {mask.width}x{mask.height} pixels, the image {image.width}x{image.height}; they must be "
                "the same size",
                param="mask",
            )
        drawing = self.pipeline.inpaint_task(image, mask, subject.class_, feather=feather, **subject.texts, **options)
        return self._told("inpaint", subject, drawing)

    def edit(self, body: Edit) -> Ordered:
        subject, image = self._subject(body, needed=True), self._picture(body.image, "image")
        options = self._options(body) | self._control(body.control, image.size)
        left, top, right, bottom = body.box
        box = (left, top, right, bottom)
        drawing = self.pipeline.edit_task(image, box, subject.class_, feather=body.feather, **subject.texts, **options)
        return self._told("edit", subject, drawing, box=body.box)

    def outpaint(self, body: Outpaint) -> Ordered:
        subject, image = self._subject(body), self._picture(body.image, "image")
        sides = {"left": body.left, "top": body.top, "right": body.right, "bottom": body.bottom}
        width, height = image.width + body.left + body.right, image.height + body.top + body.bottom
        if width * height > self.limits.pixels:
            raise Problem(400, f"the result would have {width}x{height} pixels; at most {self.limits.pixels} are made")
        options = self._options(body) | self._control(body.control, (width, height))
        drawing = self.pipeline.outpaint_task(image, subject.class_, **sides, **subject.texts, **options)
        return self._told("outpaint", subject, drawing, **sides)

    def expand(self, body: Expand) -> Ordered:
        subject, way = self._subject(body, needed=body.image is None), body.way or EXPAND_METHODS[0]
        image = None if body.image is None else self._picture(body.image, "image")
        size = (body.size[0], body.size[1])
        self.limits.check_size(size, param="size")
        options = self._options(body) | self._control(body.control, size)
        return self.enlarge(image, subject, size, way=way, options=options)

    def enlarge(
        self,
        image: Image.Image | None,
        subject: Subject,
        size: tuple[int, int],
        *,
        way: str,
        options: dict[str, Any],
    ) -> Ordered:
        self.limits.check_size(size, param="size")
        drawing = self.pipeline.expand_task(image, subject.class_, size=size, way=way, **subject.texts, **options)
        return self._told("expand", subject, drawing, size=list(size), way=way)

    def extract(self, body: Extract) -> tuple[Image.Image, str]:
        """What a picture shows of a kind, and the kind; without a size, as a new picture would follow it."""
        given = ControlImage(image=body.image, kind=body.kind, strength=1.0, from_image=True)
        size = self.size if body.size is None else (body.size[0], body.size[1])
        self.limits.check_size(size, param="size")
        control: ControlInput = self._control(given, size, param="image")["control"]
        return control.image, control.kind

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of what the model draws."""
        (high, wide), stride = self.pipeline.model.config.grid, self.pipeline.tokenizer.config.stride
        return wide * stride, high * stride

    @property
    def takes(self) -> Literal["class", "text"]:
        return "class" if self.pipeline.prompts is None else "text"

    def named(self, prompt: str, negative: str | None) -> Subject:
        """What the prompt of the OpenAI API asks for: a class by its name, where the model takes classes."""
        if self.takes == "text":
            return self._texts(prompt, negative)
        self._refuse("negative", negative)
        return Subject(self.find(prompt, param="prompt"))

    def find(self, class_: str | int, *, param: str = "class") -> int:
        """The id of a class; an unknown one is a problem with the names that are nearest to it."""
        classes = self.pipeline.classes
        try:
            return classes.find(class_)
        except InputError as error:
            nearest = [classes.name(i) for i in classes.nearest(str(class_))]
            raise Problem(400, str(error), param=param, code="unknown_class", nearest=nearest) from None

    def options(self, sampling: Sampling, *, num: int, seed: int | None, best_of: int) -> dict[str, Any]:
        """What all drawings take. All settings are checked here, before any work."""
        self.limits.check_candidates(num, best_of)
        given = sampling.given()
        if isinstance(given.get("schedule"), list):
            given["schedule"] = tuple(given["schedule"])
        settings = self.pipeline.sampling.settings(**given)
        if settings.steps > self.limits.steps:
            raise Problem(400, f"steps is {settings.steps}; at most {self.limits.steps} are taken", param="steps")
        chosen = secrets.randbelow(2**32) if seed is None else seed
        return {"num_images": num, "seed": chosen, "best_of": best_of, "batch_size": num * best_of, **given}

    def _subject(self, body: Common, *, needed: bool = False) -> Subject:
        if self.takes == "text":
            self._refuse("class", body.class_)
            subject, missing, name = self._texts(body.prompt, body.negative), body.prompt is None, "prompt"
        else:
            self._refuse("prompt", body.prompt)
            self._refuse("negative", body.negative)
            subject, missing, name = Subject(), body.class_ is None, "class"
            if body.class_ is not None:
                subject = Subject(self.find(body.class_))
        if needed and missing:
            raise Problem(400, f"no {name} is given; the model takes one, so there is nothing to draw", param=name)
        return subject

    def _texts(self, prompt: str | None, negative: str | None) -> Subject:
        subject = Subject(None, prompt, negative)
        for name, text in subject.texts.items():
            self.limits.check_text(text, param=name)
        return subject

    def _refuse(self, name: str, value: str | int | None) -> None:
        """Whatever belongs to the other kind of model."""
        if value is not None:
            shown = repr(value if isinstance(value, int) or len(value) <= 40 else value[:40] + "...")
            other = (
                "prompts; give a prompt instead" if self.takes == "text" else "classes; give one of /v1/arpg/classes"
            )
            raise Problem(
                400, f"{name} is {shown}, but the model takes {other}", param=name, code=f"takes_{self.takes}"
            )

    def _options(self, body: Common) -> dict[str, Any]:
        return self.options(body, num=body.num, seed=body.seed, best_of=body.best_of)

    def _control(self, given: ControlImage | None, size: tuple[int, int], *, param: str = "control") -> dict[str, Any]:
        """The option `control`, where there is one. What is taken from a picture is taken at the size given."""
        if given is None:
            return {}
        config: ControlConfig | None = self.pipeline.model.config.control
        if config is None:
            raise Problem(
                400,
                f"{param} is given, but the model takes no condition images; leave it out",
                param=param,
                code="no_control",
            )
        kind = cast(str, given.kind or config.kinds[0])
        if kind not in config.kinds:
            raise Problem(400, f"kind is {kind!r}; the model takes {', '.join(config.kinds)}", param=param)
        if not given.from_image:
            image = read_picture(decode_base64(given.image, param=param), self.limits, param=param, alpha=True)
            return {"control": ControlInput(image, kind, given.strength)}
        if not can_extract(kind):
            raise Problem(
                400,
                f"this server cannot take {kind} from a picture; send a ready-made condition image",
                param=param,
                code="no_extractor",
            )
        return {"control": ControlInput.from_image(self._picture(given.image, param), kind, given.strength, size=size)}

    def _picture(self, text: str, param: str) -> Image.Image:
        return read_picture(decode_base64(text, param=param), self.limits, param=param)

    def _told(self, task: str, subject: Subject, drawing: ImageTask, **more: Any) -> Ordered:
        """Checks that the drawing is not too much work, and says what it is."""
        tokens = max(stage.grid[0] * stage.grid[1] for stage in drawing.stages)
        most = (self.limits.side // self.pipeline.tokenizer.config.stride) ** 2
        if tokens > most:
            raise Problem(
                400, f"the result would have {tokens} tokens; at most {most} are drawn, ask for a smaller size"
            )
        shown = {"prompt": subject.prompt, **subject.texts} if self.takes == "text" else {"class": subject.class_}
        for control in drawing.spec.controls:
            more["control"] = {"kind": control.kind, "strength": control.strength}
        return drawing, {"model": self.name, "task": task, **shown, **more}


def alpha_mask(mask: Image.Image) -> Image.Image:
    """White where a picture with transparency is fully transparent: that is what the OpenAI API edits."""
    return Image.fromarray(np.where(np.asarray(mask.getchannel("A")) == 0, 255, 0).astype(np.uint8))
