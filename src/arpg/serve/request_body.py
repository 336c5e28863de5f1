"""Bodies of requests: JSON of bounded structure, and multipart forms; large ones are parsed in a thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from arpg.serve.api_error import ApiError, check

SMALL_BYTES = 1 << 16  # what is parsed on the event loop
MAX_STRUCTURE = 100_000  # braces, brackets, colons, commas and quotes of a JSON body, also those inside of strings
MAX_KEYS = 100  # of an object
MAX_DEPTH = 8
MAX_FIELDS, MAX_FILES = 64, 4  # of a form


class JsonRoute(APIRoute):
    """A route whose handler is called with the request and its JSON body, parsed by `parse_json`.

    FastAPI would parse the JSON on the event loop, whatever is in it, and resolve dependencies that no handler has.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the route; without a body, FastAPI's."""
        if self.body_field is None:
            return super().get_route_handler()
        schema: Any = self.body_field.field_info.annotation
        validate = TypeAdapter(schema).validate_python

        async def handle(call: Request) -> Response:
            try:
                body = validate(await _read_json(call))
            except ValidationError as error:
                raise RequestValidationError(error.errors()) from None
            answer: Response = await self.endpoint(call, body)
            return answer

        return handle


async def _read_json(call: Request) -> Any:
    """Return the JSON of a request; None where it has no body, its bytes where they are said to be something else."""
    body = await call.body()
    if not body:
        return None
    if "json" not in call.headers.get("content-type", "").lower():
        return body
    return parse_json(body) if len(body) <= SMALL_BYTES else await asyncio.to_thread(parse_json, body)


def parse_json(body: bytes) -> Any:
    """Parse JSON; raise a 400 where it is not valid, or has more keys, levels or values than any request needs.

    What is only counted is counted before, because parsing holds the interpreter lock.
    """
    check(
        sum(map(body.count, b'{[:,"')) <= MAX_STRUCTURE,
        f"the body has more than {MAX_STRUCTURE} braces, brackets, colons, commas and quotes; send less",
        code="too_complex",
    )
    try:
        value = json.loads(body)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise ApiError(400, "the body is not valid JSON; send a JSON object") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        keys = max((len(each) for each in level if isinstance(each, dict)), default=0)
        check(keys <= MAX_KEYS, f"an object has {keys} keys; at most {MAX_KEYS} are accepted", code="too_complex")
        below = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [item for values in below for item in values]
        if not level:
            return value
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels; send less", code="too_complex")


async def read_form(call: Request) -> list[tuple[str, str | bytes]]:
    """Return the fields and files of a multipart form by name; nothing of it is written to a disk."""
    is_form = call.headers.get("content-type", "").lower().startswith("multipart/form-data")
    check(is_form, "the body is not a form; send multipart/form-data with an image and a prompt")
    body = await call.body()
    parsing = _parse_form(call.headers, body)
    try:
        return await (parsing if len(body) <= SMALL_BYTES else asyncio.to_thread(asyncio.run, parsing))
    except (MultiPartException, LookupError, ValueError):  # also a charset that does not exist
        raise ApiError(400, "the body is not a valid form; send multipart/form-data, in UTF-8") from None


class _FormParser(MultiPartParser):
    """Keeps files in memory, where they are already as the body, and notices whether the form has an end."""

    spool_max_size = 1 << 40
    ended = False

    def on_end(self) -> None:
        self.ended = True


async def _parse_form(headers: Headers, body: bytes) -> list[tuple[str, str | bytes]]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = _FormParser(headers, stream(), max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=len(body))
    form = await parser.parse()
    items = [
        (name, await value.read() if isinstance(value, UploadFile) else value) for name, value in form.multi_items()
    ]
    await form.close()
    check(parser.ended, "the form has no end: its closing boundary is missing; send all of it")
    return items
