"""How an api process ends: readiness goes first, then new requests are refused, running ones end.

    SIGTERM ─notice─> refuses with 503 `draining` ─until idle, at most the grace─> the server stops

During the notice a load balancer learns from /readyz to send nothing more.
"""

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.clock import Clock
from app.errors import Overloaded

ALWAYS_ANSWERED = frozenset({"/healthz", "/readyz", "/metrics"})
RETRY_AFTER_MS = 5000


@dataclass
class Drain:
    """The state of one process's end. Times are monotonic milliseconds."""

    clock: Clock
    notice_s: float
    grace_s: float
    began_ms: float | None = None
    in_flight: int = 0

    def begin(self) -> None:
        """Safe to call more than once."""
        if self.began_ms is None:
            self.began_ms = self.clock.monotonic_ms()

    @property
    def begun(self) -> bool:
        return self.began_ms is not None

    @property
    def refusing(self) -> bool:
        """Whether new requests are refused."""
        return self._for_s() >= self.notice_s

    @property
    def over(self) -> bool:
        """Whether the server may stop: nothing runs any more, or the grace is spent."""
        if not self.refusing:
            return False
        return self.in_flight == 0 or self._for_s() >= self.notice_s + self.grace_s

    def _for_s(self) -> float:
        if self.began_ms is None:
            return -1.0
        return (self.clock.monotonic_ms() - self.began_ms) / 1000


class DrainGate:
    """Counts requests, and refuses new ones while the process ends. Pure ASGI."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ALWAYS_ANSWERED:
            await self.app(scope, receive, send)
            return
        if self.drain.refusing:
            raise Overloaded(
                "this server is being shut down; send the request again, another one takes it",
                code="draining",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self.drain.in_flight += 1
        try:
            await self.app(scope, receive, self._closing(send))
        finally:
            self.drain.in_flight -= 1

    def _closing(self, send: Send) -> Send:
        """Answers of a process that ends close their connection."""

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self.drain.begun:
                headers = [*message.get("headers", []), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        return closing
