"""Validation where engines serve two base models: an upload finds the one that it was made for."""

from dataclasses import replace

import pytest

from tests.adapter_files import good_adapter, tiny_description
from tests.factories import bearer, make_key, make_tenant
from tests.validation_bench import ProbedEngine, make_bench, post_upload

WIDE = replace(tiny_description(hidden=32, kv=16), name="wide", base_digest="e" * 64)


@pytest.fixture
def engines():
    return [ProbedEngine(), ProbedEngine(description=WIDE)]


@pytest.fixture
async def bench(app, engines):
    return await make_bench(app, engines=engines)


@pytest.fixture
async def key(platform):
    return await make_key(platform, await make_tenant(platform))


async def verdict(client, key, bench, files):
    await post_upload(client, key, files, "a")
    await bench.work()
    answer = await client.get("/v1/adapters/a/versions/1", headers=bearer(key))
    return answer.json()


@pytest.mark.parametrize("which", [0, 1])
async def test_an_adapter_is_tried_on_the_engine_of_its_base(client, key, bench, engines, which):
    base = engines[which].description
    version = await verdict(client, key, bench, good_adapter(base))
    assert (version["state"], version["base_digest"]) == ("ready", base.base_digest)
    assert [bool(engine.requests) for engine in engines] == [which == 0, which == 1]


async def test_one_that_fits_neither_is_rejected_once_and_says_why(client, key, bench, engines):
    foreign = tiny_description(hidden=48, kv=24)
    version = await verdict(client, key, bench, good_adapter(foreign))
    assert version["state"] == "rejected"
    groups = [check["group"] for check in version["report"]["checks"]]
    assert len(groups) == len(set(groups))
    assert not any(engine.requests for engine in engines)
