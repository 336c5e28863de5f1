"""Limits: how much one request may ask for, and pictures that are read within them."""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
from dataclasses import dataclass

from PIL import Image

from arpg.errors import require
from arpg.image import to_rgb
from arpg.serve.problem import Problem

FORMATS = ("PNG", "JPEG", "WEBP")  # what clients send; Pillow knows sixty more that nobody needs here


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for."""

    images: int = 16
    best_of: int = 8
    candidates: int = 32  # images times best_of
    steps: int = 1024
    side: int = 768  # pixels of a result, along its longer side
    prompt: int = 2000  # characters
    strength: int = 10  # of a condition image
    pixels: int = 1 << 22  # of a picture that is sent
    bytes: int = 1 << 24  # of a request

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 1, f"limit {name} is {value}; expected 1 or more")

    def check_candidates(self, num: int, best_of: int) -> None:
        if num > self.images:
            raise Problem(400, f"num is {num}; at most {self.images} images are drawn at once", param="num")
        if best_of > self.best_of:
            raise Problem(
                400, f"best_of is {best_of}; at most {self.best_of} are drawn for each image", param="best_of"
            )
        if num * best_of > self.candidates:
            raise Problem(
                400,
                f"{num} images, each the best of {best_of}, are {num * best_of} drawings; at most "
                f"{self.candidates} are made for one request",
                param="best_of",
            )

    def check_text(self, text: str, *, param: str) -> None:
        if len(text) > self.prompt:
            raise Problem(
                400,
                f"{param} has {len(text)} characters; at most {self.prompt} are taken, make it shorter",
                param=param,
                code="too_long",
            )

    def check_size(self, size: tuple[int, int], *, param: str) -> None:
        """The (width, height) of a result."""
        if max(size) > self.side:
            raise Problem(
                400,
                f"the result would have {size[0]}x{size[1]} pixels; at most {self.side} are drawn along a side",
                param=param,
                code="too_large",
            )


def decode_base64(text: str, *, param: str) -> bytes:
    """The bytes of a field; also of a data: URL, but nothing is ever fetched."""
    text = re.sub(r"^data:image/[a-z+.-]{1,20};base64,", "", text)
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", text[:64]):
        raise Problem(
            400, f"{param} is an address; nothing is fetched here, send the picture itself in base64", param=param
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Problem(400, f"{param} is not base64; send a PNG, JPEG or WebP file in base64", param=param) from None


def read_picture(data: bytes, limits: Limits, *, param: str, alpha: bool = False) -> Image.Image:
    """A picture from a client, as RGB (or with its transparency). Its size is checked before a pixel is decoded."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > limits.pixels:
                raise Problem(
                    413,
                    f"{param} has {width}x{height} pixels; at most {limits.pixels} are taken, make it smaller",
                    param=param,
                    code="too_large",
                )
            return image.convert("RGBA") if alpha else to_rgb(image)
    except Problem:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Problem(413, f"{param} has too many pixels; make it smaller", param=param, code="too_large") from None
    except (OSError, SyntaxError, ValueError, TypeError, EOFError, OverflowError, struct.error):
        raise Problem(
            400, f"{param} cannot be read as a picture; expected a whole PNG, JPEG or WebP file", param=param
        ) from None
