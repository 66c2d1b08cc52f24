"""langchain-openai and litellm, unmodified, against a served api. Importing them takes seconds."""

import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.fake_engine import BASE_NAME, ByteCodec

pytestmark = pytest.mark.wide

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Place(BaseModel):
    """Where."""

    city: str


class weather(BaseModel):  # noqa: N801 - langchain names the tool after the class
    """How the weather is."""

    city: str


@pytest.fixture
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteCodec, "tool_format", "hermes")


class TestLangchain:
    @pytest.fixture
    async def model(self, address, key) -> AsyncIterator[Any]:
        """With connections of the test's own: langchain keeps those that it opens until the
        interpreter ends."""
        from langchain_openai import ChatOpenAI

        async with httpx.AsyncClient() as connections:
            yield ChatOpenAI(
                base_url=f"{address}/v1",
                api_key=key.secret.text,
                model=BASE_NAME,
                max_retries=0,
                http_async_client=connections,
            )

    async def test_answers_and_streams(self, model, engine):
        answer = await model.ainvoke("hi")
        assert answer.content == "Hello, world"
        assert answer.usage_metadata["output_tokens"] == len("Hello, world") + 1
        pieces = [piece.content async for piece in model.astream("hi")]
        assert "".join(pieces) == "Hello, world"

    @pytest.mark.parametrize("method", ["json_schema", "json_mode"])
    async def test_structured_answers(self, model, engine, method):
        engine.text = '{"city": "Rome"}'
        answer = await model.with_structured_output(Place, method=method).ainvoke("hi")
        assert answer == Place(city="Rome")
        assert engine.requests[0].grammar is not None

    @pytest.mark.usefixtures("_tools")
    async def test_tools(self, model, engine):
        from langchain_core.messages import HumanMessage, ToolMessage

        engine.text = CALL
        bound = model.bind_tools([weather])
        asked = await bound.ainvoke("hi")
        (call,) = asked.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
        engine.text = "Sunny."
        talk = [HumanMessage("hi"), asked, ToolMessage("sun", tool_call_id=call["id"])]
        assert (await bound.ainvoke(talk)).content == "Sunny."
        engine.text = CALL
        forced = model.with_structured_output(weather, method="function_calling")
        assert await forced.ainvoke("hi") == weather(city="Rome")

    async def test_errors_are_the_openai_packages(self, model):
        import openai

        with pytest.raises(openai.BadRequestError) as caught:
            await model.bind_tools([weather]).ainvoke("hi")
        assert caught.value.code == "tools_unsupported"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # its own
class TestLitellm:
    @pytest.fixture
    def complete(self, address, key, monkeypatch) -> Any:
        monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        async def call(**changes: Any) -> Any:
            return await litellm.acompletion(
                **{
                    "model": f"openai/{BASE_NAME}",
                    "api_base": f"{address}/v1",
                    "api_key": key.secret.text,
                    "messages": [{"role": "user", "content": "hi"}],
                    "num_retries": 0,
                    **changes,
                }
            )

        return call

    async def test_answers_and_streams(self, complete):
        answer = await complete(temperature=0.3, max_tokens=50)
        assert answer.choices[0].message.content == "Hello, world"
        stream = await complete(stream=True, stream_options={"include_usage": True})
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(pieces) == "Hello, world"

    async def test_structured_answers(self, complete, engine):
        engine.text = '{"city": "Rome"}'
        answer = await complete(response_format=Place)
        assert Place.model_validate_json(answer.choices[0].message.content) == Place(city="Rome")
        assert engine.requests[0].grammar is not None

    @pytest.mark.usefixtures("_tools")
    async def test_tools(self, complete, engine):
        engine.text = CALL
        function = {"name": "weather", "parameters": weather.model_json_schema()}
        answer = await complete(tools=[{"type": "function", "function": function}])
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.arguments == '{"city": "Rome"}'
        assert answer.choices[0].finish_reason == "tool_calls"

    async def test_errors_have_their_class(self, complete):
        import litellm

        with pytest.raises(litellm.BadRequestError):
            await complete(temperature=1.5, response_format={"type": "xml"})
        with pytest.raises(litellm.NotFoundError):
            await complete(model="openai/nobody")
