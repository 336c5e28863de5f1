"""The process: uvicorn around the application, and an end in which nobody loses an answer."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from pathlib import Path
from types import FrameType

import uvicorn

from arpg.errors import InputError
from arpg.hub import resolve
from arpg.pipeline import Pipeline, choose_device
from arpg.serve.app import create_app
from arpg.serve.gate import allowed_hosts
from arpg.serve.house import House, ServeSettings, check_engine
from arpg.serve.keys import Keys
from arpg.serve.logs import log_json

log = logging.getLogger(__name__)


def house(
    model: str,
    *,
    keys: Keys,
    settings: ServeSettings,
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "auto",
) -> House:
    """A house for a model by name; what can be checked at once is, the weights are read when it opens."""
    check_engine(engine)
    choose_device(device)
    folder = resolve(model)
    return House(
        lambda: Pipeline.from_pretrained(folder, device=device, dtype=dtype, engine=engine),
        name=Path(model).name or model,
        folder=folder,
        keys=keys,
        settings=settings,
    )


def bind(host: str, port: int) -> socket.socket:
    """Listen there, or say why not, before anything is loaded."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot listen on {host} port {port} ({reason}); choose another with --port") from None


def run(house: House, bound: socket.socket) -> None:
    """Serve until a signal; then finish what is inside, answer new work with 503, and go."""
    log_json()
    hosts = allowed_hosts(bound.getsockname()[0], house.keys)
    config = uvicorn.Config(
        create_app(house, hosts=hosts),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
    )
    Server(config, house).run(sockets=[bound])


class Server(uvicorn.Server):
    """The first signal drains: the sockets stay open until nothing is inside. A second one ends at once."""

    def __init__(self, config: uvicorn.Config, house: House) -> None:
        super().__init__(config)
        self.house = house
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.house.door.draining or self._loop is None:
            super().handle_exit(signal.SIGINT, frame)
            return
        self.house.door.draining = True
        log.info("draining", extra={"inside": self.house.door.inside})
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = asyncio.get_running_loop().create_task(self._leave_when_empty())

    async def _leave_when_empty(self) -> None:
        until = time.monotonic() + self.house.settings.deadline + 5
        while self.house.door.inside and time.monotonic() < until:
            await asyncio.sleep(0.05)
        self.should_exit = True
