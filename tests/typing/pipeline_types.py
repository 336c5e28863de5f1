"""Types that a user's type checker sees. `mypy` reads this file with the package (`files` in pyproject.toml).

An ignored error that does not occur is an error there, so `refused` holds what is not accepted.
"""

from pathlib import Path
from typing import assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from arpg import ControlInput, ImageTask, Pipeline


def results(pipe: Pipeline) -> None:
    assert_type(Pipeline.from_pretrained("model", torch_dtype=torch.bfloat16), Pipeline)
    assert_type(pipe("Kiwi").images, list[Image.Image])
    assert_type(pipe("Kiwi", output_type="np").images, NDArray[np.float32])
    assert_type(pipe("Kiwi", output_type="pt").images, torch.Tensor)
    assert_type(pipe("Kiwi", output_type="latent").images, torch.Tensor)
    assert_type(pipe.generate("Kiwi"), list[Image.Image])
    assert_type(pipe.inpaint_task("a.png", Path("mask.png")), ImageTask)
    assert_type(pipe.to("cuda", torch.float16), Pipeline)
    assert_type(pipe.device, torch.device)
    assert_type(pipe.dtype, torch.dtype)
    assert_type(list(pipe.classes), list[str])
    assert_type(pipe.push_to_hub("user/mine", private=True), str)


def accepted(pipe: Pipeline, image: NDArray[np.uint8], mask: torch.Tensor, generator: torch.Generator) -> None:
    pipe(["Kiwi", 3], num_inference_steps=8, guidance_scale=2.0, num_images_per_prompt=4, generator=generator)
    pipe("Kiwi", image=image, mask_image=mask, callback_on_step_end=lambda pipe, step, timestep, kwargs: kwargs)
    pipe("Kiwi", height=192, width=192, method="windows", order=[2, 1, 0], schedule=(1, 2), top_k=None)
    pipe.generate(np.int64(3), seed=None, order=lambda grid: range(grid[0] * grid[1]), best_of=4)
    pipe.generate(np.array([1, 2]), seed=[1, generator], control=ControlInput(image, "depth", 0.5))
    pipe.generate(prompt=["a kiwi", "a pear"], negative=[None, "blur"])
    pipe.edit(image, (0, 0, 8, 8), "Kiwi", feather=4)
    pipe.outpaint("photo.png", right=48, steps=12)
    pipe.expand(size=(192, 192), prompt="a kiwi", method="positions")
    pipe.control(mask, kind="depth", num_images=2)


def refused(pipe: Pipeline, image: Image.Image) -> None:
    pipe.generate("Kiwi", steps="many")  # type: ignore[arg-type]
    pipe.generate("Kiwi", stepz=4)  # type: ignore[call-arg]
    pipe.generate("Kiwi", feather=4)  # type: ignore[call-arg]
    pipe.outpaint(image, box=(0, 0, 8, 8))  # type: ignore[call-arg]
    pipe("Kiwi", output_type="jpeg")  # type: ignore[call-overload]
    pipe("Kiwi", guidance_scale="high")  # type: ignore[call-overload]
    pipe.inpaint(image, image, prompt=["two", "prompts"])  # type: ignore[arg-type]
