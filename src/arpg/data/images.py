"""Image sets: folders and zip files of images, one folder per class, with captions where there are some.

    ROOT/CLASS/.../FILE     classes are the folders below ROOT, sorted by name
    ROOT/FILE               no classes: every label is 0
    captions.json           {file: caption} or {file: {"name": caption, ...}}, beside the images it describes
    captions.jsonl          {"file": ..., "caption": ...} per line, likewise
    metadata.jsonl          {"file_name": ..., "text": ...} per line, likewise
    NAME.txt                the caption of the image NAME beside it

ROOT is a folder, a zip file, or a path into a zip file, like data/fruits.zip/fruits/train. WebDataset tars, and
folders of them, are read as well: KEY.jpg with KEY.txt, or with a KEY.json that has a "caption"; so are Parquet files,
with the columns `image`, `label` and `caption`. All of them may be in an object store (`arpg.storage`).
"""

from __future__ import annotations

import bisect
import io
import itertools
import json
import posixpath
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from arpg.errors import InputError, first_line, present, require, require_package
from arpg.image import to_rgb
from arpg.storage import AnyPath, as_path, fetch, list_files, sorted_glob

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
TAR_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
CAPTIONS = ("captions.json", "captions.jsonl", "metadata.jsonl")
# Columns of Parquet files; the first that is there counts.
IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "img")
LABEL_COLUMNS = ("label", "cls")
CAPTION_COLUMNS = ("caption", "text", "txt")

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


class Reader(Protocol):
    """Reads the files of an image source by name, from any thread; can be sent to another process."""

    where: str

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images by index. `read` is thread-safe; a set can be sent to another process."""

    where: str  # the source, for error messages
    names: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    captions: tuple[str, ...] | None
    readers: tuple[Reader, ...]  # of each image

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Image.Image:
        """Read image `index` as RGB: upright (EXIF), with transparent parts on white."""
        reader, name = self.readers[index], self.names[index]
        try:
            with Image.open(io.BytesIO(reader.read(name))) as image:
                return to_rgb(image)
        except InputError:  # of the archive itself
            raise
        except _BROKEN as error:
            where = f"{reader.where}/{name}"
            raise InputError(f"{where} cannot be read as an image ({error}); repair or remove it") from None

    def only(self, indices: Sequence[int]) -> ImageSet:
        """Return the subset of the images at `indices`."""
        chosen = [int(i) for i in indices]
        captions = None if self.captions is None else tuple(self.captions[i] for i in chosen)
        names, labels = tuple(self.names[i] for i in chosen), tuple(self.labels[i] for i in chosen)
        return ImageSet(self.where, names, labels, self.classes, captions, tuple(self.readers[i] for i in chosen))


def open_images(path: str | AnyPath) -> ImageSet:
    """Open the image set at a folder, a zip file, a folder inside a zip file, a WebDataset tar or a Parquet file."""
    path = as_path(path)
    if path.suffix in SHARD_KINDS and path.is_file():
        return SHARD_KINDS[path.suffix](path)
    if path.is_dir():
        for suffix in SHARD_KINDS:
            if shards := sorted_glob(path, f"*{suffix}"):
                return concatenate([open_images(shard) for shard in shards])
        return _image_set(_FolderReader(path), list_files(path))
    archive = next((p for p in (path, *path.parents) if p.is_file()), None)
    archive = present(archive, f"{path} does not exist; expected a folder of images, a zip, tar or Parquet file")
    require(
        zipfile.is_zipfile(fetch(archive)), f"{archive} is not a zip file; expected a folder of images or a zip file"
    )
    inner = path.relative_to(archive).as_posix()
    prefix = "" if inner == "." else f"{inner}/"
    reader = _ZipReader(archive, prefix, str(path))
    members = [info.filename for info in reader.file().infolist() if not info.is_dir()]
    files = [name.removeprefix(prefix) for name in members if name.startswith(prefix)]
    tops = sorted({name.split("/")[0] for name in members})
    require(bool(files) or not prefix, f"{archive} has no folder {inner}; at its top are {', '.join(tops[:8])}")
    return _image_set(reader, files)


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
    captioned = all(images.captions is not None for images in sets)
    return ImageSet(
        where=", ".join(images.where for images in sets),
        names=tuple(name for images in sets for name in images.names),
        labels=tuple(number[i.classes[label]] if i.classes else 0 for i in sets for label in i.labels),
        classes=tuple(number),
        captions=tuple(caption for images in sets for caption in images.captions or ()) if captioned else None,
        readers=tuple(reader for images in sets for reader in images.readers),
    )


class _FolderReader:
    """Reads files below a folder."""

    def __init__(self, root: AnyPath) -> None:
        self.root, self.where = root, str(root)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()


class _ArchiveReader:
    """Reads members of an archive; what a thread has open or read (`_local`) stays in its process."""

    def __init__(self, path: AnyPath, where: str) -> None:
        self.path, self.where = path, where
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _local=threading.local())

    def local_file(self) -> Path:
        """Return the archive on this machine; asks an object store once per thread, and after it left the cache."""
        found: Path | None = getattr(self._local, "path", None)
        if found is None or not found.exists():
            found = self._local.path = fetch(self.path)
        return found


class _ZipReader(_ArchiveReader):
    """Reads members of a zip file by their names below `prefix`; each thread has a handle, which has one position."""

    def __init__(self, path: AnyPath, prefix: str, where: str) -> None:
        super().__init__(path, where)
        self.prefix = prefix

    def file(self) -> zipfile.ZipFile:
        try:
            if not hasattr(self._local, "file"):
                self._local.file = zipfile.ZipFile(fetch(self.path))
            file: zipfile.ZipFile = self._local.file
            return file
        except (OSError, zipfile.BadZipFile) as error:
            raise InputError(f"{self.path} is not a whole zip file ({error}); copy it again") from None

    def read(self, name: str) -> bytes:
        return self.file().read(self.prefix + name)


class _TarReader(_ArchiveReader):
    """Reads members of a tar by offset and size."""

    def __init__(self, path: AnyPath, members: dict[str, tuple[int, int]]) -> None:
        super().__init__(path, str(path))
        self.members = members

    def read(self, name: str) -> bytes:
        offset, size = self.members[name]
        with self.local_file().open("rb") as file:  # not kept open: a set may have thousands of tars
            file.seek(offset)
            data = file.read(size)
        require(len(data) == size, f"{self.path} ends inside {name}; copy it again")
        return data


class _ParquetReader(_ArchiveReader):
    """Reads the images of a Parquet file by row; a thread keeps the row group that it read last."""

    def __init__(self, path: AnyPath, column: str, ends: list[int]) -> None:
        super().__init__(path, str(path))
        self.column, self.ends = column, ends  # `ends`: rows up to the end of each row group

    def read(self, name: str) -> bytes:
        row = int(posixpath.basename(name))
        group = bisect.bisect_right(self.ends, row)
        if getattr(self._local, "group", None) != group:
            with _open_parquet(self.local_file()) as file:
                self._local.values = file.read_row_group(group, [self.column])[self.column]
            self._local.group = group
        value = self._local.values[row - (self.ends[group - 1] if group else 0)].as_py()
        data = value.get("bytes") if isinstance(value, dict) else value
        return bytes(present(data, f"{self.path}: row {row} of {self.column} is empty; expected an image file"))


def _image_set(reader: Reader, files: Iterable[str]) -> ImageSet:
    where = reader.where
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
    captions = _captions(where, files, names, reader.read)
    return ImageSet(where, names, labels, classes, captions, (reader,) * len(names))


def _captions(
    where: str, files: Sequence[str], names: Sequence[str], read: Callable[[str], bytes]
) -> tuple[str, ...] | None:
    """Read one caption per name from all caption files; None where there are no such files."""
    sidecars = {f"{posixpath.splitext(name)[0]}.txt": posixpath.basename(name) for name in names}
    files = [path for path in files if path in sidecars or posixpath.basename(path) in CAPTIONS]
    if not files:
        return None
    table: dict[str, str] = {}
    for path in files:
        try:
            text = read(path).decode("utf-8")
            if path.endswith(".txt"):
                entries = {sidecars[path]: " ".join(text.split())}
            elif path.endswith(".jsonl"):
                rows = [json.loads(line) for line in text.splitlines() if line.strip()]
                keys = ("file_name", "text") if posixpath.basename(path) == "metadata.jsonl" else ("file", "caption")
                entries = {row[keys[0]]: row[keys[1]] for row in rows}
            else:
                entries = {k: v["name"] if isinstance(v, dict) else v for k, v in json.loads(text).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{where}/{path} is not a caption file ({type(error).__name__}: {error}); "
                'expected {file: caption}, or lines of {"file": ..., "caption": ...} in captions.jsonl, or of '
                '{"file_name": ..., "text": ...} in metadata.jsonl, or plain text in a .txt file'
            ) from None
        table |= {posixpath.join(posixpath.dirname(path), name): caption for name, caption in entries.items()}
    missing = [name for name in names if not isinstance(table.get(name), str)]
    require(
        not missing,
        f"{where} has captions, but {len(missing)} images have none, like {missing[0] if missing else ''}; add them",
    )
    return tuple(table[name] for name in names)


def _open_tar(path: AnyPath) -> ImageSet:
    """Index a WebDataset tar: its images, and their captions where all have one."""
    try:
        with tarfile.open(fetch(path), "r:") as archive:
            members = {m.name: (m.offset_data, m.size) for m in archive if m.isfile()}
    except (tarfile.TarError, OSError) as error:
        raise InputError(
            f"{path} is not a whole, uncompressed tar file ({error}); unpack it or copy it again"
        ) from None
    reader = _TarReader(path, members)
    images = [name for name in members if _ending(name) in TAR_ENDINGS]
    require(len(images) >= 1, f"{path} has no images; expected members that end in {', '.join(TAR_ENDINGS)}")
    keys = [_key(name) for name in images]
    require(len(set(keys)) == len(keys), f"{path} has two images of one key; expected one image for each")
    texts = [_tar_caption(path, key, members, reader.read) for key in keys]
    found = [text for text in texts if text is not None]
    require(
        len(found) in (0, len(images)),
        f"{path} has captions, but {len(images) - len(found)} of its images have none; expected KEY.txt or KEY.json",
    )
    readers = (reader,) * len(images)
    return ImageSet(str(path), tuple(images), (0,) * len(images), (), tuple(found) or None, readers)


def _tar_caption(
    path: AnyPath, key: str, members: dict[str, tuple[int, int]], read: Callable[[str], bytes]
) -> str | None:
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


def _open_parquet(path: Path) -> Any:
    advice = f"{path} is a Parquet file, which needs pyarrow; pip install 'arpg[cloud]'"
    parquet = require_package("pyarrow.parquet", advice)
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # as ArrowInvalid is
        raise InputError(f"{path} is not a whole Parquet file ({first_line(error)}); copy it again") from None


def _read_parquet(path: AnyPath) -> ImageSet:
    """Index a Parquet file with a column of image files: bytes, or (as Hugging Face has it) a struct with "bytes"."""
    with _open_parquet(fetch(path)) as file:
        return _index_parquet(path, file)


def _index_parquet(path: AnyPath, file: Any) -> ImageSet:
    names = set(file.schema_arrow.names)

    def column(choices: tuple[str, ...]) -> str | None:
        return next((name for name in choices if name in names), None)

    image = present(
        column(IMAGE_COLUMNS), f"{path} has the columns {sorted(names)}; expected images in {', '.join(IMAGE_COLUMNS)}"
    )
    count = file.metadata.num_rows
    require(count >= 1, f"{path} has no rows; expected images")
    ends = list(itertools.accumulate(file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)))
    labels: tuple[int, ...] = (0,) * count
    classes: tuple[str, ...] = ()
    if label := column(LABEL_COLUMNS):
        values = file.read([label])[label].to_pylist()
        require(
            all(isinstance(value, int) and value >= 0 for value in values),
            f"{path}: {label} is not a whole number in every row; expected the class of each image",
        )
        labels, classes = tuple(values), _parquet_classes(file, label, max(values) + 1)
    caption = column(CAPTION_COLUMNS)
    texts = None if caption is None else file.read([caption])[caption].to_pylist()
    require(
        texts is None or all(isinstance(text, str) for text in texts), f"{path}: {caption} is not a text in every row"
    )
    rows = tuple(f"{path.stem}/{row:09d}" for row in range(count))
    readers = (_ParquetReader(path, image, ends),) * count
    return ImageSet(str(path), rows, labels, classes, None if texts is None else tuple(texts), readers)


def _parquet_classes(file: Any, label: str, count: int) -> tuple[str, ...]:
    """Return the class names that Hugging Face keeps in the file's metadata; else numbers."""
    about = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
    found = about.get("info", {}).get("features", {}).get(label, {}).get("names")
    return tuple(found) if found and len(found) >= count else tuple(map(str, range(count)))


SHARD_KINDS: dict[str, Callable[[AnyPath], ImageSet]] = {".tar": _open_tar, ".parquet": _read_parquet}
