"""Extractors: edges, soft edges and depth of a picture, as a grey picture of the same size.

Edges are white on black; near is white, far is black. Shapes: H W pixels.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from arpg.config import CONTROLS, one_of
from arpg.control.depth import FILE, DepthModel, open_depth
from arpg.errors import InputError, require
from arpg.hub import home
from arpg.image import Pixels, to_rgb

KINDS = CONTROLS
LOW, HIGH = 100, 200  # Canny's thresholds, as the paper has them
SCALES = (1, 2, 4)  # pixels, of the blurs before the gradients of soft edges
STEP = 0.2  # the gradient of a sharp step of half the range, whatever the scale: this much is white


def extract(kind: str, image: Image.Image, *, depth: DepthModel | str | Path | None = None) -> Image.Image:
    """The condition of a kind that is in a picture: mode "L", same size.

    `depth` says by what depth is estimated: see `open_depth`. A ready-made condition needs only `ready_made`.
    """
    one_of("kind", kind, KINDS)
    rgb = to_rgb(image)
    if kind == "canny":
        return Image.fromarray(canny(np.asarray(rgb)))
    if kind == "soft":
        return Image.fromarray(soft_edges(np.asarray(rgb)))
    model = depth if callable(depth) else open_depth(depth)
    return Image.fromarray(stretched(model(rgb)))


def can_extract(kind: str) -> bool:
    """Whether what the kind needs is here: OpenCV; for depth, ONNX Runtime and FastDepth in $ARPG_HOME."""
    if kind == "depth":
        return find_spec("onnxruntime") is not None and (home() / FILE).is_file()
    return find_spec("cv2") is not None


def ready_made(image: Image.Image) -> Image.Image:
    """A condition that someone drew or computed, as it is: upright, grey, black where it is transparent."""
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        black = Image.new("RGBA", image.size, "black")
        image = Image.alpha_composite(black, image.convert("RGBA"))
    return to_rgb(image).convert("L")


def canny(pixels_HW3: Pixels) -> Pixels:
    """Canny's edges, 0 or 255, of the channel in which the gradient is largest."""
    edges: Pixels = opencv().Canny(np.ascontiguousarray(pixels_HW3), LOW, HIGH)
    return edges


def soft_edges(pixels_HW3: Pixels) -> Pixels:
    """Soft edges: gradients at three scales, thinned towards their ridges; nothing here is learned.

    This stands where others use HED. It is not HED: it knows light and shade only, not what belongs to an object.
    """
    cv2 = opencv()
    image = np.asarray(pixels_HW3, np.float32) / 255
    strongest = np.zeros(image.shape[:2], np.float32)
    for scale in SCALES:
        smooth = cv2.GaussianBlur(image, (0, 0), scale)
        along = [cv2.Sobel(smooth, cv2.CV_32F, x, 1 - x, ksize=3, scale=1 / 8) for x in (1, 0)]
        # Times the scale: a step then counts the same at every scale.
        size = scale * np.hypot(*along).max(-1)
        highest = cv2.dilate(size, np.ones((2 * scale + 1, 2 * scale + 1), np.uint8))
        strongest = np.maximum(strongest, size * (size / np.maximum(highest, 1e-6)) ** 2)
    grey: Pixels = np.clip(255 * strongest / STEP + 0.5, 0, 255).astype(np.uint8)
    return grey


def stretched(near_HW: NDArray[np.floating[Any]]) -> Pixels:
    """Nearness on any scale as grey: the nearest is white, the farthest black; without any difference, mid-grey."""
    require(bool(np.isfinite(near_HW).all()), "the depth has values that are not numbers; choose another depth model")
    low, high = float(near_HW.min()), float(near_HW.max())
    if high <= low:
        return np.full(near_HW.shape, 128, np.uint8)
    return np.round(255 * (near_HW - low) / (high - low)).astype(np.uint8)


def depth_map(depth_HW: NDArray[np.floating[Any]]) -> Pixels:
    """Depth that is known, from 0 (near) to 1 (far), as grey: composed scenes have it. Nothing is stretched."""
    good = bool(np.isfinite(depth_HW).all()) and float(depth_HW.min()) >= 0 and float(depth_HW.max()) <= 1
    require(good, "the depth has values outside of 0 to 1; expected 0 (near) to 1 (far)")
    return np.round(255 * (1 - depth_HW)).astype(np.uint8)


def opencv() -> Any:
    """The library, if it is there."""
    try:
        import cv2
    except ImportError:
        raise InputError("edges need OpenCV, which is not installed: pip install 'arpg[control]'") from None
    return cv2
