"""ApiError: an error response, a status and a one-line message in the form of the OpenAI API."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from arpg.errors import InputError

_TYPES = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class ApiError(Exception):
    """An error response. `message` is written for the client; nothing else of the exception reaches it."""

    status: int
    message: str
    param: str | None = field(default=None, kw_only=True)  # the offending field of the request
    code: str | None = field(default=None, kw_only=True)
    nearest: list[str] = field(default_factory=list, kw_only=True)  # valid names close to an unknown one
    retry_after: float | None = field(default=None, kw_only=True)  # seconds

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error: dict[str, Any] = {"message": self.message, "type": _TYPES.get(self.status, default)}
        error |= {"param": self.param, "code": self.code}
        return {"error": {**error, "nearest": self.nearest} if self.nearest else error}

    def response(self) -> Response:
        """Return the response. Its JSON is ASCII, so that lone surrogates of the client's text can be sent back."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(json.dumps(self.body()), self.status, headers, "application/json")


def check(
    condition: bool, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
) -> None:
    """Raise an `ApiError` unless `condition` holds."""
    if not condition:
        raise ApiError(status, message, param=param, code=code)


def shorten(value: Any) -> str:
    """Return a value of a request as an error message shows it: at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def internal_error() -> ApiError:
    """Return the 500 for a failure of the server; the details are in its log under the id of the call."""
    return ApiError(500, "generation failed on the server; the details are in its log", code="internal_error")


def bad_request(error: InputError) -> ApiError:
    """Turn an `InputError` of the library into a 400; its messages begin with the parameter: `steps is 0; ...`."""
    match = re.match(r"(\w+) is ", str(error))
    return ApiError(400, str(error), param=match[1] if match else None)
