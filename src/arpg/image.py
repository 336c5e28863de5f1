"""Images: conversion between tensors, arrays and PIL, crops, sheets, and image files."""

from __future__ import annotations

import io
import math
import os
import struct
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps, PngImagePlugin, UnidentifiedImageError
from torch import Tensor

from arpg.errors import InputError, describe_broken, first_line, require, require_file
from arpg.files import write_whole
from arpg.storage import AnyPath

Pixels = NDArray[np.uint8]
ImageInput = Image.Image | NDArray[Any] | Tensor | str | Path  # see `to_image`
MAX_PIXELS = 64 * 10**6
_TOO_LARGE = f"at most {MAX_PIXELS // 10**6} million pixels are taken; make it smaller"
MAX_INTERMEDIATE_PIXELS = 1 << 24  # of what a resize makes between its input and its output
GAP = 2  # pixels between the images of a sheet


def to_rgb(image: Image.Image, *, background: str = "white") -> Image.Image:
    """Convert to 8-bit RGB: upright (EXIF), and on the background where it is transparent."""
    image = _upright_8_bit(image)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, background), image.convert("RGBA"))
    return image.convert("RGB")


def to_rgba(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGBA, upright (EXIF): as `to_rgb`, with the transparency kept."""
    return _upright_8_bit(image).convert("RGBA")


def _upright_8_bit(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    require(image.mode != "F", "the image has floating-point pixels; expected 8 or 16 bits, convert it")
    if image.mode.startswith("I"):  # 16-bit greyscale, which Pillow would clip rather than scale
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    return image


def open_image(path: Path, *, what: str = "image", alpha: bool = False) -> Image.Image:
    """Open an image file as RGB, or RGBA with `alpha`; its size is checked before any pixel is decoded."""
    require_file(path, "an image file", what=what)
    try:
        with (
            warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning),
            Image.open(path) as image,
        ):
            width, height = image.size
            require(width * height <= MAX_PIXELS, f"{what} {path} is {width}x{height} pixels; {_TOO_LARGE}")
            return to_rgba(image) if alpha else to_rgb(image)
    except Image.DecompressionBombError:
        raise InputError(f"{what} {path} is very large; {_TOO_LARGE}") from None
    except UnidentifiedImageError as error:
        raise InputError(f"{what} {describe_broken(path, 'an image file', error)}") from None
    except (OSError, SyntaxError, ValueError, struct.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{what} {path} is cut short or damaged ({first_line(error)}); save it again") from None


def to_image(image: ImageInput, *, what: str = "image", alpha: bool = False) -> Image.Image:
    """Return a PIL image as it is, open a path (see `open_image`), and convert an array `[H, W, C]` or a tensor
    `[C, H, W]`.

    Pixels are uint8, or floating point from 0 to 1. One channel may be left out (`[H, W]`), and a batch of one image is
    that image.
    """
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, str | Path):
        return open_image(Path(image), what=what, alpha=alpha)
    is_tensor = isinstance(image, Tensor)
    array = image.detach().cpu().float().numpy() if isinstance(image, Tensor) and image.is_floating_point() else image
    array = np.asarray(array)
    layout = "[C, H, W]" if is_tensor else "[H, W, C]"
    shape = f"{what} is {array.dtype} {list(array.shape)}; expected"
    array = array[0] if array.ndim == 4 and len(array) == 1 else array
    array = array.transpose(1, 2, 0) if is_tensor and array.ndim == 3 else array
    array = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (3, 4))
    require(fits and array.size > 0, f"{shape} {layout} with 1, 3 or 4 channels, or [H, W]")
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        require(low >= 0 and high <= 1, f"{what} has pixels from {low:g} to {high:g}; expected 0 to 1, or uint8")
        array = np.round(array * 255).astype(np.uint8)
    require(array.dtype == np.uint8, f"{shape} uint8, bool, or floating point from 0 to 1")
    return Image.fromarray(np.ascontiguousarray(array))


def to_mask(mask: ImageInput) -> NDArray[np.bool_]:
    """Return which pixels `[H, W]` a mask sets: white or transparent ones, those that are True, or numbers from 0.5."""
    grey = np.asarray(to_rgb(to_image(mask, what="mask")).convert("L"))
    require(
        isinstance(mask, Image.Image | str | Path) or not 0 < int(grey.max()) < 128,
        f"mask has numbers from 0 to {int(grey.max())} of 255, so nothing is to be filled; expected 255, 1.0 or True "
        "where it is",
    )
    return grey >= 128


def check_pixels(pixels: Pixels, *, what: str = "pixels") -> None:
    """Raise an `InputError` unless `pixels` are images as uint8 `[n, H, W, 3]`."""
    require(
        pixels.ndim == 4 and pixels.shape[-1] == 3 and len(pixels) > 0 and pixels.dtype == np.uint8,
        f"{what} are {pixels.dtype} {list(pixels.shape)}; expected images as uint8 [n, H, W, 3], at least one",
    )


def normalize(pixels: Tensor) -> Tensor:
    """Scale floating-point pixels from [0, 255] to [-1, 1]."""
    return pixels / 127.5 - 1


def to_images(pixels_BHW3: Pixels | Tensor, device: torch.device | str | None = None) -> Tensor:
    """Convert uint8 `[B, H, W, 3]` to `[B, 3, H, W]` in [-1, 1], channels last in memory; `to_uint8` is the inverse."""
    # A copy, because arrays from files are often read-only, which tensors cannot be.
    tensor = torch.from_numpy(np.array(pixels_BHW3)) if isinstance(pixels_BHW3, np.ndarray) else pixels_BHW3
    return normalize(tensor.to(device).permute(0, 3, 1, 2).float())


def to_uint8(image_B3HW: Tensor) -> Tensor:
    """Convert images in [-1, 1] to uint8 `[B, H, W, 3]`, rounded as the published code does: trunc(127.5 x + 128)."""
    return (127.5 * image_B3HW.float() + 128.0).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def to_pil(image_B3HW: Tensor) -> list[Image.Image]:
    """Convert images in [-1, 1] to PIL images."""
    # Contiguous rows, made on the device: Pillow would copy them pixel by pixel.
    return [Image.fromarray(array) for array in to_uint8(image_B3HW).contiguous().cpu().numpy()]


def resize(
    image: Image.Image,
    size: tuple[int, int],
    resample: Image.Resampling = Image.Resampling.BICUBIC,
    *,
    box: tuple[float, float, float, float] | None = None,
) -> Image.Image:
    """Resize `box` of an image (or all of it) to (width, height), without a large image in between.

    Pillow resizes the width first. Where that would make more than `MAX_INTERMEDIATE_PIXELS` (a tall, narrow image that
    becomes wide), the height is first: what is between is then no larger than the input or the output.
    """
    left, top, right, bottom = box or (0, 0, *image.size)
    if size[0] * (bottom - top) > max(MAX_INTERMEDIATE_PIXELS, (right - left) * size[1]):
        image = image.resize((image.width, size[1]), resample, box=(0, top, image.width, bottom))
        box = (left, 0, right, size[1])
    return image.resize(size, resample, box=box)


def adm_crop(image: Image.Image, size: int) -> Image.Image:
    """Crop the centre square at `size` pixels as ADM does for ImageNet: box filter by halves, then bicubic.

    ADM resizes the whole image and crops then. An image so long that this would make more than
    `MAX_INTERMEDIATE_PIXELS` (an aspect ratio above 256 at 256 pixels, 64 at 512) is cropped around its centre before.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    longest = max(2, MAX_INTERMEDIATE_PIXELS // size**2) * min(image.size)
    if max(image.size) > longest:
        cut = [max(0, side - longest + 1) // 2 for side in image.size]  # the same at both ends
        image = image.crop((cut[0], cut[1], image.width - cut[0], image.height - cut[1]))
    scale = size / min(image.size)
    width, height = round(image.width * scale), round(image.height * scale)
    image = resize(image, (width, height))
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


class View(NamedTuple):
    """A square window of the ADM square that is a tenth larger than an image, in its pixels, perhaps mirrored."""

    left: int
    top: int
    side: int
    mirror: bool


def view_square(size: int) -> int:
    """Return the side of the ADM square that the views of an image of `size` are cut from."""
    return int(1.1 * size)


def crop_views(image: Image.Image, size: int, views: Sequence[View]) -> list[Image.Image]:
    """Cut views out of an ADM square that is a tenth larger; a window of another side is resized to `size`."""
    square, crops = adm_crop(image, view_square(size)), []
    for left, top, side, mirror in views:
        crop = square.crop((left, top, left + side, top + side))
        crop = crop if side == size else crop.resize((size, size), Image.Resampling.BICUBIC)
        crops.append(ImageOps.mirror(crop) if mirror else crop)
    return crops


def ten_crop(image: Image.Image, size: int) -> list[Image.Image]:
    """Crop an ADM square that is a tenth larger at its corners and its centre, and mirror these five views."""
    room = view_square(size) - size
    middle = round(room / 2)
    corners = ((0, 0), (room, 0), (0, room), (room, room), (middle, middle))
    return crop_views(image, size, [View(*corner, size, mirror) for mirror in (False, True) for corner in corners])


def sheet(
    images: Sequence[Image.Image], *, columns: int | None = None, captions: Sequence[str] | None = None
) -> Image.Image:
    """Lay out images in one, row by row, about square unless `columns` is given, with captions below them."""
    columns = min(columns or math.ceil(math.sqrt(len(images))), len(images))
    rows = math.ceil(len(images) / columns)
    if captions is not None:
        images = [_captioned(image, text) for image, text in zip(images, captions, strict=True)]
    width, height = images[0].size
    canvas = Image.new("RGB", (columns * (width + GAP) - GAP, rows * (height + GAP) - GAP), "white")
    for i, image in enumerate(images):
        canvas.paste(image, (i % columns * (width + GAP), i // columns * (height + GAP)))
    return canvas


def _captioned(image: Image.Image, text: str) -> Image.Image:
    """Enlarge a small image to about 192 pixels and write up to three lines of text below it."""
    scale, line = max(1, 192 // max(image.size)), 11
    width, height = image.width * scale, image.height * scale
    canvas = Image.new("RGB", (width, height + 3 * line + 4), "white")
    canvas.paste(image.resize((width, height), Image.Resampling.NEAREST), (0, 0))
    draw = ImageDraw.Draw(canvas)
    for i, part in enumerate(textwrap.wrap(text, max(8, width // 6))[:3]):
        draw.text((2, height + 1 + i * line), part, fill="black")
    return canvas


def check_output(path: Path, *, folder: bool) -> None:
    """Raise an `InputError` if an image file, or with `folder` a folder of them, could not be written."""
    require(folder or not path.is_dir(), f"{path} is a folder; expected the name of an image file, like {path}/out.png")
    require(not folder or not path.exists() or path.is_dir(), f"{path} is a file; expected a folder for the images")
    if not folder:
        require(_can_write(path.suffix.lower()), f"{path} has no known image ending; use .png, .jpg or .webp")
    check_writable(path, folder=folder)


def _can_write(ending: str) -> bool:
    """Return whether Pillow writes RGB images in the format of a file's ending; some it only reads."""
    try:
        Image.new("RGB", (1, 1)).save(io.BytesIO(), format=Image.registered_extensions()[ending])
    except (KeyError, OSError, ValueError):
        return False
    return True


def check_writable(path: AnyPath, *, folder: bool = False) -> None:
    """Raise an `InputError` if a file, or with `folder` files in a folder, could not be written.

    An object store says so only when it is written to.
    """
    if not isinstance(path, Path):
        return
    require(folder or not path.is_dir(), f"{path} is a folder; expected the name of a file")
    target = path if folder else path.parent
    existing = next(p for p in (target.absolute(), *target.absolute().parents) if p.exists())
    require(existing.is_dir(), f"{path} cannot be written: {existing} is a file; choose another place")
    require(os.access(existing, os.W_OK), f"{path} cannot be written: no permission in {existing}")


def save(image: Image.Image, path: Path, *, about: str = "") -> None:
    """Write an image file completely or not at all; a PNG keeps `about` (the settings that made it) as text."""
    text = PngImagePlugin.PngInfo()
    text.add_text("arpg", about)
    options = {"pnginfo": text} if path.suffix.lower() == ".png" and about else {}
    kind = Image.registered_extensions()[path.suffix.lower()]
    write_whole(path, lambda temporary: image.save(temporary, format=kind, **options))
