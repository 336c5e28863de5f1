"""API keys: read them, keep their digests, and compare in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from arpg.errors import InputError, require
from arpg.serve.api_error import ApiError

KEYS_VARIABLE = "ARPG_API_KEYS"
MIN_LENGTH = 16


class ApiKeys:
    """The accepted keys. Only digests are kept, so that no log, error or core dump contains a key."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(dict.fromkeys(_digest(key) for key in keys))

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"<{len(self)} keys>"

    def __contains__(self, key: str) -> bool:
        """Compare with every key, in a time that does not depend on which of them matches or how much of it."""
        digest, found = _digest(key), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def check(self, authorization: str | None) -> None:
        """Raise a 401 unless the value of the Authorization header contains one of the keys."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "an API key is needed; send it as 'Authorization: Bearer KEY'", code="missing_api_key")
        if key.strip() not in self:
            raise ApiError(401, "the API key is not valid; check it for typing errors", code="invalid_api_key")


def read_keys(file: Path | None, variable: str | None) -> ApiKeys:
    """Read keys from a file (one per line, `#` starts a comment) and an environment variable (comma-separated)."""
    keys: list[str] = []
    if file is not None:
        require(file.is_file(), f"keys file {file} does not exist; expected a text file with one key on each line")
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            raise InputError(
                f"keys file {file} cannot be read; expected UTF-8 text with one key on each line"
            ) from None
        keys += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        require(len(keys) > 0, f"keys file {file} has no key in it; expected one on each line")
    keys += [key.strip() for key in (variable or "").split(",") if key.strip()]
    for number, key in enumerate(keys, 1):  # the message must not contain the key
        require(
            len(key) >= MIN_LENGTH and key.isascii() and not any(c.isspace() for c in key),
            f"key {number} has {len(key)} characters or others than ASCII; expected at least {MIN_LENGTH}, without "
            "spaces (openssl rand -hex 24 makes a good one)",
        )
    return ApiKeys(keys)


def check_exposure(host: str, keys: ApiKeys, *, insecure: bool) -> None:
    """Raise an `InputError` where other machines can reach `host` and there are neither keys nor `insecure`."""
    require(
        bool(len(keys)) or insecure or _is_loopback(host),
        f"host is {host}, which other machines can reach, and there are no API keys; give --keys-file or "
        f"${KEYS_VARIABLE}, or --insecure to allow everybody",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
