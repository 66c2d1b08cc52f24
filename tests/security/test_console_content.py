"""What every page of the console says and to whom: walked over the routes that the app has.

A page that is new is covered by being registered. What a tenant's people can write is written with
markup and with formulas in it, and looked for on every page and in every export.
"""

import csv
import io
import re
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import insert, update

from app.adapters.models import Adapter, AdapterVersion, AliasChange, Check, ValidationRun
from app.audit import service as audit
from app.auth import cookie_name
from app.clock import FrozenClock
from app.ids import new_id
from app.keys.models import ApiKey
from app.limit_requests.models import LimitRequest
from app.main import create_app
from app.platform import Platform
from app.tenants.models import Tenant
from app.usage.entries import hour_of
from app.usage.models import UsageDaily, UsageHourly, UsageRecord
from app.users.models import User
from app.webhooks.models import WebhookEndpoint
from tests.factories import PASSWORD, bearer, make_key, make_tenant, make_user, sign_in
from tests.fake_engine import FakeEngine
from tests.security.test_console_matrix import OPERATORS, fill, owned_values
from tests.security.test_every_route import OPEN_CONSOLE, routes_below
from tests.serving import add_version, install_engines, make_ready_adapter

EVIL = '"><img src=x onerror=alert(1)>'
FORMULAS = ("=1+1", "\tx")


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    install_engines(platform, {"ipc://fake": FakeEngine(text=EVIL)})
    return create_app(platform=platform)


@pytest.fixture
async def owner(client: httpx.AsyncClient, platform: Platform) -> Tenant:
    await platform.engines.refresh()
    return await make_tenant(platform, "owner")


async def write_everywhere(
    client: httpx.AsyncClient, platform: Platform, owner: Tenant, said: str
) -> dict[str, str]:
    """One of everything, each text of which somebody could have chosen is `said`; the paths'
    parameters."""
    first = await make_ready_adapter(platform, owner, "support")
    await add_version(platform, first, 2)
    await make_ready_adapter(platform, owner, "other", digest="d2" * 32)
    values = await owned_values(client, platform, owner)
    now, whose = platform.clock.now(), {"tenant_id": owner.id}
    run = new_id("run")
    finding = {"code": "x", "severity": "fail", "message": said, "field": said, "figures": {}}
    used = {
        **whose,
        "key_id": values["{key_id}"],
        "adapter_id": first.adapter_id,
        "model": said,
        "prompt_tokens": 1,
        "cached_tokens": 0,
        "completion_tokens": 1,
    }
    sums = used | {"requests": 1, "cancelled": 0, "failed": 0}
    async with platform.db.transaction() as session:
        for model, rows in {
            ValidationRun: {
                **whose,
                "id": run,
                "version_id": first.id,
                "state": "done",
                "attempts": 1,
                "message": said,
                "created_at": now,
            },
            Check: {
                "id": new_id("chk"),
                "run_id": run,
                "version_id": first.id,
                "position": 1,
                "check_group": "config",
                "status": "fail",
                "findings": [finding],
                "figures": {said: said},
                "duration_ms": 1,
                "created_at": now,
            },
            LimitRequest: {
                **whose,
                "id": new_id("lrq"),
                "limit_name": "max_adapters",
                "wanted": 3.0,
                "reason": said,
                "asked_by": "usr_1",
                "asked_label": said,
                "created_at": now,
                "state": "open",
                "answer": said,
            },
            UsageRecord: {
                **used,
                "request_id": "req_1",
                "version_id": first.id,
                "alias": "live",
                "endpoint": "completions",
                "streamed": True,
                "engine": "ipc://fake",
                "status": "failed",
                "error_code": said,
                "finish_reasons": [said],
                "reserved_tokens": 2,
                "overshoot_tokens": 0,
                "started_at": now,
                "started_hour": hour_of(now),
                "lease_until": now,
                "closed_at": now,
            },
            UsageHourly: {**sums, "hour": hour_of(now)},
            UsageDaily: {**sums, "day": hour_of(now) // 24},
        }.items():
            await session.execute(insert(model), [rows])
        for model, changed in {
            ApiKey: {"name": said},
            WebhookEndpoint: {"description": said, "url": f"https://example.com/{said}"},
            AdapterVersion: {"reason": said, "code": said[:60], "targets": [said]},
            AliasChange: {"actor_label": said},
        }.items():
            where = getattr(model, "tenant_id") == owner.id  # noqa: B009 - of several models
            await session.execute(update(model).where(where).values(**changed))
        await session.execute(update(Adapter).where(Adapter.name == "other").values(name=said))
        await audit.record(
            session,
            actor=said,
            action="key.create",
            target=said,
            tenant_id=owner.id,
            detail={said: said},
            at=now,
        )
    return values


def pages(app: FastAPI, values: dict[str, str], *, operator: bool) -> Iterator[str]:
    """The addresses of all pages that this kind of person has."""
    for method, path in routes_below(app, "/console"):
        own = path.startswith((*OPERATORS, "/console/audit"))
        if method == "GET" and path not in OPEN_CONSOLE and own is operator:
            yield fill(path, values)


async def test_what_people_write_is_text_on_every_page_of_a_tenant(
    client: httpx.AsyncClient, app: FastAPI, platform: Platform, owner: Tenant
) -> None:
    values = await write_everywhere(client, platform, owner, EVIL)
    admin = await make_user(platform, owner, email="evil@example.com")
    client.cookies.update(await sign_in(platform, admin))
    async with platform.db.transaction() as session:
        await session.execute(update(User).where(User.id == admin.id).values(email=EVIL))
        await session.execute(update(Tenant).where(Tenant.id == owner.id).values(name=EVIL))
    shown = 0
    addresses = [*pages(app, values, operator=False), "/console/audit"]
    assert len(addresses) >= 18
    for address in (*addresses, "/console/usage?by=model", "/console/adapters?q=%3Cimg"):
        answer = await client.get(address)
        assert answer.status_code in (200, 303), address
        if "csv" not in address:
            assert "<img" not in answer.text, address
            shown += "&lt;img" in answer.text or "\\u003cimg" in answer.text
    assert shown >= 15
    said = await client.post("/console/playground", data={"model": "support", "prompt": EVIL})
    assert said.status_code == 200
    assert "<img" not in said.text
    assert said.text.count("&lt;img src=x") >= 2  # the prompt, and the model's answer


async def test_what_people_write_is_text_on_every_page_of_an_operator(
    client: httpx.AsyncClient, app: FastAPI, platform: Platform, owner: Tenant
) -> None:
    values = await write_everywhere(client, platform, owner, EVIL)
    values |= {"{tenant_id}": owner.id, "{engine_id}": "x", "{version_id}": "x"}
    client.cookies.update(await sign_in(platform, await make_user(platform)))
    addresses = list(pages(app, values, operator=True))
    assert len(addresses) >= 9
    for address in addresses:
        answer = await client.get(address)
        assert answer.status_code == 200, address
        if "csv" not in address:
            assert "<img" not in answer.text, address
    assert "&lt;img" in (await client.get("/console/requests")).text


@pytest.mark.parametrize("formula", FORMULAS)
async def test_no_cell_of_any_export_is_a_formula(
    client: httpx.AsyncClient, app: FastAPI, platform: Platform, owner: Tenant, formula: str
) -> None:
    await write_everywhere(client, platform, owner, formula)
    key = bearer(await make_key(platform, owner))
    operator = bearer(await make_key(platform, None))
    client.cookies.update(await sign_in(platform, await make_user(platform, owner)))
    exports = [path for _, path in routes_below(app, "/") if "export" in path or "csv" in path]
    assert len(exports) >= 4
    neutralized = 0
    for path in exports:
        headers = operator if path.startswith("/admin") else key if path.startswith("/v1") else {}
        for query in ("", "?of=requests", "?by=model", "?group_by=model", "?action=key.create"):
            answer = await client.get(f"{path}{query}", headers=headers)
            if answer.status_code == 400:  # not a parameter of this one
                continue
            assert answer.status_code == 200, path
            for row in csv.reader(io.StringIO(answer.text, newline="")):
                for cell in row:
                    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")), path
                    neutralized += cell.startswith("'")
    assert neutralized >= 4


async def test_a_foreign_tenant_reads_nothing_of_the_owner_on_any_page(
    client: httpx.AsyncClient, app: FastAPI, platform: Platform, owner: Tenant
) -> None:
    """Also where no id is asked for: lists, sums, suggestions and exports."""
    secret = "quokka-7f3e1d"
    values = await write_everywhere(client, platform, owner, secret)
    stranger = await make_user(platform, await make_tenant(platform))
    client.cookies.update(await sign_in(platform, stranger))
    addresses = [*pages(app, values, operator=False), "/console/audit", "/console/audit/export.csv"]
    for address in (*addresses, "/console/playground/models?model=quokka", "/console/usage?by=key"):
        text = (await client.get(address)).text
        assert secret not in text, address
        assert owner.id not in text, address


async def test_a_viewer_sees_every_page_and_no_form_that_changes_anything(
    client: httpx.AsyncClient, app: FastAPI, platform: Platform, owner: Tenant
) -> None:
    values = await write_everywhere(client, platform, owner, "said")
    viewer = await make_user(platform, owner, role="tenant_viewer")
    client.cookies.update(await sign_in(platform, viewer))
    own = ("/console/sign-out", "/console/password", "/console/playground")
    for address in pages(app, values, operator=False):
        answer = await client.get(address)
        refused = "upload" in address
        assert answer.status_code in ((403,) if refused else (200, 303)), address
        forms = re.findall(r'<form[^>]*method="post"[^>]*action="([^"]+)"', answer.text)
        assert [form for form in forms if not form.startswith(own)] == [], address


class TestSessions:
    async def test_a_cookie_that_was_planted_is_no_session_and_becomes_none(
        self, client: httpx.AsyncClient, app: FastAPI, platform: Platform
    ) -> None:
        user, name = await make_user(platform), cookie_name(platform.settings)
        planted = "p" * 43
        answer = await client.post(
            "/console/sign-in",
            data={"email": user.email, "password": PASSWORD, "next": "/console"},
            headers={"cookie": f"{name}={planted}"},
        )
        assert answer.status_code == 303
        assert answer.cookies[name] not in ("", planted)
        client.cookies.clear()
        for method, path in routes_below(app, "/console"):
            if path not in OPEN_CONSOLE:
                filled = re.sub(r"\{[^}]*\}", "x", path)
                told = await client.request(method, filled, headers={"cookie": f"{name}={planted}"})
                assert told.status_code == 303, (method, path)
                assert told.headers["location"].startswith("/console/sign-in"), (method, path)

    async def test_an_expired_session_opens_no_page_and_changes_nothing(
        self, client: httpx.AsyncClient, app: FastAPI, platform: Platform, clock: FrozenClock
    ) -> None:
        client.cookies.update(await sign_in(platform, await make_user(platform)))
        clock.advance(seconds=platform.settings.session_absolute_s + 1)
        for method, path in routes_below(app, "/console"):
            if path not in OPEN_CONSOLE:
                told = await client.request(method, re.sub(r"\{[^}]*\}", "x", path))
                assert told.status_code == 303, (method, path)
                assert told.headers["location"].startswith("/console/sign-in"), (method, path)
