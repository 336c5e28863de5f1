"""Calls to the server and what comes back."""

import asyncio
import base64
import io
import json
import threading

import numpy as np
from PIL import Image


def b64(image, **options):
    file = io.BytesIO()
    image.save(file, format=options.pop("format", "PNG"), **options)
    return base64.b64encode(file.getvalue()).decode()


def image_of(entry):
    return Image.open(io.BytesIO(base64.b64decode(entry["png"])))


def pixels(image):
    return np.asarray(image.convert("RGB"))


def events(text):
    """The events of a stream, as (name, data)."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def post(client, route, body, status=200):
    answer = client.post(f"/v1/arpg/{route}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def error(answer, status):
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    return answer.json()["error"]


def until(condition, seconds=60):
    """Poll until `condition` is true; return whether it was in time."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        pause.wait(0.01)
    return False


def ask(app, *headers, method="GET", path="/v1/models", body=b""):
    """Call an ASGI application with headers that a client library would not send; return status and body."""
    sent = []
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return first.pop() if first else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path}
    scope |= {"raw_path": path.encode(), "query_string": b"", "scheme": "http", "client": ("127.0.0.1", 1)}
    scope |= {"root_path": "", "server": ("127.0.0.1", 8000), "headers": list(headers)}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
