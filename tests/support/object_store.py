"""An S3 server on loopback (moto) whose faults tests inject: errors, slow answers, uploads and downloads cut short."""

import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field
from io import BytesIO

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class Faults:
    """How many of the next requests go wrong, and how; all requests are recorded."""

    errors: int = 0  # answered with 500
    truncated_uploads: int = 0  # bodies of which the server gets a half
    truncated_downloads: int = 0  # bodies of which the client gets a half
    slow: float = 0.0  # seconds before every answer
    requests: list[tuple[str, str]] = field(default_factory=list)


class FaultyApp:
    """A WSGI application around another one."""

    def __init__(self, app, faults):
        self.app, self.faults, self.lock = app, faults, threading.Lock()

    def _take(self, name):
        with self.lock:
            left = getattr(self.faults, name)
            setattr(self.faults, name, max(left - 1, 0))
            return left > 0

    def __call__(self, environ, start_response):
        method = environ["REQUEST_METHOD"]
        self.faults.requests.append((method, environ["PATH_INFO"]))
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        time.sleep(self.faults.slow)
        if self._take("errors"):
            start_response("500 Internal Server Error", [("Content-Type", "text/plain"), ("Content-Length", "0")])
            return [b""]
        if method == "PUT" and len(body) > 1 and self._take("truncated_uploads"):
            body = body[: len(body) // 2]
            for name in ("HTTP_X_AMZ_DECODED_CONTENT_LENGTH", "HTTP_CONTENT_MD5"):
                environ.pop(name, None)
        environ["wsgi.input"], environ["CONTENT_LENGTH"] = BytesIO(body), str(len(body))
        answer = self.app(environ, start_response)
        data = b"".join(answer)
        if (
            method == "GET"
            and len(data) > 1
            and environ["PATH_INFO"].count("/") > 1
            and self._take("truncated_downloads")
        ):
            return [data[: len(data) // 2]]
        return [data]


@contextlib.contextmanager
def s3_server():
    """Yield the address of a server and its faults."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    faults = Faults()
    app = FaultyApp(DomainDispatcherApplication(create_backend_app), faults)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
