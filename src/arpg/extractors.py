"""Extractors: edges, soft edges and depth of an image, as a greyscale image of the same size.

Edges are white on black; near is white, far is black. Shapes: H W pixels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from arpg.device import choose_device
from arpg.errors import InputError, first_line, one_of, require, require_package
from arpg.image import Pixels, resize, to_rgb
from arpg.settings import CONTROL_KINDS
from arpg.storage import home

FASTDEPTH_FILE = "fastdepth.onnx"  # MIT; docs/guides/control.md has the sha256 of the one tested
METRIC_DEPTH_MODELS = ("depth_pro", "glpn", "zoedepth")  # predict distance, where others predict nearness

# From an RGB image to the nearness of its pixels on any scale: [H, W], larger is nearer.
DepthModel = Callable[[Image.Image], NDArray[np.float32]]

CANNY_THRESHOLDS = (100, 200)  # our choice: the common one of OpenCV's examples; the paper names none
SOFT_SCALES = (1, 2, 4)  # pixels of blur before the gradients of soft edges
_OPENING = threading.Lock()  # many threads extract at once, and each model is to be loaded once
SOFT_WHITE = 0.2  # the gradient that becomes white: that of a sharp step of half the range, at every scale


def extract(kind: str, image: Image.Image, *, depth: DepthModel | str | Path | None = None) -> Image.Image:
    """Extract the condition of a kind from an image: mode "L", same size.

    `depth` is the depth model, see `open_depth`. A condition image that exists already needs `to_condition` only.
    """
    one_of("kind", kind, CONTROL_KINDS)
    rgb = to_rgb(image)
    if kind == "canny":
        return Image.fromarray(canny(np.asarray(rgb)))
    if kind == "soft":
        return Image.fromarray(soft_edges(np.asarray(rgb)))
    model = depth if callable(depth) else open_depth(depth)
    return Image.fromarray(stretch_to_grey(model(rgb)))


def can_extract(kind: str) -> bool:
    """Return whether the kind can be extracted: with OpenCV; depth with ONNX Runtime and FastDepth in $ARPG_HOME."""
    if kind == "depth":
        return find_spec("onnxruntime") is not None and (home() / FASTDEPTH_FILE).is_file()
    return find_spec("cv2") is not None


def to_condition(image: Image.Image) -> Image.Image:
    """Convert a ready-made condition image: upright (EXIF), greyscale, black where it is transparent."""
    return to_rgb(image, background="black").convert("L")


def canny(pixels_HW3: Pixels) -> Pixels:
    """Return Canny's edges, 0 or 255, of the channel in which the gradient is largest."""
    edges: Pixels = import_opencv().Canny(np.ascontiguousarray(pixels_HW3), *CANNY_THRESHOLDS)
    return edges


def soft_edges(pixels_HW3: Pixels) -> Pixels:
    """Return soft edges: gradients at three scales, thinned towards their ridges.

    Others use HED here. Unlike HED, nothing is learned: edges come from light and shade only, not from objects.
    """
    cv2 = import_opencv()
    image = np.asarray(pixels_HW3, np.float32) / 255
    strongest = np.zeros(image.shape[:2], np.float32)
    for scale in SOFT_SCALES:
        smooth = cv2.GaussianBlur(image, (0, 0), scale)
        along = [cv2.Sobel(smooth, cv2.CV_32F, x, 1 - x, ksize=3, scale=1 / 8) for x in (1, 0)]
        # Times the scale: a step then counts the same at every scale.
        size = scale * np.hypot(*along).max(-1)
        highest = cv2.dilate(size, np.ones((2 * scale + 1, 2 * scale + 1), np.uint8))
        strongest = np.maximum(strongest, size * (size / np.maximum(highest, 1e-6)) ** 2)
    grey: Pixels = np.clip(255 * strongest / SOFT_WHITE + 0.5, 0, 255).astype(np.uint8)
    return grey


def stretch_to_grey(near_HW: NDArray[np.floating[Any]]) -> Pixels:
    """Scale nearness to 0..255: the nearest pixel is white, the farthest black; if all are equal, mid-grey."""
    require(bool(np.isfinite(near_HW).all()), "the depth has values that are not numbers; choose another depth model")
    low, high = float(near_HW.min()), float(near_HW.max())
    if high <= low:
        return np.full(near_HW.shape, 128, np.uint8)
    return np.round(255 * (near_HW - low) / (high - low)).astype(np.uint8)


def import_opencv() -> Any:
    """Import OpenCV; raise an `InputError` that names the extra where it is not installed."""
    return require_package("cv2", "edges need OpenCV, which is not installed: pip install 'arpg[control]'")


def open_depth(name: str | Path | None = None) -> DepthModel:
    """Open a depth model: an ONNX file like FastDepth's (None: fastdepth.onnx in $ARPG_HOME), or a model of
    `transformers`, a hub id or a folder. The last two models stay open.
    """
    with _OPENING:
        return _open(str(home() / FASTDEPTH_FILE if name is None else name))


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
    """Open an ONNX file on the CPU, where an image takes milliseconds."""
    advice = f"{path} needs ONNX Runtime, which is not installed: pip install 'arpg[control]'"
    onnxruntime = require_package("onnxruntime", advice)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # sets of images are read by several threads; more within each compete
    options.log_severity_level = 3  # FastDepth's file has weights that nothing uses: a line for each of them
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):  # its errors have no class in common
            raise
        raise InputError(f"{path} is not an ONNX network ({first_line(error)}); copy it again") from None


class FastDepth:
    """A network from `[1, 3, h, w]` in [0, 1] to distance `[1, 1, h, w]`. FastDepth was trained on indoor scenes."""

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
        fitted = resize(image.convert("RGB"), self.size, Image.Resampling.BILINEAR)
        pixels_13hw = np.asarray(fitted, np.float32).transpose(2, 0, 1)[None] / 255
        far_hw = np.asarray(self.session.run(None, {self.input: pixels_13hw})[0][0, 0], np.float32)
        return -np.asarray(resize(Image.fromarray(far_hw), image.size, Image.Resampling.BILINEAR))


class TransformersDepth:
    """Any model of `AutoModelForDepthEstimation`: Depth Anything, DPT (MiDaS), GLPN, ZoeDepth, Depth Pro.

    It runs on the GPU where there is one.
    """

    def __init__(self, name: str) -> None:
        advice = f"depth model {name!r} needs transformers, which is not installed: pip install 'arpg[text]'"
        transformers = require_package("transformers", advice)
        try:
            self.processor: Any = transformers.AutoImageProcessor.from_pretrained(name)
            network: Any = transformers.AutoModelForDepthEstimation.from_pretrained(name)
        except (OSError, ValueError, ImportError) as error:
            raise InputError(
                f"depth model {name!r} could not be loaded ({first_line(error)}); expected an .onnx file, or a hub id "
                "or a folder with a depth model of transformers"
            ) from None
        self.network: Any = network.eval().to(choose_device("auto"))
        config = network.config
        metric = getattr(config, "depth_estimation_type", "relative") == "metric"
        self.sign = -1.0 if metric or config.model_type in METRIC_DEPTH_MODELS else 1.0

    def __call__(self, image: Image.Image) -> NDArray[np.float32]:
        import torch

        inputs = self.processor(images=image.convert("RGB"), return_tensors="pt").to(self.network.device)
        with torch.inference_mode():
            outputs = self.network(**inputs)
        sizes = [(image.height, image.width)]
        found = self.processor.post_process_depth_estimation(outputs, target_sizes=sizes)[0]["predicted_depth"]
        return self.sign * np.asarray(found.float().cpu().numpy(), np.float32)
