"""The life of a root secret's version, from rotation to removal."""

import os
from datetime import datetime

import httpx
import pytest

from app.auth import authenticate_key
from app.clock import FrozenClock
from app.crypto import FileSource
from app.errors import Conflict
from app.platform import Platform
from app.rotation import drop_drained, versions_in_use
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


def changed_at(source: FileSource, at: datetime) -> None:
    """The file's own time stamp is the real clock's; the test's is frozen."""
    os.utime(source.path, (at.timestamp(), at.timestamp()))


async def test_an_old_version_goes_when_every_key_was_used_and_every_session_ended(
    platform: Platform, clock: FrozenClock
) -> None:
    source = FileSource(platform.settings.root_secret_file)
    key = await make_key(platform, await make_tenant(platform))
    await sign_in(platform, await make_user(platform))
    source.rotate()
    changed_at(source, clock.now())
    platform.secrets.reload()

    async def drop() -> None:
        async with platform.db.transaction() as session:
            await drop_drained(session, source, 1, now=clock.now(), actor="tests")

    with pytest.raises(Conflict) as caught:
        await drop()
    assert caught.value.code == "just_rotated"
    clock.advance(seconds=120)
    async with platform.db.reading() as session:
        assert await versions_in_use(session, clock.now()) == {1: 2}
    with pytest.raises(Conflict):
        await drop()
    await authenticate_key(platform, key.secret.text)
    await platform.last_used.flush()
    with pytest.raises(Conflict):
        await drop()
    clock.advance(seconds=platform.settings.session_absolute_s)
    await drop()
    platform.secrets.reload()
    assert platform.secrets.versions == [2]
    platform.forget_keys()
    assert (await authenticate_key(platform, key.secret.text)).key_id == key.row.id


async def test_an_answer_that_is_kept_for_a_repeated_request_counts_too(
    platform: Platform, clock: FrozenClock, client: httpx.AsyncClient
) -> None:
    operator = bearer(await make_key(platform, None))
    made = await client.post(
        "/admin/v1/tenants", json={"name": "a"}, headers={**operator, "idempotency-key": "k"}
    )
    assert made.status_code == 201
    FileSource(platform.settings.root_secret_file).rotate()
    platform.secrets.reload()
    async with platform.db.reading() as session:
        assert await versions_in_use(session, clock.now()) == {1: 2}  # the key and the answer
