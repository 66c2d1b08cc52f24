"""The life of a root secret's version, from rotation to removal."""

import pytest

from app.auth import authenticate_key
from app.clock import FrozenClock
from app.crypto import FileSource
from app.errors import Conflict
from app.platform import Platform
from app.rotation import drop_drained, versions_in_use
from tests.factories import make_key, make_tenant, make_user, sign_in


async def test_an_old_version_goes_when_every_key_was_used_and_every_session_ended(
    platform: Platform, clock: FrozenClock
) -> None:
    source = FileSource(platform.settings.root_secret_file)
    key = await make_key(platform, await make_tenant(platform))
    await sign_in(platform, await make_user(platform))
    source.rotate()
    platform.secrets.reload()

    async def drop() -> None:
        async with platform.db.transaction() as session:
            await drop_drained(session, source, 1, now=clock.now(), actor="tests")

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
