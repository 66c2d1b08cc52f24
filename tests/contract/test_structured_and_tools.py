"""Schemas and tools as the unmodified openai package sends them and reads what comes back."""

import json

import openai
import pytest
from pydantic import BaseModel, Field

from engine.errors import RequestRefused
from tests.fake_engine import BASE_NAME, ByteCodec

HELLO = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Place(BaseModel):
    """A pydantic model, from which the package writes the schema."""

    city: str = Field(description="its name")
    days: list[int] = []
    nearby: "list[Place]" = []


def weather(city: str) -> str:
    """How the weather is."""
    return f"sunny in {city}"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": weather.__doc__,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteCodec, "tool_format", "hermes")


class TestStructuredAnswers:
    async def test_a_pydantic_model_comes_back_parsed(self, client, engine):
        engine.text = '{"city": "Rome", "days": [1], "nearby": []}'
        answer = await client.chat.completions.parse(
            model=BASE_NAME, messages=HELLO, response_format=Place
        )
        assert answer.choices[0].message.parsed == Place(city="Rome", days=[1])
        schema = json.loads(engine.requests[0].grammar.text)
        assert schema["$defs"]["Place"]["properties"].keys() == {"city", "days", "nearby"}

    async def test_any_object(self, client, engine):
        engine.text = '{"a": 1}'
        answer = await client.chat.completions.create(
            model=BASE_NAME, messages=HELLO, response_format={"type": "json_object"}
        )
        assert json.loads(answer.choices[0].message.content) == {"a": 1}

    async def test_a_schema_that_cannot_be_followed_is_a_bad_request(self, client, engine):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model=BASE_NAME, messages=HELLO, response_format=form
            )
        assert caught.value.code == "unsupported_schema"
        assert caught.value.param == "response_format.json_schema.schema.not"
        engine.refuse = RequestRefused("no", code="grammar_unavailable", field="response_format")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model=BASE_NAME, messages=HELLO, response_format={"type": "json_object"}
            )
        assert caught.value.param == "response_format"


@pytest.mark.usefixtures("_tools")
class TestTools:
    async def test_a_call_its_result_and_the_answer(self, client, engine):
        engine.text = CALL
        first = await client.chat.completions.create(
            model=BASE_NAME, messages=HELLO, tools=[TOOL], tool_choice="auto"
        )
        choice = first.choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        result = weather(**json.loads(call.function.arguments))
        engine.text = "It is sunny."
        talk = [
            *HELLO,
            choice.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
        second = await client.chat.completions.create(model=BASE_NAME, messages=talk, tools=[TOOL])
        assert second.choices[0].message.content == "It is sunny."
        assert second.choices[0].message.tool_calls is None

    async def test_the_streaming_helper_assembles_calls(self, client, engine):
        engine.text = f"One moment.\n{CALL}\n{CALL}"
        async with client.chat.completions.stream(
            model=BASE_NAME, messages=HELLO, tools=[TOOL], tool_choice="auto"
        ) as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_completion()
        calls = final.choices[0].message.tool_calls
        assert [call.function.arguments for call in calls] == ['{"city": "Rome"}'] * 2
        assert final.choices[0].message.content.strip() == "One moment."
        assert final.choices[0].finish_reason == "tool_calls"
        assert events.count("tool_calls.function.arguments.done") == 2

    async def test_a_function_that_must_be_called(self, client, engine):
        engine.text = CALL
        answer = await client.chat.completions.create(
            model=BASE_NAME,
            messages=HELLO,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "weather"}},
        )
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"
        assert engine.requests[0].grammar is not None
