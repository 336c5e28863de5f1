"""What is ordered: each kind of request as the drawing that answers it, checked against the limits."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from PIL import Image

from arpg.config import WAYS
from arpg.drawing import Drawing
from arpg.errors import InputError
from arpg.pipeline import Pipeline
from arpg.serve.limits import Limits, decode_base64, read_picture
from arpg.serve.problem import Problem
from arpg.serve.schemas import Common, Edit, Expand, Generate, Inpaint, Outpaint, Sampling

Ordered = tuple[Drawing, dict[str, Any]]  # and what to tell about it, with the settings


class Studies:
    """Orders for one model. Its methods decode pictures and run the tokenizer: not for the event loop's thread."""

    def __init__(self, pipeline: Pipeline, name: str, limits: Limits) -> None:
        self.pipeline, self.name, self.limits = pipeline, name, limits

    def generate(self, body: Generate) -> Ordered:
        class_ = body.class_ if body.class_ is not None else body.prompt
        if class_ is None or (body.class_ is not None and body.prompt is not None):
            raise Problem(400, "expected a class or a prompt, and not both", param="class")
        label = self.find(class_, param="prompt" if body.class_ is None else "class")
        return self.generate_label(label, self._options(body))

    def generate_label(self, label: int, options: dict[str, Any]) -> Ordered:
        return self._told("generate", label, self.pipeline.generation(label, **options))

    def inpaint(self, body: Inpaint) -> Ordered:
        image, mask = self._picture(body.image, "image"), self._picture(body.mask, "mask")
        return self.fill(image, mask, body.class_, feather=body.feather, options=self._options(body))

    def fill(
        self,
        image: Image.Image,
        mask: Image.Image,
        class_: str | int | None,
        *,
        feather: int,
        options: dict[str, Any],
        param: str = "class",
    ) -> Ordered:
        """White of the mask is filled."""
        label = None if class_ is None else self.find(class_, param=param)
        if mask.size != image.size:
            raise Problem(
                400,
                f"the mask is {mask.width}x{mask.height} pixels, the image {image.width}x{image.height}; they must be "
                "the same size",
                param="mask",
            )
        drawing = self.pipeline.inpainting(image, mask, label, feather=feather, **options)
        return self._told("inpaint", label, drawing)

    def edit(self, body: Edit) -> Ordered:
        label, image = self.find(body.class_), self._picture(body.image, "image")
        left, top, right, bottom = body.box
        box = (left, top, right, bottom)
        options = self._options(body)
        return self._told(
            "edit", label, self.pipeline.editing(image, box, label, feather=body.feather, **options), box=body.box
        )

    def outpaint(self, body: Outpaint) -> Ordered:
        label = None if body.class_ is None else self.find(body.class_)
        image = self._picture(body.image, "image")
        sides = {"left": body.left, "top": body.top, "right": body.right, "bottom": body.bottom}
        width, height = image.width + body.left + body.right, image.height + body.top + body.bottom
        if width * height > self.limits.pixels:
            raise Problem(400, f"the result would have {width}x{height} pixels; at most {self.limits.pixels} are made")
        drawing = self.pipeline.outpainting(image, label, **sides, **self._options(body))
        return self._told("outpaint", label, drawing, **sides)

    def expand(self, body: Expand) -> Ordered:
        label = None if body.class_ is None else self.find(body.class_)
        image = None if body.image is None else self._picture(body.image, "image")
        way = body.way or WAYS[0]
        return self.enlarge(image, label, (body.size[0], body.size[1]), way=way, options=self._options(body))

    def enlarge(
        self,
        image: Image.Image | None,
        label: int | None,
        size: tuple[int, int],
        *,
        way: str,
        options: dict[str, Any],
    ) -> Ordered:
        self.limits.check_size(size, param="size")
        drawing = self.pipeline.expansion(image, label, size=size, way=way, **options)
        return self._told("expand", label, drawing, size=list(size), way=way)

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

    def _options(self, body: Common) -> dict[str, Any]:
        return self.options(body, num=body.num, seed=body.seed, best_of=body.best_of)

    def _picture(self, text: str, param: str) -> Image.Image:
        return read_picture(decode_base64(text, param=param), self.limits, param=param)

    def _told(self, task: str, label: int | None, drawing: Drawing, **more: Any) -> Ordered:
        """Checks that the drawing is not too much work, and says what it is."""
        tokens = max(stage.grid[0] * stage.grid[1] for stage in drawing.stages)
        most = (self.limits.side // self.pipeline.tokenizer.config.stride) ** 2
        if tokens > most:
            raise Problem(
                400, f"the result would have {tokens} tokens; at most {most} are drawn, ask for a smaller size"
            )
        return drawing, {"model": self.name, "task": task, "class": label, **more}


def alpha_mask(mask: Image.Image) -> Image.Image:
    """White where a picture with transparency is fully transparent: that is what the OpenAI API edits."""
    return Image.fromarray(np.where(np.asarray(mask.getchannel("A")) == 0, 255, 0).astype(np.uint8))
