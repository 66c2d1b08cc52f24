"""Prompts: a bound before tokenizing, and no tenant holds up another."""

import asyncio
import threading

import pytest

from app.errors import InvalidRequest, RateLimited
from app.inference.prompts import MOST_LONG_PROMPTS, LongPrompts, encode_prompt
from app.inference.schemas import chat_call
from app.settings import Settings
from tests.fake_engine import ByteCodec, describe


class Untouched(ByteCodec):
    """A codec that must not be asked to tokenize."""

    def encode_chat(self, messages: object, tools: object = ()) -> list[int]:
        raise AssertionError("the prompt was tokenized")


async def test_what_cannot_fit_is_refused_before_it_is_tokenized(settings: Settings) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 5000}]}
    with pytest.raises(InvalidRequest) as refused:
        await encode_prompt(chat_call(body, settings), Untouched(), describe(), "ten_1")  # type: ignore[arg-type]
    assert refused.value.code == "context_length_exceeded"
    assert "at least 1250 tokens" in refused.value.message


class TestLongPrompts:
    async def test_one_tenants_pile_leaves_a_thread_for_another(self) -> None:
        prompts = LongPrompts()
        release = threading.Event()

        def stuck() -> list[int]:
            release.wait(20)
            return [1]

        pile = [asyncio.create_task(prompts.run("greedy", stuck)) for _ in range(5)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(prompts.run("polite", lambda: [2]), 10) == [2]
        release.set()
        assert await asyncio.gather(*pile) == [[1]] * 5

    async def test_beyond_the_bound_a_tenant_is_told_to_send_fewer(self) -> None:
        prompts = LongPrompts()
        release = threading.Event()

        def stuck() -> list[int]:
            release.wait(20)
            return [1]

        pile = [asyncio.create_task(prompts.run("greedy", stuck)) for _ in range(MOST_LONG_PROMPTS)]
        await asyncio.sleep(0)
        with pytest.raises(RateLimited, match="send fewer"):
            await prompts.run("greedy", stuck)
        release.set()
        await asyncio.gather(*pile)
        assert await prompts.run("greedy", lambda: [3]) == [3]

    async def test_a_call_that_is_cancelled_keeps_its_place_until_its_thread_ends(self) -> None:
        prompts = LongPrompts()
        release = threading.Event()
        began: list[int] = []
        running = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stuck() -> list[int]:
            began.append(1)
            loop.call_soon_threadsafe(running.set)
            release.wait(20)
            return [1]

        first = asyncio.create_task(prompts.run("greedy", stuck))
        await running.wait()
        first.cancel()
        second = asyncio.create_task(prompts.run("greedy", stuck))
        await asyncio.sleep(0.05)
        assert len(began) == 1
        release.set()
        assert await second == [1]
        with pytest.raises(asyncio.CancelledError):
            await first
