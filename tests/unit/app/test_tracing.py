"""Traces from the gateway to the engine: what belongs to what, and what is never in them."""

import asyncio
import time
from dataclasses import replace

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.client import EngineClient
from engine.clock import SimulatedClock
from engine.request_trace import RequestTraces
from engine.tracing import TRACEPARENT, Tracing, open_tracing
from engine.types import RequestOutput, RequestUsage
from tests.engine_process import EngineProcess, make_request
from tests.factories import bearer, make_key, make_tenant
from tests.fake_engine import FakeEngine
from tests.otlp import collector
from tests.serving import install_engines, make_ready_adapter, serve

CANARY = "canary-6f1d"
CALL = {
    "model": "support",
    "messages": [{"role": "user", "content": f"say {CANARY}"}],
    "max_tokens": 8,
}
PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def by_name(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


class TestGateway:
    @pytest.fixture
    def engine(self):
        return FakeEngine(text=f"{CANARY} indeed")

    @pytest.fixture
    async def api(self, platform, engine, tracing):
        from app.main import create_app

        platform.tracing = tracing
        install_engines(platform, {"ipc://fake": engine})
        tenant = await make_tenant(platform, "acme")
        await make_ready_adapter(platform, tenant, "support")
        key = await make_key(platform, tenant)
        async with (
            serve(create_app(platform=platform)) as address,
            httpx.AsyncClient(base_url=address, headers=bearer(key), timeout=60) as client,
        ):
            await platform.engines.refresh()
            yield client

    @pytest.mark.parametrize("stream", [False, True])
    async def test_admission_and_engine_belong_to_the_requests_span(
        self, api, engine, exporter, stream
    ):
        answer = await api.post("/v1/chat/completions", json=CALL | {"stream": stream})
        assert answer.status_code == 200
        while "gateway request" not in by_name(exporter):  # noqa: ASYNC110 - ends after the answer
            await asyncio.sleep(0.01)
        spans = by_name(exporter)
        gateway, admit = spans["gateway request"], spans["admit"]
        assert admit.parent.span_id == gateway.context.span_id
        sent = engine.requests[0].traceparent
        assert TRACEPARENT.fullmatch(sent)
        assert sent.split("-")[1:3] == [
            f"{gateway.context.trace_id:032x}",
            f"{gateway.context.span_id:016x}",
        ]
        assert gateway.attributes["http.route"] == "/v1/chat/completions"
        assert gateway.attributes["http.response.status_code"] == 200
        assert gateway.attributes["loramux.request_id"] == answer.headers["x-request-id"]

    async def test_no_span_holds_content_or_keys(self, api, exporter):
        await api.post("/v1/chat/completions", json=CALL)
        await api.get(f"/v1/models/{CANARY}")
        told = "".join(span.to_json() for span in exporter.get_finished_spans())
        assert told
        assert CANARY not in told
        assert "lmx_" not in told

    async def test_a_clients_trace_context_is_not_taken_over(self, api, exporter):
        await api.get("/v1/models", headers={"traceparent": PARENT})
        assert by_name(exporter)["gateway request"].parent is None


async def test_without_tracing_nothing_is_sent_along(platform):
    from app.main import create_app

    engine = FakeEngine()
    install_engines(platform, {"ipc://fake": engine})
    tenant = await make_tenant(platform, "acme")
    await make_ready_adapter(platform, tenant, "support")
    key = await make_key(platform, tenant)
    async with (
        serve(create_app(platform=platform)) as address,
        httpx.AsyncClient(base_url=address, headers=bearer(key), timeout=60) as client,
    ):
        await platform.engines.refresh()
        await client.post("/v1/chat/completions", json=CALL)
    assert engine.requests[0].traceparent is None


class TestEngineSpans:
    USAGE = RequestUsage(5, 0, 7, queue_ms=10, adapter_wait_ms=4, ttft_ms=30, total_ms=100)

    def spans(self, tracing, exporter, usage):
        traces = RequestTraces(tracing, "engine-1", SimulatedClock(1_000_000.0))
        traces.begin(replace(make_request("r"), traceparent=PARENT))
        traces.record([RequestOutput("r", 0), RequestOutput("r", 1, finish="stop", usage=usage)])
        traces.record([RequestOutput("r", 1, finish="stop", usage=usage)])
        return by_name(exporter)

    def test_queue_load_prefill_and_decode_lie_where_the_counts_say(self, tracing, exporter):
        spans = self.spans(tracing, exporter, self.USAGE)
        begin = spans["engine"].start_time
        times = {
            name: ((span.start_time - begin) / 1e6, (span.end_time - begin) / 1e6)
            for name, span in spans.items()
        }
        assert times == {
            "engine": (0, 100),
            "engine queue": (0, 10),
            "adapter load": (0, 4),
            "prefill": (10, 30),
            "decode": (30, 100),
        }
        assert len(exporter.get_finished_spans()) == 5

    def test_they_belong_to_the_gateways_trace(self, tracing, exporter):
        spans = self.spans(tracing, exporter, self.USAGE)
        assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {"ab" * 16}
        assert f"{spans['engine'].parent.span_id:016x}" == "cd" * 8
        assert spans["decode"].parent.span_id == spans["engine"].context.span_id

    def test_a_request_without_a_token_has_no_prefill(self, tracing, exporter):
        spans = self.spans(tracing, exporter, replace(self.USAGE, ttft_ms=None, adapter_wait_ms=0))
        assert set(spans) == {"engine", "engine queue"}


class TestExport:
    async def test_an_engine_process_sends_its_spans_to_the_collector(self, tmp_path, monkeypatch):
        with collector() as (address, got):
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
            monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
            process = EngineProcess(tmp_path).start()
            client = EngineClient(process.address)
            await client.start()
            try:
                await client.describe()
                request = replace(make_request("r", 3), traceparent=PARENT)
                async for _ in client.generate(request):
                    pass
                assert await asyncio.to_thread(got.came.wait, 20)
            finally:
                await client.close()
                process.stop()
        assert {"engine", "engine queue", "prefill", "decode"} <= set(got.spans)
        assert got.spans["engine"].trace_id.hex() == "ab" * 16
        assert got.services == {"loramux-engine"}

    @pytest.mark.wide
    def test_a_collector_that_is_away_costs_nobody_anything(self, monkeypatch):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        monkeypatch.setattr("engine.tracing.CLOSE_S", 0.1)
        tracing = open_tracing("test")
        began = time.monotonic()
        for _ in range(5000):
            tracing.begin("span").end()
        assert time.monotonic() - began < 5
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < 1
        tracing.closing.join(20)
        assert not tracing.closing.is_alive()

    def test_the_usual_variables_name_the_service(self, monkeypatch):
        with collector() as (address, got):
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
            monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
            tracing = open_tracing("loramux-api")
            tracing.begin("span").end()
            tracing.close()
            assert got.came.wait(10)
        assert got.services == {"ours"}
