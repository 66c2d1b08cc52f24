"""Every console page and the usage API over many tenants, adapters and a million ledger rows.

    python -m benchmarks.pages [--folder build/pages] [--postgres postgresql://user@host/db]
        [--tenants 100] [--adapters 2000] [--rows 1000000] [--requests 30] [--only REGEX]

Pages are asked as the tenant's admin, its viewer and an operator, in this process over ASGI. For
each: the time until the whole answer is there (p50 and p95, wall clock) and the process's CPU time
for it (of SQLite also the database's), SQL statements, and the bytes of a first visit: the page
and every script and sheet that it names, as they are sent. What misses its bound is marked, and
the command then ends with 1. The first run fills the database, which is kept in --folder (for
PostgreSQL: in a database of its own on that server); later runs begin at once.
"""

import argparse
import asyncio
import re
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from fastapi import FastAPI
from sqlalchemy import event

from app.auth import cookie_name
from app.inference import engines as engine_router
from app.logging import configure_logging
from app.main import create_app
from app.platform import Platform
from app.tenants.service import find_tenant
from benchmarks.arguments import at_least_one
from benchmarks.pages_parts.rows import addresses, mark_of, postgres_url, prepare, sqlite_url
from tests.factories import PASSWORD, bearer, make_key
from tests.fake_engine import FakeEngine
from tests.serving import install_engines

MOST_STATEMENTS, MOST_MS, MOST_BYTES = 8, 150.0, 100_000
USAGE_STATEMENTS, USAGE_MS = 5, 300.0
PEOPLE = ("admin", "viewer", "operator")
MORE_OF_TENANT = {
    "overview 30 days": "/console/overview?span=30d",
    "adapters by use": "/console/adapters?sort=-last_used&page=20",
    "adapters searched": "/console/adapters?q=bot&state=ready",
    "adapters offered": "/console/playground/models?model=s",
    "comparison": "/console/adapters/support-bot/aliases/stable/comparison?window=24h",
    "usage by key": "/console/usage?by=key",
    "usage by model, 12 months": "/console/usage?span=12m&by=model",
    "usage 24 hours": "/console/usage?span=24h",
    "audit filtered": "/console/audit?action=key.create",
}
OF_OPERATOR = {
    "tenants": "/console/tenants",
    "tenants searched": "/console/tenants?q=99",
    "tenants, last page": "/console/tenants?page=4",
    "tenant": "/console/tenants/{main}",
    "tenant, suspend": "/console/tenants/{main}/suspend",
    "tenant, delete": "/console/tenants/{main}/delete",
    "requests": "/console/requests",
    "engines": "/console/engines",
    "engines, live": "/console/engines/live",
    "jobs": "/console/jobs",
    "system": "/console/system",
    "audit": "/console/audit",
    "audit filtered": "/console/audit?action=tenant.update",
    "password": "/console/password",
}
USAGE_API = {
    "usage": "/v1/usage",
    "usage by key and model": "/v1/usage?group_by=key&group_by=model&limit=100",
    "usage by hour": "/v1/usage?bucket=hour&start=2026-06-23T00:00:00Z",
    "usage by month": "/v1/usage?bucket=month&start=2026-04-02T00:00:00Z",
    "limits": "/v1/limits",
}
USAGE_API_OF_OPERATOR = {
    "all usage": "/admin/v1/usage",
    "all usage by tenant": "/admin/v1/usage?group_by=tenant&limit=100",
    "one tenant's": "/admin/v1/usage?tenant_id={main}&group_by=adapter&limit=100",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What one address costs. Times in milliseconds, of the whole answer."""

    who: str
    name: str
    p50_ms: float
    p95_ms: float
    cpu_ms: float
    statements: int
    first_bytes: int
    usage: bool

    @property
    def misses(self) -> list[str]:
        most_ms = USAGE_MS if self.usage else MOST_MS
        most_statements = USAGE_STATEMENTS if self.usage else MOST_STATEMENTS
        found = []
        if self.p95_ms >= most_ms:
            found.append("slow")
        if self.statements > most_statements:
            found.append("statements")
        if self.first_bytes >= MOST_BYTES:
            found.append("bytes")
        return found


class Visitor:
    """Asks as one person, and counts."""

    def __init__(self, client: httpx.AsyncClient, platform: Platform, headers: dict[str, str]):
        self._client = client
        self._platform = platform
        self._headers = headers
        self._assets: dict[str, int] = {}

    async def ask(self, who: str, name: str, address: str, requests: int) -> Asked:
        statements = len(await self._statements(address))
        first = await self._first_visit(address)
        walls: list[float] = []
        cpus: list[float] = []
        for _ in range(requests):
            cpu, began = time.process_time(), time.perf_counter()
            answer = await self._client.get(address, headers=self._headers)
            walls.append((time.perf_counter() - began) * 1000)
            cpus.append((time.process_time() - cpu) * 1000)
            assert answer.status_code == 200, (address, answer.status_code, answer.text[:200])
        return Asked(
            who,
            name,
            statistics.median(walls),
            sorted(walls)[max(0, -(-len(walls) * 95 // 100) - 1)],
            statistics.median(cpus),
            statements,
            first,
            usage="usage" in name or address.startswith(("/v1/usage", "/admin/v1/usage")),
        )

    async def _statements(self, address: str) -> list[str]:
        with _counted(self._platform) as seen:
            answer = await self._client.get(address, headers=self._headers)
        assert answer.status_code == 200, (address, answer.status_code, answer.text[:200])
        return seen

    async def _first_visit(self, address: str) -> int:
        page = await self._client.get(address, headers=self._headers)
        found = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text))
        return len(page.content) + sum([await self._sent(path) for path in sorted(found)])

    async def _sent(self, path: str) -> int:
        """Bytes of a file over the wire."""
        if path not in self._assets:
            accept = {"accept-encoding": "gzip"}
            async with self._client.stream("GET", path, headers=accept) as answer:
                self._assets[path] = sum([len(part) async for part in answer.aiter_raw()])
        return self._assets[path]


@contextmanager
def _counted(platform: Platform) -> Iterator[list[str]]:
    """Statements of both of the database's engines meanwhile, without BEGIN."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith("BEGIN"):
            seen.append(statement)

    engines = (platform.db.engine.sync_engine, platform.db._blocking)
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)


async def measure(platform: Platform, requests: int, only: str) -> list[Asked]:
    install_engines(platform, {"ipc://fake": FakeEngine()})
    app = create_app(platform=platform)
    async with app.router.lifespan_context(app):
        return await _measure(app, platform, requests, only)


async def _measure(app: FastAPI, platform: Platform, requests: int, only: str) -> list[Asked]:
    await platform.engines.refresh()
    pages, main = await addresses(platform)
    found: list[Asked] = []
    async with platform.db.reading() as session:
        tenant = await find_tenant(session, main)
    keys = {
        "key": bearer(await make_key(platform, tenant, name="benchmark")),
        "operator's key": bearer(await make_key(platform, None, name="benchmark")),
    }
    asked = {
        "admin": pages | MORE_OF_TENANT,
        "viewer": pages | MORE_OF_TENANT,
        "operator": OF_OPERATOR,
        "key": USAGE_API,
        "operator's key": USAGE_API_OF_OPERATOR,
    }
    del asked["viewer"]["upload"]  # which is not for viewers
    for who, names in asked.items():
        headers = keys[who] if who in keys else {"cookie": await _signed_in(platform, who)}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            visitor = Visitor(client, platform, headers)
            for name, address in names.items():
                if re.search(only, f"{who} {name}"):
                    one = await visitor.ask(who, name, address.format(main=main), requests)
                    show(one)
                    found.append(one)
    return found


async def _signed_in(platform: Platform, who: str) -> str:
    signed_in = await platform.sign_in(
        email=f"{who}@example.com",
        password=PASSWORD,
        address="127.0.0.1",
        user_agent="benchmark",
        old_token=None,
    )
    return f"{cookie_name(platform.settings)}={signed_in.token}"


def show(one: Asked) -> None:
    print(
        f"{one.who:15}{one.name:26}{one.p50_ms:6.0f} {one.p95_ms:7.0f} {one.cpu_ms:7.0f} "
        f"{one.statements:8} {one.first_bytes:13,}  {' '.join(one.misses)}",
        flush=True,
    )


async def run(url: str, folder: Path, wanted: argparse.Namespace) -> list[Asked]:
    platform = await prepare(
        url, folder, tenants=wanted.tenants, adapters=wanted.adapters, rows=wanted.rows
    )
    print(f"\n{platform.db.engine.dialect.name:40} p50 ms  p95 ms  CPU ms  statements  first bytes")
    found = await measure(platform, wanted.requests, wanted.only)
    await platform.close()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=Path("build/pages"))
    options.add_argument("--postgres", help="a server: postgresql://user@host/database")
    options.add_argument("--tenants", type=at_least_one, default=100)
    options.add_argument("--adapters", type=at_least_one, default=2000)
    options.add_argument("--rows", type=at_least_one, default=1_000_000)
    options.add_argument("--requests", type=at_least_one, default=30)
    options.add_argument("--only", default="", help="of the lines that this pattern finds")
    wanted = options.parse_args()
    configure_logging("error")
    engine_router.POLL_S = 86_400.0  # the router's own questions are no page's
    mark = mark_of(wanted.tenants, wanted.adapters, wanted.rows)
    folder: Path = wanted.folder
    urls = [(sqlite_url(folder, mark), folder / "sqlite")]
    if wanted.postgres:
        urls.append((postgres_url(wanted.postgres, mark), folder / "postgres"))
    missed = 0
    for url, data in urls:
        missed += sum(bool(one.misses) for one in asyncio.run(run(url, data, wanted)))
    if missed:
        print(f"\n{missed} addresses miss a bound")
        sys.exit(1)


if __name__ == "__main__":
    main()
