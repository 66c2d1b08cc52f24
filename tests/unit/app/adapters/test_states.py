"""The state machine of versions, and its one door."""

import pytest

from app.adapters import repository, states
from app.adapters.models import Adapter, AdapterVersion
from app.clock import FrozenClock
from app.platform import Platform
from tests.factories import make_tenant

STATES = sorted(states.NEXT)


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


def test_every_state_leads_to_erased_and_nothing_leads_back() -> None:
    assert states.NEXT[states.ERASED] == frozenset()
    assert states.sources(states.ERASED) == set(STATES) - {states.ERASED}


def test_a_verdict_is_only_given_while_validating() -> None:
    assert states.sources(states.REJECTED) == {states.VALIDATING}
    assert states.sources(states.READY) == {states.VALIDATING, states.ARCHIVED}


async def test_a_version_moves_where_the_machine_allows_and_nowhere_else(
    platform: Platform, clock: FrozenClock
) -> None:
    tenant = await make_tenant(platform)
    now = clock.now()
    async with platform.db.transaction() as session:
        session.add(
            Adapter(id="adp_1", tenant_id=tenant.id, name="a", created_by="t", created_at=now)
        )
        await session.flush()
        session.add(
            AdapterVersion(
                id="ver_1",
                adapter_id="adp_1",
                tenant_id=tenant.id,
                number=1,
                digest="d" * 64,
                state="uploaded",
                config_bytes=1,
                weights_bytes=1,
                created_by="t",
                created_at=now,
                updated_at=now,
            )
        )
    for before in STATES:
        for after in STATES:
            async with platform.db.transaction() as session:
                version = await session.get_one(AdapterVersion, "ver_1")
                version.state = before
                await session.flush()
                moved = await repository.move(session, "ver_1", after, now=now)
                await session.refresh(version)
                assert moved == (after in states.NEXT[before])
                assert version.state == (after if moved else before)
