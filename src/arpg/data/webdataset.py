"""WebDataset tars: KEY.jpg with KEY.txt, or with KEY.json that has a "caption"; members of one key belong together."""

from __future__ import annotations

import json
import os
import posixpath
import tarfile
from collections.abc import Callable
from pathlib import Path

from arpg.errors import InputError, require

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


def read_tar(path: Path) -> tuple[list[str], list[str] | None, Callable[[str], bytes]]:
    """The names of the images in their order, their captions where all have one, and how a member is read.

    Reading is by offset through one descriptor, so threads need no handles of their own.
    """
    try:
        with tarfile.open(path, "r:") as archive:
            members = {m.name: (m.offset_data, m.size) for m in archive if m.isfile()}
    except (tarfile.TarError, OSError) as error:
        raise InputError(
            f"{path} is not a whole, uncompressed tar file ({error}); unpack it or copy it again"
        ) from None
    descriptor = os.open(path, os.O_RDONLY)

    def read(name: str) -> bytes:
        offset, size = members[name]
        data = os.pread(descriptor, size, offset)
        require(len(data) == size, f"{path} ends inside {name}; copy it again")
        return data

    images = [name for name in members if _ending(name) in ENDINGS]
    require(len(images) >= 1, f"{path} has no images; expected members that end in {', '.join(ENDINGS)}")
    keys = [_key(name) for name in images]
    require(len(set(keys)) == len(keys), f"{path} has two images of one key; expected one image for each")
    texts = [_caption(path, key, members, read) for key in keys]
    found = [text for text in texts if text is not None]
    require(
        len(found) in (0, len(images)),
        f"{path} has captions, but {len(images) - len(found)} of its images have none; expected KEY.txt or KEY.json",
    )
    return images, found or None, read


def _caption(path: Path, key: str, members: dict[str, tuple[int, int]], read: Callable[[str], bytes]) -> str | None:
    if f"{key}.txt" in members:
        try:
            return read(f"{key}.txt").decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: {key}.txt is not UTF-8 text ({error})") from None
    if f"{key}.json" in members:
        try:
            caption = json.loads(read(f"{key}.json"))["caption"]
            if isinstance(caption, str):
                return caption
        except (ValueError, KeyError, TypeError):
            pass
        raise InputError(f'{path}: {key}.json has no "caption"; expected {{"caption": "..."}}')
    return None


def _key(name: str) -> str:
    """All up to the first dot of the base name, as WebDataset has it."""
    folder, base = posixpath.split(name)
    return posixpath.join(folder, base.split(".")[0])


def _ending(name: str) -> str:
    return "." + posixpath.basename(name).partition(".")[2].lower()
