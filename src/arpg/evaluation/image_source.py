"""Images to evaluate: an npz file, a folder or a zip file, read as a stream of uint8 batches of one size."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from arpg.data.images import ImageSet, open_images
from arpg.errors import InputError, require
from arpg.image import Pixels, adm_crop, check_pixels

ARRAY = "arr_0"  # where np.savez puts what it is given, and where ADM's files have their images
THREADS = 8


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Images that can be walked in batches, any number of times."""

    where: str
    count: int
    batches: Callable[[int], Iterator[Pixels]]


def open_source(path: str | Path, *, size: int | None = None) -> ImageSource:
    """An npz file with the images in arr_0 (uint8 [n, H, W, 3]), or a folder or zip file of image files.

    With a size, image files are cropped to that square as ADM prepares ImageNet; an npz file must have it already.
    """
    path = Path(path)
    require(size is None or size >= 1, f"size is {size}; expected 1 or more pixels")
    return _open_npz(path, size) if path.suffix == ".npz" else from_images(open_images(path), size=size)


def from_array(pixels: Pixels, *, where: str = "images") -> ImageSource:
    check_pixels(pixels, what=where)

    def batches(batch_size: int) -> Iterator[Pixels]:
        for start in range(0, len(pixels), batch_size):
            yield pixels[start : start + batch_size]

    return ImageSource(where, len(pixels), batches)


def from_images(images: ImageSet, *, size: int | None = None) -> ImageSource:
    """Of image files, read by several threads; with a size, cropped to that square."""

    def read(index: int) -> Pixels:
        image = images.read(index)
        return np.asarray(image if size is None else adm_crop(image, size))

    def batches(batch_size: int) -> Iterator[Pixels]:
        require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
        shape: tuple[int, ...] | None = None
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(images), batch_size):
                stop = min(start + batch_size, len(images))
                arrays = list(pool.map(read, range(start, stop)))
                for i, array in enumerate(arrays, start):
                    shape = shape or array.shape
                    require(
                        array.shape == shape,
                        f"{images.where}: {images.names[i]} is {array.shape[1]}x{array.shape[0]} pixels, but "
                        f"{images.names[0]} is {shape[1]}x{shape[0]}; give a size to crop to",
                    )
                yield np.stack(arrays)

    return ImageSource(images.where, len(images), batches)


def npz_names(path: Path) -> set[str]:
    """The names of the arrays in an npz file."""
    require(path.is_file(), f"{path} does not exist; expected an npz file")
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is not a whole npz file ({error}); make or copy it again") from None


def _open_npz(path: Path, size: int | None) -> ImageSource:
    names = npz_names(path)
    require(
        ARRAY in names, f"{path} has no {ARRAY}, only {', '.join(sorted(names)) or 'nothing'}; expected images in it"
    )
    shape, dtype = _header(path)
    require(
        dtype == np.uint8 and len(shape) == 4 and shape[-1] == 3 and min(shape) > 0,
        f"{path}: {ARRAY} is {dtype} {list(shape)}; expected images as uint8 [n, height, width, 3], from 0 to 255",
    )
    require(
        size is None or shape[1:3] == (size, size),
        f"{path}: images are {shape[2]}x{shape[1]} pixels, not {size}x{size}; only image files are cropped",
    )
    bytes_each = shape[1] * shape[2] * shape[3]

    def batches(batch_size: int) -> Iterator[Pixels]:
        require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
        try:
            with zipfile.ZipFile(path) as archive, archive.open(f"{ARRAY}.npy") as file:
                _skip_header(file)
                for start in range(0, shape[0], batch_size):
                    n = min(batch_size, shape[0] - start)
                    data = file.read(n * bytes_each)
                    require(
                        len(data) == n * bytes_each, f"{path} ends after {start} of {shape[0]} images; make it again"
                    )
                    # bytearray: torch wants memory that it could write to
                    yield np.frombuffer(bytearray(data), np.uint8).reshape(n, *shape[1:])
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"{path} is damaged ({error}); make or copy it again") from None

    return ImageSource(str(path), shape[0], batches)


def _header(path: Path) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{ARRAY}.npy") as file:
            shape, fortran, dtype = _skip_header(file)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} is damaged ({error}); make or copy it again") from None
    require(not fortran, f"{path}: {ARRAY} is stored column by column; save np.ascontiguousarray of it")
    return shape, dtype


def _skip_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    return read(file)
