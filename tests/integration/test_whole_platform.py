"""What must hold of the whole platform: nothing lost when a process dies, nothing told to logs."""

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live import EXAMPLES, LivePlatform, free_port

pytestmark = [pytest.mark.wide, pytest.mark.timeout(300)]

BASE = "SmolLM2-135M-Instruct"
STREAMS = 4
LEASE_S = 5
CLOSED_WITHIN_S = 90.0
CANARY = "canary-7f3e1d-quokka"


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlatform]:
    """A platform of its own, whose ledger leases end soon."""
    lease = {"LORAMUX_LEDGER_LEASE_S": str(LEASE_S)}
    running = LivePlatform(tmp_path_factory.mktemp("crashes"), free_port(), lease)
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def key(platform: LivePlatform) -> str:
    return platform.tenant_with_key("crashes")


def chat(url: str, key: str, prompt: str, max_tokens: int) -> Iterator[str]:
    """The lines of one streamed answer."""
    body = {
        "model": BASE,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(timeout=60, headers=headers) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
    ):
        yield from answer.iter_lines()


def ledger(platform: LivePlatform) -> list[tuple[str, str, int]]:
    """(request id, status, completion tokens) of every row."""
    with sqlite3.connect(f"file:{platform.data_dir}/loramux.db?mode=ro", uri=True) as database:
        return database.execute(
            "SELECT request_id, status, completion_tokens FROM usage_records"
        ).fetchall()


@pytest.mark.parametrize("victim", ["engine", "api", "worker"])
def test_kill_9_in_the_middle_of_streams_leaves_one_closed_row_a_request(
    platform: LivePlatform, key: str, victim: str
) -> None:
    before = len(ledger(platform))
    ends: list[str] = []
    flowing = threading.Barrier(STREAMS + 1)

    def follow(number: int) -> None:
        last = ""
        try:
            for index, line in enumerate(chat(platform.url, key, f"Tell story {number}.", 200)):
                last = line or last
                if index == 6:
                    flowing.wait(timeout=60)
        except httpx.HTTPError as error:
            last = type(error).__name__
        ends.append(last)

    threads = [threading.Thread(target=follow, args=(n,)) for n in range(STREAMS)]
    for thread in threads:
        thread.start()
    flowing.wait(timeout=60)
    platform.kill(victim)
    for thread in threads:
        thread.join(timeout=120)
    assert len(ends) == STREAMS, "a stream hangs"
    if victim == "engine":
        assert set(ends) == {"data: [DONE]"}  # after an error frame, not a cut connection
    deadline = time.monotonic() + CLOSED_WITHIN_S
    while time.monotonic() < deadline:
        rows = ledger(platform)
        if len(rows) == before + STREAMS and all(status != "open" for _, status, _ in rows):
            break
        time.sleep(1.0)
    rows = ledger(platform)
    assert len(rows) == before + STREAMS
    assert not [row for row in rows if row[1] == "open"]
    assert max(Counter(request_id for request_id, _, _ in rows).values()) == 1
    assert all(tokens > 0 for _, _, tokens in rows[before:])
    _until_it_answers(platform, key)
    _every_swept_row_is_in_the_metrics(platform)


def _every_swept_row_is_in_the_metrics(platform: LivePlatform) -> None:
    """What the worker closed, the api shows: no row is in the ledger alone."""
    name = "loramux_swept_requests_total"
    lines = httpx.get(f"{platform.url}/metrics").text.splitlines()
    shown = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
    with sqlite3.connect(f"file:{platform.data_dir}/loramux.db?mode=ro", uri=True) as database:
        query = "SELECT closed_by, count(*) FROM usage_records GROUP BY closed_by"
        by = dict(database.execute(query).fetchall())
    swept, spooled = by.get("sweep", 0), by.get("spool", 0)  # whoever comes first empties a spool
    assert swept <= shown <= swept + spooled


def _until_it_answers(platform: LivePlatform, key: str) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            lines = list(chat(platform.url, key, "Hello", 2))
            if lines and "data: [DONE]" in lines and not any("error" in line for line in lines):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError("the platform did not come back")


def test_no_prompt_answer_key_or_password_is_left_in_logs_or_files(
    platform: LivePlatform, key: str
) -> None:
    platform.run("adapters", "push", str(EXAMPLES / "pirate"), "--name", "quiet", key=key)
    answer = list(chat(platform.url, key, f"Repeat after me: {CANARY}", 16))
    assert answer
    wrong = {"model": CANARY * 20, "messages": [{"role": CANARY, "content": CANARY}]}
    headers = {"Authorization": f"Bearer {key}"}
    httpx.post(f"{platform.url}/v1/chat/completions", json=wrong, headers=headers, timeout=60)
    form = {"email": "nobody@example.com", "password": CANARY}
    httpx.post(
        f"{platform.url}/console/sign-in",
        data=form,
        headers={"Origin": platform.url},
        timeout=60,
    )
    secret = key.rpartition("_")[2]
    time.sleep(2.0)  # the journal's and the logs' buffers
    told = [
        (file, word)
        for file in sorted(platform.data_dir.rglob("*"))
        if file.is_file()
        for word in (CANARY, secret)
        if word.encode() in _bytes(file)
    ]
    assert told == []


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""
