"""`python -m engine` with the packaged model: killed in the middle of an answer, and back."""

import asyncio
import subprocess
from contextlib import asynccontextmanager

import pytest

from app.processes import engine_command
from engine.client import EngineClient
from engine.errors import EngineUnavailable
from engine.text import TextCodec, TextStream
from engine.types import GenerateRequest, SamplingParams

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]
START_S = 240.0


@pytest.fixture(autouse=True)
def one_way_of_rounding(settings, monkeypatch):
    """The answer is then the same on every CPU."""
    monkeypatch.setenv("LORAMUX_ENGINE_BATCH_INVARIANT", "true")


@asynccontextmanager
async def engine_of(settings):
    process = await asyncio.to_thread(
        subprocess.Popen, engine_command(settings, settings.engines[0]).argv
    )
    try:
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


def question(codec, request_id, max_tokens, ignore_eos=False):
    return GenerateRequest(
        request_id=request_id,
        tenant="ten_1",
        prompt=codec.encode_chat([{"role": "user", "content": "What is the capital of France?"}]),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos),
        cache_salt="salt",
    )


async def read_into(received, stream):
    async for output in stream:
        received += output.token_ids


async def test_a_killed_engine_fails_the_answer_and_keeps_its_counts(settings):
    codec = TextCodec.load(settings.base_model)
    client = EngineClient(settings.engines[0])
    await client.start()
    async with engine_of(settings) as process:
        description = await client.describe(START_S)
        assert description.tokenizer_digest == codec.tokenizer_digest
        journal = settings.data_dir / "journal" / "engine-0.jsonl"
        stream = client.generate(question(codec, "killed", 2000, ignore_eos=True))
        received: list[int] = []
        while b'"c":' not in journal.read_bytes():  # a count of tokens, for the only request
            received += (await anext(stream)).token_ids
        process.kill()
        with pytest.raises(EngineUnavailable):
            await read_into(received, stream)
    async with engine_of(settings) as process:
        await client.describe(START_S)
        [entry] = await client.journal(["killed"])
        assert entry.finish == "error"
        assert 0 < entry.completion_tokens <= len(received) + 1  # one may have been lost on its way
        text = TextStream(codec)
        answer = ""
        async for output in client.generate(question(codec, "again", 40)):
            answer += text.push(output.token_ids).text
        assert "Paris" in answer
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0
    await client.close()
