"""`arpg demo` and `arpg selftest`: the first images, and whether an installation computes what it should."""

from __future__ import annotations

import importlib.util
import itertools
import os
import platform
from pathlib import Path
from typing import Annotated

from arpg.cli.options import DeviceOption, load_pipeline, out, output_option, progress_bar
from arpg.config import DEFAULT_MODEL
from arpg.errors import require

DEMO_IMAGES = 16  # of classes at even distances
# A module of each extra that says whether it is installed.
EXTRAS = {
    "text": "transformers",
    "control": "onnxruntime",
    "train": "matplotlib",
    "serve": "fastapi",
    "ray": "ray",
    "diffusers": "diffusers",
    "hopper": "quack",
}
SELFTEST = {  # with every setting that is searched for a model, so that its new defaults do not change the tokens
    "num_images": 1,
    "steps": 4,
    "guidance": 2.0,
    "guidance_schedule": "constant",
    "order": "halton",
    "schedule": "arccos",
    "temperature": 1.0,
    "top_p": 1.0,
    "seed": 0,
}
SELFTEST_CLASS = 16
# The first 16 tokens of that image of the default model. A CPU that adds in another order may change one of them, a
# defect changes all.
SELFTEST_IDS = (1466, 5481, 5984, 2667, 3890, 1082, 6504, 6238, 1764, 4162, 1598, 6168, 1283, 3486, 8100, 2110)


def demo(
    output: Annotated[Path, output_option("The image to write.")] = Path(f"demo-out/{DEFAULT_MODEL}.png"),
    device: DeviceOption = "auto",
) -> None:
    """Generate images of 16 classes with the bundled model."""
    from arpg.image import check_output, save, sheet

    check_output(output, folder=False)
    pipe = load_pipeline(DEFAULT_MODEL, device=device)
    classes = [i * len(pipe.classes) // DEMO_IMAGES for i in range(DEMO_IMAGES)]
    task = pipe.generate_task(classes, num_images=1, seed=0)
    done = itertools.count(1)
    with progress_bar("sampling") as progress:
        images = task.run(lambda _: progress(next(done), task.spec.settings.steps))
    save(sheet(images), output)
    out.print(f"Look at {output}: {DEMO_IMAGES} classes of {DEFAULT_MODEL}, the bundled model.")


def selftest(device: DeviceOption = "auto") -> None:
    """Check this installation: list versions and extras, and compare the tokens of an image with recorded ones."""
    import torch

    import arpg
    from arpg.device import cpu_name
    from arpg.kernels.dispatch import working_gemms

    pipe = load_pipeline(DEFAULT_MODEL, device=device, dtype="float32", engine="eager")
    chosen = pipe.model.device
    hardware = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else cpu_name()
    extras = [f"{name} {'yes' if importlib.util.find_spec(module) else 'no'}" for name, module in EXTRAS.items()]
    lines = {
        "arpg": arpg.__version__,
        "Python": f"{platform.python_version()} on {platform.platform(terse=True)}",
        "torch": torch.__version__,
        "device": f"{chosen}, {hardware}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads",
        "extras": ", ".join(extras),
    }
    if chosen.type == "cuda":
        lines["GEMMs"] = ", ".join(["cuBLAS", *working_gemms(chosen)])
    for name, text in lines.items():
        out.print(f"{name:<8} {text}")
    steps: list[list[int]] = []
    task = pipe.generate_task(SELFTEST_CLASS, **SELFTEST)
    image = task.run(lambda step: steps.append(step.ids_BN[0].tolist()))[0]
    equal = sum(a == b for a, b in zip(steps[-1], SELFTEST_IDS, strict=False))
    require(
        equal >= 0.75 * len(SELFTEST_IDS) and image.size == pipe.image_size,
        f"{equal} of {len(SELFTEST_IDS)} tokens are as recorded, so something computes wrong numbers here; please "
        "report it with the lines above",
    )
    out.print(f"tokens   {equal} of {len(SELFTEST_IDS)} as recorded: this installation works")
