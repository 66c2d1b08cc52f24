"""Tables of tenants, keys and users: search, sort, pages, and only one's own rows."""

from datetime import timedelta

import pytest

from app.clock import FrozenClock
from app.errors import InvalidRequest
from app.keys import repository as key_rows
from app.keys.service import key_table
from app.platform import Platform
from app.tables import TableQuery
from app.tenants.service import tenant_table
from app.users.service import user_table
from tests.factories import make_key, make_tenant, make_user


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


async def key_names(platform: Platform, tenant_id: str | None, **wanted: object) -> list[str]:
    async with platform.db.reading() as session:
        table = await key_table(session, TableQuery(**wanted), tenant_id=tenant_id)  # type: ignore[arg-type]
    return [key.name for key, _ in table.rows]


class TestKeys:
    async def test_are_found_by_any_part_that_is_shown(self, platform: Platform) -> None:
        tenant = await make_tenant(platform, "acme")
        key = await make_key(platform, tenant, name="nightly build")
        await make_key(platform, await make_tenant(platform, "other"), name="else")
        for text in ("LY bu", key.secret.public_id, key.secret.text[-4:], "acm", key.row.id):
            assert await key_names(platform, None, search=text) == ["nightly build"], text

    @pytest.mark.parametrize("text", ["%", "n_ghtly", "nightly%", "' OR 1=1 --", "\\"])
    async def test_a_search_is_text_and_no_pattern(self, platform: Platform, text: str) -> None:
        await make_key(platform, await make_tenant(platform), name="nightly")
        assert await key_names(platform, None, search=text) == []

    async def test_of_a_tenant_never_show_another_tenants_whatever_is_searched(
        self, platform: Platform
    ) -> None:
        mine, foreign = await make_tenant(platform), await make_tenant(platform)
        await make_key(platform, mine, name="mine")
        key = await make_key(platform, foreign, name="theirs")
        for text in ("", "theirs", key.secret.public_id, foreign.name, key.row.id):
            assert "theirs" not in await key_names(platform, mine.id, search=text)

    async def test_are_sorted_by_a_column_and_the_unused_come_last_either_way(
        self, platform: Platform, clock: FrozenClock
    ) -> None:
        tenant = await make_tenant(platform)
        made = [await make_key(platform, tenant, name=name) for name in ("b", "a", "c")]
        async with platform.db.transaction() as session:
            used = {
                made[0].row.id: clock.now(),
                made[1].row.id: clock.now() - timedelta(minutes=5),
            }
            await key_rows.write_last_used(session, used)
        assert await key_names(platform, tenant.id, sort="name") == ["a", "b", "c"]
        assert await key_names(platform, tenant.id, sort="-name") == ["c", "b", "a"]
        assert await key_names(platform, tenant.id, sort="last_used_at") == ["a", "b", "c"]
        assert await key_names(platform, tenant.id, sort="-last_used_at") == ["b", "a", "c"]

    async def test_pages_neither_repeat_nor_lose_a_row_that_sorts_like_another(
        self, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        made = {(await make_key(platform, tenant, name="same")).row.id for _ in range(5)}
        seen: list[str] = []
        for offset in (0, 2, 4):
            async with platform.db.reading() as session:
                wanted = TableQuery(sort="name", limit=2, offset=offset)
                table = await key_table(session, wanted, tenant_id=tenant.id)
            assert table.total == 5
            seen += [key.id for key, _ in table.rows]
        assert sorted(seen) == sorted(made)

    async def test_an_unknown_column_is_refused_by_name(self, platform: Platform) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await key_names(platform, None, sort="secret_hash")
        assert caught.value.param == "sort"
        assert "last_used_at" in caught.value.message


async def test_tenants_come_with_their_last_use_over_all_keys(
    platform: Platform, clock: FrozenClock
) -> None:
    busy, idle = await make_tenant(platform, "busy"), await make_tenant(platform, "idle")
    older, newer = await make_key(platform, busy), await make_key(platform, busy)
    await make_key(platform, idle)
    async with platform.db.transaction() as session:
        used = {older.row.id: clock.now() - timedelta(hours=1), newer.row.id: clock.now()}
        await key_rows.write_last_used(session, used)
    async with platform.db.reading() as session:
        table = await tenant_table(session, TableQuery(sort="-last_used_at"))
    assert [(tenant.name, used) for tenant, used in table.rows] == [
        ("busy", clock.now()),
        ("idle", None),
    ]


async def test_users_of_a_tenant_are_its_own(platform: Platform) -> None:
    mine, foreign = await make_tenant(platform), await make_tenant(platform)
    await make_user(platform, mine, email="ada@example.com")
    await make_user(platform, foreign, email="eve@example.com")
    async with platform.db.reading() as session:
        own = await user_table(session, TableQuery(search="example"), tenant_id=mine.id)
        every = await user_table(session, TableQuery(sort="-email"), tenant_id=None)
    assert [user.email for user, _ in own.rows] == ["ada@example.com"]
    assert [user.email for user, _ in every.rows] == ["eve@example.com", "ada@example.com"]
