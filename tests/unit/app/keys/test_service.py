"""Keys as a tenant's admin manages them: its own, and never another tenant's."""

from datetime import timedelta

import pytest

from app.clock import FrozenClock
from app.errors import Conflict, InvalidRequest, NotFound
from app.keys import service
from app.platform import Platform
from tests.factories import make_key, make_tenant


class TestAForeignKey:
    """It cannot be told from one that does not exist, by any function."""

    @pytest.mark.parametrize("known", [True, False])
    async def test_is_not_found(self, platform: Platform, clock: FrozenClock, known: bool) -> None:
        mine, foreign = await make_tenant(platform), await make_tenant(platform)
        key_id = (await make_key(platform, foreign)).row.id if known else "key_none"
        async with platform.db.transaction() as session:
            for attempt in (
                service.find_key(session, key_id, tenant_id=mine.id),
                service.revoke_key(
                    session, key_id, now=clock.now(), actor="tests", tenant_id=mine.id
                ),
                service.rotate_key(
                    session,
                    key_id,
                    secrets=platform.secrets,
                    now=clock.now(),
                    actor="tests",
                    tenant_id=mine.id,
                    overlap=timedelta(0),
                ),
            ):
                with pytest.raises(NotFound) as caught:
                    await attempt
                assert caught.value.message == (
                    f"There is no key {key_id!r}; list the keys to see their ids."
                )

    async def test_is_not_listed(self, platform: Platform) -> None:
        mine, foreign = await make_tenant(platform), await make_tenant(platform)
        key = await make_key(platform, mine)
        await make_key(platform, foreign)
        await make_key(platform, None)
        async with platform.db.reading() as session:
            listed = await service.list_keys(session, tenant_id=mine.id)
        assert [row.id for row in listed] == [key.row.id]


class TestStates:
    async def test_follow_the_clock(self, platform: Platform, clock: FrozenClock) -> None:
        row = (await make_key(platform, await make_tenant(platform))).row
        second = timedelta(seconds=1)
        row.expires_at = clock.now() + 2 * second
        assert service.state(row, clock.now()) == "active"
        assert service.state(row, clock.now() + 2 * second) == "expired"
        row.revoke_at = clock.now() + second
        assert service.state(row, clock.now()) == "active"
        assert service.state(row, clock.now() + second) == "revoked"
        row.revoked_at = clock.now()
        assert service.state(row, clock.now()) == "revoked"

    async def test_only_an_active_key_is_rotated(
        self, platform: Platform, clock: FrozenClock
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        async with platform.db.transaction() as session:
            await service.revoke_key(
                session, key.row.id, now=clock.now(), actor="tests", tenant_id=None
            )
        with pytest.raises(Conflict) as caught:
            async with platform.db.transaction() as session:
                await service.rotate_key(
                    session,
                    key.row.id,
                    secrets=platform.secrets,
                    now=clock.now(),
                    actor="tests",
                    tenant_id=None,
                    overlap=timedelta(hours=1),
                )
        assert caught.value.code == "key_not_active"

    async def test_a_key_that_would_expire_at_once_is_not_made(
        self, platform: Platform, clock: FrozenClock
    ) -> None:
        tenant = await make_tenant(platform)
        with pytest.raises(InvalidRequest):
            async with platform.db.transaction() as session:
                await service.create_key(
                    session,
                    secrets=platform.secrets,
                    now=clock.now(),
                    actor="tests",
                    tenant=tenant,
                    expires_at=clock.now(),
                )


async def test_no_row_holds_a_keys_text(platform: Platform) -> None:
    key = await make_key(platform, await make_tenant(platform), name="ci")
    values = {str(value) for value in vars(key.row).values()}
    secret = key.secret.text.rpartition("_")[2]
    assert not any(secret in value for value in values)
