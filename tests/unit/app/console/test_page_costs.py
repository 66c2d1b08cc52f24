"""What a page costs a tenant with two thousand adapters: statements, and bytes over the wire."""

import gzip
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import event

from app.api_docs import WEB
from app.main import create_app
from app.platform import Platform
from tests.console_seed import ADAPTERS, pages, seed
from tests.factories import make_tenant, make_user, sign_in
from tests.fake_engine import BASE_DIGEST, FakeEngine
from tests.serving import install_engines

MOST_STATEMENTS = 8
MOST_BYTES = 100_000
ROUTER = ("FROM engines", "UPDATE engines", "INTO engines")
"""The router asks on its own, whatever page is looked at."""


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    install_engines(platform, {"ipc://fake": FakeEngine()})
    return create_app(platform=platform)


@pytest.mark.parametrize("adapters", [120, pytest.param(ADAPTERS, marks=pytest.mark.wide)])
async def test_every_page_keeps_to_eight_statements_and_100_kb(
    client: httpx.AsyncClient, platform: Platform, adapters: int
) -> None:
    await platform.engines.refresh()
    tenant = await make_tenant(platform)
    made = await seed(platform, tenant, BASE_DIGEST, adapters=adapters)
    client.cookies.update(await sign_in(platform, await make_user(platform, tenant)))
    asked: list[str] = []
    event.listen(
        platform.db.engine.sync_engine,
        "before_cursor_execute",
        lambda _c, _cursor, statement, *_: asked.append(statement),
    )
    for address in pages(made).values():
        asked.clear()
        page = await client.get(address)
        assert page.status_code == 200, (address, page.text)
        statements = [
            one
            for one in asked
            if not one.startswith("BEGIN") and not any(part in one for part in ROUTER)
        ]
        assert len(statements) <= MOST_STATEMENTS, (address, statements)
        assert len(page.content) + assets(page.text) < MOST_BYTES, address
    for column in ("name", "state", "rank", "size", "uploaded", "last_used"):
        sorted_by = await client.get(f"/console/adapters?sort=-{column}&q=o&state=ready")
        assert sorted_by.status_code == 200, column
    assert "support-bot" in (await client.get("/console/playground/models?model=BOT")).text
    page = await client.get("/console/adapters?sort=-last_used&page=2")
    assert f"51–100 of {adapters:,} adapters" in page.text  # noqa: RUF001


def assets(page: str) -> int:
    """Bytes of the scripts and sheets that a page loads, as they are sent."""
    found = re.findall(r'(?:src|href)="/static/([^"]+)"', page)
    return sum(len(gzip.compress(Path(WEB / "static" / name).read_bytes())) for name in found)
