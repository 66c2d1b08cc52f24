"""Everything is killed once under load, and then nothing may be lost, double or orphaned.

    python -m tests.crash_load [--requests 500] [--seed 1]

500 streamed requests, a third of whose clients vanish at a random token, and some uploads, on real
processes: two apis, a worker, beat, an engine (the real core with invented tokens), a Redis and a
PostgreSQL of its own. api, worker, engine, Redis and PostgreSQL get `kill -9` once each while the
load runs. Ends by itself within five minutes; the exit code is 0 when all held.
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import create_engine, text

from app.platform import open_platform
from app.usage.roll_up import roll_up
from engine.client import EngineClient
from tests.adapter_files import good_adapter
from tests.core_process import served_description
from tests.factories import make_key, make_tenant
from tests.stack import OwnPostgres, Stack
from tests.validation_bench import BOUNDARY, upload_body

CALLERS = 24
UPLOADS = 6
MAX_TOKENS = 60
STEP_MS = 15.0
VICTIMS = ("worker", "redis", "engine", "postgres", "api-1")
DOWN_S = 1.0
LOAD_S = 120.0
DRAIN_S = 110.0
STEP_TOKENS = 1
"""What one step may add to a request: the difference that a count may have."""
SECOND_TOKENS = int(1000 / STEP_MS) + 1
"""What a second may add: the journal's grain, where the engine itself was the victim."""


@dataclass
class Seen:
    """What the clients saw."""

    answered: set[str] = field(default_factory=set)  # request ids of 200s: admitted for certain
    vanished: set[str] = field(default_factory=set)
    refusals: Counter[str] = field(default_factory=Counter)
    uploads: set[str] = field(default_factory=set)  # ids of accepted versions
    done: int = 0
    killed: dict[str, float] = field(default_factory=dict)


class Load:
    def __init__(self, stack: Stack, key: str, requests: int, seed: int) -> None:
        self.stack = stack
        self.seen = Seen()
        self._key = key
        self._requests = requests
        self._random = random.Random(seed)
        self._left = requests
        self._deadline = time.monotonic() + LOAD_S

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=CALLERS + UPLOADS)
        headers = {"authorization": f"Bearer {self._key}"}
        async with httpx.AsyncClient(timeout=30, limits=limits, headers=headers) as client:
            await asyncio.gather(
                *(self._caller(client) for _ in range(CALLERS)),
                *(self._uploader(client, n) for n in range(UPLOADS)),
                self._killer(),
            )

    async def _killer(self) -> None:
        """One after the other, spread over the load."""
        for number, victim in enumerate(VICTIMS, start=1):
            while self.seen.done < self._requests * number / (len(VICTIMS) + 2):
                if time.monotonic() > self._deadline:
                    raise AssertionError(f"the load does not get on after {self.seen.killed}")
                await asyncio.sleep(0.05)
            self.seen.killed[victim] = time.time()
            await asyncio.to_thread(self.stack.kill, victim)
            await asyncio.sleep(DOWN_S)
            await asyncio.to_thread(self.stack.start_process, victim)

    async def _caller(self, client: httpx.AsyncClient) -> None:
        while self._left > 0 and time.monotonic() < self._deadline:
            self._left -= 1
            vanish_at = self._random.randint(0, 40) if self._random.random() < 1 / 3 else None
            # some that are refused come again; each attempt is a request of its own
            while not await self._attempt(client, vanish_at):
                if time.monotonic() > self._deadline:
                    return
            self.seen.done += 1

    async def _attempt(self, client: httpx.AsyncClient, vanish_at: int | None) -> bool:
        """Whether the call was admitted, whatever became of it."""
        url = self._random.choice(self.stack.urls)
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"call {self._random.random()}"}],
            "max_tokens": MAX_TOKENS,
            "stream": True,
        }
        try:
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    self.seen.refusals[answer.json()["error"]["code"]] += 1
                    await asyncio.sleep(min(2.0, float(answer.headers.get("retry-after", 1))))
                    return False
                request_id = answer.headers["x-request-id"]
                self.seen.answered.add(request_id)
                chunks = 0
                async for line in answer.aiter_lines():
                    chunks += line.startswith("data: ")
                    if vanish_at is not None and chunks > vanish_at:
                        self.seen.vanished.add(request_id)
                        return True
                return True
        except httpx.HTTPError as error:
            self.seen.refusals[type(error).__name__] += 1
            await asyncio.sleep(0.2)
            return False

    async def _uploader(self, client: httpx.AsyncClient, number: int) -> None:
        """Tries the same upload, under one idempotency key, until it is accepted."""
        await asyncio.sleep(number * 3)
        files = good_adapter(served_description())
        while time.monotonic() < self._deadline:
            try:
                answer = await client.post(
                    f"{self._random.choice(self.stack.urls)}/v1/adapters",
                    content=upload_body(files, f"adapter-{number}"),
                    headers={
                        "content-type": f"multipart/form-data; boundary={BOUNDARY}",
                        "idempotency-key": f"upload-{number}",
                    },
                )
            except httpx.HTTPError:
                await asyncio.sleep(0.3)
                continue
            if answer.status_code == 202:
                self.seen.uploads.add(answer.json()["id"])
                return
            self.seen.refusals[f"upload:{answer.json()['error']['code']}"] += 1
            await asyncio.sleep(1.0)


# --------------------------------------------------------------------------- what must hold


class Verdict:
    """Reads the database and the engine until all is settled, then says what is wrong."""

    def __init__(self, stack: Stack, seen: Seen) -> None:
        self._stack = stack
        self._seen = seen
        self._db = create_engine(stack.settings.database_url)
        self.problems: list[str] = []
        self.notes: list[str] = []

    def rows(self, query: str) -> list[Any]:
        with self._db.connect() as connection:
            return list(connection.execute(text(query)))

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    async def settle(self) -> None:
        """Waits for the sweeps; what is not settled then is a problem."""
        waiting = {
            "open ledger rows": "SELECT count(*) FROM usage_records WHERE status = 'open'",
            "uploads without a verdict": (
                "SELECT count(*) FROM adapter_versions WHERE state NOT IN ('ready', 'rejected')"
            ),
        }
        began = time.monotonic()
        for what, query in waiting.items():
            while True:
                left = int(self.rows(query)[0][0])
                if left == 0 or time.monotonic() - began > DRAIN_S:
                    break
                await asyncio.sleep(0.5)
            self.check(left == 0, f"{left} {what} after {DRAIN_S:.0f} s")
        self.notes.append(f"settled {time.monotonic() - began:.0f} s after the load")

    def ledger(self) -> None:
        rows = self.rows(
            "SELECT request_id, status, closed_by, error_code, completion_tokens, "
            "overshoot_tokens FROM usage_records"
        )
        by_id = {row.request_id: row for row in rows}
        self.check(len(by_id) == len(rows), "a request has two rows")
        missing = self._seen.answered - by_id.keys()
        self.check(
            not missing, f"{len(missing)} answered requests have no row: {list(missing)[:3]}"
        )
        made = {
            id_: tokens for id_, tokens in self._stack.engine_counts().items() if id_[:3] == "req"
        }
        unknown = made.keys() - by_id.keys()
        self.check(not unknown, f"the engine ran {len(unknown)} requests without a row")
        differing: Counter[int] = Counter()
        for request_id, row in by_id.items():
            difference = abs(made.get(request_id, 0) - row.completion_tokens - row.overshoot_tokens)
            lost_with_engine = row.error_code in ("engine_unavailable", "api_lost", "engine_lost")
            allowed = SECOND_TOKENS if lost_with_engine else STEP_TOKENS
            differing[difference] += 1
            if difference > allowed:
                self.problems.append(
                    f"{request_id} {row.status} {row.closed_by} {row.error_code}: the engine made "
                    f"{made.get(request_id, 0)}, the ledger has {row.completion_tokens} + "
                    f"{row.overshoot_tokens}"
                )
        ended = Counter((row.status, row.closed_by) for row in rows)
        self.notes.append(f"{len(rows)} rows: {dict(ended)}")
        self.notes.append(f"tokens off by: {dict(sorted(differing.items()))}")

    async def sums(self) -> None:
        (months,) = self.rows(
            "SELECT sum(tokens) AS tokens, sum(reserved) AS reserved FROM usage_months "
            "WHERE owner_id LIKE 'ten_%'"
        )
        (billed,) = self.rows("SELECT sum(prompt_tokens + completion_tokens) FROM usage_records")
        self.check(months.reserved == 0, f"{months.reserved} tokens of the month stay reserved")
        self.check(months.tokens == billed[0], f"the month has {months.tokens}, rows {billed[0]}")
        platform = open_platform(self._stack.settings)
        try:
            self.check(await roll_up(platform.db, platform.clock) == 0, "sums differ from rows")
        finally:
            await platform.close()

    def uploads(self) -> None:
        versions = {row[0]: row[1] for row in self.rows("SELECT id, state FROM adapter_versions")}
        self.check(
            versions.keys() == self._seen.uploads,
            f"{len(self._seen.uploads)} uploads were accepted and {len(versions)} are kept",
        )
        self.notes.append(f"uploads: {dict(Counter(versions.values()))}")

    async def nothing_is_left(self, key: str) -> None:
        client = EngineClient(self._stack.settings.engines[0])
        await client.start()
        try:
            status = await client.status()
        finally:
            await client.close()
        held = (status.running, status.waiting, status.kv_blocks_used)
        self.check(held == (0, 0, 0), f"the engine still holds {held}")
        self.check(not any(r.pins for r in status.adapters), "an adapter stays pinned")
        spooled = list((self._stack.settings.data_dir / "spool").glob("*"))
        self.check(not spooled, f"{len(spooled)} files stay in the spool")
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as api:
            limits = (await api.get(f"{self._stack.urls[0]}/v1/limits")).json()
        self.check(limits.get("concurrent") == 0, f"seats stay taken: {limits}")

    def counters(self) -> None:
        """What the surviving api counted is what it closed; the other one began anew."""
        scraped = httpx.get(f"{self._stack.urls[0]}/metrics", timeout=60).text
        counted = sum(
            float(line.rsplit(" ", 1)[1])
            for line in scraped.splitlines()
            if line.startswith("loramux_requests_total{")
        )
        self.check(counted > 0, "the surviving api has counted nothing")


async def run(stack: Stack, requests: int, seed: int) -> tuple[Seen, Verdict]:
    platform = open_platform(stack.settings)
    try:
        tenant = await make_tenant(
            platform, "crowd", requests_per_minute=100_000, tokens_per_minute=10_000_000
        )
        key = (await make_key(platform, tenant)).secret.text
    finally:
        await platform.close()
    load = Load(stack, key, requests, seed)
    await load.run()
    verdict = Verdict(stack, load.seen)
    await verdict.settle()
    verdict.ledger()
    await verdict.sums()
    verdict.uploads()
    await verdict.nothing_is_left(key)
    verdict.counters()
    return load.seen, verdict


def report(seen: Seen, verdict: Verdict, say: Callable[[str], Any]) -> None:
    say(f"{seen.done} requests, {len(seen.vanished)} clients vanished; killed {list(seen.killed)}")
    say(f"refused meanwhile: {dict(seen.refusals)}")
    for note in verdict.notes:
        say(note)
    for problem in verdict.problems[:20]:
        say(f"PROBLEM {problem}")
    say(f"{len(verdict.problems)} problems")


def main(argv: list[str]) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=500)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--keep", action="store_true", help="leave the logs behind")
    wanted = options.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="loramux-crash-"))
    stack = Stack(
        folder,
        apis=2,
        step_ms=STEP_MS,
        postgres=OwnPostgres(),
        LORAMUX_LEDGER_LEASE_S="5",
        LORAMUX_VALIDATION_LEASE_S="5",
    )
    try:
        stack.start(worker=True)
        seen, verdict = asyncio.run(run(stack, wanted.requests, wanted.seed))
    finally:
        stack.stop()
    report(seen, verdict, lambda line: sys.stdout.write(line + "\n"))
    if not wanted.keep and not verdict.problems:
        shutil.rmtree(folder)
    else:
        sys.stdout.write(f"logs: {folder}\n")
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
