"""ImageStore: results that clients fetch by URL, in memory, for a short time, under names that cannot be guessed."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass

from arpg.serve.api_error import check

PATH = "/images"  # of the URLs; outside /v1: the name is the secret, no key is needed


@dataclass(frozen=True)
class StoredImage:
    """An image file, its media type, and when it expires."""

    data: bytes
    media_type: str
    expires: float


class ImageStore:
    """Holds at most `max_bytes` for at most `seconds`; the oldest files go first. Used on the event loop alone."""

    def __init__(self, *, max_bytes: int, seconds: float) -> None:
        self.max_bytes, self.seconds, self.num_bytes = max_bytes, seconds, 0
        self._images: OrderedDict[str, StoredImage] = OrderedDict()

    def check_room(self) -> None:
        """Raise a 400 where this server has no store."""
        check(
            self.max_bytes > 0,
            "response_format is 'url', which this server does not offer; use b64_json",
            param="response_format",
        )

    def add(self, data: bytes, media_type: str) -> str:
        """Keep a file and return its path; what is expired, and the oldest files in its way, are dropped."""
        self._drop_expired()
        while self._images and self.num_bytes + len(data) > self.max_bytes:
            self._drop(next(iter(self._images)))
        name = f"{secrets.token_urlsafe(32)}.{media_type.split('/')[1]}"
        self._images[name] = StoredImage(data, media_type, time.monotonic() + self.seconds)
        self.num_bytes += len(data)
        return f"{PATH}/{name}"

    def find(self, name: str) -> StoredImage | None:
        """Return a file that is not expired."""
        self._drop_expired()
        return self._images.get(name)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        while self._images and next(iter(self._images.values())).expires <= now:
            self._drop(next(iter(self._images)))

    def _drop(self, name: str) -> None:
        self.num_bytes -= len(self._images.pop(name).data)
