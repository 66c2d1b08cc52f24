"""Signing in, and how long a session lives."""

import asyncio

import pytest

from app.clock import FrozenClock
from app.db import Database
from app.errors import RateLimited, Unauthenticated
from app.platform import Platform
from app.tenants import service as tenants
from app.users import service, sessions, throttle
from app.users.models import User
from app.users.sessions import OpenSession, SignedIn
from tests.factories import PASSWORD, make_tenant, make_user


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


async def sign_in(
    platform: Platform,
    user: User | str,
    password: str = PASSWORD,
    *,
    address: str = "192.0.2.7",
    old_token: str | None = None,
) -> SignedIn:
    return await platform.sign_in(
        email=user if isinstance(user, str) else user.email,
        password=password,
        address=address,
        user_agent="tests",
        old_token=old_token,
    )


async def found(platform: Platform, token: str) -> OpenSession | None:
    async with platform.db.reading() as session:
        return await sessions.find_session(
            session,
            token,
            secrets=platform.secrets,
            settings=platform.settings,
            now=platform.clock.now(),
        )


class TestSigningIn:
    async def test_gives_a_session_of_that_user(self, platform: Platform) -> None:
        tenant = await make_tenant(platform)
        user = await make_user(platform, tenant, role="tenant_viewer")
        opened = await found(platform, (await sign_in(platform, user)).token)
        assert opened is not None
        assert opened.caller.user_id == user.id
        assert opened.caller.tenant_id == tenant.id
        assert opened.caller.role == "tenant_viewer"
        assert opened.caller.tenant_salt == tenant.salt

    async def test_does_not_mind_the_case_of_the_email(self, platform: Platform) -> None:
        await make_user(platform, email="Ada@Example.com")
        assert (await sign_in(platform, " ADA@example.com ")).user.email == "ada@example.com"

    async def test_tells_an_unknown_account_from_a_wrong_password_in_no_way(
        self, platform: Platform
    ) -> None:
        user = await make_user(platform)
        with pytest.raises(Unauthenticated) as wrong:
            await sign_in(platform, user, "wrong password")
        with pytest.raises(Unauthenticated) as unknown:
            await sign_in(platform, "nobody@example.com")
        assert wrong.value.body() == unknown.value.body()

    async def test_is_refused_to_suspended_and_invited_users(self, platform: Platform) -> None:
        await make_user(platform)
        user = await make_user(platform)
        async with platform.db.transaction() as session:
            await service.set_status(
                session,
                user.id,
                active=False,
                tenant_id=None,
                now=platform.clock.now(),
                actor="tests",
            )
        invited = await make_user(platform, password=None)
        for refused in (user, invited):
            with pytest.raises(Unauthenticated):
                await sign_in(platform, refused)

    async def test_ends_the_session_whose_cookie_came_along(self, platform: Platform) -> None:
        user = await make_user(platform)
        planted = (await sign_in(platform, user)).token
        fresh = (await sign_in(platform, user, old_token=planted)).token
        assert fresh != planted
        assert await found(platform, planted) is None
        assert await found(platform, fresh) is not None

    async def test_keeps_no_token_in_the_database(self, platform: Platform) -> None:
        from sqlalchemy import select

        from app.users.models import UserSession

        token = (await sign_in(platform, await make_user(platform))).token
        async with platform.db.reading() as session:
            row = (await session.execute(select(UserSession))).scalar_one()
        assert token not in {str(value) for value in vars(row).values()}


class TestThrottle:
    async def test_slows_the_guessing_of_one_account_from_anywhere(
        self, platform: Platform, clock: FrozenClock
    ) -> None:
        user = await make_user(platform)
        for n in range(throttle.ACCOUNT.free):
            with pytest.raises(Unauthenticated):
                await sign_in(platform, user, "wrong password", address=f"192.0.2.{n}")
        with pytest.raises(RateLimited) as caught:
            await sign_in(platform, user, address="198.51.100.9")
        assert int(caught.value.headers()["Retry-After"]) >= 1
        assert "try again in 1 second." in caught.value.message
        clock.advance(seconds=2)
        assert (await sign_in(platform, user)).user.id == user.id

    async def test_slows_one_address_that_tries_many_accounts(self, platform: Platform) -> None:
        user = await make_user(platform)
        for n in range(throttle.ADDRESS.free):
            with pytest.raises(Unauthenticated):
                await sign_in(platform, f"guess-{n}@example.com")
        with pytest.raises(RateLimited):
            await sign_in(platform, user)
        assert (await sign_in(platform, user, address="198.51.100.9")).user.id == user.id

    async def test_lets_no_burst_of_guesses_through(self, platform: Platform) -> None:
        user = await make_user(platform)
        results = await asyncio.gather(
            *(sign_in(platform, user, "wrong password", address=f"10.0.0.{n}") for n in range(20)),
            return_exceptions=True,
        )
        looked_at = [r for r in results if isinstance(r, Unauthenticated)]
        held_back = [r for r in results if isinstance(r, RateLimited)]
        assert len(looked_at) == throttle.ACCOUNT.free
        assert len(looked_at) + len(held_back) == 20

    async def test_a_success_forgives_the_account(self, platform: Platform) -> None:
        user = await make_user(platform)
        for _ in range(3):
            for n in range(throttle.ACCOUNT.free - 1):
                with pytest.raises(Unauthenticated):
                    await sign_in(platform, user, "wrong password", address=f"10.1.1.{n}")
            await sign_in(platform, user)

    async def test_many_good_sign_ins_from_one_address_are_no_attack(
        self, platform: Platform
    ) -> None:
        user = await make_user(platform)
        for _ in range(throttle.ADDRESS.free + 5):
            await sign_in(platform, user)


class TestLifetime:
    async def test_ends_when_idle_for_too_long(
        self, platform: Platform, clock: FrozenClock
    ) -> None:
        token = (await sign_in(platform, await make_user(platform))).token
        clock.advance(seconds=platform.settings.session_idle_s - 1)
        assert await found(platform, token) is not None
        clock.advance(seconds=1)
        assert await found(platform, token) is None

    async def test_ends_after_its_absolute_time_although_it_is_used(
        self, platform: Platform, clock: FrozenClock
    ) -> None:
        from app.users import repository

        token = (await sign_in(platform, await make_user(platform))).token
        step = platform.settings.session_idle_s - 1
        alive_s = 0
        while (opened := await found(platform, token)) is not None:
            async with platform.db.transaction() as session:
                await repository.touch_session(session, opened.session_id, clock.now())
            clock.advance(seconds=step)
            alive_s += step
        assert 0 <= alive_s - platform.settings.session_absolute_s < step

    async def test_ends_with_sign_out(self, platform: Platform) -> None:
        token = (await sign_in(platform, await make_user(platform))).token
        async with platform.db.transaction() as session:
            await sessions.sign_out(session, token, secrets=platform.secrets)
        assert await found(platform, token) is None

    async def test_ends_when_its_tenant_or_user_is_suspended(self, platform: Platform) -> None:
        tenant = await make_tenant(platform)
        user, other = await make_user(platform, tenant), await make_user(platform, tenant)
        tokens = [(await sign_in(platform, u)).token for u in (user, other)]
        now = platform.clock.now()
        async with platform.db.transaction() as session:
            await service.set_status(
                session, user.id, active=False, tenant_id=tenant.id, now=now, actor="tests"
            )
        assert [await found(platform, token) is None for token in tokens] == [True, False]
        async with platform.db.transaction() as session:
            await tenants.set_status(session, tenant.id, active=False, now=now, actor="tests")
        assert await found(platform, tokens[1]) is None

    async def test_survives_a_rotation_of_the_root_secret(self, platform: Platform) -> None:
        from app.crypto import FileSource

        token = (await sign_in(platform, await make_user(platform))).token
        FileSource(platform.settings.root_secret_file).rotate()
        platform.secrets.reload()
        assert await found(platform, token) is not None

    async def test_the_sweep_deletes_what_has_ended_and_nothing_else(
        self, platform: Platform, clock: FrozenClock
    ) -> None:
        user = await make_user(platform)
        old = (await sign_in(platform, user)).token
        clock.advance(seconds=platform.settings.session_idle_s)
        new = (await sign_in(platform, user)).token
        async with platform.db.transaction() as session:
            await sessions.sweep(session, settings=platform.settings, now=clock.now())
        assert await self._count(platform.db) == 1
        assert await found(platform, new) is not None
        assert await found(platform, old) is None

    async def _count(self, db: Database) -> int:
        from sqlalchemy import func, select

        from app.users.models import UserSession

        async with db.reading() as session:
            return (
                await session.execute(select(func.count()).select_from(UserSession))
            ).scalar_one()
