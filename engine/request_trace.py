"""The engine's spans of one request, made from its own counts once it has ended."""

from collections.abc import Iterable

from engine.clock import Clock
from engine.tracing import Tracing
from engine.types import GenerateRequest, RequestOutput, RequestUsage

NS_PER_MS = 1_000_000


class RequestTraces:
    """Remembers who asked for a trace; nothing is done while a request runs."""

    def __init__(self, tracing: Tracing, engine_id: str, clock: Clock) -> None:
        self._tracing = tracing
        self._engine_id = engine_id
        self._clock = clock
        self._parents: dict[str, str] = {}

    def begin(self, request: GenerateRequest) -> None:
        if request.traceparent is not None:
            self._parents[request.request_id] = request.traceparent

    def drop(self, request_id: str) -> None:
        """The engine refused it; the gateway's span says so."""
        self._parents.pop(request_id, None)

    def record(self, outputs: Iterable[RequestOutput]) -> None:
        """Makes the spans of the requests that end with these outputs."""
        for output in outputs:
            if output.usage is None:
                continue
            parent = self._parents.pop(output.request_id, None)
            if parent is not None:
                self._spans(output, output.usage, parent)

    def _spans(self, output: RequestOutput, usage: RequestUsage, parent: str) -> None:
        end = self._clock.wall_ms() * NS_PER_MS
        begin = end - _ns(usage.total_ms)
        engine = self._tracing.record(
            "engine",
            begin,
            end,
            parent=parent,
            attributes={
                "loramux.request_id": output.request_id,
                "loramux.engine_id": self._engine_id,
                "loramux.prompt_tokens": usage.prompt_tokens,
                "loramux.cached_tokens": usage.cached_tokens,
                "loramux.completion_tokens": usage.completion_tokens,
                "loramux.preemptions": usage.preemptions,
                "loramux.finish": output.finish or "",
                "loramux.error_code": output.error_code or "",
            },
        )
        queued = begin + _ns(usage.queue_ms)
        self._tracing.record("engine queue", begin, queued, parent=engine)
        if usage.adapter_wait_ms > 0:
            loaded = begin + _ns(usage.adapter_wait_ms)
            self._tracing.record("adapter load", begin, loaded, parent=engine)
        if usage.ttft_ms is not None:
            first = begin + _ns(usage.ttft_ms)
            self._tracing.record("prefill", queued, first, parent=engine)
            self._tracing.record("decode", first, end, parent=engine)


def _ns(ms: float) -> int:
    return int(ms * NS_PER_MS)
