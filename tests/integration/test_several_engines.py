"""`loramux serve` with three engines of two base models: routed, drained and killed under load."""

import asyncio
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.live import LivePlatform, free_port
from tests.tiny_base import write_tiny_base

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]
CALL = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 48, "stream": True}


@pytest.fixture(scope="module")
def platform():
    """Two engines serve `red` and one serves `blue`."""
    folder = Path(tempfile.mkdtemp(prefix="lmx"))
    red = write_tiny_base(folder / "red", seed=1)
    blue = write_tiny_base(folder / "blue", seed=2, hidden=32)
    engines = [f"ipc://{folder}/e{number}.sock" for number in range(3)]
    live = LivePlatform(
        folder / "data",
        free_port(),
        extra={
            "LORAMUX_BASE_MODEL": str(red),
            "LORAMUX_ENGINES": ",".join(engines),
            "LORAMUX_ENGINE_BASE_MODELS": f"{red},{red},{blue}",
            "LORAMUX_ENGINE_THREADS": "1",
            "LORAMUX_ARENA_BYTES": str(32 * 2**20),
            "LORAMUX_TENANT_REQUESTS_PER_MINUTE": "100000",
            "LORAMUX_TENANT_TOKENS_PER_MINUTE": "100000000",
        },
    )
    live.start()
    try:
        wait_for(live, {"ready": 3})
        yield live
    finally:
        live.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def key(platform):
    return platform.tenant_with_key("acme")


def states(live):
    return {row["name"]: row for row in live.json("engines", "list")}


def wait_for(live, wanted, within_s=180.0):
    """Until so many engines are in these states."""
    deadline = time.monotonic() + within_s
    while True:
        found = Counter(row["state"] for row in states(live).values())
        if all(found[state] == count for state, count in wanted.items()):
            return
        assert time.monotonic() < deadline, f"{found}\n{live.log.read_text()[-3000:]}"
        time.sleep(0.5)


async def call(client, model="red", **changes):
    """ "ok", "error frame", or the code of the refusal."""
    answer = await client.post("/v1/chat/completions", json=CALL | {"model": model} | changes)
    if answer.status_code != 200:
        assert answer.headers.get("retry-after"), answer.text
        return answer.json()["error"]["code"]
    frames = [line for line in answer.text.splitlines() if line]
    assert frames[-1] == "data: [DONE]"
    return "error frame" if '"error"' in frames[-2] else "ok"


@asynccontextmanager
async def load(live, key, callers=6, model="red"):
    """Callers that call again and again; afterwards what each call came to, with its start."""
    outcomes: list[tuple[float, str]] = []
    stop = asyncio.Event()
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=live.url, headers=headers, timeout=60) as client:

        async def again():
            while not stop.is_set():
                began = time.monotonic()
                outcomes.append((began, await call(client, model)))

        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(again())
            try:
                yield outcomes
            finally:
                stop.set()


async def answered_by(live):
    """Tokens that each engine has made so far, by the end of its address, from /metrics."""
    await asyncio.sleep(1.5)  # the router hears of it once a second
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"{live.url}/metrics")).text
    pattern = r'loramux_engine_tokens_total\{engine="[^"]*/(\w+\.sock)",kind="completion"\} (\S+)'
    return Counter({name: float(count) for name, count in re.findall(pattern, text)})


async def test_both_base_models_are_listed_and_answer(platform, key):
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=platform.url, headers=headers, timeout=60) as client:
        listed = {model["id"] for model in (await client.get("/v1/models")).json()["data"]}
        assert {"red", "blue"} <= listed
        assert await call(client, "red") == "ok"
        assert await call(client, "blue") == "ok"
    bases = Counter(row["base_model"] for row in states(platform).values())
    assert bases == {"red": 2, "blue": 1}
    for engine in states(platform).values():
        assert "well" in platform.run("health", "engine", "--listen", engine["address"])
    assert "well" not in platform.run("health", "engine", "--listen", "ipc:///x", check=False)


async def test_both_engines_of_a_base_share_the_load(platform, key):
    before = await answered_by(platform)
    async with load(platform, key) as outcomes:
        await asyncio.sleep(3)
    moved = await answered_by(platform) - before
    assert {outcome for _, outcome in outcomes} == {"ok"}
    assert moved["e0.sock"] > 0
    assert moved["e1.sock"] > 0
    assert moved["e2.sock"] == 0


async def test_an_engine_is_drained_under_load_and_nobody_notices(platform, key):
    async with load(platform, key) as outcomes:
        await asyncio.sleep(1)
        out = await asyncio.to_thread(
            platform.run, "engines", "drain", "engine-0", "--wait", "60", "--json"
        )
        assert json.loads(out)["state"] == "drained"
        drained = await answered_by(platform)
        await asyncio.sleep(3)
    moved = await answered_by(platform) - drained
    assert moved["e0.sock"] == 0
    assert moved["e1.sock"] > 0
    assert {outcome for _, outcome in outcomes} == {"ok"}
    refused = await asyncio.to_thread(platform.run, "engines", "drain", "engine-1", check=False)
    assert refused == ""
    assert states(platform)["engine-1"]["state"] == "ready"
    platform.run("engines", "resume", "engine-0")
    await asyncio.to_thread(wait_for, platform, {"ready": 3})


async def test_one_killed_under_load_costs_its_own_requests_and_no_more(platform, key):
    restarts = platform.log.read_text().count("it is started again")
    async with load(platform, key, callers=8) as outcomes:
        await asyncio.sleep(2)
        victim = next(pid for pid in platform.children()["engine"] if is_engine(pid, "e0.sock"))
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.sleep(4)
    broken = [outcome for _, outcome in outcomes if outcome != "ok"]
    assert set(broken) <= {"error frame", "engine_unavailable"}
    assert len(broken) <= 8
    after = [outcome for began, outcome in outcomes if began > killed + 0.5]
    assert len(after) > 3
    assert set(after) == {"ok"}
    await asyncio.to_thread(wait_for, platform, {"ready": 3})
    assert platform.log.read_text().count("it is started again") == restarts + 1


def is_engine(pid, address):
    return address in Path(f"/proc/{pid}/cmdline").read_text()
