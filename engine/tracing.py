"""OpenTelemetry traces, from the gateway to the engine. Off unless asked for; the packages are the
extra `tracing` and are imported when tracing starts.

    gateway request ── admit
                    └─ engine ── engine queue, adapter load, prefill, decode

What is exported, where to and how much of it is said by the usual OTEL_* environment variables.
Spans carry ids, counts and times; never a prompt, an answer, a name or a key. An exporter that
fails loses spans and nothing else: it works in a thread of its own, behind a bounded queue.
"""

import logging
import re
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C trace context, as it travels in a request message."""
CLOSE_S = 2.0
"""What unsent spans get at the end of the process."""

Attributes = Mapping[str, str | int | float | bool]


class TracingUnavailable(EngineError):
    """Tracing was asked for and its packages are not installed."""

    code = "tracing_unavailable"


def installed() -> bool:
    """Whether the extra `tracing` is there."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


class Tracing:
    """Makes spans; `open_tracing` makes it, a test over an exporter in memory."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("loramux")

    def begin(
        self, name: str, *, parent: str | None = None, attributes: Attributes | None = None
    ) -> "Span":
        """A span that begins now; the caller ends it."""
        return self._tracer.start_span(
            name, context=_context(parent), attributes=dict(attributes or {})
        )

    def record(
        self,
        name: str,
        begin_ns: int,
        end_ns: int,
        *,
        parent: str | None = None,
        attributes: Attributes | None = None,
    ) -> str:
        """A span of the past, in Unix nanoseconds; its own traceparent."""
        span = self._tracer.start_span(
            name,
            context=_context(parent),
            attributes=dict(attributes or {}),
            start_time=begin_ns,
        )
        span.end(end_time=max(begin_ns, end_ns))
        return traceparent_of(span)

    def close(self) -> None:
        """Sends what is left, for `CLOSE_S` at most: a collector that is away delays nobody."""
        self.closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        self.closing.start()
        self.closing.join(CLOSE_S)


def open_tracing(service: str) -> Tracing:
    """Exports by OTLP over HTTP. OTEL_SERVICE_NAME wins over `service`.

    Raises TracingUnavailable without the extra `tracing`.
    """
    if not installed():
        raise TracingUnavailable(
            "tracing is on and its packages are not installed; run `pip install 'loramux[tracing]'`"
            " or set LORAMUX_TRACING=false"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    named = Resource({"service.name": service}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


def traceparent_of(span: "Span") -> str:
    """What a message carries so that the other side's spans belong to this one."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _context(parent: str | None) -> Any:
    """OpenTelemetry's context of a traceparent; an empty one without (never the ambient one)."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if parent is None or not TRACEPARENT.fullmatch(parent):
        return Context()
    _, trace_id, span_id, flags = parent.split("-")
    context = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
    return set_span_in_context(NonRecordingSpan(context), Context())
