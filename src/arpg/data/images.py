"""Image sets: folders and zip files of images, one folder per class, with captions where there are some.

    ROOT/CLASS/.../FILE     classes are the folders below ROOT, sorted by name
    ROOT/FILE               no classes: every label is 0
    captions.json           {file: caption} or {file: {"name": caption, ...}}, beside the images it describes
    captions.jsonl          {"file": ..., "caption": ...} per line, likewise

ROOT is a folder, a zip file, or a path into a zip file, like data/fruits.zip/fruits/train. WebDataset tars, and
folders of them, are read as well: KEY.jpg with KEY.txt, or with a KEY.json that has a "caption".
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from arpg.errors import InputError, present, require
from arpg.image import to_rgb

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
TAR_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
CAPTIONS = ("captions.json", "captions.jsonl")

# What Pillow and zipfile raise for files that are damaged, encrypted or of another kind.
_BROKEN = (
    OSError,
    ValueError,
    SyntaxError,
    RuntimeError,
    EOFError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    Image.DecompressionBombError,
)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images by index. `read` is thread-safe."""

    where: str  # the source, for error messages
    names: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    captions: tuple[str, ...] | None
    load: Callable[[int], Image.Image]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Image.Image:
        """Read image `index` as RGB: upright (EXIF), with transparent parts on white."""
        return self.load(index)

    def only(self, indices: Sequence[int]) -> ImageSet:
        """Return the subset of the images at `indices`."""
        chosen = [int(i) for i in indices]
        captions = None if self.captions is None else tuple(self.captions[i] for i in chosen)
        names, labels = tuple(self.names[i] for i in chosen), tuple(self.labels[i] for i in chosen)
        return ImageSet(self.where, names, labels, self.classes, captions, lambda index: self.load(chosen[index]))


def open_images(path: str | Path) -> ImageSet:
    """Open the image set at a folder, a zip file, a folder inside a zip file, or a WebDataset tar."""
    path = Path(path)
    if path.suffix == ".tar" and path.is_file():
        names, captions, read = _read_tar(path)
        load = _loader(str(path), names, read)
        return ImageSet(str(path), tuple(names), (0,) * len(names), (), tuple(captions) if captions else None, load)
    if path.is_dir() and (tars := sorted(path.glob("*.tar"))):
        return concatenate([open_images(tar) for tar in tars])
    if path.is_dir():
        return _image_set(str(path), _walk(path), lambda name: (path / name).read_bytes())
    archive = next((p for p in (path, *path.parents) if p.is_file()), None)
    archive = present(archive, f"{path} does not exist; expected a folder of images, a zip or a tar file")
    require(zipfile.is_zipfile(archive), f"{archive} is not a zip file; expected a folder of images or a zip file")
    reader = _ZipReader(archive)
    members = [info.filename for info in reader.file().infolist() if not info.is_dir()]
    inner = path.relative_to(archive).as_posix()
    prefix = "" if inner == "." else f"{inner}/"
    files = [name.removeprefix(prefix) for name in members if name.startswith(prefix)]
    tops = sorted({name.split("/")[0] for name in members})
    require(bool(files) or not prefix, f"{archive} has no folder {inner}; at its top are {', '.join(tops[:8])}")
    return _image_set(str(path), files, lambda name: reader.read(prefix + name))


def concatenate(sets: Sequence[ImageSet]) -> ImageSet:
    """Concatenate image sets; classes of the same name become one class."""
    require(len(sets) >= 1, "there are no image sets to concatenate; give at least one")
    with_classes = [bool(images.classes) for images in sets]
    if any(with_classes) and not all(with_classes):
        bare = sets[with_classes.index(False)].where
        raise InputError(f"{bare} has no class folders, but other sets do; put its images into one folder per class")
    number: dict[str, int] = {}
    for images in sets:
        for name in images.classes:
            number.setdefault(name, len(number))
    labels: list[int] = []
    for images in sets:
        labels += [number[images.classes[label]] if images.classes else 0 for label in images.labels]
    captions: list[str] | None = []
    for images in sets:
        captions = None if captions is None or images.captions is None else [*captions, *images.captions]
    members = [(images, i) for images in sets for i in range(len(images))]

    def load(index: int) -> Image.Image:
        images, i = members[index]
        return images.read(i)

    return ImageSet(
        where=", ".join(images.where for images in sets),
        names=tuple(name for images in sets for name in images.names),
        labels=tuple(labels),
        classes=tuple(number),
        captions=None if captions is None else tuple(captions),
        load=load,
    )


class _ZipReader:
    """Reads members of a zip file, with a handle per thread, because a handle has one file position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.local = threading.local()

    def file(self) -> zipfile.ZipFile:
        file: zipfile.ZipFile | None = getattr(self.local, "file", None)
        if file is None:
            try:
                file = self.local.file = zipfile.ZipFile(self.path)
            except (OSError, zipfile.BadZipFile) as error:
                raise InputError(f"{self.path} is not a whole zip file ({error}); copy it again") from None
        return file

    def read(self, name: str) -> bytes:
        return self.file().read(name)


def _walk(root: Path) -> list[str]:
    """List all files below a folder, as relative paths with slashes."""
    found = []
    for folder, _, files in os.walk(root, followlinks=True):
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files]
    return found


def _image_set(where: str, files: Iterable[str], read: Callable[[str], bytes]) -> ImageSet:
    # Archives made on a Mac carry "._" twins of every file under __MACOSX.
    files = [name for name in files if not any(p.startswith((".", "__MACOSX")) for p in name.split("/"))]
    names = tuple(sorted(name for name in files if name.lower().endswith(ENDINGS)))
    require(len(names) >= 1, f"{where} has no images; expected files that end in {', '.join(ENDINGS)}")
    loose = [name for name in names if "/" not in name]
    require(
        len(loose) in (0, len(names)),
        f"{where} has class folders and also loose images, like {loose[0] if loose else ''}; use one or the other",
    )
    classes = () if loose else tuple(sorted({name.split("/")[0] for name in names}))
    number = {name: i for i, name in enumerate(classes)}
    labels = tuple(0 if loose else number[name.split("/")[0]] for name in names)
    captions = _captions(where, [name for name in files if posixpath.basename(name) in CAPTIONS], names, read)

    return ImageSet(where, names, labels, classes, captions, _loader(where, names, read))


def _loader(where: str, names: Sequence[str], read: Callable[[str], bytes]) -> Callable[[int], Image.Image]:
    def load(index: int) -> Image.Image:
        name = names[index]
        try:
            with Image.open(io.BytesIO(read(name))) as image:
                return to_rgb(image)
        except InputError:  # of the archive itself
            raise
        except _BROKEN as error:
            raise InputError(f"{where}/{name} cannot be read as an image ({error}); repair or remove it") from None

    return load


def _captions(
    where: str, files: Sequence[str], names: Sequence[str], read: Callable[[str], bytes]
) -> tuple[str, ...] | None:
    """Read one caption per name from all caption files; None where there are no such files."""
    if not files:
        return None
    table: dict[str, str] = {}
    for path in files:
        try:
            text = read(path).decode("utf-8")
            if path.endswith(".jsonl"):
                rows = [json.loads(line) for line in text.splitlines() if line.strip()]
                entries = {row["file"]: row["caption"] for row in rows}
            else:
                entries = {k: v["name"] if isinstance(v, dict) else v for k, v in json.loads(text).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{where}/{path} is not a caption file ({type(error).__name__}: {error}); "
                'expected {file: caption}, or lines of {"file": ..., "caption": ...} in a .jsonl file'
            ) from None
        table |= {posixpath.join(posixpath.dirname(path), name): caption for name, caption in entries.items()}
    missing = [name for name in names if not isinstance(table.get(name), str)]
    require(
        not missing,
        f"{where} has captions, but {len(missing)} images have none, like {missing[0] if missing else ''}; add them",
    )
    return tuple(table[name] for name in names)


def _read_tar(path: Path) -> tuple[list[str], list[str] | None, Callable[[str], bytes]]:
    """Index a WebDataset tar: the names of its images, their captions where all have one, and a reader of members.

    Members are read by offset through one descriptor, so threads need no handles of their own.
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

    images = [name for name in members if _ending(name) in TAR_ENDINGS]
    require(len(images) >= 1, f"{path} has no images; expected members that end in {', '.join(TAR_ENDINGS)}")
    keys = [_key(name) for name in images]
    require(len(set(keys)) == len(keys), f"{path} has two images of one key; expected one image for each")
    texts = [_tar_caption(path, key, members, read) for key in keys]
    found = [text for text in texts if text is not None]
    require(
        len(found) in (0, len(images)),
        f"{path} has captions, but {len(images) - len(found)} of its images have none; expected KEY.txt or KEY.json",
    )
    return images, found or None, read


def _tar_caption(path: Path, key: str, members: dict[str, tuple[int, int]], read: Callable[[str], bytes]) -> str | None:
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
    """Return the path up to the first dot of its base name, which is WebDataset's key."""
    folder, base = posixpath.split(name)
    return posixpath.join(folder, base.split(".")[0])


def _ending(name: str) -> str:
    return "." + posixpath.basename(name).partition(".")[2].lower()
