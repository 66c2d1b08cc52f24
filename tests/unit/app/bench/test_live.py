"""The open-loop driver against a served application that answers as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from app.bench.live import Caller, LiveRun, discover_models, model_of, open_client, spread
from app.bench.report import summarise
from app.bench.workloads import Budget, TimedRequest, Workload
from app.clock import SystemClock
from tests.serving import serve

MODELS = ["base", "a", "b"]


def chunk(**values: object) -> str:
    return f"data: {json.dumps(values)}\n\n"


def delta(text: str, finish: str | None = None) -> dict[str, object]:
    return {"delta": {"content": text} if text else {}, "finish_reason": finish}


class Peer:
    """A server of the OpenAI shape. `behaviour` by model: how it answers."""

    def __init__(self) -> None:
        self.calls: list[dict[str, object]] = []
        self.keys: list[str] = []
        self.gap_s = 0.005
        self.known = True
        self.models_document: dict[str, object] = {"data": [{"id": model} for model in MODELS]}
        self.called = asyncio.Semaphore(0)
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.answer)

    async def models(self) -> JSONResponse:
        return JSONResponse(self.models_document, 200 if self.known else 404)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append(body)
        self.keys.append(request.headers["authorization"])
        self.called.release()
        if body["model"] == "full":
            error = {"error": {"code": "queue_full", "message": "later"}}
            return JSONResponse(error, status_code=503)
        if body["model"] == "strange":
            return Response("gateway", status_code=502)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, object]) -> AsyncIterator[str]:
        model, count = body["model"], int(str(body["max_tokens"]))
        yield chunk(choices=[{"delta": {"role": "assistant", "content": ""}}])
        for _ in range(count):
            await asyncio.sleep(self.gap_s)
            part = model if str(model).startswith("reasoning") else "content"
            yield chunk(choices=[{"delta": {part: "word "}, "finish_reason": None}])
            if model == "breaks":
                yield chunk(error={"code": "engine_failed", "message": "gone"})
                return
            if model == "stops short":
                return
        if model == "hangs":
            await asyncio.sleep(30)
        yield chunk(choices=[delta("", "length")])
        twice = 2 if model == "two at once" else 1
        yield chunk(choices=[], usage={"completion_tokens": twice * count})
        yield "data: [DONE]\n\n"


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
async def client(peer: Peer) -> AsyncIterator[httpx.AsyncClient]:
    async with serve(peer.app) as address, open_client(address, 10.0) as opened:
        yield opened


def request(at_ms: float = 0.0, *, tenant: int = 0, adapter: int = 0, tokens: int = 4,
            budget: Budget = Budget()) -> TimedRequest:  # fmt: skip
    return TimedRequest(at_ms, tenant, adapter, 0, 8, tokens, tokens, budget)


def live(client: httpx.AsyncClient, *models: str, timeout_s: float = 10.0) -> LiveRun:
    callers = [Caller("secret", models or MODELS)]
    return LiveRun(client, callers, Workload(), SystemClock(), timeout_s)


async def test_models_are_discovered_and_every_request_is_answered(
    client: httpx.AsyncClient, peer: Peer
) -> None:
    models = await discover_models(client, "secret")
    run = live(client, *models)
    seconds = await run.run([request(adapter=number) for number in range(6)])
    report = summarise(run.outcomes, seconds)
    assert report.answered == report.offered == 6
    assert sorted(str(call["model"]) for call in peer.calls) == ["a", "a", "b", "b", "base", "base"]
    assert peer.keys == ["Bearer secret"] * 6
    assert report.output_tokens_per_s == pytest.approx(24 / seconds)


async def test_times_are_what_the_caller_saw(client: httpx.AsyncClient, peer: Peer) -> None:
    peer.gap_s = 0.05
    run = live(client)
    await run.run([request()])
    outcome = run.outcomes[0]
    assert outcome.ttft_ms is not None
    assert 45 <= outcome.ttft_ms < 500
    assert len(outcome.gaps_ms) == 3
    assert min(outcome.gaps_ms) > 20


async def test_requests_leave_at_their_times_however_slow_the_server(
    client: httpx.AsyncClient, peer: Peer
) -> None:
    peer.gap_s = 0.2
    run = live(client)
    await run.run([request(20.0 * number, tokens=3) for number in range(5)])
    sent = [outcome.sent_ms for outcome in run.outcomes]
    assert all(at_ms >= 20.0 * number for number, at_ms in enumerate(sent))
    assert run.outcomes[0].last_ms is not None
    assert sent[-1] < run.outcomes[0].last_ms


@pytest.mark.parametrize(
    ("model", "code"),
    [("full", "queue_full"), ("strange", "http_502"), ("breaks", "engine_failed"),
     ("stops short", "truncated"), ("hangs", "timeout")],
)  # fmt: skip
async def test_what_is_not_answered_whole_has_a_cause_and_counts_against_goodput(
    client: httpx.AsyncClient, model: str, code: str
) -> None:
    run = live(client, model, "fine", timeout_s=1.5)
    await run.run([request(adapter=0), request(adapter=1)])
    report = summarise(run.outcomes, 1.0)
    assert report.refused == {code: 1}
    assert report.goodput == 0.5


async def test_a_server_that_is_gone_is_a_connection_failure(client: httpx.AsyncClient) -> None:
    async with open_client("http://127.0.0.1:9", 1.0) as nobody:
        run = live(nobody)
        await run.run([request()])
    assert [outcome.refused for outcome in run.outcomes] == ["connection"]


async def test_stopping_sends_nothing_more_and_gives_up_what_is_open(
    client: httpx.AsyncClient, peer: Peer
) -> None:
    peer.gap_s = 5.0
    run = live(client)
    going = asyncio.create_task(run.run([request(), request(), request(60_000.0)]))
    for _ in range(2):
        await peer.called.acquire()
    run.stop.set()
    await asyncio.wait_for(going, 2.0)
    assert [outcome.refused for outcome in run.outcomes] == ["interrupted"] * 2
    assert all(outcome.done for outcome in run.outcomes)


async def test_the_servers_count_wins_where_tokens_came_together(client: httpx.AsyncClient) -> None:
    run = live(client, "two at once")
    await run.run([request(tokens=5, budget=Budget(None, 60_000.0))])
    assert run.outcomes[0].tokens == 10
    assert run.outcomes[0].good


@pytest.mark.parametrize("part", ["reasoning_content", "reasoning"])
async def test_a_models_thinking_is_tokens_too(client: httpx.AsyncClient, part: str) -> None:
    """llama.cpp and vLLM send it beside the content, each under its own name."""
    run = live(client, part)
    await run.run([request(tokens=5)])
    assert run.outcomes[0].first_ms is not None
    assert len(run.outcomes[0].gaps_ms) == 4


async def test_an_address_without_models_says_so(client: httpx.AsyncClient, peer: Peer) -> None:
    peer.known = False
    with pytest.raises(httpx.HTTPStatusError):
        await discover_models(client, "secret")
    peer.known = True
    peer.models_document = {"models": []}
    with pytest.raises(ValueError, match="list of models"):
        await discover_models(client, "secret")


def test_every_model_of_every_caller_has_a_number() -> None:
    callers = [Caller("k0", ["a", "b"]), Caller("k1", ["c"])]
    tenants, adapters = spread(callers)
    workload = Workload(tenants=tenants, adapters=adapters)
    named = {
        model_of(callers, request(tenant=workload.tenant_of(number), adapter=number))[1]
        for number in range(adapters)
    }
    assert named == {"a", "b", "c"}
    assert model_of(callers, request(tenant=3, adapter=-1)) == (callers[1], "c")
