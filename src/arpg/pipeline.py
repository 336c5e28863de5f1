"""Pipeline: tokenizer, network, class names or text encoder together; the API that most users need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from arpg.checkpoint import FolderConfig, load_model, load_tokenizer, prepare, read_folder, write_folder
from arpg.classes import ClassNames, numbered_classes
from arpg.config import EXPAND_METHODS
from arpg.decode import Engine, Request, Step, make_plan
from arpg.device import choose_device as choose_device
from arpg.errors import require
from arpg.hub import home, resolve
from arpg.image import to_rgb
from arpg.likelihood import picture_bits
from arpg.model import ARPG
from arpg.quantization.precision import Precision, to_precision
from arpg.settings import SamplingDefaults, SamplingSettings
from arpg.tasks import Label, Prompt, stages
from arpg.tasks.canvas import Box, Canvas, box_mask
from arpg.tasks.control_input import ControlInput, Controls, checked
from arpg.tasks.task import ImageTask, TaskSpec
from arpg.text_encoder import PromptCache
from arpg.tokenizer import VQTokenizer

OnStep = Callable[[Step], None] | None


class Pipeline:
    """From class names, or from prompts, to images.

    >>> pipe = Pipeline.from_pretrained("arpg-xl")
    >>> images = pipe.generate(["golden retriever", "volcano"], num_images=4, seed=0)

    Where a method takes a class, a model that was trained on text takes `prompt` and `negative` (what guidance leads
    away from) instead.
    """

    def __init__(
        self,
        model: ARPG,
        tokenizer: VQTokenizer,
        *,
        sampling: SamplingDefaults | None = None,
        classes: ClassNames | None = None,
        license: str = "unknown",
        prompts: PromptCache | None = None,
        engine: str = "auto",
    ) -> None:
        """`prompts`: where the states of prompts come from; by default, the encoder that the model names.

        `engine`: how the loop is executed, see `decode/execution.py`.
        """
        require(
            model.config.vocab_size == tokenizer.config.codebook_size,
            f"the model speaks {model.config.vocab_size} codes, the tokenizer {tokenizer.config.codebook_size}; "
            "they do not belong together",
        )
        patch, stride = model.config.control and model.config.control.patch, tokenizer.config.stride
        require(patch in (None, stride), f"model.control.patch is {patch}; the tokenizer has {stride} pixels per token")
        self.model = model
        self.engine = Engine(model, engine)
        self.tokenizer = tokenizer
        self.sampling = sampling or SamplingDefaults()
        self.classes = classes or numbered_classes(model.config.num_classes)
        self.license = license
        text = model.config.text
        self.prompts = prompts or (None if text is None else PromptCache(text, device=model.device))

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        device: str | torch.device = "auto",
        precision: Precision = "auto",
        dtype: Precision | None = None,
        engine: str = "auto",
    ) -> Pipeline:
        """Load a folder, a published name (`arpg-l`, `arpg-xl`, `arpg-xxl`) or a hub id.

        `device="auto"` takes a GPU if there is one. `precision` is auto (bfloat16 on a GPU, float32 on a CPU), float32,
        bfloat16, float16, fp8 or int8 (8-bit weights, `arpg.quantization`), or a torch type; `dtype` is its old name.
        `engine` is auto (CUDA graphs on a GPU, eager elsewhere), eager, compiled or graph (`arpg.decode.execution`).
        The tokenizer stays in float32, but where the model computes in bfloat16, pixels are made in it, too.
        """
        folder = resolve(name)
        config = read_folder(folder)
        on = choose_device(device)
        precision = precision if dtype is None else dtype
        model = to_precision(load_model(folder), precision, on)
        tokenizer = load_tokenizer(folder, device=on, dtype=torch.float32)
        prepare(model, tokenizer)
        text = model.config.text
        prompts = None if text is None else PromptCache(text, folder=home() / "text", device=on)
        return cls(
            model,
            tokenizer,
            sampling=config.sampling,
            classes=config.classes,
            license=config.license,
            prompts=prompts,
            engine=engine,
        )

    def save_pretrained(self, folder: str | Path) -> None:
        config = FolderConfig(
            model=self.model.config,
            tokenizer=self.tokenizer.config,
            sampling=self.sampling,
            license=self.license,
            classes=self.classes if self.prompts is None else None,
        )
        write_folder(Path(folder), config, model=self.model.state_dict(), tokenizer=self.tokenizer.state_dict())

    def generate_task(
        self,
        classes: str | int | Sequence[str | int] | None = None,
        *,
        prompt: str | Sequence[str] | None = None,
        negative: str | Sequence[str | None] | None = None,
        num_images: int = 1,
        seed: int | Sequence[int] = 0,
        batch_size: int = 32,
        best_of: int = 1,
        control: Controls = None,
        **settings: Any,
    ) -> ImageTask:
        """`num_images` images of each class or prompt; image i has seed `seed + i`, or its own of a list.

        `negative`: what guidance leads away from, one text for all prompts or one for each.

        `best_of`: so many candidates are drawn for each image (with seeds that count on), and the one that the model
        finds most likely is kept. `control`: a condition image for all of them (then the class may be left out), or a
        list with one for each. `settings`: steps, guidance, order, schedule, guidance_schedule, temperature, top_k,
        top_p, attention, decode, draft; what is not given is the model's own recommendation.
        """
        asked: Any = prompt if classes is None else classes
        items: list[Any] = [asked] if asked is None or isinstance(asked, str | int) else list(asked)
        something = asked is not None or control is not None
        require(something and len(items) >= 1, f"no {self._takes} is given; there is nothing to draw")
        negatives = [negative] * len(items) if negative is None or isinstance(negative, str) else list(negative)
        require(
            len(negatives) == len(items),
            f"there are {len(negatives)} negative prompts for {len(items)}; expected one each",
        )
        given = None if prompt is None or classes is None else str(prompt)
        asks = [(None, item) if classes is None else (item, given) for item in items]
        found = [self._label(name, text, no) for (name, text), no in zip(asks, negatives, strict=True)]
        labels = tuple(label for label in found for _ in range(_number(num_images)))
        resolved = self.sampling.settings(**settings)
        first, own = (seed, None) if isinstance(seed, int) else (0, tuple(seed))
        wanted = TaskSpec(
            labels, resolved, first, best_of, batch_size, own, checked(control, self.model.config.control)
        )
        return ImageTask(self.model, self.tokenizer, wanted, stages=[stages.from_nothing(self.model.config.grid)])

    def inpaint_task(
        self,
        image: Image.Image,
        mask: Image.Image,
        class_: str | int | None = None,
        *,
        feather: int = 0,
        **options: Any,
    ) -> ImageTask:
        """Fill the white of the mask, given the rest, with a class, a prompt or what fits; pixels outside stay as they
        are.

        `feather` blends that many pixels inside the mask. Options: prompt, negative, num_images and all that
        `generate_task` takes; a condition image covers the whole picture.
        """
        wanted, picture = self._wanted(class_, **options), to_rgb(image)
        masked = np.asarray(mask.convert("L")) >= 128
        canvas = Canvas.fit(picture, masked, grid=self.model.config.grid, stride=self.tokenizer.config.stride)
        stage = stages.fill(canvas, feather=feather)
        return ImageTask(self.model, self.tokenizer, wanted, stages=[stage], pictures=[picture])

    def edit_task(self, image: Image.Image, box: Box, class_: str | int | None = None, **options: Any) -> ImageTask:
        """Put a class or a prompt into the box (left, top, right, bottom) of an image; options as in `inpaint_task`."""
        given = class_ is not None or options.get("prompt") is not None
        require(given, f"there is nothing to put into the box; give a {self._takes}")
        mask = Image.fromarray(box_mask(to_rgb(image).size, box).astype(np.uint8) * 255)
        return self.inpaint_task(image, mask, class_, **options)

    def outpaint_task(
        self,
        image: Image.Image,
        class_: str | int | None = None,
        *,
        left: int = 0,
        top: int = 0,
        right: int = 0,
        bottom: int = 0,
        **options: Any,
    ) -> ImageTask:
        """Continue a picture beyond its sides, by as many pixels as wanted; the picture itself stays as it is.

        A canvas larger than the trained grid is filled window by window, each leaning on what is there already. A
        condition image covers the whole canvas, and each window sees its part of it.
        """
        wanted, picture = self._wanted(class_, **options), to_rgb(image)
        grid, stride = self.model.config.grid, self.tokenizer.config.stride
        stage = stages.extend(Canvas.extend(picture, (left, top, right, bottom), grid=grid, stride=stride), grid)
        return ImageTask(self.model, self.tokenizer, wanted, stages=[stage], pictures=[picture])

    def expand_task(
        self,
        image: Image.Image | None = None,
        class_: str | int | None = None,
        *,
        size: tuple[int, int],
        way: str = EXPAND_METHODS[0],
        **options: Any,
    ) -> ImageTask:
        """A picture, or without one a picture of the class or prompt that is drawn first, at a larger (width, height).

        `way`: positions, windows or checkerboard, see `stages.expand`. Other options as in `generate_task`.
        """
        given = class_ is not None or options.get("prompt") is not None
        require(image is not None or given, f"there is neither a picture nor a {self._takes}; give one of them")
        wanted, picture = self._wanted(class_, **options), None if image is None else to_rgb(image)
        grid, stride = self.model.config.grid, self.tokenizer.config.stride
        own = (grid[1] * stride, grid[0] * stride) if picture is None else picture.size
        stage = stages.expand(own, size, window=grid, stride=stride, way=way)
        first = [stages.from_nothing(grid)] if picture is None else []
        pictures = [] if picture is None else [picture]
        return ImageTask(self.model, self.tokenizer, wanted, stages=[*first, stage], pictures=pictures)

    def control(
        self,
        image: Image.Image,
        class_: str | int | None = None,
        *,
        kind: str = "canny",
        strength: float = 1.0,
        from_image: bool = False,
        on_step: OnStep = None,
        **options: Any,
    ) -> list[Image.Image]:
        """Images of a class or prompt (or of whatever fits) that follow a condition image, or with `from_image` what a
        picture shows of the kind; options as in `generate_task`.
        """
        steer = self.condition_of(image, kind, strength) if from_image else ControlInput(image, kind, strength)
        return self.finish(self.generate_task(class_, control=steer, **options), on_step)

    def condition_of(
        self, picture: Image.Image, kind: str = "canny", strength: float = 1.0, *, depth: str | None = None
    ) -> ControlInput:
        """What a picture shows of a kind, at the size that the model was trained with; `depth`: see `open_depth`."""
        high, wide = (side * self.tokenizer.config.stride for side in self.model.config.grid)
        return ControlInput.of(picture, kind, strength, size=(wide, high), depth=depth)

    def generate(
        self, classes: str | int | Sequence[str | int] | None = None, *, on_step: OnStep = None, **options: Any
    ) -> list[Image.Image]:
        """Images of classes or prompts, as in `generate_task`. `on_step` is called after every step."""
        return self.finish(self.generate_task(classes, **options), on_step)

    def inpaint(
        self,
        image: Image.Image,
        mask: Image.Image,
        class_: str | int | None = None,
        *,
        on_step: OnStep = None,
        **options: Any,
    ) -> list[Image.Image]:
        """Fill the white of the mask, as in `inpaint_task`."""
        return self.finish(self.inpaint_task(image, mask, class_, **options), on_step)

    def edit(
        self, image: Image.Image, box: Box, class_: str | int | None = None, *, on_step: OnStep = None, **options: Any
    ) -> list[Image.Image]:
        """Put a class or a prompt into a box, as in `edit_task`."""
        return self.finish(self.edit_task(image, box, class_, **options), on_step)

    def outpaint(
        self, image: Image.Image, class_: str | int | None = None, *, on_step: OnStep = None, **options: Any
    ) -> list[Image.Image]:
        """Continue a picture beyond its sides, as in `outpaint_task`."""
        return self.finish(self.outpaint_task(image, class_, **options), on_step)

    def expand(
        self,
        image: Image.Image | None = None,
        class_: str | int | None = None,
        *,
        size: tuple[int, int],
        on_step: OnStep = None,
        **options: Any,
    ) -> list[Image.Image]:
        """A larger picture, as in `expand_task`."""
        return self.finish(self.expand_task(image, class_, size=size, **options), on_step)

    def stream(
        self, classes: str | int | Sequence[str | int] | None = None, *, num_images: int = 1, **options: Any
    ) -> Iterator[list[Image.Image]]:
        """The images of `generate_task` after each step, all in one batch; patches that are not there yet are grey."""
        asked = options.get("prompt") if classes is None else classes
        batch = max(1, num_images) * (1 if asked is None or isinstance(asked, str | int) else max(1, len(asked)))
        return self.previews(self.generate_task(classes, num_images=num_images, batch_size=batch, **options))

    def previews(self, drawing: ImageTask) -> Iterator[list[Image.Image]]:
        """What is there after each step of a drawing."""
        for step in self.steps(drawing):
            yield drawing.preview(step)

    def finish(self, drawing: ImageTask, on_step: OnStep = None) -> list[Image.Image]:
        """Draw it."""
        for step in self.steps(drawing):
            if on_step is not None:
                on_step(step)
        return drawing.images()

    def steps(self, drawing: ImageTask) -> Iterator[Step]:
        """Put the requests of a drawing through the loop, one after the other."""
        while (request := drawing.next_request()) is not None:
            for step in self.run(request, drawing.spec.settings):
                yield step
            drawing.accept(step)

    def run(self, request: Request, settings: SamplingSettings) -> Iterator[Step]:
        """Plan a request and put it through the loop."""
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        return self.engine.decode(request, plan, settings)

    def _wanted(
        self,
        class_: str | int | None,
        *,
        prompt: str | None = None,
        negative: str | None = None,
        num_images: int = 1,
        seed: int = 0,
        batch_size: int = 32,
        best_of: int = 1,
        control: Controls = None,
        **settings: Any,
    ) -> TaskSpec:
        labels = (self._label(class_, prompt, negative),) * _number(num_images)
        controls = checked(control, self.model.config.control)
        return TaskSpec(labels, self.sampling.settings(**settings), seed, best_of, batch_size, None, controls)

    @property
    def _takes(self) -> str:
        return "class" if self.prompts is None else "prompt"

    def _label(self, class_: str | int | None, prompt: str | None, negative: str | None) -> Label:
        """What a picture shall show; a class or a prompt where the model takes the other is an error that says so."""
        if self.prompts is None:
            for name, value in (("prompt", prompt), ("negative", negative)):
                require(
                    value is None,
                    f"{name} is {value!r}, but the model takes classes; give one of them (see `arpg classes`), or "
                    "choose a model that takes prompts, such as garden-text",
                )
            return self.model.config.num_classes if class_ is None else self.classes.find(class_)
        require(class_ is None, f"class is {class_!r}, but the model takes prompts; give a prompt instead")
        states = [None if text is None else self.prompts.states(text) for text in (prompt, negative)]
        return Prompt(prompt or "", states[0], negative or "", states[1])

    def score(
        self,
        image: Image.Image,
        class_: str | int | None = None,
        *,
        prompt: str | None = None,
        orders: int = 1,
        order: str = "random",
        seed: int = 0,
    ) -> NDArray[np.float32]:
        """`[orders, h, w]`: the bits of each token of an image under each order; their mean is the bits per token.

        The image is brought to the model's size by a centre crop. No class or prompt: the unconditional likelihood.
        """
        labels = [self._label(class_, prompt, None)]
        found = picture_bits(self.model, self.tokenizer, image, labels, orders=orders, order=order, seed=seed)
        bits: NDArray[np.float32] = found[0]
        return bits

    def classify(self, image: Image.Image, *, orders: int = 1, seed: int = 0) -> NDArray[np.float32]:
        """`[classes]`: bits per token of an image under each class, over the same random orders; the least is best."""
        require(
            self.prompts is None, "the model takes prompts, so it has no classes to choose from; score prompts instead"
        )
        labels = range(self.model.config.num_classes)
        bits = picture_bits(self.model, self.tokenizer, image, labels, orders=orders, order="random", seed=seed)
        means: NDArray[np.float32] = bits.mean((1, 2, 3))
        return means


def _number(num_images: int) -> int:
    require(num_images >= 1, f"the number of images is {num_images}; expected 1 or more")
    return num_images
