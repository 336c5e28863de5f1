"""Storage: paths of local folders and of object stores, retries, a local cache of remote files, and leases on folders.

A path is a `pathlib.Path`, or a `RemotePath` for a URL (s3://bucket/tokens, gs://..., hf://..., memory://...), which
fsspec opens. Both have the same methods, so that other modules do not ask which one they have. A remote file is
uploaded under a temporary name, its size is checked, and then it gets its own name, so readers never see half a file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import posixpath
import random
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from arpg.errors import InputError, first_line, require

T = TypeVar("T")
TRIES = 6  # of a request that fails for a reason that may pass
BACKOFF_SECONDS = 0.25  # before the second try; doubled before each further one
CACHE_GB = 32.0  # default of $ARPG_CACHE_GB
LEASE = ".lease.json"
HEARTBEAT_SECONDS, STALE_SECONDS = 10.0, 60.0
ABANDONED_SECONDS = 3600.0  # without a byte: a download whose process has died

_PERMANENT = (FileExistsError, IsADirectoryError, NotADirectoryError, NotImplementedError)
_LIBRARIES = {"aiohttp", "aiobotocore", "botocore", "gcsfs", "httpx", "requests", "s3fs", "urllib3"}
_NO_CREDENTIALS = ("NoCredentials", "PartialCredentials", "DefaultCredentials", "TokenRetrieval", "CredentialRetrieval")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or folder in an object store, with the methods of `pathlib.Path` that this package uses."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.url)

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return posixpath.splitext(self.name)[1]

    @property
    def stem(self) -> str:
        """The name without its ending."""
        return posixpath.splitext(self.name)[0]

    @property
    def parent(self) -> RemotePath:
        """The folder that holds this path; that of a bucket is the bucket."""
        scheme, _, rest = self.url.partition("://")
        return RemotePath(f"{scheme}://{posixpath.dirname(rest) or rest}")

    @property
    def parents(self) -> tuple[RemotePath, ...]:
        """All folders above, the nearest first."""
        return () if self.parent == self else (self.parent, *self.parent.parents)

    def relative_to(self, other: RemotePath) -> Path:
        """Return the part of the path below `other`."""
        return Path(self.url).relative_to(other.url)

    def info(self) -> dict[str, Any]:
        """Return what the store knows of a file: "size" and more; a missing one raises FileNotFoundError."""
        found: dict[str, Any] = self._call(lambda fs, path: fs.info(path))
        return found

    @property
    def version(self) -> str:
        """A text that changes when the file is written again."""
        info = self.info()
        keys = ("ETag", "etag", "md5Hash", "generation", "blob_id", "LastModified", "mtime", "created")
        return f"{info['size']} " + " ".join(str(info[key]) for key in keys if key in info)

    def exists(self) -> bool:
        """Return whether there is a file or a folder."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Return whether this is a file."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Return whether this is a folder: a prefix of files."""
        return self._kind() == "directory"

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the files and folders in this folder."""
        for path in self._call(lambda fs, path: fs.ls(path, detail=False)):
            yield self / posixpath.basename(path.rstrip("/"))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield the files and folders below whose relative path fits; * does not match a slash."""
        parts = pattern.split("/")
        for child in self.iterdir() if self.is_dir() else ():
            if fnmatchcase(child.name, parts[0]):
                yield from child.glob("/".join(parts[1:])) if len(parts) > 1 else (child,)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: an object store has no folders of its own."""

    def open(self, mode: Literal["rb"]) -> IO[bytes]:
        """Open the copy of the file in the local cache."""
        return fetch(self).open(mode)

    def read_bytes(self) -> bytes:
        """Return the bytes of the file."""
        data: bytes = self._call(lambda fs, path: fs.cat_file(path))
        return data

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the text of the file."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Write a small file, which a reader may see half written on some stores; others take `arpg.files`."""
        self._call(lambda fs, path: fs.pipe_file(path, data), writing=True)

    def upload(self, source: Path) -> RemotePath:
        """Upload a local file under a temporary name beside this path and return that; `replace` completes it."""
        temporary = self.parent / f".{self.name}.{uuid.uuid4().hex[:12]}.tmp"
        size = source.stat().st_size

        def put(fs: Any, path: str) -> None:
            fs.put_file(str(source), path)
            found = fs.info(path)["size"]
            if found != size:
                raise _TruncatedError(f"{found} of {size} bytes arrived")

        try:
            temporary._call(put, writing=True)
        except FileNotFoundError as error:
            raise InputError(f"{self} cannot be written: {first_line(error)}; make the bucket first") from None
        except BaseException:
            with contextlib.suppress(Exception):
                temporary.unlink(missing_ok=True)
            raise
        return temporary

    def replace(self, target: RemotePath) -> None:
        """Give the file another name, in one step for readers."""
        self._call(lambda fs, path: fs.cp_file(path, fs._strip_protocol(target.url)), writing=True)
        self.unlink(missing_ok=True)

    def create(self, data: bytes) -> bool:
        """Write a small file unless it is there; return whether it was written."""
        try:
            self._call(lambda fs, path: fs.pipe_file(path, data, mode="create"), writing=True)
        except FileExistsError:
            return False
        return True

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        if not missing_ok:
            self.info()  # S3 deletes what is not there without an error
        with contextlib.suppress(FileNotFoundError):
            self._call(lambda fs, path: fs.rm_file(path))

    def _kind(self) -> str | None:
        try:
            return str(self.info()["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _call(self, act: Callable[[Any, str], T], *, writing: bool = False) -> T:
        """Call `act(filesystem, path)`, again after errors that may pass; others become an `InputError`."""
        fs = _filesystem(self.url.partition("://")[0])
        path = fs._strip_protocol(self.url)
        for number in range(TRIES):
            try:
                return act(fs, path)
            except FileNotFoundError:
                raise
            except Exception as error:
                self._raise_if_permanent(error, writing)
                last = error
            if number + 1 < TRIES:
                _log.info("%s: %s; trying again", self, first_line(last))
                time.sleep(BACKOFF_SECONDS * 2**number * random.uniform(0.5, 1.0))  # or all workers come back at once
        raise InputError(
            f"{self} cannot be reached ({first_line(last)}); check the network, the endpoint and that the bucket exists"
        ) from last

    def _raise_if_permanent(self, error: Exception, writing: bool) -> None:
        kind = type(error).__name__
        if kind.startswith(_NO_CREDENTIALS):
            raise InputError(
                f"{self}: there are no credentials ({first_line(error)}); set those of the store, like "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS or HF_TOKEN"
            ) from None
        if isinstance(error, PermissionError):
            action = "write" if writing else "read"
            raise InputError(
                f"{self}: access is denied ({first_line(error)}); use credentials that may {action} there"
            ) from None
        transient = isinstance(error, OSError | TimeoutError | _TruncatedError)
        if isinstance(error, _PERMANENT) or not (transient or type(error).__module__.split(".")[0] in _LIBRARIES):
            raise error


AnyPath = Path | RemotePath


class _TruncatedError(Exception):
    """Less arrived than was sent."""


def as_path(place: str | AnyPath) -> AnyPath:
    """Return the path of a local place or of a URL."""
    if not isinstance(place, str):
        return place
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", place)
    if match is None:
        return Path(place)
    if match[1].lower() == "file":
        return Path(unquote(urlsplit(place).path))
    require(len(place.rstrip("/")) > len(match[0]) - 1, f"{place!r} names no bucket; expected PROTOCOL://BUCKET/PATH")
    return RemotePath(place.rstrip("/"))


@functools.cache
def _filesystem(protocol: str) -> Any:
    try:
        import fsspec

        cls = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise InputError(
            f"{protocol}:// needs another package ({first_line(error)}); pip install 'arpg[cloud]'"
        ) from None
    except ValueError:
        raise InputError(
            f"{protocol}:// is no known protocol; expected s3, gs, hf, file or one that fsspec has"
        ) from None
    options: dict[str, Any] = {}
    if protocol in ("s3", "s3a"):  # its own retries are those of `_call`
        options["config_kwargs"] = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 5,
            "read_timeout": 30,
        }
    try:
        return cls(use_listings_cache=False, skip_instance_cache=True, **options)  # other processes write, too
    except Exception as error:
        raise InputError(f"{protocol}:// cannot be used: {first_line(error)}") from None


def list_files(folder: AnyPath) -> list[str]:
    """List all files below a folder, as relative paths with slashes."""
    if isinstance(folder, RemotePath):
        found: list[str] = folder._call(lambda fs, path: [p[len(path) :].lstrip("/") for p in fs.find(path)])
        return found
    return [
        (Path(root) / name).relative_to(folder).as_posix()
        for root, _, names in os.walk(folder, followlinks=True)
        for name in names
    ]


def sorted_glob(folder: AnyPath, pattern: str) -> list[AnyPath]:
    """Return the files and folders in `folder` that fit `pattern`, sorted by name."""
    return sorted(folder.glob(pattern), key=lambda path: path.name)


def remove_folder(folder: AnyPath) -> None:
    """Delete a folder with all that is in it."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
        return
    for name in list_files(folder):
        (folder / name).unlink(missing_ok=True)


def home() -> Path:
    """Return the folder of what is fetched or kept: $ARPG_HOME, or else one in the user's cache folder."""
    if value := os.environ.get("ARPG_HOME"):
        return Path(value)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "arpg"


def fetch(path: AnyPath) -> Path:
    """Return a local file with the bytes of `path`: itself, or its copy in the cache, downloaded where it is new.

    The cache is `home()/remote`; beyond $ARPG_CACHE_GB the files that were used least recently are deleted. What a
    process has open or mapped stays readable for it.
    """
    if isinstance(path, Path):
        return path
    folder = home() / "remote"
    target = folder / hashlib.sha256(f"{path} {path.version}".encode()).hexdigest()[:40]
    try:
        os.utime(target)  # used now
        return target
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".download.", dir=folder)
    os.close(handle)
    temporary = Path(name)

    def download(fs: Any, remote: str) -> None:
        size = fs.info(remote)["size"]
        fs.get_file(remote, name)
        if temporary.stat().st_size != size:
            raise _TruncatedError(f"{temporary.stat().st_size} of {size} bytes arrived")

    try:
        path._call(download)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _evict(folder, keep=target)
    return target


def _cache_gigabytes() -> float:
    text = os.environ.get("ARPG_CACHE_GB", str(CACHE_GB))
    try:
        return float(text)
    except ValueError:
        raise InputError(f"ARPG_CACHE_GB is {text!r}; expected a number of gigabytes, such as {CACHE_GB:g}") from None


def _evict(folder: Path, *, keep: Path) -> None:
    limit = 1e9 * _cache_gigabytes()
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process evicts, too
            stat = path.stat()
            files.append((stat.st_mtime_ns, stat.st_size, path))
    total = sum(size for _, size, _ in files)
    abandoned = 1e9 * (time.time() - ABANDONED_SECONDS)
    for used, size, path in sorted(files):
        if total <= limit:
            break
        if path != keep and (not path.name.startswith(".") or used < abandoned):
            path.unlink(missing_ok=True)
            total -= size


class Lease:
    """The right to write a folder: a file with its owner and a time that a thread renews, held in a `with` block.

    A second job that wants the folder is refused while the first lives. After a crash the lease is free at once on the
    same machine, and after `STALE_SECONDS` on others. Restarts of one torchrun job share a lease.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.folder, self.path = folder, folder / LEASE
        run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        self.owner = uuid.uuid4().hex if run == "none" else f"torchrun {run}"
        self._stop = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        for _ in range(TRIES):
            created, found = self._create(), self._read()
            if created and found is not None and found.get("owner") == self.owner:
                break
            if found is not None and found.get("owner") != self.owner:  # also one that was cut short, which has none
                self._require_dead(found)
            self.path.unlink(missing_ok=True)
        self.check()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if not self._lost and self._is_ours(self._read()):
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise an `InputError` if another job has taken the folder; call it before a manifest is written."""
        require(
            not self._lost and self._is_ours(self._read()),
            f"{self.folder} was taken over by another job; this one stops and changes nothing there",
        )

    def _is_ours(self, found: dict[str, Any] | None) -> bool:
        """Whether a lease is held by this job; one that was cut short names nobody and is written again."""
        return found is not None and found.get("owner", self.owner) == self.owner

    def _require_dead(self, found: dict[str, Any]) -> None:
        host, pid, age = found.get("host"), found.get("pid"), time.time() - float(found.get("time", 0))
        dead = age > STALE_SECONDS
        if host == socket.gethostname() and isinstance(pid, int) and sys.platform != "win32":  # there, 0 is Ctrl-C
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                dead = True
            except PermissionError:  # it lives, and belongs to another user
                pass
        require(
            dead,
            f"{self.folder} is being written by process {pid} on {host}; wait for it or choose another folder",
        )

    def _content(self) -> bytes:
        data = {"owner": self.owner, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        return json.dumps(data).encode()

    def _create(self) -> bool:
        if isinstance(self.path, RemotePath):
            return self.path.create(self._content())
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".lease.") as file:
                file.write(self._content())
                file.flush()
                os.link(file.name, self.path)  # complete at once, and only where there is none
        except FileExistsError:
            return False
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be written: {error.strerror or error}; choose another place"
            ) from None
        return True

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _rewrite(self) -> None:
        if isinstance(self.path, RemotePath):
            self.path.write_bytes(self._content())
            return
        new = self.path.with_name(f"{LEASE}.{os.getpid()}")  # whoever reads the lease must not see it half written
        new.write_bytes(self._content())
        new.replace(self.path)

    def _renew(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                if not self._is_ours(self._read()):
                    self._lost = True
                    return
                self._rewrite()
            except (OSError, InputError) as error:  # a store that is away for a moment; the next beat may arrive
                _log.warning("%s could not be renewed: %s", self.path, first_line(error))
