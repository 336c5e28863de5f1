"""Services around a small pipeline, and real servers on free ports: closed at the end of their scope."""

import contextlib
import socket
import threading
from functools import partial

from arpg.serve.served_model import ServedModel
from arpg.serve.server import Server
from arpg.serve.server_config import ServeSettings
from arpg.serve.service import ImageService


def itself(pipeline):
    """What a model loads; it can be sent to another process."""
    return pipeline


@contextlib.contextmanager
def services(default):
    """A function that opens an `ImageService` around a pipeline and `more` by name; all are closed at the end."""
    opened = []

    def serve(*, keys=None, pipeline=default, more=None, **settings):
        pipelines = {"small": pipeline, **(more or {})}
        models = [ServedModel(name, partial(itself, made)) for name, made in pipelines.items()]
        service = ImageService(models, keys=keys, settings=ServeSettings(**settings))
        service.open()
        opened.append(service)
        return service

    yield serve
    for service in opened:
        service.close()


@contextlib.contextmanager
def servers(served):
    """A function that runs a real server on a free port and returns its address and service."""
    running = []

    def run(*, tls=None, **settings):
        service = served(**settings)
        bound = socket.create_server(("127.0.0.1", 0))
        server = Server(service, lifespan="off", **(tls or {}))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        running.append((server, thread))
        return f"{'https' if tls else 'http'}://127.0.0.1:{bound.getsockname()[1]}", service

    yield run
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(30)
        assert not thread.is_alive()
