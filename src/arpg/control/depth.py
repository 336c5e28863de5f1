"""Depth of photographs: FastDepth as an ONNX file, or any depth model of `transformers` by name.

Shapes: H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from arpg.errors import InputError, require
from arpg.hub import home

FILE = "fastdepth.onnx"  # MIT; docs/control-score.md has the sha256 of the one tested
METRIC = ("depth_pro", "glpn", "zoedepth")  # these say how far, where others say how near

# From an RGB picture to how near each of its pixels is, on any scale: [H, W], larger is nearer.
DepthModel = Callable[[Image.Image], NDArray[np.float32]]


def open_depth(name: str | Path | None = None) -> DepthModel:
    """An ONNX file like FastDepth's (none: fastdepth.onnx in $ARPG_HOME), or a model of `transformers`: a hub id or a
    folder. Opened once.
    """
    return _open(str(home() / FILE if name is None else name))


@lru_cache(maxsize=2)
def _open(name: str) -> DepthModel:
    path = Path(name)
    if path.suffix != ".onnx":
        return TransformersDepth(name)
    require(
        path.is_file(),
        f"{path} does not exist, and depth needs it; put FastDepth there as an ONNX file, give the path of one, or "
        "name a depth model of transformers, like depth-anything/Depth-Anything-V2-Small-hf",
    )
    return FastDepth(open_session(path), where=str(path))


def open_session(path: Path) -> Any:
    """ONNX Runtime's session of a file, on the CPU: a picture takes milliseconds there."""
    try:
        import onnxruntime
    except ImportError:
        raise InputError(f"{path} needs ONNX Runtime, which is not installed: pip install 'arpg[control]'") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # FastDepth's file has weights that nothing uses: a line for each of them
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):  # its errors have no class in common
            raise
        raise InputError(f"{path} is not an ONNX network ({_first_line(error)}); copy it again") from None


class FastDepth:
    """A network from `[1, 3, h, w]` in [0, 1] to the distance `[1, 1, h, w]`. FastDepth learned indoor scenes."""

    def __init__(self, session: Any, *, where: str) -> None:
        inputs, outputs = session.get_inputs(), session.get_outputs()
        shapes = [list(inputs[0].shape), list(outputs[0].shape)]
        plain = all(len(shape) == 4 and all(isinstance(n, int) for n in shape) for shape in shapes)
        require(
            len(inputs) == 1 and plain and shapes[0][:2] == [1, 3] and shapes[1][:2] == [1, 1],
            f"{where} goes from {shapes[0]} to {shapes[1]}; expected [1, 3, h, w] to [1, 1, h, w], like FastDepth",
        )
        self.session, self.input, self.size = session, inputs[0].name, (shapes[0][3], shapes[0][2])

    def __call__(self, image: Image.Image) -> NDArray[np.float32]:
        fitted = image.convert("RGB").resize(self.size, Image.Resampling.BILINEAR)
        pixels_13hw = np.asarray(fitted, np.float32).transpose(2, 0, 1)[None] / 255
        far_hw = np.asarray(self.session.run(None, {self.input: pixels_13hw})[0][0, 0], np.float32)
        return -np.asarray(Image.fromarray(far_hw).resize(image.size, Image.Resampling.BILINEAR))


class TransformersDepth:
    """Any network that `AutoModelForDepthEstimation` knows: Depth Anything, DPT (MiDaS), GLPN, ZoeDepth, Depth Pro."""

    def __init__(self, name: str) -> None:
        try:
            import transformers
        except ImportError:
            raise InputError(
                f"depth model {name!r} needs transformers, which is not installed: pip install 'arpg[text]'"
            ) from None
        try:
            self.processor: Any = transformers.AutoImageProcessor.from_pretrained(name)
            self.network: Any = transformers.AutoModelForDepthEstimation.from_pretrained(name).eval()
        except (OSError, ValueError, ImportError) as error:
            raise InputError(
                f"depth model {name!r} could not be loaded ({_first_line(error)}); expected an .onnx file, or a hub id "
                "or a folder with a depth model of transformers"
            ) from None
        config = self.network.config
        metric = getattr(config, "depth_estimation_type", "relative") == "metric"
        self.sign = -1.0 if metric or config.model_type in METRIC else 1.0

    def __call__(self, image: Image.Image) -> NDArray[np.float32]:
        import torch

        inputs = self.processor(images=image.convert("RGB"), return_tensors="pt")
        with torch.inference_mode():
            outputs = self.network(**inputs)
        sizes = [(image.height, image.width)]
        found = self.processor.post_process_depth_estimation(outputs, target_sizes=sizes)[0]["predicted_depth"]
        return self.sign * np.asarray(found.float().cpu().numpy(), np.float32)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:160]
