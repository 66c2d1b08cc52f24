"""The openai package, the api and the real engine with the packaged base model, end to end."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import jsonschema
import openai
import pytest
from fastapi import FastAPI

from app.clock import SystemClock
from app.crypto import Passwords
from app.main import create_app
from app.platform import Platform, open_platform
from app.processes import engine_command
from app.settings import Settings
from app.usage import repository
from tests.conftest import CHEAP_HASHER
from tests.factories import make_key, make_tenant
from tests.serving import serve

HELLO = [{"role": "user", "content": "Say hello in five words."}]
GREEDY = {"temperature": 0, "max_tokens": 16}


@pytest.fixture
def settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Tools in Hermes' format; chats without tools keep the checkpoint's own.

    One way of rounding, on every CPU: an answer after a cached prefix is the answer before it.
    """
    monkeypatch.setenv("LORAMUX_ENGINE_BATCH_INVARIANT", "true")
    return settings.model_copy(update={"tool_format": "hermes"})


@pytest.fixture
async def platform(settings: Settings) -> AsyncIterator[Platform]:
    opened = open_platform(settings, clock=SystemClock(), passwords=Passwords(CHEAP_HASHER))
    yield opened
    await opened.close()


@pytest.fixture
def engine_process(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    address = settings.engines[0]
    Path(address.removeprefix("ipc://")).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    process = subprocess.Popen(engine_command(settings, address).argv)
    yield process
    process.terminate()
    process.wait(60)


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    return create_app(platform=platform)


@pytest.fixture
async def client(
    app: FastAPI, platform: Platform, engine_process: subprocess.Popen[bytes]
) -> AsyncIterator[openai.AsyncOpenAI]:
    key = await make_key(platform, await make_tenant(platform, "acme"))
    async with (
        serve(app) as address,
        openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key=key.secret.text, max_retries=0, timeout=120
        ) as opened,
    ):
        for _ in range(1200):
            if platform.engines.problem() is None:
                break
            assert engine_process.poll() is None, "the engine ended before it was ready"
            await asyncio.sleep(0.1)
        yield opened


async def row_of(platform, request_id):
    await platform.ledger.drain()
    async with platform.db.reading() as session:
        return await repository.get(session, request_id)


@pytest.mark.timeout(300)
async def test_the_real_engine_answers_the_unmodified_client(client, platform):
    (model,) = [model.id async for model in client.models.list()]
    chat = client.chat.completions

    whole = await chat.create(model=model, messages=HELLO, logprobs=True, **GREEDY)
    text = whole.choices[0].message.content
    assert text
    tokens = whole.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == text

    stream = await chat.create(
        model=model, messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens

    word = text.split()[2]
    stopped = await chat.create(model=model, messages=HELLO, stop=[word], **GREEDY)
    assert stopped.choices[0].message.content == text[: text.index(word)]
    row = await row_of(platform, stopped._request_id)
    assert row.completion_tokens == stopped.usage.completion_tokens
    assert row.completion_tokens < whole.usage.completion_tokens

    gone = await chat.create(
        model=model, messages=HELLO, stream=True, max_tokens=1000, extra_body={"top_k": 5}
    )
    await anext(aiter(gone))
    await gone.close()
    for _ in range(600):
        if not platform.ledger.running:
            break
        await asyncio.sleep(0.1)
    row = await row_of(platform, gone.response.headers["x-request-id"])
    assert row.status == "cancelled"
    assert row.completion_tokens < 900
    for _ in range(600):
        if (await platform.engines.all[0].client.status()).running == 0:
            break
        await asyncio.sleep(0.1)
    else:
        pytest.fail("the engine goes on for a client that is gone")


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
VERDICT = {"anyOf": [{"const": "yes"}, {"const": "no"}]}
DAY = {"type": "string", "format": "date"}


@pytest.mark.wide
@pytest.mark.timeout(300)
async def test_the_real_engine_keeps_schemas_and_calls_tools(client):
    (model,) = [model.id async for model in client.models.list()]
    chat = client.chat.completions

    async def ask(schema, **changes):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        asked = {"model": model, "messages": HELLO, "max_tokens": 200, "response_format": form}
        return await chat.create(**asked | changes)

    answers = await asyncio.gather(
        *(ask(schema, n=2, seed=seed) for seed, schema in enumerate((PERSON, VERDICT, DAY))),
        ask(PERSON, temperature=0, logprobs=True, top_logprobs=2),
    )
    for answer, schema in zip(answers, (PERSON, VERDICT, DAY, PERSON), strict=True):
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), schema)
    alone = [await ask(PERSON, n=2, seed=0) for _ in range(2)]  # the same batch: the same rounding
    first, second = ([c.message.content for c in answer.choices] for answer in alone)
    assert first == second

    cut = await ask(PERSON, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"

    function = {"name": "lookup", "parameters": PERSON, "strict": True}
    tools = [{"type": "function", "function": function}]
    one, several, either = await asyncio.gather(
        ask(VERDICT, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=3),
        ask(VERDICT, tools=tools, tool_choice="required", seed=3, max_tokens=400),
        ask(VERDICT, tools=tools, seed=4),
    )
    assert one.choices[0].finish_reason == "tool_calls"
    assert len(one.choices[0].message.tool_calls) == 1
    assert several.choices[0].message.tool_calls
    for answer in (one, several, either):
        message = answer.choices[0].message
        for call in message.tool_calls or ():
            jsonschema.validate(json.loads(call.function.arguments), PERSON)
        if not message.tool_calls:
            jsonschema.validate(json.loads(message.content), VERDICT)
    free = await chat.create(model=model, messages=HELLO, tools=tools, max_tokens=20, seed=5)
    assert free.choices[0].message.content or free.choices[0].message.tool_calls

    for hostile in ({"type": "string", "pattern": "(.*a.{200}).*"}, {"pattern": "(("}):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(hostile, temperature=1.9)
        assert caught.value.code in ("schema_too_complex", "invalid_schema")
