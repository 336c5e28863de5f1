"""Pipeline: model, tokenizer, class names or text encoder together; the API that most users need."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from arpg.checkpoint import MODEL, FolderConfig, load_model, load_tokenizer, prepare, read_folder, write_folder
from arpg.classes import ClassNames, numbered_classes
from arpg.config import DEFAULT_TEXT_MODEL, PRECISIONS
from arpg.decode import Engine, Step
from arpg.decode.graphs import GraphedTokenizer
from arpg.decode.likelihood import image_bits
from arpg.device import choose_device as choose_device
from arpg.errors import one_of, require
from arpg.files import hash_file
from arpg.hub import push, resolve
from arpg.image import ImageInput, to_image, to_mask, to_rgb
from arpg.lora import MergedAdapters, adapter_name, read_adapter
from arpg.model import ARPG
from arpg.quantization.packed import unpack_linears
from arpg.quantization.precision import Precision, kv_cache_dtype_of, precision_of, to_precision
from arpg.settings import CONTROL_KINDS, EXPAND_METHODS, TASK_SETTINGS, Order, SamplingDefaults, canonical_names
from arpg.storage import AnyPath, as_path, home
from arpg.tasks import Label, Prompt, label_condition, stages
from arpg.tasks.call import OUTPUT_TYPES, ImageOutput, choose_task, decode_with_bar, to_output
from arpg.tasks.control_input import ControlInput, check_controls
from arpg.tasks.options import (
    CallOptions,
    Class,
    Classes,
    ControlOptions,
    ExpandOptions,
    GenerateOptions,
    InpaintOptions,
    OutpaintOptions,
    TaskOptions,
    as_list,
    read_seed,
    show_options,
)
from arpg.tasks.stages import Box, Canvas, box_image
from arpg.tasks.task import ImageTask, OnStep, TaskSpec
from arpg.text_encoder import PromptCache
from arpg.tokenizer import PixelCodec, Tokenizer, VQTokenizer


class Pipeline:
    """Generates and edits images of classes or prompts. `pipe(...)` is the call of diffusers; the verbs say which task.

    Where a method takes a class, a model that was trained on text takes `prompt` and `negative` (a prompt that guidance
    leads away from) instead. Every task takes these options, and accepts the names of diffusers for some of them:

    - `num_images` (`num_images_per_prompt`): images of each class or prompt.
    - `seed` (`generator`): image i has seed `seed + i`; a list has one for each image, None is a random seed. A
      `torch.Generator` stands for its initial seed: it is not advanced.
    - `best_of`: candidates sampled for each image (with consecutive seeds), of which the most likely is kept.
    - `batch_size`: images decoded together; tokens do not depend on it, pixels may differ by one grey level.
    - `control`: a `ControlInput`, or a list with one for each image.
    - `steps` (`num_inference_steps`), `guidance` (`guidance_scale`) and the other sampling settings
      (`arpg.settings.SETTINGS`); what is not given is the model's recommendation.

    Methods that return images also take `on_step`, a function that is called with every `Step`. Images, masks and
    condition images are PIL images, arrays `[H, W, C]`, tensors `[C, H, W]` or paths (`arpg.image.to_image`). A
    progress bar is shown on a terminal and in a notebook, see `set_progress_bar_config`.

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
        codec: PixelCodec | None = None,
    ) -> None:
        """`prompts` encodes prompts; the default is the encoder that the model's configuration names.

        `engine` is how the decode loop is executed, see `from_pretrained`. `codec` is how tasks get ids of images and
        images of ids; the default is the tokenizer, called at once.
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
        self.weights: AnyPath | None = None  # the file that they come from, if any
        self._adapters: MergedAdapters | None = None
        self._graphed: GraphedTokenizer | None = None
        self._codec = codec
        text = model.config.text
        self.prompts = prompts or (None if text is None else PromptCache(text, device=model.device))
        self._progress_bar: dict[str, Any] = {}

    @classmethod
    def from_pretrained(
        cls,
        name: str | AnyPath,
        *,
        device: str | torch.device = "auto",
        precision: Precision = "auto",
        torch_dtype: Precision | None = None,
        dtype: Precision | None = None,
        engine: str = "auto",
        kv_cache_dtype: str = "auto",
    ) -> Pipeline:
        """Load an installed model (`arpg info` lists them), a folder, a published model (`arpg-l`, `arpg-xl`,
        `arpg-xxl`) or a hub id.

        `device="auto"` takes a GPU if there is one. `precision` is auto (bfloat16 on a GPU, float16 on GPUs before
        Ampere, float32 elsewhere), float32, bfloat16, float16, fp8 or int8 (8-bit weights, `arpg.quantization`), or a
        torch dtype; `torch_dtype` (as in diffusers) and `dtype` are other names of it.
        `engine` is auto (CUDA graphs on an NVIDIA GPU, else eager), eager, compiled or graph (`arpg.decode.engine`).
        `kv_cache_dtype` is auto (the type that the model computes in) or fp8, half of 16 bits, in any precision.
        The tokenizer stays in float32, but decodes pixels in bfloat16 where the model computes in bfloat16.
        """
        folder = resolve(name)
        config = read_folder(folder)
        on = choose_device(device)
        given = [each for each in (dtype, torch_dtype) if each is not None]
        require(
            len(given) + (precision != "auto") <= 1,
            "more than one of precision, dtype and torch_dtype is given; they are the same, leave the others out",
        )
        precision = given[0] if given else precision
        model = to_precision(load_model(folder, config=config), precision, on, kv_cache_dtype=kv_cache_dtype)
        tokenizer = load_tokenizer(folder, config=config, device=on, dtype=torch.float32)
        prepare(model, tokenizer, engine=engine)
        text = model.config.text
        prompts = None if text is None else PromptCache(text, folder=home() / "text", device=on)
        made = cls(
            model,
            tokenizer,
            sampling=config.sampling,
            classes=config.classes,
            license=config.license,
            prompts=prompts,
            engine=engine,
        )
        made.weights = folder / MODEL
        return made

    def load_lora(self, path: str | Path, scale: float = 1.0, *, name: str | None = None) -> None:
        """Merge a LoRA adapter (`arpg finetune --lora`) into the weights; its classes are added by name.

        Several can be loaded; their additions are summed, each times its `scale`. `name` (the default is that of the
        file, or of its folder) is what `unload_lora` takes; loading the same name again changes its scale.
        """
        if self._adapters is None:
            known = None if self.weights is None else hash_file(self.weights)
            self._adapters = MergedAdapters(self.model, self.classes, known)
        self._adapters.add(name or adapter_name(path), read_adapter(path), scale)
        self._adapters_changed()

    def unload_lora(self, name: str | None = None) -> None:
        """Remove an adapter, or all of them; the weights are then exactly what they were."""
        if self._adapters is not None:
            self._adapters.remove(name)
            self._adapters_changed()

    def _adapters_changed(self) -> None:
        assert self._adapters is not None
        self.classes = self._adapters.classes
        self.engine = self.engine.on_device_of_model()  # captured graphs read the layers that the model had

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

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str = "Upload an ARPG model",
        create_pr: bool = False,
    ) -> str:
        """Upload the model folder to a repository of the Hugging Face hub, which is created if there is none.

        Returns the address of the commit. A repository without README.md gets a model card.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push(
                Path(folder),
                repo_id,
                license=self.license,
                private=private,
                token=token,
                message=commit_message,
                create_pr=create_pr,
            )

    def to(
        self,
        *where: str | torch.device | torch.dtype,
        device: str | torch.device | None = None,
        dtype: Precision | None = None,
    ) -> Pipeline:
        """Move to a device and change the precision, in place: `pipe.to("cuda")`, `pipe.to("cpu", torch.bfloat16)`.

        What is not given stays. The tokenizer stays in float32, see `from_pretrained`.
        """
        for value in where:
            if isinstance(value, torch.dtype) or value in PRECISIONS:
                require(dtype is None, f"the precisions {dtype} and {value} are given; expected one")
                dtype = value
            else:
                require(device is None, f"the devices {device} and {value} are given; expected one")
                device = value
        on = self.device if device is None else choose_device(device)
        self.engine.check_device(on)  # before anything is moved
        precision = precision_of(self.model) if dtype is None else dtype
        with nullcontext() if self._adapters is None else self._adapters.removed():
            kv_cache_dtype = kv_cache_dtype_of(self.model)
            to_precision(unpack_linears(self.model), precision, on, kv_cache_dtype=kv_cache_dtype)
            if isinstance(self.tokenizer, VQTokenizer):
                prepare(self.model, self.tokenizer.to(on), engine=self.engine.mode)
        there = self.tokenizer.device  # not `on`, which may be cuda for cuda:0
        require(there == self.device, f"the tokenizer is on {there}; move it to {self.device}, too")
        if self.prompts is not None:
            self.prompts.to(on)
        self.engine, self._graphed = self.engine.on_device_of_model(), None
        return self

    @property
    def graphed_tokenizer(self) -> GraphedTokenizer:
        """The tokenizer, with images from CUDA graphs where they are decoded by kernels."""
        if self._graphed is None or self._graphed.tokenizer is not self.tokenizer:
            self._graphed = GraphedTokenizer(self.tokenizer)
        return self._graphed

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return self.model.dtype

    def __repr__(self) -> str:
        wide, high = self.image_size
        takes = "prompts" if self.prompts is not None else f"{len(self.classes)} classes"
        controls = self.model.config.control
        takes += f" and {', '.join(controls.kinds)} condition images" if controls is not None else ""
        millions = sum(tensor.numel() for tensor in self.model.state_dict().values()) / 1e6
        return (
            f"Pipeline({millions:.1f}M parameters in {precision_of(self.model)} on {self.device}, engine "
            f"{self.engine.mode}: {takes} to images of {wide}x{high} pixels)"
        )

    def set_progress_bar_config(self, **config: Any) -> None:
        """Set keyword arguments of the progress bar, a `tqdm`; `disable=True` turns it off, `disable=False` on.

        Without `disable` it is shown where stderr is a terminal, and in notebooks.
        """
        self._progress_bar = config

    @overload
    def __call__(
        self, prompt: Classes = None, *, output_type: Literal["pil"] = "pil", **options: Unpack[CallOptions]
    ) -> ImageOutput[list[Image.Image]]: ...
    @overload
    def __call__(
        self, prompt: Classes = None, *, output_type: Literal["np"], **options: Unpack[CallOptions]
    ) -> ImageOutput[NDArray[np.float32]]: ...
    @overload
    def __call__(
        self, prompt: Classes = None, *, output_type: Literal["pt", "latent"], **options: Unpack[CallOptions]
    ) -> ImageOutput[Tensor]: ...
    @show_options
    def __call__(
        self, prompt: Classes = None, *, output_type: str = "pil", **options: Unpack[CallOptions]
    ) -> ImageOutput[Any]:
        """Run the task that the arguments describe, and return its `.images`.

        `prompt` is what the model takes: prompts, or names or ids of classes; None generates without a condition.
        Without an image, images are generated, and enlarged (`expand`) where `height` and `width` are larger than the
        model's. With `image` and `mask_image` the white part is filled (`inpaint`), with `box` replaced (`edit`), with
        `left`, `top`, `right` or `bottom` the image is continued (`outpaint`), with `height` or `width` enlarged
        (`expand`). `control_image`, `kind` and `strength` are a condition image to follow.

        `output_type`: "pil" images, "np" float32 `[B, H, W, 3]` or "pt" `[B, 3, H, W]` from 0 to 1, or "latent", the
        token ids `[B, h, w]`. `callback_on_step_end(pipe, step, timestep, {"latents": ids})` is called after every step
        with the number of steps so far, twice, and the tokens `[B, h * w]`; it cannot replace them.
        """
        one_of("output_type", output_type, OUTPUT_TYPES)
        given: dict[str, Any] = {k: v for k, v in options.items() if v is not None or k in ("seed", "generator")}
        callback, done = given.pop("callback_on_step_end", None), 0
        task = choose_task(self, prompt, given)

        def on_step(step: Step) -> None:
            nonlocal done
            if callback is not None:
                returned = callback(self, done, done, {"latents": step.ids_BN})
                same = returned is None or returned.get("latents", step.ids_BN) is step.ids_BN
                require(same, "callback_on_step_end returned other latents; tokens cannot be replaced")
            done += 1

        decode_with_bar(task, on_step, self._progress_bar)
        return to_output(task, output_type)

    def _run(self, task: ImageTask, on_step: OnStep) -> list[Image.Image]:
        decode_with_bar(task, on_step, self._progress_bar)
        return task.images()

    def _task(self, spec: TaskSpec, *in_order: stages.Stage, images: Sequence[Image.Image] = ()) -> ImageTask:
        codec = self._codec or PixelCodec(self.graphed_tokenizer)
        return ImageTask(self.engine, codec, spec, stages=in_order, images=images)

    @show_options
    def generate_task(self, classes: Classes = None, **options: Unpack[GenerateOptions]) -> ImageTask:
        """Sample images of classes or prompts from empty grids, see `generate`."""
        return self._task(self._generate_spec(classes, **options), stages.generate_stage(self.model.config.grid))

    @show_options
    def inpaint_task(
        self,
        image: ImageInput,
        mask: ImageInput,
        class_: Class | None = None,
        *,
        feather: int = TASK_SETTINGS["feather"].default,
        **options: Unpack[TaskOptions],
    ) -> ImageTask:
        """Sample the white part of a mask, see `inpaint`."""
        spec, rgb = self._spec(class_, **options), to_rgb(to_image(image))
        canvas = Canvas.fit(rgb, to_mask(mask), grid=self.model.config.grid, stride=self.tokenizer.config.stride)
        return self._task(spec, stages.inpaint_stage(canvas, feather=feather), images=[rgb])

    @show_options
    def edit_task(
        self, image: ImageInput, box: Box, class_: Class | None = None, **options: Unpack[InpaintOptions]
    ) -> ImageTask:
        """Replace a box of an image, see `edit`."""
        given = class_ is not None or options.get("prompt") is not None
        require(given, f"there is nothing to put into the box; give a {self._takes}")
        return self.inpaint_task(image, box_image(to_rgb(to_image(image)).size, box), class_, **options)

    @show_options
    def outpaint_task(
        self,
        image: ImageInput,
        class_: Class | None = None,
        *,
        left: int = 0,
        top: int = 0,
        right: int = 0,
        bottom: int = 0,
        **options: Unpack[TaskOptions],
    ) -> ImageTask:
        """Continue an image beyond its sides, see `outpaint`."""
        spec, rgb = self._spec(class_, **options), to_rgb(to_image(image))
        grid, stride = self.model.config.grid, self.tokenizer.config.stride
        canvas = Canvas.extend(rgb, (left, top, right, bottom), grid=grid, stride=stride)
        return self._task(spec, stages.outpaint_stage(canvas, grid), images=[rgb])

    @show_options
    def expand_task(
        self,
        image: ImageInput | None = None,
        class_: Class | None = None,
        *,
        size: tuple[int, int],
        **options: Unpack[ExpandOptions],
    ) -> ImageTask:
        """Enlarge an image, see `expand`."""
        given = class_ is not None or options.get("prompt") is not None
        require(image is not None or given, f"there is neither an image nor a {self._takes}; give one of them")
        named = canonical_names(options)
        method = named.pop("method", None) or EXPAND_METHODS[0]
        spec, images = self._spec(class_, **named), [] if image is None else [to_rgb(to_image(image))]
        grid, stride = self.model.config.grid, self.tokenizer.config.stride
        image_size = images[0].size if images else self.image_size
        stage = stages.expand_stage(image_size, size, window=grid, stride=stride, method=method)
        first = [] if images else [stages.generate_stage(grid)]
        return self._task(spec, *first, stage, images=images)

    @show_options
    def generate(
        self, classes: Classes = None, *, on_step: OnStep = None, **options: Unpack[GenerateOptions]
    ) -> list[Image.Image]:
        """Generate `num_images` images of each class or prompt.

        `prompt` and `negative` are a text or a list of texts. `control` is a condition image for all images (then the
        class may be left out), or a list with one for each.
        """
        return self._run(self.generate_task(classes, **options), on_step)

    @show_options
    def inpaint(
        self,
        image: ImageInput,
        mask: ImageInput,
        class_: Class | None = None,
        *,
        on_step: OnStep = None,
        **options: Unpack[InpaintOptions],
    ) -> list[Image.Image]:
        """Fill the white part of a mask, given the rest of the image; pixels outside of the mask do not change.

        `feather` blends that many pixels inside the mask with the original. A condition image covers the whole image.
        """
        return self._run(self.inpaint_task(image, mask, class_, **options), on_step)

    @show_options
    def edit(
        self,
        image: ImageInput,
        box: Box,
        class_: Class | None = None,
        *,
        on_step: OnStep = None,
        **options: Unpack[InpaintOptions],
    ) -> list[Image.Image]:
        """Replace the box (left, top, right, bottom) of an image by a class or a prompt; options as in `inpaint`."""
        return self._run(self.edit_task(image, box, class_, **options), on_step)

    @show_options
    def outpaint(
        self,
        image: ImageInput,
        class_: Class | None = None,
        *,
        on_step: OnStep = None,
        **options: Unpack[OutpaintOptions],
    ) -> list[Image.Image]:
        """Continue an image by `left`, `top`, `right` and `bottom` pixels; its own pixels do not change.

        A canvas larger than the trained grid is sampled window by window, each given what is known already. A
        condition image covers the whole canvas, and each window takes its part of it.
        """
        return self._run(self.outpaint_task(image, class_, **options), on_step)

    @show_options
    def expand(
        self,
        image: ImageInput | None = None,
        class_: Class | None = None,
        *,
        size: tuple[int, int],
        on_step: OnStep = None,
        **options: Unpack[ExpandOptions],
    ) -> list[Image.Image]:
        """Enlarge an image to `size` (width, height) with newly sampled detail; without an image, generate one first.

        `method` is windows (the default), checkerboard or positions, see `arpg.tasks.stages.expand_stage`.
        """
        return self._run(self.expand_task(image, class_, size=size, **options), on_step)

    @show_options
    def control(
        self,
        image: ImageInput,
        class_: Classes = None,
        *,
        kind: str = CONTROL_KINDS[0],
        strength: float = 1.0,
        from_image: bool = False,
        on_step: OnStep = None,
        **options: Unpack[ControlOptions],
    ) -> list[Image.Image]:
        """Generate images of a class, a prompt or neither that follow a condition image; options as in `generate`.

        `from_image`: `image` is a photograph or the like, whose edges or depth are the condition.
        """
        control = self.extract_control(image, kind, strength) if from_image else ControlInput(image, kind, strength)
        return self.generate(class_, control=control, on_step=on_step, **options)

    def extract_control(
        self, image: ImageInput, kind: str = CONTROL_KINDS[0], strength: float = 1.0, *, depth: str | None = None
    ) -> ControlInput:
        """Extract the edges or the depth of an image at the size that the model was trained with.

        `depth` names the depth model, see `arpg.extractors.open_depth`.
        """
        return ControlInput.from_image(image, kind, strength, size=self.image_size, depth=depth)

    @show_options
    def stream(self, classes: Classes = None, **options: Unpack[GenerateOptions]) -> Iterator[list[Image.Image]]:
        """Generate as `generate` does, all images in one batch, and yield previews of them after every step.

        Patches that are not sampled yet are grey. Other tasks: `pipe.inpaint_task(...).stream()` and so on.
        """
        spec = self._generate_spec(classes, **options)
        spec = dataclasses.replace(spec, batch_size=len(spec.labels))
        return self._task(spec, stages.generate_stage(self.model.config.grid)).stream()

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
        items = as_list(prompt if classes is None else classes)
        require(len(items) >= 1, f"no {self._takes} is given; there is nothing to generate")
        negatives = [negative] * len(items) if negative is None or isinstance(negative, str) else list(negative)
        require(
            len(negatives) == len(items),
            f"there are {len(negatives)} negative prompts for {len(items)}; expected one each",
        )
        both = None if prompt is None or classes is None else str(prompt)  # an error that `_label` explains
        pairs = [(None, item) if classes is None else (item, both) for item in items]
        labels = [self._label(name, text, no) for (name, text), no in zip(pairs, negatives, strict=True)]
        return self._task_spec(labels, options)

    def _spec(
        self, class_: Class | None, *, prompt: str | None = None, negative: str | None = None, **options: Any
    ) -> TaskSpec:
        """Resolve a class or a prompt, and the options of a task."""
        return self._task_spec([self._label(class_, prompt, negative)], options)

    def _task_spec(self, labels: Sequence[Label], options: Mapping[str, Any]) -> TaskSpec:
        """Resolve options: None is the default, except for `seed`, where it is a random one."""
        named = canonical_names(options)
        given = {name: value for name, value in named.items() if value is not None or name == "seed"}
        num_images, seed, best_of, batch_size = (
            given.pop(name, TASK_SETTINGS[name].default) for name in ("num_images", "seed", "best_of", "batch_size")
        )
        TASK_SETTINGS["num_images"].check(num_images)
        seed, controls = read_seed(seed), check_controls(given.pop("control", None), self.model.config.control)
        return TaskSpec(
            tuple(label for label in labels for _ in range(num_images)),
            self.sampling.settings(**given),
            seed=seed if isinstance(seed, int) else 0,
            seeds=None if isinstance(seed, int) else tuple(seed),
            best_of=best_of,
            batch_size=batch_size,
            controls=controls,
        )

    @property
    def _takes(self) -> str:
        return "class" if self.prompts is None else "prompt"

    def _label(self, class_: Class | None, prompt: str | None, negative: str | None) -> Label:
        """Return the class id or the encoded prompt; the other of both is an `InputError`."""
        if self.prompts is None:
            for name, value in (("prompt", prompt), ("negative", negative)):
                require(
                    value is None,
                    f"{name} is {value!r}, but the model takes classes; give one of them (see `arpg classes`), or "
                    f"choose a model that takes prompts, such as {DEFAULT_TEXT_MODEL}",
                )
            return self.model.config.num_classes if class_ is None else self.classes.find(class_)
        require(class_ is None, f"class is {class_!r}, but the model takes prompts; give a prompt instead")
        states = [None if text is None else self.prompts.states(text) for text in (prompt, negative)]
        return Prompt(prompt or "", states[0], negative or "", states[1])

    def score(
        self,
        image: ImageInput,
        class_: Class | None = None,
        *,
        prompt: str | None = None,
        orders: int = 1,
        order: Order = "random",
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

    def classify(self, image: ImageInput, *, orders: int = 1, seed: int = 0) -> NDArray[np.float32]:
        """Return the bits per token of an image under each class, `[classes]`; fewest bits: the most likely class."""
        require(
            self.prompts is None, "the model takes prompts, so it has no classes to choose from; score prompts instead"
        )
        labels = label_condition(self.model, range(self.model.config.num_classes))
        bits = image_bits(self.model, self.tokenizer, image, labels, orders=orders, order="random", seed=seed)
        means: NDArray[np.float32] = bits.mean((1, 2, 3))
        return means


def load_with_adapters(name: str | AnyPath, adapters: Sequence[tuple[str, float]], **options: Any) -> Pipeline:
    """Load a pipeline as `Pipeline.from_pretrained` does, then LoRA adapters: (path, scale) each."""
    pipe = Pipeline.from_pretrained(name, **options)
    for path, scale in adapters:
        pipe.load_lora(path, scale)
    return pipe
