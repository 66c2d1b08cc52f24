"""Every route that the app has, asked with every kind of credential that must not reach it.

New routes are covered by being registered; one that is open on purpose is named here.
"""

import re
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from app.platform import Platform
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in

OPEN_CONSOLE = {
    "/console/sign-in",
    "/console/sign-out",
    "/console/invitation/{token}",
    "/console/password-reset/{token}",
}
"""Pages for people who are not signed in."""


def flatten(routes: list[BaseRoute]) -> Iterator[APIRoute]:
    """All routes, also those of included routers."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        else:
            original = getattr(route, "original_router", None)
            yield from flatten(list(getattr(original or route, "routes", []) or []))


def routes_below(app: FastAPI, prefix: str) -> list[tuple[str, str]]:
    """(method, path with its parameters filled in) of every route below the prefix."""
    found = [
        (method, route.path)
        for route in flatten(app.routes)
        for method in sorted(route.methods)
        if route.path.startswith(prefix)
    ]
    assert found, f"no route below {prefix}"
    return found


def filled(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "x", path)


async def answers(
    client: httpx.AsyncClient, routes: list[tuple[str, str]], headers: dict[str, str]
) -> dict[str, int]:
    """The status of each route. Bodies are empty: whoever is refused is refused before that."""
    result = {}
    for method, path in routes:
        answer = await client.request(method, filled(path), headers=headers)
        result[f"{method} {path}"] = answer.status_code
        if "/console" not in path:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return result


class TestTenantApi:
    async def test_needs_a_key_on_every_route(
        self, client: httpx.AsyncClient, app: FastAPI
    ) -> None:
        routes = routes_below(app, "/v1/")
        for headers in ({}, {"authorization": "Bearer lmx_nonsense"}):
            assert set((await answers(client, routes, headers)).values()) == {401}

    async def test_takes_no_operators_key_for_it_carries_no_limits(
        self, client: httpx.AsyncClient, app: FastAPI, platform: Platform
    ) -> None:
        operator = bearer(await make_key(platform, None))
        found = await answers(client, routes_below(app, "/v1/"), operator)
        assert set(found.values()) == {403}, found

    async def test_takes_no_console_session(
        self, client: httpx.AsyncClient, app: FastAPI, platform: Platform
    ) -> None:
        client.cookies.update(await sign_in(platform, await make_user(platform)))
        found = await answers(client, routes_below(app, "/v1/"), {})
        assert set(found.values()) == {401}, found

    async def test_takes_no_key_of_a_suspended_tenant(
        self, client: httpx.AsyncClient, app: FastAPI, platform: Platform
    ) -> None:
        key = bearer(await make_key(platform, await make_tenant(platform, suspended=True)))
        found = await answers(client, routes_below(app, "/v1/"), key)
        assert set(found.values()) == {403}, found


class TestOperatorApi:
    @pytest.mark.parametrize("who", ["nobody", "tenant key", "tenant session"])
    async def test_is_for_operators_on_every_route(
        self, client: httpx.AsyncClient, app: FastAPI, platform: Platform, who: str
    ) -> None:
        tenant = await make_tenant(platform)
        headers: dict[str, str] = {}
        if who == "tenant key":
            headers = bearer(await make_key(platform, tenant))
        elif who == "tenant session":
            client.cookies.update(await sign_in(platform, await make_user(platform, tenant)))
        found = await answers(client, routes_below(app, "/admin/v1/"), headers)
        assert set(found.values()) == {401 if who == "nobody" else 403}, found

    async def test_refuses_another_sites_form_on_every_unsafe_route(
        self, client: httpx.AsyncClient, app: FastAPI, platform: Platform
    ) -> None:
        client.cookies.update(await sign_in(platform, await make_user(platform)))
        unsafe = [
            (method, path)
            for method, path in routes_below(app, "/admin/v1/") + routes_below(app, "/console")
            if method not in ("GET", "HEAD")
        ]
        for method, path in unsafe:
            answer = await client.request(
                method, filled(path), headers={"origin": "https://evil.example"}
            )
            assert answer.status_code == 403, (method, path)
            assert "LORAMUX_PUBLIC_URL" in answer.text


class TestConsole:
    async def test_leads_strangers_to_its_sign_in_on_every_page(
        self, client: httpx.AsyncClient, app: FastAPI
    ) -> None:
        routes = [r for r in routes_below(app, "/console") if r[1] not in OPEN_CONSOLE]
        for method, path in routes:
            answer = await client.request(method, filled(path))
            assert answer.status_code == 303, (method, path)
            assert answer.headers["location"].startswith("/console/sign-in"), (method, path)

    async def test_asks_for_a_new_password_on_every_page_while_it_is_a_one_time_one(
        self, client: httpx.AsyncClient, app: FastAPI, platform: Platform
    ) -> None:
        user = await make_user(platform, must_change=True)
        client.cookies.update(await sign_in(platform, user))
        closed = OPEN_CONSOLE | {"/console/password"}
        routes = [r for r in routes_below(app, "/console") if r[1] not in closed]
        for method, path in routes:
            answer = await client.request(method, filled(path))
            assert answer.headers.get("location") == "/console/password", (method, path)


def test_every_route_is_in_a_part_that_is_looked_at_here(app: FastAPI) -> None:
    """A route elsewhere would be covered by none of the above."""
    known = ("/v1/", "/admin/v1/", "/console", "/docs", "/healthz", "/readyz", "/metrics")
    strays = [r.path for r in flatten(app.routes) if not r.path.startswith(known)]
    assert [path for path in strays if path not in ("/", "/openapi.json")] == []
