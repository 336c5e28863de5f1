"""ComfyUI nodes (V3 schema) over `arpg.Pipeline`; choices, ranges and help texts come from the tables of settings.

IMAGE is `[B, H, W, 3]` and MASK `[B, H, W]`, both floating point from 0 to 1. Image i of a batch has seed `seed + i`.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_api.latest import ComfyAPISync, ComfyExtension, io

from arpg import ControlInput, ImageTask, Pipeline
from arpg.config import DEFAULT_MODEL, PRECISIONS
from arpg.settings import SETTINGS, TASK_SETTINGS, Setting

ArpgPipeline = io.Custom("ARPG_PIPELINE")
ArpgSettings = io.Custom("ARPG_SETTINGS")

MAX_SEED = 2**63 - 1
RECOMMENDED = "0: as the model recommends"
OWN_INPUTS = ("steps", "guidance")  # inputs of every task node; the other sampling settings are a node of their own


def _input(setting: Setting, **more: Any) -> Any:
    """Return the widget of a setting."""
    if setting.choices:
        about = " ".join(f"{name}: {text}" for name, text in setting.choices.items())
        return io.Combo.Input(setting.name, options=list(setting.choices), tooltip=f"{setting.help} {about}", **more)
    kind = io.Int if setting.kind is int else io.Float
    low, high, step = setting.slider or (setting.minimum, 1024, 1)
    limits = {"min": setting.kind(low), "max": setting.kind(high), "step": setting.kind(step)}
    return kind.Input(setting.name, **{"tooltip": setting.help, "default": setting.default, **limits, **more})


def _task_inputs() -> list[Any]:
    """Return the inputs of every node that makes images."""
    return [
        ArpgPipeline.Input("pipeline"),
        io.String.Input(
            "prompt", default="", multiline=True, tooltip="A class, or a prompt where the model takes text."
        ),
        io.String.Input("negative", default="", optional=True, tooltip="A prompt that guidance leads away from."),
        io.Int.Input(
            "seed", default=0, min=0, max=MAX_SEED, control_after_generate=True, tooltip=TASK_SETTINGS["seed"].help
        ),
        _input(TASK_SETTINGS["num_images"], max=64),
        _input(SETTINGS["steps"], default=0, min=0, tooltip=f"{SETTINGS['steps'].help} {RECOMMENDED}."),
        _input(SETTINGS["guidance"], default=0.0, tooltip=f"{SETTINGS['guidance'].help} {RECOMMENDED}."),
        ArpgSettings.Input("settings", optional=True, tooltip="Further settings; none: as the model recommends."),
    ]


def _schema(name: str, description: str, inputs: list[Any], outputs: list[Any] | None = None) -> Any:
    return io.Schema(
        node_id=f"ARPG{name.replace(' ', '')}",
        display_name=f"ARPG {name}",
        category="ARPG",
        description=description,
        inputs=inputs,
        outputs=outputs or [io.Image.Output(display_name="images")],
    )


def _options(
    pipeline: Pipeline,
    prompt: str,
    seed: int,
    num_images: int,
    steps: int,
    guidance: float,
    negative: str = "",
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of a task, the class or prompt included."""
    given: dict[str, Any] = {**(settings or {}), "seed": seed, "num_images": num_images}
    given |= {name: value for name, value in (("steps", steps), ("guidance", guidance)) if value}
    label = "class_" if pipeline.prompts is None else "prompt"
    given |= {label: prompt.strip() or None, "negative": negative.strip() or None}
    return given


def _run(task: ImageTask, done: int = 0, tasks: int = 1) -> torch.Tensor:
    """Run a task with progress and previews; return its images `[B, H, W, 3]`."""
    progress = ComfyAPISync().execution
    for steps, step in enumerate(task.steps(), start=1):
        throw_exception_if_processing_interrupted()
        total = len(task) * (step.num_steps or 0) or steps + 1  # exact decoding does not know its steps before the end
        progress.set_progress(done * total + steps, tasks * total, preview_image=task.preview(step)[0])
    pixels = np.stack([np.asarray(image) for image in task.images()])
    return torch.from_numpy(pixels.astype(np.float32) / 255)


def _each(images: torch.Tensor, options: dict[str, Any], build: Any) -> torch.Tensor:
    """Run `build(image, index, options)` for each image of a batch, each with seeds of its own."""
    made = []
    for i, image in enumerate(images):
        own = {**options, "seed": options["seed"] + i * options["num_images"]}
        made.append(_run(build(image.cpu().numpy(), i, own), i, len(images)))
    return torch.cat(made)


class Loader(io.ComfyNode):
    """Loads a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return _schema(
            "Loader",
            "Load a bundled model, a model folder, a published model or a hub id.",
            [
                io.String.Input(
                    "model",
                    default=DEFAULT_MODEL,
                    tooltip="An installed name, or the path of a folder.",
                ),
                io.Combo.Input("device", options=["auto", "cuda", "cpu"], default="auto"),
                io.Combo.Input("precision", options=list(PRECISIONS), default="auto"),
            ],
            [ArpgPipeline.Output(display_name="pipeline")],
        )

    @classmethod
    def execute(cls, model: str, device: str, precision: str) -> io.NodeOutput:
        """Load the pipeline."""
        return io.NodeOutput(Pipeline.from_pretrained(model, device=device, precision=precision))


class LoRA(io.ComfyNode):
    """Merges a LoRA adapter into a copy of a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        inputs = [
            ArpgPipeline.Input("pipeline"),
            io.String.Input("path", tooltip="A .safetensors file of `arpg finetune --lora`, or its folder."),
            io.Float.Input("scale", default=1.0, min=-4.0, max=4.0, step=0.05, tooltip="Weight of the adapter."),
        ]
        return _schema("LoRA", "Add a LoRA adapter.", inputs, [ArpgPipeline.Output(display_name="pipeline")])

    @classmethod
    def execute(cls, pipeline: Pipeline, path: str, scale: float) -> io.NodeOutput:
        """Copy the pipeline, because other nodes share it, and merge the adapter into the copy."""
        pipeline = copy.deepcopy(pipeline)
        pipeline.load_lora(path, scale)
        return io.NodeOutput(pipeline)


class Settings(io.ComfyNode):
    """Collects sampling settings."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        more = {"top_k": {"default": 0, "tooltip": f"{SETTINGS['top_k'].help} 0: all."}}
        inputs = [_input(each, **more.get(name, {})) for name, each in SETTINGS.items() if name not in OWN_INPUTS]
        return _schema("Settings", "Sampling settings.", inputs, [ArpgSettings.Output(display_name="settings")])

    @classmethod
    def execute(cls, **settings: Any) -> io.NodeOutput:
        """Return the settings; exact and speculative decoding find their own steps and are causal."""
        settings["top_k"] = settings["top_k"] or None
        if settings["decode"] != "steps":
            settings |= {"schedule": None, "attention": None}
        return io.NodeOutput(settings)


class Generate(io.ComfyNode):
    """Generates images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return _schema("Generate", "Generate images of a class or a prompt; neither: unconditionally.", _task_inputs())

    @classmethod
    def execute(cls, pipeline: Pipeline, **inputs: Any) -> io.NodeOutput:
        """Generate the images."""
        options = _options(pipeline, **inputs)
        return io.NodeOutput(_run(pipeline.generate_task(options.pop("class_", None), **options)))


class Inpaint(io.ComfyNode):
    """Fills the masked part of images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        own = [io.Image.Input("image"), io.Mask.Input("mask"), _input(TASK_SETTINGS["feather"])]
        return _schema("Inpaint", "Fill the masked part; every other pixel stays as it is.", [*_task_inputs(), *own])

    @classmethod
    def execute(
        cls, pipeline: Pipeline, image: torch.Tensor, mask: torch.Tensor, feather: int, **inputs: Any
    ) -> io.NodeOutput:
        """Inpaint every image of the batch; one mask serves all."""

        def build(pixels: Any, i: int, options: dict[str, Any]) -> ImageTask:
            hole = mask[min(i, len(mask) - 1)].cpu().numpy()
            return pipeline.inpaint_task(pixels, hole, feather=feather, **options)

        return io.NodeOutput(_each(image, _options(pipeline, **inputs), build))


class Outpaint(io.ComfyNode):
    """Continues images beyond their sides."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        sides = [
            io.Int.Input(side, default=0, min=0, max=1024, step=8, tooltip="Pixels to add on this side.")
            for side in ("left", "top", "right", "bottom")
        ]
        inputs = [*_task_inputs(), io.Image.Input("image"), *sides]
        return _schema("Outpaint", "Continue an image; its own pixels stay as they are.", inputs)

    @classmethod
    def execute(
        cls, pipeline: Pipeline, image: torch.Tensor, left: int, top: int, right: int, bottom: int, **inputs: Any
    ) -> io.NodeOutput:
        """Outpaint every image of the batch."""

        def build(pixels: Any, i: int, options: dict[str, Any]) -> ImageTask:
            return pipeline.outpaint_task(pixels, left=left, top=top, right=right, bottom=bottom, **options)

        return io.NodeOutput(_each(image, _options(pipeline, **inputs), build))


class Control(io.ComfyNode):
    """Generates images that follow condition images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        own = [
            io.Image.Input("image", tooltip="A condition image, or with from_image any image."),
            _input(TASK_SETTINGS["kind"]),
            _input(TASK_SETTINGS["strength"]),
            io.Boolean.Input("from_image", default=False, tooltip="Extract the edges or the depth of the image first."),
        ]
        return _schema("Control", "Generate images that follow edges or depth.", [*_task_inputs(), *own])

    @classmethod
    def execute(
        cls, pipeline: Pipeline, image: torch.Tensor, kind: str, strength: float, from_image: bool, **inputs: Any
    ) -> io.NodeOutput:
        """Generate for every condition image of the batch."""

        def build(pixels: Any, i: int, options: dict[str, Any]) -> ImageTask:
            read = pipeline.extract_control if from_image else ControlInput
            return pipeline.generate_task(options.pop("class_", None), control=read(pixels, kind, strength), **options)

        return io.NodeOutput(_each(image, _options(pipeline, **inputs), build))


class ArpgExtension(ComfyExtension):
    """The node pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the nodes."""
        return [Loader, LoRA, Settings, Generate, Inpaint, Outpaint, Control]


async def comfy_entrypoint() -> ArpgExtension:
    """Return the extension; ComfyUI calls this when it loads the pack."""
    return ArpgExtension()
