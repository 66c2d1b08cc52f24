"""Pages of the console: whose figures and events they show, and cells that are no formulas."""

import csv
import io
import re
from datetime import timedelta
from itertools import product

import httpx
import pytest

from app.audit import service
from app.console.usage import MOST_LINES
from app.platform import Platform
from app.tenants.models import Tenant
from app.usage import ledger_repository
from app.usage.entries import FinalEntry, hour_of, month_of
from app.usage.ledger_repository import Closed
from app.usage.report import MAX_LINES
from app.users.service import invite
from tests.factories import PASSWORD, make_tenant, make_user, sign_in


async def happened(platform: Platform, tenant_id: str, action: str, target: str) -> None:
    await service.record_alone(
        platform.db, actor="test", action=action, target=target, tenant_id=tenant_id
    )


async def enter(
    platform: Platform, client: httpx.AsyncClient, tenant: Tenant | None = None, **user: str
) -> None:
    """A session of a new user: an operator without a tenant."""
    client.cookies.clear()
    client.cookies.update(await sign_in(platform, await make_user(platform, tenant, **user)))


async def test_a_tenant_reads_its_own_events_and_an_operator_everybodys(
    platform: Platform, client: httpx.AsyncClient
) -> None:
    ours, theirs = await make_tenant(platform), await make_tenant(platform)
    await happened(platform, ours.id, "key.create", "our-thing")
    await happened(platform, theirs.id, "key.create", "their-thing")
    await enter(platform, client, ours, role="tenant_viewer")
    page = await client.get("/console/audit")
    assert "our-thing" in page.text
    assert "their-thing" not in page.text
    exported = await client.get("/console/audit/export.csv")
    assert "their-thing" not in exported.text
    await enter(platform, client)
    assert "their-thing" in (await client.get("/console/audit")).text


async def test_a_filter_that_fits_nothing_says_so(
    platform: Platform, client: httpx.AsyncClient
) -> None:
    await enter(platform, client)
    page = await client.get("/console/audit?action=no.such")
    assert "No such event" in page.text


@pytest.mark.parametrize("target", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx"])
async def test_no_cell_of_the_export_is_a_formula(
    platform: Platform, client: httpx.AsyncClient, target: str
) -> None:
    tenant = await make_tenant(platform)
    await happened(platform, tenant.id, "key.create", target)
    await enter(platform, client, tenant, role="tenant_admin")
    exported = await client.get("/console/audit/export.csv?action=key.create")
    (row,) = list(csv.DictReader(io.StringIO(exported.text)))
    assert row["target"] == "'" + target


async def test_nobody_reads_it_signed_out(client: httpx.AsyncClient) -> None:
    for path in ("audit", "audit/export.csv", "usage/export.csv", "overview", "limits"):
        answer = await client.get(f"/console/{path}")
        assert answer.status_code == 303, path
        assert answer.headers["location"].startswith("/console/sign-in"), path


async def test_every_tenant_page_shows_itself_to_a_viewer(
    platform: Platform, client: httpx.AsyncClient
) -> None:
    await enter(platform, client, await make_tenant(platform), role="tenant_viewer")
    for path in (
        "overview",
        "overview?span=1h",
        "overview?span=30d",
        "limits",
        "usage?by=key",
        "usage?span=12m",
        "audit",
    ):
        answer = await client.get(f"/console/{path}")
        assert answer.status_code == 200, path
    assert (await client.get("/console/overview?span=1y")).status_code == 400


async def test_the_usage_page_counts_every_day_of_every_adapter(
    platform: Platform, client: httpx.AsyncClient
) -> None:
    """More lines a day and adapter than one report has: nothing is left out of the sums."""
    tenant, now = await make_tenant(platform), platform.clock.now()
    closed = []
    for adapter, day in product(range(40), range(29)):
        at = now - timedelta(days=day)
        row = Closed(tenant.id, None, f"adp_{adapter}", "bot@v1", 0, at, hour_of(at))
        entry = FinalEntry("req", "ipc://a", "completed", 5, 0, 2, 0, ["stop"], at)
        closed.append((row, entry))
    assert len(closed) > MAX_LINES
    await platform.db.write_in_thread(
        lambda connection: ledger_repository.add_closed(connection, closed)
    )
    await enter(platform, client, tenant, role="tenant_viewer")
    page = (await client.get("/console/usage?span=30d&by=adapter")).text
    assert page.count(f">{29 * 5}<") == 40  # prompt tokens of each adapter
    assert f">{40 * 29 * 5:,}<" in page
    assert f">{40 * 29 * 2:,}<" in page


async def test_the_usage_page_shows_the_most_tokens_and_the_rest_in_one_line(
    platform: Platform, client: httpx.AsyncClient
) -> None:
    tenant, now = await make_tenant(platform), platform.clock.now()
    closed = []
    for number in range(MOST_LINES + 10):
        row = Closed(tenant.id, None, None, f"bot-{number:02}@v1", 0, now, hour_of(now))
        entry = FinalEntry("req", "ipc://a", "completed", 1000 + number, 0, 2, 0, ["stop"], now)
        closed.append((row, entry))
    await platform.db.write_in_thread(
        lambda connection: ledger_repository.add_closed(connection, closed)
    )
    await enter(platform, client, tenant, role="tenant_viewer")
    page = (await client.get("/console/usage?by=model")).text
    shown = re.findall(r"bot-(\d\d)@v1", page)
    assert shown == [f"{number:02}" for number in range(MOST_LINES + 9, 9, -1)]
    assert f">{sum(1000 + n for n in range(10)):,}<" in page  # all others
    assert f">{sum(1000 + n for n in range(MOST_LINES + 10)):,}<" in page


@pytest.mark.parametrize("guessed_at", [False, True])
async def test_whoever_chose_a_password_by_a_link_is_signed_in_with_it(
    platform: Platform, client: httpx.AsyncClient, guessed_at: bool
) -> None:
    """While others guess at the account, the password is kept, and signing in waits."""
    tenant = await make_tenant(platform)
    async with platform.db.transaction() as session:
        invitation = await invite(
            session,
            email="ann@example.com",
            role="tenant_admin",
            tenant=tenant,
            secrets=platform.secrets,
            passwords=platform.passwords,
            settings=platform.settings,
            now=platform.clock.now(),
            actor="tests",
        )
    path = f"/console/invitation/{invitation.token}"
    guess = {"email": "ann@example.com", "password": "a guess"}
    for _ in range(30 * guessed_at):
        if (await client.post("/console/sign-in", data=guess)).status_code == 429:
            break
    assert "Save it and sign in" in (await client.get(path)).text
    answer = await client.post(path, data={"password": PASSWORD})
    assert answer.status_code == 303
    if guessed_at:
        assert answer.headers["location"] == "/console/sign-in?saved=1"
        return
    assert answer.headers["location"] == "/console"
    assert (await client.get("/console/adapters")).status_code == 200
    assert (await client.post(path, data={"password": PASSWORD})).status_code == 404
    await says_what_to_do(client, path)


async def says_what_to_do(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 404
    assert "This link does not work" in answer.text
    assert 'href="/console/sign-in"' in answer.text
    assert 'type="password"' not in answer.text


async def test_an_unknown_link_says_so_before_a_password_is_typed(
    client: httpx.AsyncClient,
) -> None:
    for kind in ("invitation", "password-reset"):
        await says_what_to_do(client, f"/console/{kind}/no-such-token")


@pytest.mark.parametrize(
    ("unlimited", "told"),
    [
        (False, "calls whose process ended"),
        (True, "running requests, or by calls whose process ended"),
    ],
)
async def test_tokens_held_while_nothing_runs_are_those_of_a_process_that_ended(
    platform: Platform, client: httpx.AsyncClient, unlimited: bool, told: str
) -> None:
    if unlimited:  # then nothing counts what runs
        platform.settings = platform.settings.model_copy(update={"tenant_max_concurrent": None})
    tenant = await make_tenant(platform)
    month = month_of(platform.clock.now())
    await platform.db.write_in_thread(
        lambda connection: ledger_repository.reserve_month(
            connection, tenant.id, month, [744], None
        )
    )
    await enter(platform, client, tenant, role="tenant_viewer")
    page = (await client.get("/console/limits")).text
    assert f"744 more are held by {told}" in page
    assert "after about 15 min" in page
