"""A tenant's resident bytes: set by operators, shown to the tenant, carried to the engine."""

import httpx
import pytest

from app.inference.service import resident_bytes
from app.platform import Platform
from app.tenants.models import Tenant
from app.tenants.service import effective_limits
from engine.errors import AdapterRefused
from engine.types import ResidentBytes
from tests.factories import bearer, make_key, make_tenant
from tests.fake_engine import BASE_NAME, FakeEngine

CALL = {"model": BASE_NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def test_they_travel_with_every_call_and_limits_shows_them(
    api: httpx.AsyncClient, engine: FakeEngine, platform: Platform
) -> None:
    bound = await make_tenant(platform, max_resident_bytes=4000, reserved_resident_bytes=1000)
    free = await make_tenant(platform)
    for tenant, promise in ((bound, (4000, 1000)), (free, (None, 0))):
        headers = bearer(await make_key(platform, tenant))
        answer = await api.post("/v1/chat/completions", json=CALL, headers=headers)
        assert answer.status_code == 200
        assert engine.requests[-1].resident == ResidentBytes(*promise)
        limits = (await api.get("/v1/limits", headers=headers)).json()
        assert (limits["max_resident_bytes"], limits["reserved_resident_bytes"]) == promise


def test_the_platforms_limit_bounds_a_tenants_reservation(platform: Platform) -> None:
    settings = platform.settings.model_copy(update={"tenant_max_resident_bytes": 300})
    limits = effective_limits(Tenant(weight=1.0, reserved_resident_bytes=1000), settings)
    assert resident_bytes(limits) == ResidentBytes(300, 300)


async def test_an_adapter_that_can_never_fit_is_the_callers_to_change(
    api: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.refuse = AdapterRefused(
        "The adapter takes 9 bytes.", code="adapter_exceeds_resident_bytes"
    )
    answer = await api.post("/v1/chat/completions", json={**CALL, "model": "support"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "adapter_exceeds_resident_bytes",
        "model",
    )
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_resident_bytes": 0}, "max_resident_bytes"),
        ({"reserved_resident_bytes": -1}, "reserved_resident_bytes"),
        ({"max_resident_bytes": 10, "reserved_resident_bytes": 11}, "reserved_resident_bytes"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(
    client: httpx.AsyncClient, platform: Platform, given: dict[str, int], field: str
) -> None:
    operator = bearer(await make_key(platform, None))
    tenant = await make_tenant(platform, max_resident_bytes=20, reserved_resident_bytes=20)
    for answer in (
        await client.post("/admin/v1/tenants", json={"name": "new", **given}, headers=operator),
        await client.patch(f"/admin/v1/tenants/{tenant.id}", json=given, headers=operator),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


async def test_operators_see_and_change_them(client: httpx.AsyncClient, platform: Platform) -> None:
    operator = bearer(await make_key(platform, None))
    given = {"max_resident_bytes": 2**40, "reserved_resident_bytes": 0}
    body = {"name": "acme", **given}
    made = (await client.post("/admin/v1/tenants", json=body, headers=operator)).json()
    assert {name: made[name] for name in given} == given
    path = f"/admin/v1/tenants/{made['id']}"
    ended = await client.patch(path, json={"max_resident_bytes": None}, headers=operator)
    assert ended.json()["max_resident_bytes"] is None
