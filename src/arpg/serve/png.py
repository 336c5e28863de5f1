"""PNG files for responses: one filter for all rows and run-length compression, a quarter of the CPU time of Pillow's.

Pillow tries all five filters of each row, and its deflate searches for repeated strings, which photographs do not have.
The files are as small without both (docs/performance/serving-cost.md), and neither step holds the interpreter lock.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {"L": 0, "RGB": 2}
AVERAGE = 3  # the filter: of the pixel at the left and the one above


def encode_png(image: Image.Image, text: Mapping[str, str] | None = None) -> bytes:
    """Return the PNG file of an 8-bit grey or RGB image; `text` becomes text chunks, its values are ASCII."""
    size = struct.pack(">II5B", image.width, image.height, 8, COLOUR_TYPES[image.mode], 0, 0, 0)
    texts = [_chunk(b"tEXt", f"{name}\0{value}".encode("ascii")) for name, value in (text or {}).items()]
    deflate = zlib.compressobj(strategy=zlib.Z_RLE)
    pixels = deflate.compress(_filtered(np.asarray(image)).data) + deflate.flush()
    return b"".join((SIGNATURE, _chunk(b"IHDR", size), *texts, _chunk(b"IDAT", pixels), _chunk(b"IEND", b"")))


def _filtered(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the rows of an image `[H, W]` or `[H, W, 3]` less their predictions, each after the filter's number."""
    rows, channels = pixels.reshape(len(pixels), -1), pixels[0, 0].size
    left, above = np.zeros_like(rows), np.zeros_like(rows)
    left[:, channels:] = rows[:, :-channels]
    above[1:] = rows[:-1]
    filtered = np.empty((rows.shape[0], 1 + rows.shape[1]), np.uint8)
    filtered[:, 0] = AVERAGE
    average = (left & above) + ((left ^ above) >> 1)  # rounded down, without a ninth bit
    np.subtract(rows, average, out=filtered[:, 1:])
    return filtered


def _chunk(name: bytes, data: bytes) -> bytes:
    return b"".join((struct.pack(">I", len(data)), name, data, struct.pack(">I", zlib.crc32(data, zlib.crc32(name)))))
