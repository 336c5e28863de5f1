"""ApiError: what a client gets when a call fails, as a status and a one-line message in the form of the OpenAI API."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from arpg.errors import InputError

_TYPES = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response. `message` is written for the client; nothing else of the exception reaches it."""

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

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, default),
            "param": self.param,
            "code": self.code,
        }
        return {"error": {**error, **({"nearest": self.nearest} if self.nearest else {})}}

    def encoded(self) -> bytes:
        """Return the body as ASCII JSON, so that lone surrogates of the client's text can be sent back."""
        return json.dumps(self.body()).encode()

    def headers(self) -> dict[str, str]:
        found = {}
        if self.retry_after is not None:
            found["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def check(
    condition: bool, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
) -> None:
    """Raise an `ApiError` unless `condition` holds."""
    if not condition:
        raise ApiError(status, message, param=param, code=code)


def internal_error() -> ApiError:
    """A failure of the server; the details are in its log under the id of the call."""
    return ApiError(500, "generation failed on the server; the details are in its log", code="internal_error")


def deadline_exceeded(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the request was not finished within {seconds:g} seconds; request fewer images or steps, or try again later",
        code="deadline_exceeded",
        retry_after=5,
    )


def bad_request(error: InputError) -> ApiError:
    """Turn an `InputError` of the library into a 400; its messages begin with the parameter: `steps is 0; ...`."""
    match = re.match(r"(\w+) is ", str(error))
    return ApiError(400, str(error), param=match[1] if match else None)
