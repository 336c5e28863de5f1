"""API keys: read them, keep their digests, compare in constant time, and follow changes of their file."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from arpg.errors import InputError, require, require_file
from arpg.serve.api_error import ApiError

log = logging.getLogger(__name__)
KEYS_VARIABLE = "ARPG_API_KEYS"
MIN_LENGTH = 16
RELOAD_S = 1.0  # how often the file of the keys is looked at, while requests arrive
ANONYMOUS = "none"  # the label of calls to a server without keys


class ApiKeys:
    """The accepted keys by label. Only digests are kept, so that no log, error or core dump contains a key.

    `keys`: KEY or "LABEL KEY" each; a key without a label is labelled by the start of its digest. With `file`, the keys
    are those and the lines of the file, which is read again when it changes; while it is not valid, the keys stay as
    they are.
    """

    def __init__(self, keys: Iterable[str] = (), *, file: Path | None = None) -> None:
        self._fixed = _parse(keys)
        self._file, self._version, self._checked = file, None if file is None else _version(file), time.monotonic()
        self._labels = self._fixed if file is None else {**self._fixed, **_read(file)}

    def __len__(self) -> int:
        return len(self._labels)

    def __repr__(self) -> str:
        return f"<{len(self)} keys>"

    @property
    def num_tenants(self) -> int:
        """The number of labels: a tenant may have several keys, as while one is rotated."""
        return len(set(self._labels.values()))

    def find(self, key: str) -> str | None:
        """Return the label of a key. All keys are compared, in a time that does not depend on which one matches."""
        digest, found = _digest(key), None
        for known, label in self._labels.items():
            if hmac.compare_digest(digest, known):
                found = label
        return found

    def check(self, authorization: str | None) -> str:
        """Return the label of the key in the value of the Authorization header; raise a 401 without a valid one."""
        self.reload()
        if not self._labels:
            return ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "an API key is needed; send it as 'Authorization: Bearer KEY'", code="missing_api_key")
        label = self.find(key.strip())
        if label is None:
            raise ApiError(401, "the API key is not valid; check it for typing errors", code="invalid_api_key")
        return label

    def reload(self) -> None:
        """Read the file again if it has changed since the last look, at most once in `RELOAD_S`."""
        if self._file is None or time.monotonic() - self._checked < RELOAD_S:
            return
        self._checked = time.monotonic()
        version = _version(self._file)
        if version == self._version:
            return
        self._version = version
        try:
            self._labels = {**self._fixed, **_read(self._file)}
            log.info("keys read again", extra={"keys": len(self)})
        except InputError as error:
            log.error("the keys stay as they were: %s", error)


def read_keys(file: Path | None, variable: str | None) -> ApiKeys:
    """Read keys from a file (one per line, `#` starts a comment) and an environment variable (comma-separated)."""
    return ApiKeys([key for key in (variable or "").split(",") if key.strip()], file=file)


def _version(file: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced; None: there is none."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(file: Path) -> dict[bytes, str]:
    require_file(file, "a text file with one key on each line", what="keys file")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InputError(f"keys file {file} cannot be read; expected UTF-8 text with one key on each line") from None
    keys = _parse(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
    require(len(keys) > 0, f"keys file {file} has no key in it; expected one on each line")
    return keys


def _parse(entries: Iterable[str]) -> dict[bytes, str]:
    """Return the labels by digest of entries "KEY" or "LABEL KEY"; no message contains a key."""
    labels: dict[bytes, str] = {}
    for number, entry in enumerate(entries, 1):
        *label, key = entry.split()
        require(
            len(label) <= 1 and len(key) >= MIN_LENGTH and key.isascii(),
            f"key {number} has {len(key)} characters or others than ASCII; expected at least {MIN_LENGTH}, after at "
            "most a label and a space (openssl rand -hex 24 makes a good one)",
        )
        require(
            not label or re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", label[0]) is not None,
            f"the label of key {number} is not valid; expected 1 to 40 letters, digits, '_', '.' or '-'",
        )
        digest = _digest(key)
        labels[digest] = label[0] if label else f"key-{digest.hex()[:6]}"
    return labels


def check_exposure(host: str, keys: ApiKeys, *, insecure: bool) -> None:
    """Raise an `InputError` where other machines can reach `host` and there are neither keys nor `insecure`."""
    require(
        bool(len(keys)) or insecure or is_loopback(host),
        f"host is {host}, which other machines can reach, and there are no API keys; give --keys-file or "
        f"${KEYS_VARIABLE}, or --insecure to allow everybody",
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address: localhost, 127.0.0.0/8, ::1, and these inside IPv6."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
