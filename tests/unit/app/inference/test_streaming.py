"""Streams: chunks, the one usage, errors in the middle, and clients that go away."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from app.inference.stream import EventStream
from app.usage import repository
from engine.errors import EngineUnavailable

HELLO = {
    "model": "support",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
}
PROMPT_TOKENS = len("user:hi\n")


async def read_stream(response):
    """The frames' JSON; asserts that the stream ends with [DONE]."""
    frames = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


async def stream(api, **changes):
    async with api.stream("POST", "/v1/chat/completions", json={**HELLO, **changes}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        return await read_stream(response)


def text_of(chunks, index=0):
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk.get("choices", [])
        if choice["index"] == index
    )


async def row_of(platform, request_id):
    await platform.ledger.drain()
    async with platform.db.reading() as session:
        return await repository.get(session, request_id)


async def until(condition):
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it never came true")


class TestChunks:
    async def test_role_text_finish_usage_done(self, api):
        chunks = await stream(api)
        first, *rest = chunks
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert text_of(chunks) == "d1d1: Hello, world"
        assert rest[-2]["choices"][0]["finish_reason"] == "stop"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1

    async def test_exactly_one_chunk_has_usage_and_it_has_no_choices(self, api):
        chunks = await stream(api)
        with_usage = [chunk for chunk in chunks if chunk["usage"] is not None]
        assert len(with_usage) == 1
        assert with_usage[0] is chunks[-1]
        assert with_usage[0]["choices"] == []
        assert with_usage[0]["usage"]["completion_tokens"] == 19

    async def test_without_asking_no_chunk_mentions_usage(self, api):
        chunks = await stream(api, stream_options=None)
        assert all("usage" not in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)

    async def test_a_character_is_never_cut(self, api, engine):
        engine.text = "grüß 🙂 dich"
        chunks = await stream(api)
        assert text_of(chunks) == "d1d1: grüß 🙂 dich"
        assert all("\ufffd" not in text_of([chunk]) for chunk in chunks)

    async def test_a_stop_string_is_held_back_across_chunks(self, api, engine):
        engine.text = "one tw one two three"
        chunks = await stream(api, stop=["two"])
        assert text_of(chunks) == "d1d1: one tw one "
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"

    async def test_choices_come_interleaved_by_index(self, api):
        chunks = await stream(api, n=2)
        assert text_of(chunks, 0) == text_of(chunks, 1) == "d1d1: Hello, world"
        order = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"]]
        assert order[2:6] == [0, 1, 0, 1]
        finishes = [
            c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]
        ]
        assert sorted(choice["index"] for choice in finishes) == [0, 1]

    async def test_logprobs_come_with_their_tokens(self, api):
        chunks = await stream(api, logprobs=True, top_logprobs=1)
        tokens = [
            entry["token"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert "".join(tokens) == text_of(chunks)

    async def test_completions_stream_in_their_own_form(self, api):
        body = {"model": "support", "prompt": "say", "stream": True, "logprobs": 0}
        async with api.stream("POST", "/v1/completions", json=body) as response:
            chunks = await read_stream(response)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "d1d1: Hello, world"
        offsets = [
            offset
            for chunk in chunks
            if chunk["choices"][0]["logprobs"]
            for offset in chunk["choices"][0]["logprobs"]["text_offset"]
        ]
        assert offsets == list(range(18))


class TestCounting:
    @pytest.mark.parametrize("stop", [None, ["lo"]])
    async def test_a_stream_is_counted_like_a_whole_answer(self, api, platform, engine, stop):
        rows, remaining = [], []
        for streamed in (True, False):
            body = {**HELLO, "stream": streamed, "stop": stop, "stream_options": None}
            response = await api.post("/v1/chat/completions", json=body)
            rows.append(await row_of(platform, response.headers["x-request-id"]))
            remaining.append(
                int((await api.get("/v1/models")).headers["x-ratelimit-remaining-tokens"])
            )
        assert rows[0].completion_tokens == rows[1].completion_tokens > 0
        assert rows[0].prompt_tokens == rows[1].prompt_tokens
        assert 200_000 - remaining[0] == remaining[0] - remaining[1]


class TestFailures:
    @pytest.mark.parametrize(
        ("fault", "code"),
        [
            (EngineUnavailable("gone"), "engine_unavailable"),
            ("non_finite_logits", "non_finite_logits"),
            ("adapter_deleted", "adapter_deleted"),
            ("engine_step_failed", "engine_step_failed"),
        ],
    )
    async def test_a_fault_at_the_fifth_token_ends_with_an_error_frame(
        self, api, engine, platform, fault, code
    ):
        engine.fail_at = (5, fault)
        async with api.stream("POST", "/v1/chat/completions", json=HELLO) as response:
            chunks = await read_stream(response)
        assert text_of(chunks) == "d1d1:"
        assert chunks[-1]["error"]["code"] == code
        assert set(chunks[-1]["error"]) == {"message", "type", "param", "code"}
        assert all(chunk.get("usage") is None for chunk in chunks)
        row = await row_of(platform, response.headers["x-request-id"])
        assert (row.status, row.error_code, row.completion_tokens) == (
            "failed",
            fault_code(fault),
            5,
        )
        assert engine.running == 0

    async def test_a_fault_before_the_first_token_has_its_own_status(self, api, engine, platform):
        engine.fail_at = (0, "adapter_quarantined")
        response = await api.post("/v1/chat/completions", json=HELLO)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "adapter_quarantined"
        assert int(response.headers["retry-after"]) >= 1
        row = await row_of(platform, response.headers["x-request-id"])
        assert (row.status, row.prompt_tokens, row.completion_tokens) == ("failed", 0, 0)

    async def test_a_failed_call_gives_its_limits_back(self, api, engine, platform):
        engine.fail_at = (0, EngineUnavailable("gone"))
        await api.post("/v1/chat/completions", json=HELLO)
        limits = (await api.get("/v1/limits")).json()
        assert [window["used"] for window in limits["per_minute"]] == [0, 0]
        assert limits["concurrent"] == 0

    async def test_an_unforeseen_fault_still_ends_the_stream(
        self, api, engine, platform, monkeypatch, caplog
    ):
        def explode(self, output):
            raise ZeroDivisionError

        engine.hold()
        engine.let(1)
        async with api.stream("POST", "/v1/chat/completions", json=HELLO) as response:
            lines = response.aiter_lines()
            await anext(lines)
            monkeypatch.setattr("app.inference.generation.Generation._take", explode)
            engine.let(1)
            rest = [line async for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["error"]["type"] == "server_error"
        row = await row_of(platform, response.headers["x-request-id"])
        assert row.status == "failed"


def fault_code(fault):
    return fault if isinstance(fault, str) else fault.code


@asynccontextmanager
async def reading(api, tokens, engine, **changes):
    """A stream of which `tokens` tokens were generated and read."""
    engine.hold()
    engine.let(tokens)
    async with api.stream("POST", "/v1/chat/completions", json={**HELLO, **changes}) as response:
        text, lines = "", response.aiter_lines()
        while len(text) < tokens:
            line = await anext(lines)
            if line.startswith("data: "):
                text += text_of([json.loads(line[6:])])
        yield response
        del lines  # while it lives the connection stays open


class TestDisconnect:
    @pytest.mark.parametrize("overshoot", [0, 2])
    async def test_what_was_generated_is_billed_and_the_rest_is_overshoot(
        self, api, engine, platform, overshoot
    ):
        engine.overshoot = overshoot
        async with reading(api, 5, engine) as response:
            pass
        await until(lambda: engine.running == 0)
        await until(lambda: not platform.ledger.running)
        row = await row_of(platform, response.headers["x-request-id"])
        assert (row.status, row.completion_tokens) == ("cancelled", 5)
        assert row.overshoot_tokens == overshoot
        assert row.prompt_tokens == PROMPT_TOKENS
        assert engine.cancelled == [row.request_id]

    async def test_before_the_first_token_an_explicit_zero_is_billed(self, api, engine, platform):
        engine.hold()
        call = asyncio.create_task(api.post("/v1/chat/completions", json=HELLO))
        await until(lambda: engine.running == 1)
        call.cancel()
        await until(lambda: engine.running == 0)
        await until(lambda: not platform.ledger.running)
        row = await row_of(platform, engine.requests[0].request_id)
        assert (row.status, row.completion_tokens) == ("cancelled", 0)

    async def test_a_stream_that_is_ended_before_its_first_bytes_sends_no_body_without_them(self):
        async def deltas():
            yield object()

        async def ended(message):
            sent.append(message["type"])
            raise asyncio.CancelledError

        sent: list[str] = []
        generation = SimpleNamespace(deltas=deltas, abandoned=False, abandon=lambda: None)
        stream = EventStream(generation, None, {}, include_usage=False)
        with pytest.raises(asyncio.CancelledError):
            await stream({}, asyncio.Event().wait, ended)
        assert sent == ["http.response.start"]

    async def test_a_whole_answer_that_nobody_waits_for_is_cancelled_too(
        self, api, engine, platform
    ):
        engine.hold()
        body = {**HELLO, "stream": False, "stream_options": None}
        call = asyncio.create_task(api.post("/v1/chat/completions", json=body))
        await until(lambda: engine.running == 1)
        engine.let(3)
        await until(lambda: engine.completion_tokens.get(engine.requests[0].request_id) == 3)
        await asyncio.sleep(0.05)
        call.cancel()
        await until(lambda: engine.running == 0)
        await until(lambda: not platform.ledger.running)
        row = await row_of(platform, engine.requests[0].request_id)
        assert (row.status, row.completion_tokens) == ("cancelled", 3)

    async def test_a_disconnect_frees_the_tenants_seat(self, api, engine, platform):
        async with reading(api, 2, engine):
            assert (await api.get("/v1/limits")).json()["concurrent"] == 1
        await until(lambda: not platform.ledger.running)
        assert (await api.get("/v1/limits")).json()["concurrent"] == 0

    async def test_an_engine_that_dies_meanwhile_changes_nothing_for_the_bill(
        self, api, engine, platform
    ):
        async with reading(api, 4, engine) as response:
            engine.alive = False  # the cancel cannot be delivered
        await until(lambda: engine.cancel_attempts)
        engine.fail_at = (4, EngineUnavailable("gone"))
        engine.let(1)
        await until(lambda: not platform.ledger.running)
        row = await row_of(platform, response.headers["x-request-id"])
        assert (row.status, row.completion_tokens) == ("cancelled", 4)


class TestDatabaseSessions:
    async def test_none_is_held_while_a_stream_runs(self, api, engine, platform):
        async with reading(api, 3, engine):
            pool = platform.db.engine.pool
            assert pool.checkedout() == 0
