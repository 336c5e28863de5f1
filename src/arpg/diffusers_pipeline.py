"""ARPG as a pipeline of diffusers: the same folders, arguments and images as `arpg.Pipeline` (extra `diffusers`).

pipe = DiffusionPipeline.from_pretrained(folder, custom_pipeline="integrations/diffusers")
image = pipe("Kiwi", num_inference_steps=12).images[0]
"""

from __future__ import annotations

import os
from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, ModelMixin

from arpg.errors import require
from arpg.pipeline import Pipeline


class ARPGModel(ModelMixin):
    """The one component of the pipeline: network and tokenizer of a model folder. `model_index.json` names it."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.pipeline, self.model, self.tokenizer = pipeline, pipeline.model, pipeline.tokenizer

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], **options: Any) -> ARPGModel:
        """Load a model folder on the CPU, in float32 or `torch_dtype`. Options that would change more are refused."""
        dtype = options.get("dtype") or options.get("torch_dtype") or torch.float32
        for name in ("device_map", "variant", "quantization_config"):
            require(options.get(name) is None, f"{name} is {options.get(name)!r}; leave it out, and use pipe.to(...)")
        return cls(Pipeline.from_pretrained(os.fspath(path), device="cpu", torch_dtype=dtype))

    def to(self, *args: Any, **kwargs: Any) -> ARPGModel:
        """Move to a device and a type, as a torch module is moved."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        self.pipeline.to(device=device, dtype=dtype)
        return self


class ARPGPipeline(DiffusionPipeline):
    """Generates and edits images with an ARPG model; arguments as in `arpg.Pipeline.__call__`."""

    model: ARPGModel

    def __init__(self, model: ARPGModel) -> None:
        super().__init__()
        self.register_modules(model=model)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> ARPGPipeline:
        """Load a bundled or published model, a folder or a hub id, on the CPU; `torch_dtype` is its precision."""
        return cls(ARPGModel.from_pretrained(name, **options))

    def save_pretrained(self, folder: str | os.PathLike[str], **_: Any) -> None:
        """Write a model folder that this class, `DiffusionPipeline` and `arpg.Pipeline` load."""
        self.model.pipeline.save_pretrained(os.fspath(folder))

    def __call__(
        self, prompt: Any = None, *, output_type: Any = "pil", return_dict: bool = True, **options: Any
    ) -> ImagePipelineOutput | tuple[Any, ...]:
        """Run the task that the arguments describe, see `arpg.Pipeline.__call__`."""
        pipeline = self.model.pipeline
        pipeline.set_progress_bar_config(**getattr(self, "_progress_bar_config", {}))
        if callback := options.pop("callback_on_step_end", None):
            options["callback_on_step_end"] = lambda _, *arguments: callback(self, *arguments)
        images = pipeline(prompt, output_type=output_type, **options).images
        return ImagePipelineOutput(images=images) if return_dict else (images,)
