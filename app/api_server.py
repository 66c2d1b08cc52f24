"""The api's HTTP server: uvicorn, with a limit on how long and how large headers may be."""

import asyncio
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.settings import Settings, get_settings

MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 20
DRAIN_S = 20


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


def server_options(settings: Settings) -> dict[str, Any]:
    """uvicorn's configuration; access log and proxy headers are app.middleware's and app.main's."""
    protocol = type(
        "ConfiguredBoundedHeaders",
        (BoundedHeaders,),
        {"header_timeout_s": settings.header_timeout_s},
    )
    return {
        "factory": True,
        "host": settings.host,
        "port": settings.port,
        "http": protocol,
        "ws": "none",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": DRAIN_S,
    }


def run(settings: Settings) -> None:
    """Serves until SIGTERM, then lets running answers end."""
    uvicorn.run("app.main:create_app", **server_options(settings))


if __name__ == "__main__":
    run(get_settings())
    sys.exit(0)
