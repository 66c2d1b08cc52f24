"""What a user of the openai package sees, with no line of it changed."""

import openai
import pytest

from app.keys.service import NewKey
from engine.errors import EngineUnavailable, RequestRefused
from tests.factories import make_key, make_tenant
from tests.fake_engine import BASE_NAME

HELLO = [{"role": "user", "content": "hi"}]


async def chat(client, **changes):
    return await client.chat.completions.create(
        **{"model": "support", "messages": HELLO, **changes}
    )


class TestChat:
    async def test_a_whole_answer(self, client):
        answer = await chat(client, temperature=0.2, max_tokens=50, user="someone")
        assert answer.choices[0].message.content == "d1d1: Hello, world"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.total_tokens == (
            answer.usage.prompt_tokens + answer.usage.completion_tokens
        )
        assert answer._request_id.startswith("req_")

    async def test_a_stream_with_usage(self, client):
        stream = await chat(client, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == "d1d1: Hello, world"
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].choices == []

    async def test_the_streaming_helper_assembles_the_answer(self, client):
        async with client.chat.completions.stream(model="support", messages=HELLO) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "d1d1: Hello, world"

    async def test_logprobs_parse(self, client):
        answer = await chat(client, logprobs=True, top_logprobs=2, max_tokens=3)
        tokens = answer.choices[0].logprobs.content
        assert [token.token for token in tokens] == ["d", "1", "d"]
        assert len(tokens[0].top_logprobs) == 2

    async def test_an_answer_can_be_sent_back_in_the_next_call(self, client):
        first = await chat(client)
        message = first.choices[0].message.model_dump()
        second = await chat(client, messages=[*HELLO, message, *HELLO])
        assert second.choices[0].message.content

    async def test_own_parameters_go_through_extra_body(self, client, engine):
        await chat(client, extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2})
        sampling = engine.requests[0].sampling
        assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.1, 1.2)

    async def test_raw_headers_tell_limits_and_adapter(self, client):
        raw = await client.chat.completions.with_raw_response.create(
            model="support", messages=HELLO
        )
        assert raw.headers["x-ratelimit-remaining-requests"] == "599"
        assert "@v1; " in raw.headers["x-loramux-adapter"]


class TestCompletions:
    async def test_whole_and_streamed(self, client):
        answer = await client.completions.create(model="support", prompt="say", logprobs=1)
        assert answer.choices[0].text == "d1d1: Hello, world"
        assert answer.choices[0].logprobs.tokens[0] == "d"
        stream = await client.completions.create(model="support", prompt="say", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == answer.choices[0].text


class TestModels:
    async def test_list_and_retrieve(self, client):
        ids = {model.id async for model in client.models.list()}
        assert ids == {BASE_NAME, "support", "support@v1"}
        assert (await client.models.retrieve("support@v1")).id == "support@v1"


class TestErrors:
    async def test_an_unknown_model(self, client):
        with pytest.raises(openai.NotFoundError) as caught:
            await chat(client, model="nobody")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")

    async def test_a_wrong_key(self, address):
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key="lmx_wrong", max_retries=0
        ) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()

    async def test_an_operators_key(self, address, platform):
        operator = await make_key(platform, None)
        async with _client(address, operator) as client:
            with pytest.raises(openai.PermissionDeniedError):
                await chat(client)

    async def test_bad_parameters(self, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(client, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(client, tools=[{"type": "function", "function": {"name": "f"}}])
        assert (caught.value.code, caught.value.param) == ("tools_unsupported", "tools")

    async def test_the_rate_limit_is_retried_by_the_sdk_only_when_that_can_help(
        self, address, platform, engine
    ):
        tenant = await make_tenant(platform, "tight", tokens_per_minute=20)
        async with _client(address, await make_key(platform, tenant), retries=2) as client:
            with pytest.raises(openai.BadRequestError):  # can never fit: not tried again
                await chat(client, model=BASE_NAME, max_tokens=50)
        assert engine.requests == []

    async def test_the_rate_limit(self, address, platform):
        tenant = await make_tenant(platform, "tight", requests_per_minute=1)
        async with _client(address, await make_key(platform, tenant)) as client:
            await chat(client, model=BASE_NAME)
            with pytest.raises(openai.RateLimitError) as caught:
                await chat(client, model=BASE_NAME)
        assert caught.value.code == "requests_per_minute_exceeded"
        assert int(caught.value.response.headers["retry-after"]) >= 1

    async def test_an_engine_that_is_away(self, client, engine):
        engine.alive = False
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(client)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")

    async def test_a_full_queue(self, client, engine):
        engine.refuse = RequestRefused("full", code="queue_full")
        with pytest.raises(openai.RateLimitError):
            await chat(client)

    async def test_a_stream_that_breaks_raises_in_the_readers_loop(self, client, engine):
        engine.fail_at = (5, EngineUnavailable("gone"))
        stream = await chat(client, stream=True)
        seen: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                seen.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError) as caught:
            await read()
        assert "".join(seen) == "d1d1:"
        assert caught.value.code == "engine_unavailable"


def _client(address: str, key: NewKey, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{address}/v1", api_key=key.secret.text, max_retries=retries
    )
