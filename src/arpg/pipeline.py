"""Pipeline: model, tokenizer, class names or text encoder together; the API that most users need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from arpg.checkpoint import FolderConfig, load_model, load_tokenizer, prepare, read_folder, write_folder
from arpg.classes import ClassNames, numbered_classes
from arpg.decode import Engine
from arpg.decode.likelihood import image_bits
from arpg.device import choose_device as choose_device
from arpg.errors import require
from arpg.hub import resolve
from arpg.image import to_rgb
from arpg.model import ARPG
from arpg.quantization.precision import Precision, to_precision
from arpg.settings import CONTROL_KINDS, EXPAND_METHODS, TASK_SETTINGS, SamplingDefaults, canonical_names
from arpg.storage import AnyPath, as_path, home
from arpg.tasks import Label, Prompt, label_condition, stages
from arpg.tasks.canvas import Box, Canvas, box_image
from arpg.tasks.control_input import ControlInput, Controls, check_controls
from arpg.tasks.task import ImageTask, OnStep, TaskSpec
from arpg.text_encoder import PromptCache
from arpg.tokenizer import Tokenizer

Classes = str | int | Sequence[str | int] | None
Seed = int | torch.Generator | Sequence[int | torch.Generator]


class Pipeline:
    """Generates and edits images of classes or prompts.

    Where a method takes a class, a model that was trained on text takes `prompt` and `negative` (a prompt that guidance
    leads away from) instead. Every task takes these options, and accepts the names of diffusers for some of them:

    - `num_images` (`num_images_per_prompt`): images of each class or prompt.
    - `seed` (`generator`): image i has seed `seed + i`; a list has one for each image. A `torch.Generator` stands for
      its initial seed: it is not advanced.
    - `best_of`: candidates sampled for each image (with consecutive seeds), of which the most likely is kept.
    - `batch_size`: images decoded together; tokens do not depend on it, pixels may differ by one grey level.
    - `control`: a `ControlInput`, or a list with one for each image.
    - `steps` (`num_inference_steps`), `guidance` (`guidance_scale`) and the other sampling settings
      (`arpg.settings.SETTINGS`); what is not given is the model's recommendation.

    Methods that return images also take `on_step`, a function that is called with every `Step`.

    Examples:
        >>> pipe = Pipeline.from_pretrained("arpg-xl")
        >>> images = pipe.generate(["golden retriever", "volcano"], num_images=4, seed=0)
        >>> task = pipe.outpaint_task(images[0], "volcano", right=48)  # every verb has a task, which can be streamed
        >>> for previews in task.stream():
        ...     previews[0].save("preview.png")
    """

    def __init__(
        self,
        model: ARPG,
        tokenizer: Tokenizer,
        *,
        sampling: SamplingDefaults | None = None,
        classes: ClassNames | None = None,
        license: str = "unknown",
        prompts: PromptCache | None = None,
        engine: str = "auto",
    ) -> None:
        """`prompts` encodes prompts; the default is the encoder that the model's configuration names.

        `engine` is how the decode loop is executed, see `from_pretrained`.
        """
        require(
            model.config.vocab_size == tokenizer.config.codebook_size,
            f"the model has {model.config.vocab_size} codes, the tokenizer {tokenizer.config.codebook_size}; "
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
        name: str | AnyPath,
        *,
        device: str | torch.device = "auto",
        precision: Precision = "auto",
        dtype: Precision | None = None,
        engine: str = "auto",
    ) -> Pipeline:
        """Load an installed model (`arpg info` lists them), a folder, a published model (`arpg-l`, `arpg-xl`,
        `arpg-xxl`) or a hub id.

        `device="auto"` takes a GPU if there is one. `precision` is auto (bfloat16 on a GPU, float32 on a CPU), float32,
        bfloat16, float16, fp8 or int8 (8-bit weights, `arpg.quantization`), or a torch dtype; `dtype` is its old name.
        `engine` is auto (CUDA graphs on a GPU, eager elsewhere), eager, compiled or graph (`arpg.decode.engine`).
        The tokenizer stays in float32, but decodes pixels in bfloat16 where the model computes in bfloat16.
        """
        folder = resolve(name)
        config = read_folder(folder)
        on = choose_device(device)
        precision = precision if dtype is None else dtype
        model = to_precision(load_model(folder, config=config), precision, on)
        tokenizer = load_tokenizer(folder, config=config, device=on, dtype=torch.float32)
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

    def save_pretrained(self, folder: str | AnyPath) -> None:
        """Write a model folder that `from_pretrained` loads."""
        config = FolderConfig(
            model=self.model.config,
            tokenizer=self.tokenizer.config,
            sampling=self.sampling,
            license=self.license,
            classes=self.classes if self.prompts is None else None,
        )
        write_folder(as_path(folder), config, model=self.model.state_dict(), tokenizer=self.tokenizer.state_dict())

    def generate_task(self, classes: Classes = None, **options: Any) -> ImageTask:
        """Sample images of classes or prompts from empty grids, see `generate`."""
        spec = self._generate_spec(classes, **options)
        return ImageTask(self.engine, self.tokenizer, spec, stages=[stages.generate_stage(self.model.config.grid)])

    def inpaint_task(
        self,
        image: Image.Image,
        mask: Image.Image,
        class_: str | int | None = None,
        *,
        feather: int = 0,
        **options: Any,
    ) -> ImageTask:
        """Sample the white part of a mask, see `inpaint`."""
        spec, rgb = self._spec(class_, **options), to_rgb(image)
        masked = np.asarray(mask.convert("L")) >= 128
        canvas = Canvas.fit(rgb, masked, grid=self.model.config.grid, stride=self.tokenizer.config.stride)
        stage = stages.inpaint_stage(canvas, feather=feather)
        return ImageTask(self.engine, self.tokenizer, spec, stages=[stage], images=[rgb])

    def edit_task(self, image: Image.Image, box: Box, class_: str | int | None = None, **options: Any) -> ImageTask:
        """Replace a box of an image, see `edit`."""
        given = class_ is not None or options.get("prompt") is not None
        require(given, f"there is nothing to put into the box; give a {self._takes}")
        return self.inpaint_task(image, box_image(to_rgb(image).size, box), class_, **options)

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
        """Continue an image beyond its sides, see `outpaint`."""
        spec, rgb = self._spec(class_, **options), to_rgb(image)
        grid, stride = self.model.config.grid, self.tokenizer.config.stride
        stage = stages.outpaint_stage(Canvas.extend(rgb, (left, top, right, bottom), grid=grid, stride=stride), grid)
        return ImageTask(self.engine, self.tokenizer, spec, stages=[stage], images=[rgb])

    def expand_task(
        self,
        image: Image.Image | None = None,
        class_: str | int | None = None,
        *,
        size: tuple[int, int],
        **options: Any,
    ) -> ImageTask:
        """Enlarge an image, see `expand`."""
        given = class_ is not None or options.get("prompt") is not None
        require(image is not None or given, f"there is neither an image nor a {self._takes}; give one of them")
        options = canonical_names(options)
        method = options.pop("method", None) or EXPAND_METHODS[0]
        spec, images = self._spec(class_, **options), [] if image is None else [to_rgb(image)]
        grid, stride = self.model.config.grid, self.tokenizer.config.stride
        image_size = images[0].size if images else self.image_size
        stage = stages.expand_stage(image_size, size, window=grid, stride=stride, method=method)
        first = [] if images else [stages.generate_stage(grid)]
        return ImageTask(self.engine, self.tokenizer, spec, stages=[*first, stage], images=images)

    def generate(self, classes: Classes = None, *, on_step: OnStep = None, **options: Any) -> list[Image.Image]:
        """Generate `num_images` images of each class or prompt.

        `prompt` and `negative` are a text or a list of texts. `control` is a condition image for all images (then the
        class may be left out), or a list with one for each.
        """
        return self.generate_task(classes, **options).run(on_step)

    def inpaint(
        self,
        image: Image.Image,
        mask: Image.Image,
        class_: str | int | None = None,
        *,
        on_step: OnStep = None,
        **options: Any,
    ) -> list[Image.Image]:
        """Fill the white part of a mask, given the rest of the image; pixels outside of the mask do not change.

        `feather` blends that many pixels inside the mask with the original. A condition image covers the whole image.
        """
        return self.inpaint_task(image, mask, class_, **options).run(on_step)

    def edit(
        self, image: Image.Image, box: Box, class_: str | int | None = None, *, on_step: OnStep = None, **options: Any
    ) -> list[Image.Image]:
        """Replace the box (left, top, right, bottom) of an image by a class or a prompt; options as in `inpaint`."""
        return self.edit_task(image, box, class_, **options).run(on_step)

    def outpaint(
        self, image: Image.Image, class_: str | int | None = None, *, on_step: OnStep = None, **options: Any
    ) -> list[Image.Image]:
        """Continue an image by `left`, `top`, `right` and `bottom` pixels; its own pixels do not change.

        A canvas larger than the trained grid is sampled window by window, each given what is known already. A
        condition image covers the whole canvas, and each window takes its part of it.
        """
        return self.outpaint_task(image, class_, **options).run(on_step)

    def expand(
        self,
        image: Image.Image | None = None,
        class_: str | int | None = None,
        *,
        size: tuple[int, int],
        on_step: OnStep = None,
        **options: Any,
    ) -> list[Image.Image]:
        """Enlarge an image to `size` (width, height) with newly sampled detail; without an image, generate one first.

        `method` is checkerboard (the default), positions or windows, see `arpg.tasks.stages.expand_stage`.
        """
        return self.expand_task(image, class_, size=size, **options).run(on_step)

    def control(
        self,
        image: Image.Image,
        class_: str | int | None = None,
        *,
        kind: str = CONTROL_KINDS[0],
        strength: float = 1.0,
        from_image: bool = False,
        on_step: OnStep = None,
        **options: Any,
    ) -> list[Image.Image]:
        """Generate images of a class, a prompt or neither that follow a condition image; options as in `generate`.

        `from_image`: `image` is a photograph or the like, whose edges or depth are the condition.
        """
        control = self.extract_control(image, kind, strength) if from_image else ControlInput(image, kind, strength)
        return self.generate(class_, control=control, on_step=on_step, **options)

    def extract_control(
        self, image: Image.Image, kind: str = CONTROL_KINDS[0], strength: float = 1.0, *, depth: str | None = None
    ) -> ControlInput:
        """Extract the edges or the depth of an image at the size that the model was trained with.

        `depth` names the depth model, see `arpg.extractors.open_depth`.
        """
        return ControlInput.from_image(image, kind, strength, size=self.image_size, depth=depth)

    def stream(self, classes: Classes = None, **options: Any) -> Iterator[list[Image.Image]]:
        """Generate as `generate` does, all images in one batch, and yield previews of them after every step.

        Patches that are not sampled yet are grey. Other tasks: `pipe.inpaint_task(...).stream()` and so on.
        """
        spec = self._generate_spec(classes, **options)
        spec = dataclasses.replace(spec, batch_size=len(spec.labels))
        stage = stages.generate_stage(self.model.config.grid)
        return ImageTask(self.engine, self.tokenizer, spec, stages=[stage]).stream()

    @property
    def image_size(self) -> tuple[int, int]:
        """Width and height of a generated image in pixels."""
        (high, wide), stride = self.model.config.grid, self.tokenizer.config.stride
        return wide * stride, high * stride

    def _generate_spec(
        self,
        classes: Classes = None,
        *,
        prompt: str | Sequence[str] | None = None,
        negative: str | Sequence[str | None] | None = None,
        **options: Any,
    ) -> TaskSpec:
        """Resolve one or several classes or prompts, and the options of a task."""
        given: Any = prompt if classes is None else classes
        items: list[Any] = [given] if given is None or isinstance(given, str | int) else list(given)
        something = given is not None or options.get("control") is not None
        require(something and len(items) >= 1, f"no {self._takes} is given; there is nothing to generate")
        negatives = [negative] * len(items) if negative is None or isinstance(negative, str) else list(negative)
        require(
            len(negatives) == len(items),
            f"there are {len(negatives)} negative prompts for {len(items)}; expected one each",
        )
        both = None if prompt is None or classes is None else str(prompt)  # an error that `_label` explains
        pairs = [(None, item) if classes is None else (item, both) for item in items]
        labels = [self._label(name, text, no) for (name, text), no in zip(pairs, negatives, strict=True)]
        return self._task_spec(labels, **canonical_names(options))

    def _spec(
        self, class_: str | int | None, *, prompt: str | None = None, negative: str | None = None, **options: Any
    ) -> TaskSpec:
        """Resolve a class or a prompt, and the options of a task."""
        return self._task_spec([self._label(class_, prompt, negative)], **canonical_names(options))

    def _task_spec(
        self,
        labels: Sequence[Label],
        *,
        num_images: int = 1,
        seed: Seed = 0,
        batch_size: int = 32,
        best_of: int = 1,
        control: Controls = None,
        **settings: Any,
    ) -> TaskSpec:
        TASK_SETTINGS["num_images"].check(num_images)
        seed = read_seed(seed)
        return TaskSpec(
            tuple(label for label in labels for _ in range(num_images)),
            self.sampling.settings(**settings),
            seed=seed if isinstance(seed, int) else 0,
            seeds=None if isinstance(seed, int) else tuple(seed),
            best_of=best_of,
            batch_size=batch_size,
            controls=check_controls(control, self.model.config.control),
        )

    @property
    def _takes(self) -> str:
        return "class" if self.prompts is None else "prompt"

    def _label(self, class_: str | int | None, prompt: str | None, negative: str | None) -> Label:
        """Return the class id or the encoded prompt; the other of both is an `InputError`."""
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
        """Return the bits of each token of an image under each of several orders, `[orders, h, w]`.

        Their mean is the bits per token. The image is centre-cropped to the model's size. Without a class or prompt it
        is the unconditional likelihood.
        """
        labels = label_condition(self.model, [self._label(class_, prompt, None)])
        found = image_bits(self.model, self.tokenizer, image, labels, orders=orders, order=order, seed=seed)
        bits: NDArray[np.float32] = found[0]
        return bits

    def classify(self, image: Image.Image, *, orders: int = 1, seed: int = 0) -> NDArray[np.float32]:
        """Return the bits per token of an image under each class, `[classes]`; fewest bits: the most likely class."""
        require(
            self.prompts is None, "the model takes prompts, so it has no classes to choose from; score prompts instead"
        )
        labels = label_condition(self.model, range(self.model.config.num_classes))
        bits = image_bits(self.model, self.tokenizer, image, labels, orders=orders, order="random", seed=seed)
        means: NDArray[np.float32] = bits.mean((1, 2, 3))
        return means


def read_seed(seed: Seed) -> int | Sequence[int]:
    """Return an int or a list of ints; a torch generator stands for its initial seed."""
    if isinstance(seed, torch.Generator):
        return seed.initial_seed()
    if isinstance(seed, Sequence):
        return [each.initial_seed() if isinstance(each, torch.Generator) else each for each in seed]
    return seed
