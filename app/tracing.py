"""The gateway's spans: one a request, and one for its admission. See engine/tracing.py.

A client's own trace context is not taken over: whoever may call would decide what is sampled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.tracing import Attributes, Tracing, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_current: ContextVar[tuple[Tracing, "Span"] | None] = ContextVar("gateway_span", default=None)
UNTRACED = ("/healthz", "/readyz", "/metrics", "/static/")


class TraceRequests:
    """A span around every request. Pure ASGI; inside app.middleware.RequestContext."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(UNTRACED):
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        span = self.tracing.begin(
            "gateway request",
            attributes={
                "http.request.method": scope["method"],
                "loramux.request_id": state.get("request_id", ""),
            },
        )
        token = _current.set((self.tracing, span))
        trace_id = traceparent_of(span).split("-")[1]
        structlog.contextvars.bind_contextvars(trace_id=trace_id)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            _current.reset(token)
            span.set_attribute("http.route", getattr(scope.get("route"), "path", "unmatched"))
            caller = state.get("caller")
            span.set_attribute("loramux.tenant", getattr(caller, "tenant_id", None) or "")
            span.end()


def traceparent() -> str | None:
    """Of the request that is being answered here; None when it is not traced."""
    current = _current.get()
    return None if current is None else traceparent_of(current[1])


@contextmanager
def step(name: str, attributes: Attributes | None = None) -> Iterator[None]:
    """A span below the request's, while the block runs; nothing without tracing."""
    current = _current.get()
    if current is None:
        yield
        return
    tracing, parent = current
    span = tracing.begin(name, parent=traceparent_of(parent), attributes=attributes)
    try:
        yield
    finally:
        span.end()
