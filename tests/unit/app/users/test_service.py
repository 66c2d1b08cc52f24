"""People: the first operator, invitations, resets, passwords, roles."""

import asyncio

import pytest

from app.clock import FrozenClock
from app.errors import Conflict, InvalidRequest, NotFound
from app.platform import Platform
from app.users import service
from app.users.models import User
from app.users.service import Invitation, TokenKind
from tests.factories import PASSWORD, make_tenant, make_user, sign_in

NEW = "another long password"


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


async def invite(platform: Platform, email: str = "ada@example.com") -> Invitation:
    async with platform.db.transaction() as session:
        return await service.invite(
            session,
            email=email,
            role="operator",
            tenant=None,
            secrets=platform.secrets,
            passwords=platform.passwords,
            settings=platform.settings,
            now=platform.clock.now(),
            actor="tests",
        )


async def reset(platform: Platform, user: User) -> Invitation:
    async with platform.db.transaction() as session:
        return await service.start_reset(
            session,
            user.id,
            tenant_id=None,
            secrets=platform.secrets,
            settings=platform.settings,
            now=platform.clock.now(),
            actor="tests",
        )


async def redeem(
    platform: Platform, token: str, kind: TokenKind = "invitation", password: str = NEW
) -> User:
    async with platform.db.transaction() as session:
        return await service.redeem(
            session,
            kind=kind,
            token=token,
            password=password,
            secrets=platform.secrets,
            passwords=platform.passwords,
            settings=platform.settings,
            now=platform.clock.now(),
        )


async def change(platform: Platform, user: User, current: str, new: str) -> User:
    async with platform.db.transaction() as session:
        return await service.change_password(
            session,
            user.id,
            current=current,
            new=new,
            keep_session=None,
            secrets=platform.secrets,
            passwords=platform.passwords,
            settings=platform.settings,
            now=platform.clock.now(),
        )


class TestTheFirstOperator:
    async def test_is_made_once_with_a_password_that_must_be_changed(
        self, platform: Platform
    ) -> None:
        made = []
        for _ in range(2):
            async with platform.db.transaction() as session:
                made.append(
                    await service.ensure_operator(
                        session, passwords=platform.passwords, now=platform.clock.now()
                    )
                )
        assert made[0] is not None
        assert made[1] is None
        name, password = made[0]
        signed_in = await platform.sign_in(
            email=name, password=password, address="::1", user_agent="", old_token=None
        )
        assert signed_in.user.must_change_password
        await change(platform, signed_in.user, password, NEW)
        again = await platform.sign_in(
            email=name, password=NEW, address="::1", user_agent="", old_token=None
        )
        assert not again.user.must_change_password

    async def test_processes_that_start_at_once_make_one(self, platform: Platform) -> None:
        async def start() -> tuple[str, str] | None:
            async with platform.db.transaction() as session:
                return await service.ensure_operator(
                    session, passwords=platform.passwords, now=platform.clock.now()
                )

        made = await asyncio.gather(*(start() for _ in range(4)))
        assert len([m for m in made if m is not None]) == 1


class TestInvitations:
    async def test_let_a_user_choose_a_password_once(self, platform: Platform) -> None:
        invitation = await invite(platform)
        user = await redeem(platform, invitation.token)
        assert user.status == "active"
        assert await sign_in(platform, user, NEW)
        with pytest.raises(NotFound):
            await redeem(platform, invitation.token, password="yet another password")

    async def test_redeemed_twice_at_once_work_once(self, platform: Platform) -> None:
        invitation = await invite(platform)
        results = await asyncio.gather(
            *(redeem(platform, invitation.token) for _ in range(4)), return_exceptions=True
        )
        assert len([r for r in results if isinstance(r, User)]) == 1
        assert len([r for r in results if isinstance(r, NotFound)]) == 3

    async def test_expire(self, platform: Platform, clock: FrozenClock) -> None:
        invitation = await invite(platform)
        clock.advance(seconds=platform.settings.invitation_s)
        with pytest.raises(NotFound):
            await redeem(platform, invitation.token)

    async def test_are_not_used_up_by_a_password_that_is_refused(self, platform: Platform) -> None:
        invitation = await invite(platform)
        with pytest.raises(InvalidRequest):
            await redeem(platform, invitation.token, password="short")
        assert (await redeem(platform, invitation.token)).status == "active"

    async def test_are_no_password_resets(self, platform: Platform) -> None:
        invitation = await invite(platform)
        with pytest.raises(NotFound):
            await redeem(platform, invitation.token, kind="password-reset")

    async def test_are_stored_hashed(self, platform: Platform) -> None:
        from sqlalchemy import select

        from app.users.models import UserToken

        invitation = await invite(platform)
        async with platform.db.reading() as session:
            row = (await session.execute(select(UserToken))).scalar_one()
        assert invitation.token not in {str(value) for value in vars(row).values()}


class TestPasswordResets:
    async def test_end_every_session_and_earlier_link(self, platform: Platform) -> None:
        from tests.unit.app.users.test_sessions import found

        user = await make_user(platform)
        (cookie,) = (await sign_in(platform, user)).values()
        first, second = await reset(platform, user), await reset(platform, user)
        with pytest.raises(NotFound):
            await redeem(platform, first.token, kind="password-reset")
        await redeem(platform, second.token, kind="password-reset")
        assert await found(platform, cookie) is None
        assert await sign_in(platform, user, NEW)


class TestChangingAPassword:
    async def test_needs_the_current_one(self, platform: Platform) -> None:
        user = await make_user(platform)
        with pytest.raises(InvalidRequest) as caught:
            await change(platform, user, "not my password", NEW)
        assert caught.value.code == "wrong_password"

    @pytest.mark.parametrize("weak", ["short", "a" * 40, "x" * 300 + "abcdef", PASSWORD])
    async def test_refuses_a_weak_one_without_quoting_it(
        self, platform: Platform, weak: str
    ) -> None:
        user = await make_user(platform)
        with pytest.raises(InvalidRequest) as caught:
            await change(platform, user, PASSWORD, weak)
        assert caught.value.code == "weak_password"
        assert weak not in caught.value.message

    async def test_ends_every_other_session(self, platform: Platform) -> None:
        from tests.unit.app.users.test_sessions import found

        user = await make_user(platform)
        (kept,) = (await sign_in(platform, user)).values()
        (other,) = (await sign_in(platform, user)).values()
        async with platform.db.transaction() as session:
            await service.change_password(
                session,
                user.id,
                current=PASSWORD,
                new=NEW,
                keep_session=kept,
                secrets=platform.secrets,
                passwords=platform.passwords,
                settings=platform.settings,
                now=platform.clock.now(),
            )
        assert await found(platform, kept) is not None
        assert await found(platform, other) is None


class TestRules:
    async def test_an_email_belongs_to_one_user(self, platform: Platform) -> None:
        await make_user(platform, email="ada@example.com")
        with pytest.raises(Conflict):
            await make_user(platform, email="ADA@example.com")

    @pytest.mark.parametrize("email", ["", "ada", "a b@c.d", "ada@", "@example.com", "a@b@c"])
    async def test_an_email_looks_like_one(self, platform: Platform, email: str) -> None:
        with pytest.raises(InvalidRequest):
            await make_user(platform, email=email)

    async def test_an_operator_has_no_tenant_and_others_have_one(self, platform: Platform) -> None:
        tenant = await make_tenant(platform)
        with pytest.raises(InvalidRequest):
            await make_user(platform, tenant, role="operator")
        with pytest.raises(InvalidRequest):
            await make_user(platform, None, role="tenant_admin")

    async def test_the_last_operator_cannot_be_suspended(self, platform: Platform) -> None:
        first, second = await make_user(platform), await make_user(platform)
        await self._suspend(platform, first)
        with pytest.raises(Conflict) as caught:
            await self._suspend(platform, second)
        assert caught.value.code == "last_operator"

    async def test_a_tenant_finds_its_own_users_alone(self, platform: Platform) -> None:
        tenant, foreign = await make_tenant(platform), await make_tenant(platform)
        user = await make_user(platform, foreign)
        async with platform.db.reading() as session:
            with pytest.raises(NotFound) as known:
                await service.find_user(session, user.id, tenant_id=tenant.id)
            with pytest.raises(NotFound) as unknown:
                await service.find_user(session, "usr_none", tenant_id=tenant.id)
            assert await service.list_users(session, tenant_id=tenant.id) == []
        assert known.value.message.replace(user.id, "") == unknown.value.message.replace(
            "usr_none", ""
        )

    async def _suspend(self, platform: Platform, user: User) -> None:
        async with platform.db.transaction() as session:
            await service.set_status(
                session,
                user.id,
                active=False,
                tenant_id=None,
                now=platform.clock.now(),
                actor="tests",
            )
