"""The settings of a server and the limits of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from arpg.config import ENGINES, KV_CACHE_DTYPES
from arpg.errors import one_of, require, require_positive
from arpg.settings import SETTINGS


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for."""

    images: int = 16
    best_of: int = 8
    candidates: int = 32  # images times best_of
    steps: int = int(SETTINGS["steps"].maximum or 0)
    side: int = 768  # pixels of a result, along its longer side
    prompt: int = 2000  # characters
    strength: int = 10  # of a condition image
    pixels: int = 1 << 22  # of an image that is sent
    input_side: int = 1 << 14  # pixels of an image that is sent, along its longer side
    bytes: int = 1 << 24  # of a request with images
    json_bytes: int = 1 << 18  # of a request without images

    def __post_init__(self) -> None:
        require_positive(self, *vars(self), prefix="limit ")

    def check_tokens(self, num_tokens: int, *, stride: int) -> None:
        """Raise an `InputError` where a result would have more tokens than a square of `side` pixels."""
        most = (self.side // stride) ** 2
        require(
            num_tokens <= most,
            f"the result would have {num_tokens} tokens; at most {most}, request a smaller size",
        )


def _option(default: Any, help: str) -> Any:
    """Declare a field that `arpg serve` has an option for."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ServeSettings:
    """How a server loads its model, batches and limits requests. `ALIASES` has old names of some fields."""

    device: str = "auto"
    precision: str = "auto"
    engine: str = "auto"
    kv_cache_dtype: str = "auto"  # of the key-value cache: that of the model, or fp8
    lora: tuple[str, ...] = ()  # adapters, FILE or FILE:SCALE, merged into the weights of the model
    max_batch: int | None = _option(
        None, "Images decoded together; by default 16, on a GPU up to 128 as its memory allows."
    )
    max_wait_ms: float | None = _option(
        None, "How long an idle server waits for more requests; by default 10, on a GPU 0: others join at every step."
    )
    max_pending_requests: int = _option(64, "Requests waiting or running; more get a 429.")
    max_pending_cost: float = _option(  # large tasks have as much again
        256.0, "Work waiting or running, in images of the model's own size; more gets a 429."
    )
    key_share: float = _option(0.5, "Share of both limits for the keys of one label, where there are several labels.")
    deadline: float = _option(120.0, "Seconds for one request.")
    drain_delay_s: float = _option(
        0.0, "Seconds after SIGTERM in which /readyz is a 503 and requests are still accepted."
    )
    io_timeout_s: float = _option(30.0, "Seconds for a body to arrive, or for a client to read on.")
    header_timeout_s: float = _option(10.0, "Seconds for the headers of a request to arrive.")
    keep_alive_s: float = _option(30.0, "Seconds that an idle connection stays open.")
    max_connections: int = _option(512, "Open connections; for more, idle ones are closed.")
    max_header_bytes: int = _option(1 << 15, "Bytes of a request line and its headers; more get a 431.")
    max_headers: int = _option(100, "Headers of a request; more get a 431.")
    max_body_bytes: int = _option(1 << 28, "Bytes of all request bodies in memory; more get a 503.")
    url_bytes: int = 1 << 26  # of images that were requested as URLs; 0: there are none
    url_seconds: float = _option(600.0, "Seconds that an image returned as a URL is kept; not on Ray.")
    public_url: str = _option(
        "", "Address of the server behind a reverse proxy, for URLs of images; by default that of the request."
    )
    worker_process: bool | None = _option(
        None,
        "Run the models in a process of their own, so that HTTP and the files of images do not hold up decoding; by "
        "default on a GPU, not on Ray.",
    )
    threads: int | None = _option(None, "CPU threads of a step; by default one per core.")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        one_of("engine", self.engine, ENGINES)
        one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        counts = ("max_pending_requests", "max_connections", "max_header_bytes", "max_headers", "max_body_bytes")
        require_positive(self, *counts, *(["max_batch"] if self.max_batch is not None else []))
        require(0 < self.key_share <= 1, f"key_share is {self.key_share}; expected more than 0 and at most 1")
        require(self.max_pending_cost > 0, f"max_pending_cost is {self.max_pending_cost}; expected more than 0 images")
        for name in ("deadline", "io_timeout_s", "header_timeout_s", "keep_alive_s", "url_seconds"):
            value = getattr(self, name)
            require(value > 0, f"{name} is {value}; expected more than 0 seconds")
        require(
            self.threads is None or self.threads >= 1,
            f"threads is {self.threads}; expected 1 or more, or leave it out for one per core",
        )
        require(
            not self.public_url or urlsplit(self.public_url).scheme in ("http", "https"),
            f"public_url is {self.public_url!r}; expected an address such as https://images.example.org",
        )
        require(
            self.max_wait_ms is None or self.max_wait_ms >= 0,
            f"max_wait_ms is {self.max_wait_ms}; expected 0 or more milliseconds",
        )
        require(self.drain_delay_s >= 0, f"drain_delay_s is {self.drain_delay_s}; expected 0 or more seconds")


ALIASES = {"dtype": "precision", "queue": "max_pending_requests", "patience": "io_timeout_s"}
