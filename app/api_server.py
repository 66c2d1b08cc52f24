"""The api's HTTP server: uvicorn, with a limit on how long and how large headers may be."""

import asyncio
import gc
import sys
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.draining import Drain
from app.settings import Settings, get_settings

MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 20
CUT_OFF_S = 2
"""What answers that outlast the grace get to end with an error frame."""


class BoundedHeaders(HttpToolsProtocol):
    """Closes a connection whose headers take too long or too many bytes."""

    header_timeout_s = 15.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._header_timer is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_timer is not None and self._header_bytes > MAX_HEADER_BYTES:
            self._give_up()

    def on_message_begin(self) -> None:
        self._await_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._have_headers()
        super().on_headers_complete()

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self._give_up)
            self._header_bytes = 0

    def _have_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        self._have_headers()
        if not self.transport.is_closing():
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """Lets answers end after the first signal; a second one stops it as usual."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain
        self._asked = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._asked:
            super().handle_exit(sig, frame)
        self._asked = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self._asked:
            self._drain.begin()
            self.should_exit = self.should_exit or self._drain.over
        return await super().on_tick(counter)


def server_options(settings: Settings) -> dict[str, Any]:
    """uvicorn's configuration; access log and proxy headers are app.middleware's and app.main's."""
    protocol = type(
        "ConfiguredBoundedHeaders",
        (BoundedHeaders,),
        {"header_timeout_s": settings.header_timeout_s},
    )
    return {
        "host": settings.host,
        "port": settings.port,
        "http": protocol,
        "ws": "none",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": CUT_OFF_S,
    }


def run(settings: Settings) -> None:
    """Serves until SIGTERM, then lets running answers end."""
    from app.main import create_app

    app = create_app(settings)
    gc.collect()
    gc.set_threshold(20_000, 20, 20)  # a call makes hundreds of objects and leaves no cycles
    gc.freeze()  # what the process is made of stays: looking through it took a quarter second
    drain: Drain = app.state.platform.drain
    DrainingServer(uvicorn.Config(app, **server_options(settings)), drain).run()


if __name__ == "__main__":
    run(get_settings())
    sys.exit(0)
