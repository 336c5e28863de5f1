"""Logs: one JSON object on each line, with the request's id. Never a key, a body or a query string."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

_OWN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_json(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Everything that is logged becomes lines on the stream (stderr), uvicorn's own messages included."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("arpg").setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [], True
    logging.getLogger("uvicorn.access").disabled = True  # the gate logs each request, with its id
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
