"""Signing in and out, and what a session's cookie stands for."""

import asyncio
import secrets as random
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.caller import Caller, Role
from app.clock import Clock
from app.crypto import Passwords, Secrets
from app.db import Database
from app.errors import RateLimited, Unauthenticated
from app.ids import new_id
from app.settings import Settings
from app.tenants.models import Tenant
from app.tenants.service import effective_limits
from app.users import repository, service, throttle
from app.users.models import SignInCounter, User, UserSession
from app.users.service import MAX_PASSWORD

TOUCH_EVERY = timedelta(minutes=1)
_CONCURRENT_HASHES = 2
"""argon2id takes 64 MiB and a core; more at once would be an attack's lever."""


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A new session: the cookie's value, until when, and whether the password must be changed."""

    token: str
    user: User
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class OpenSession:
    """What a valid session's cookie stands for."""

    caller: Caller
    user: User
    session_id: str
    stale: bool  # its `last_seen_at` should be written


class SignIn:
    """Checks passwords, slowly for those who guess.

    An attempt is counted before the password is looked at, in a transaction of its own, so many
    attempts at once cannot slip under the throttle. A success clears the account's count.
    """

    def __init__(
        self,
        db: Database,
        secrets: Secrets,
        passwords: Passwords,
        clock: Clock,
        settings: Settings,
    ) -> None:
        self._db = db
        self._secrets = secrets
        self._passwords = passwords
        self._clock = clock
        self._settings = settings
        self._hashing = asyncio.Semaphore(_CONCURRENT_HASHES)

    async def __call__(
        self, *, email: str, password: str, address: str, user_agent: str, old_token: str | None
    ) -> SignedIn:
        """Raises Unauthenticated (the same for an unknown account) or RateLimited.

        `old_token`, the cookie that came along, ends: a session never outlives a sign-in.
        """
        email = email.strip().lower()[:254]
        now = self._clock.now()
        subjects = {
            f"account:{self._secrets.hash('sign-in', email).digest}": throttle.ACCOUNT,
            f"address:{self._secrets.hash('sign-in', address).digest}": throttle.ADDRESS,
        }
        async with self._db.transaction() as session:
            refused = await self._count(session, subjects, now)
            user = await repository.by_email(session, email)
        if refused > timedelta(0):
            raise RateLimited(
                f"Too many failed sign-ins; try again in {throttle.told(refused)}.",
                code="sign_in_throttled",
                retry_after_ms=int(refused.total_seconds() * 1000) + 1,
            )
        stored = None if user is None else user.password_hash
        async with self._hashing:
            matches = await asyncio.to_thread(
                self._passwords.matches, password[: MAX_PASSWORD + 1], stored
            )
        if user is None or not matches or user.status != "active":
            await self._note_failure(user, address)
            raise Unauthenticated(
                "The email or the password is wrong.", code="wrong_credentials", param="password"
            )
        return await self._open(user.id, subjects, now, address, user_agent, old_token)

    async def _count(
        self, session: AsyncSession, subjects: dict[str, throttle.Policy], now: datetime
    ) -> timedelta:
        """Counts the attempt, unless it must wait: then for how long."""
        counters: list[SignInCounter] = []
        longest = timedelta(0)
        for subject, policy in subjects.items():
            counter = await repository.lock_counter(session, subject, now)
            if now - counter.last_failure_at >= throttle.FORGET_AFTER:
                counter.failures = 0
            counters.append(counter)
            due = throttle.wait(policy, counter.failures, counter.last_failure_at, now)
            longest = max(longest, due)
        if longest == timedelta(0):
            for counter in counters:
                counter.failures += 1
                counter.last_failure_at = now
        return longest

    async def _note_failure(self, user: User | None, address: str) -> None:
        if user is None:
            return
        await audit.record_alone(
            self._db,
            actor="sign-in",
            action="user.sign_in.fail",
            target=user.id,
            tenant_id=user.tenant_id,
            detail={"email": user.email, "address": address},
            at=self._clock.now(),
        )

    async def _open(
        self,
        user_id: str,
        subjects: dict[str, throttle.Policy],
        now: datetime,
        address: str,
        user_agent: str,
        old_token: str | None,
    ) -> SignedIn:
        token = random.token_urlsafe(32)
        stored = self._secrets.hash("session", token)
        expires_at = now + timedelta(seconds=self._settings.session_absolute_s)
        async with self._db.transaction() as session:
            user = await repository.get(session, user_id, tenant_id=None, lock=True)
            if user is None or user.status != "active":
                raise Unauthenticated(
                    "The email or the password is wrong.", code="wrong_credentials"
                )
            for subject, policy in subjects.items():
                await self._forgive(session, subject, whole=policy is throttle.ACCOUNT)
            if old_token is not None:
                await repository.delete_session(session, self._secrets.hashes("session", old_token))
            user.last_sign_in_at = now
            repository.add(
                session,
                UserSession(
                    id=new_id("ses"),
                    user_id=user.id,
                    token_hash=stored.digest,
                    hash_version=stored.version,
                    address=address[:64],
                    user_agent=user_agent[:200],
                    created_at=now,
                    last_seen_at=now,
                    expires_at=expires_at,
                ),
            )
            await audit.record(
                session,
                actor=_caller(user, None, self._settings),
                action="user.sign_in",
                target=user.id,
                tenant_id=user.tenant_id,
                detail={"email": user.email, "address": address},
                at=now,
            )
        return SignedIn(token, user, expires_at)

    async def _forgive(self, session: AsyncSession, subject: str, *, whole: bool) -> None:
        """A success clears the account's count, and takes its own attempt off the address's."""
        if whole:
            await repository.delete_counter(session, subject)
            return
        counter = await repository.counter(session, subject)
        if counter is not None:
            counter.failures = max(0, counter.failures - 1)


async def find_session(
    session: AsyncSession, token: str, *, secrets: Secrets, settings: Settings, now: datetime
) -> OpenSession | None:
    """The session of a cookie; None when it is unknown, ended, or its user or tenant suspended."""
    found = await repository.session_by_hash(session, secrets.hashes("session", token))
    if found is None:
        return None
    row, user, tenant = found
    idle = timedelta(seconds=settings.session_idle_s)
    if row.expires_at <= now or row.last_seen_at + idle <= now or user.status != "active":
        return None
    if tenant is not None and tenant.status != "active":
        return None
    stale = now - row.last_seen_at >= TOUCH_EVERY
    return OpenSession(_caller(user, tenant, settings), user, row.id, stale)


async def sign_out(session: AsyncSession, token: str, *, secrets: Secrets) -> None:
    """Ends a session; an unknown one is no error."""
    await repository.delete_session(session, secrets.hashes("session", token))


async def end_sessions(
    session: AsyncSession,
    user_id: str,
    *,
    tenant_id: str | None,
    now: datetime,
    actor: Caller | str,
) -> int:
    """Signs a user out everywhere; how many sessions ended."""
    user = await service.find_user(session, user_id, tenant_id=tenant_id, lock=True)
    ended = len(await repository.sessions_of(session, user.id))
    await repository.delete_sessions(session, user.id)
    detail = {"sessions": ended}
    await service.record(session, "user.sign_out", user, actor=actor, now=now, detail=detail)
    return ended


async def list_sessions(
    session: AsyncSession, user_id: str, *, tenant_id: str | None
) -> list[UserSession]:
    """A user's open sessions, newest first. Raises NotFound, also for another tenant's user."""
    user = await service.find_user(session, user_id, tenant_id=tenant_id)
    return await repository.sessions_of(session, user.id)


async def sweep(session: AsyncSession, *, settings: Settings, now: datetime) -> None:
    """Deletes ended sessions and forgotten sign-in counters."""
    idle_since = now - timedelta(seconds=settings.session_idle_s)
    await repository.delete_expired(session, now, idle_since)
    await repository.delete_old_counters(session, now - throttle.FORGET_AFTER)


def _caller(user: User, tenant: Tenant | None, settings: Settings) -> Caller:
    return Caller(
        tenant_id=user.tenant_id or "",
        tenant_name="" if tenant is None else tenant.name,
        tenant_salt="" if tenant is None else tenant.salt,
        role=cast(Role, user.role),
        user_id=user.id,
        label=user.email,
        limits=effective_limits(tenant, settings),
    )
