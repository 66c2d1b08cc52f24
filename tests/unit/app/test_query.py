"""A query parameter that a route does not have is refused by its name, never ignored."""

import re

import httpx
import pytest

from app import openapi
from app.main import create_app
from app.platform import Platform
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in

TENANTS = [
    "/v1/keys?tenant_id=ten_1", "/v1/adapters?page=2", "/v1/models?limit=3", "/v1/usage?bukket=day",
    "/v1/users?limit=1&offset=2", "/v1/audit?who=me", "/v1/webhooks?page=1", "/v1/limits?x",
]  # fmt: skip
OPERATORS = ["tenants?nam=a", "keys?page=2", "users?q=a", "audit?x=1", "usage?tenant=a"]


@pytest.mark.parametrize("path", TENANTS)
async def test_on_the_tenants_api(client: httpx.AsyncClient, platform: Platform, path: str) -> None:
    key = await make_key(platform, await make_tenant(platform))
    _check(await client.get(path, headers=bearer(key)), path)


@pytest.mark.parametrize("path", OPERATORS)
async def test_on_the_operators_api(
    client: httpx.AsyncClient, platform: Platform, path: str
) -> None:
    key = await make_key(platform, None)
    _check(await client.get(f"/admin/v1/{path}", headers=bearer(key)), path)


def _check(answer: httpx.Response, path: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unknown_parameter")
    name = path.partition("?")[2].rpartition("&")[2].partition("=")[0]
    assert error["param"] == name
    assert f"`{name}`" in error["message"]


async def test_those_that_there_are_are_named(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    key = await make_key(platform, await make_tenant(platform))
    answer = await client.get("/v1/keys?page=2", headers=bearer(key))
    assert "after, limit" in answer.json()["error"]["message"]
    assert (await client.get("/v1/keys?limit=2", headers=bearer(key))).status_code == 200


async def test_a_call_is_as_strict(client: httpx.AsyncClient, platform: Platform) -> None:
    key = await make_key(platform, await make_tenant(platform))
    answer = await client.post("/v1/completions?stream=true", headers=bearer(key), json={})
    assert answer.json()["error"]["param"] == "stream"


async def test_the_console_ignores_them(client: httpx.AsyncClient, platform: Platform) -> None:
    page = await client.get("/console/sign-in?utm_source=mail")
    assert page.status_code == 200
    user = await make_user(platform, await make_tenant(platform))
    client.cookies.update(await sign_in(platform, user))
    assert (await client.get("/console/keys?utm_source=mail")).status_code == 200


async def test_every_route_of_both_apis_looks(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    """One that is mounted beside the others would take anything."""
    tenant_key = await make_key(platform, await make_tenant(platform))
    operator_key = await make_key(platform, None)
    document = openapi.document(create_app(platform=platform))
    for path, methods in document["paths"].items():
        if not path.startswith(openapi.API_PREFIXES):
            continue
        key = operator_key if path.startswith("/admin/") else tenant_key
        for method in methods:
            answer = await client.request(
                method, re.sub(r"\{\w+\}", "1", path) + "?nothing=1", headers=bearer(key), json={}
            )
            assert answer.json()["error"]["code"] == "unknown_parameter", f"{method} {path}"
