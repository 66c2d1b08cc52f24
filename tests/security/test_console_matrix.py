"""Every route of the console, asked by a viewer and by another tenant's admin."""

import re

import httpx
import pytest
from fastapi import FastAPI

from app.main import create_app
from app.platform import Platform
from app.tenants.models import Tenant
from app.users.service import UserRole
from tests.console_seed import add_webhook
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in
from tests.fake_engine import FakeEngine
from tests.security.test_every_route import OPEN_CONSOLE, routes_below
from tests.serving import install_engines, make_ready_adapter

OWN_BUSINESS = OPEN_CONSOLE | {"/console/password"}
"""Everybody's own password and session."""
OPERATORS = tuple(
    f"/console/{page}" for page in ("tenants", "requests", "engines", "jobs", "system")
)
"""Pages that for a tenant's people do not exist."""


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    install_engines(platform, {"ipc://fake": FakeEngine()})
    return create_app(platform=platform)


@pytest.fixture
async def owner(client: httpx.AsyncClient, platform: Platform) -> Tenant:
    await platform.engines.refresh()
    tenant = await make_tenant(platform, "owner")
    await make_ready_adapter(platform, tenant, "support")
    return tenant


async def owned_values(
    client: httpx.AsyncClient, platform: Platform, owner: Tenant
) -> dict[str, str]:
    """Something of the owner's for each parameter of the console's paths."""
    key = await make_key(platform, owner)
    body = {"name": "support", "config_bytes": 10, "weights_bytes": 10}
    upload = await client.post("/v1/uploads", json=body, headers=bearer(key))
    asked = await client.post(
        "/v1/limit-requests",
        json={"limit": "max_adapters", "wanted": 3000},
        headers=bearer(await make_key(platform, owner, access="manage")),
    )
    webhook_id, delivery_id = await add_webhook(platform, owner)
    return {
        "{name}": "support",
        "{alias}": "live",
        "{webhook_id}": webhook_id,
        "{delivery_id}": delivery_id,
        "{number}": "1",
        "{key_id}": key.row.id,
        "{upload_id}": upload.json()["id"],
        "{request_id}": asked.json()["id"],
    }


def fill(path: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        path = path.replace(name, value)
    assert "{" not in path, f"{path}: say in this file what a tenant has for that parameter"
    return path


async def test_a_viewer_changes_nothing_on_any_page(
    client: httpx.AsyncClient, app: FastAPI, platform: Platform, owner: Tenant
) -> None:
    values = await owned_values(client, platform, owner)
    viewer = await make_user(platform, owner, role="tenant_viewer")
    client.cookies.update(await sign_in(platform, viewer))
    unsafe = [
        (method, path)
        for method, path in routes_below(app, "/console")
        if method not in ("GET", "HEAD")
        and path not in OWN_BUSINESS
        and not path.startswith(OPERATORS)
    ]
    assert len(unsafe) >= 8
    for method, path in unsafe:
        answer = await client.request(method, fill(path, values))
        assert answer.status_code == 403, (method, path, answer.status_code)
    models = await client.get("/v1/models", headers=bearer(await make_key(platform, owner)))
    assert "support" in {model["id"] for model in models.json()["data"]}


async def test_another_tenants_admin_cannot_tell_its_ids_from_unknown_ones_on_any_page(
    client: httpx.AsyncClient, app: FastAPI, platform: Platform, owner: Tenant
) -> None:
    owned = await owned_values(client, platform, owner)
    unknown = {
        name: value if value == "1" else value[:4] + "q" * (len(value) - 4)
        for name, value in owned.items()
    }
    admin = await make_user(platform, await make_tenant(platform), role="tenant_admin")
    client.cookies.update(await sign_in(platform, admin))
    with_ids = [
        (method, path)
        for method, path in routes_below(app, "/console")
        if "{" in path and path not in OPEN_CONSOLE and not path.startswith(OPERATORS)
    ]
    assert len(with_ids) >= 8
    for method, path in with_ids:
        told = []
        for values in (owned, unknown):
            form = {"confirm": values["{name}"]} if method == "POST" else None
            answer = await client.request(method, fill(path, values), data=form)
            text = answer.text
            for value in values.values():
                text = text.replace(value, "?") if value != "1" else text
            told.append((answer.status_code, text))
        assert told[0] == told[1], (method, path)
        assert told[0][0] == 404, (method, path, told[0][0])


@pytest.mark.parametrize("role", ["tenant_admin", "tenant_viewer"])
async def test_for_a_tenants_people_no_operators_page_exists(
    client: httpx.AsyncClient, app: FastAPI, platform: Platform, owner: Tenant, role: UserRole
) -> None:
    client.cookies.update(await sign_in(platform, await make_user(platform, owner, role=role)))
    unknown = await client.get("/console/no-such-page")
    routes = [route for page in OPERATORS for route in routes_below(app, page)]
    assert len(routes) >= 15
    for method, path in routes:
        filled = re.sub(r"\{\w+\}", owner.id, path)
        answer = await client.request(method, filled)
        expected = unknown.text.replace("GET /console/no-such-page", f"{method} {filled[:80]}")
        assert (answer.status_code, answer.text) == (404, expected), (method, path)
