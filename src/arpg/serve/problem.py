"""What a client is told when something is wrong: a status and one clear line, in the form the OpenAI API uses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from arpg.errors import InputError

_KINDS = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_error"}


class Problem(Exception):  # noqa: N818  it is an answer, too
    """An answer that is not the one asked for. The message is meant for the client; nothing else reaches it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        nearest: Sequence[str] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.nearest, self.retry_after = list(nearest), retry_after

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        if self.nearest:
            error["nearest"] = self.nearest
        return {"error": error}

    def encoded(self) -> bytes:
        """The body as JSON; escaped, so that whatever a client sent can be said back to it."""
        return json.dumps(self.body()).encode()

    def headers(self) -> dict[str, str]:
        found = {}
        if self.retry_after is not None:
            found["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def draining() -> Problem:
    return Problem(503, "the server is shutting down; try again in a moment", code="draining", retry_after=5)


def failed() -> Problem:
    """Whatever went wrong inside; the details are in the log under the request's id."""
    return Problem(500, "drawing failed on the server; the details are in its log", code="internal_error")


def too_late(seconds: float) -> Problem:
    return Problem(
        504,
        f"the request was not finished within {seconds:g} seconds; ask for fewer images or steps, or try again later",
        code="deadline_exceeded",
        retry_after=5,
    )


def wrong(error: InputError) -> Problem:
    """What the library says about bad input; its messages begin with the setting: `steps is 0; ...`."""
    match = re.match(r"(\w+) is ", str(error))
    return Problem(400, str(error), param=match[1] if match else None)
