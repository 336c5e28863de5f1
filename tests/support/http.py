"""Calls to the server and what comes back."""

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
