"""People: made, invited, changed, suspended; their passwords."""

import re
import secrets as random
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.caller import Caller
from app.crypto import Passwords, Secrets
from app.errors import Conflict, InvalidRequest, NotFound
from app.ids import new_id
from app.settings import Settings
from app.tables import Table, TableQuery
from app.tenants.models import Tenant
from app.tenants.service import require_kept
from app.users import repository
from app.users.models import User, UserToken

UserRole = Literal["operator", "tenant_admin", "tenant_viewer"]
TokenKind = Literal["invitation", "password-reset"]
FIRST_OPERATOR = "operator"
EMAIL = re.compile(r"[^@\s<>\"']{1,64}@[^@\s<>\"']{1,189}")
MAX_PASSWORD = 256
_READABLE = "abcdefghjkmnpqrstuvwxyz23456789"


@dataclass(frozen=True, slots=True)
class Invitation:
    """A user and, this once, the token of the link that lets them choose a password."""

    kind: TokenKind
    user: User
    token: str
    expires_at: datetime


async def ensure_operator(
    session: AsyncSession, *, passwords: Passwords, now: datetime
) -> tuple[str, str] | None:
    """On the first start makes the account `operator`; returns (name, one-time password).

    None when there is an operator already. The password must be changed at first sign-in.
    """
    if await repository.count_operators(session) > 0:
        return None
    password = "-".join("".join(random.choice(_READABLE) for _ in range(5)) for _ in range(4))
    user = _new(FIRST_OPERATOR, "operator", None, now)
    user.password_hash = passwords.hash(password)
    user.status = "active"
    user.must_change_password = True
    try:
        async with session.begin_nested():
            repository.add(session, user)
    except IntegrityError:
        return None
    await record(session, "user.create", user, actor="first-start", now=now)
    return FIRST_OPERATOR, password


async def create_user(
    session: AsyncSession,
    *,
    email: str,
    role: UserRole,
    tenant: Tenant | None,
    password: str | None,
    must_change: bool,
    passwords: Passwords,
    settings: Settings,
    now: datetime,
    actor: Caller | str,
) -> User:
    """A user; without a password they can sign in only by invitation. Raises Conflict."""
    if (role == "operator") != (tenant is None):
        raise InvalidRequest(
            "An operator belongs to no tenant, and everyone else to one.", param="tenant_id"
        )
    if tenant is not None:
        require_kept(tenant)
    user = _new(_address(email), role, tenant, now)
    if password is not None:
        check_password(password, settings, email=user.email)
        user.password_hash = passwords.hash(password)
        user.status = "active"
        user.must_change_password = must_change
    if await repository.by_email(session, user.email) is not None:
        raise _taken()
    repository.add(session, user)
    try:
        await session.flush()
    except IntegrityError:
        raise _taken() from None
    await record(session, "user.create", user, actor=actor, now=now)
    return user


async def invite(
    session: AsyncSession,
    *,
    email: str,
    role: UserRole,
    tenant: Tenant | None,
    secrets: Secrets,
    passwords: Passwords,
    settings: Settings,
    now: datetime,
    actor: Caller | str,
) -> Invitation:
    """A new user and the link's token, which works once."""
    user = await create_user(
        session,
        email=email,
        role=role,
        tenant=tenant,
        password=None,
        must_change=False,
        passwords=passwords,
        settings=settings,
        now=now,
        actor=actor,
    )
    return _issue(session, "invitation", user, secrets, settings, now, actor)


async def require_room(session: AsyncSession, tenant_id: str, *, most: int) -> None:
    """Raises Conflict when a tenant has that many users; its row is locked meanwhile."""
    if await repository.count_of_tenant(session, tenant_id) >= most:
        raise Conflict(
            f"A tenant has at most {most} users; remove one that is no longer needed.",
            code="too_many_users",
        )


async def start_reset(
    session: AsyncSession,
    user_id: str,
    *,
    tenant_id: str | None,
    secrets: Secrets,
    settings: Settings,
    now: datetime,
    actor: Caller | str,
) -> Invitation:
    """A link's token that lets a user choose a new password; earlier links end."""
    user = await find_user(session, user_id, tenant_id=tenant_id, lock=True)
    await repository.void_tokens(session, user.id, now)
    kind: TokenKind = "invitation" if user.status == "invited" else "password-reset"
    await record(session, f"user.{kind}", user, actor=actor, now=now)
    return _issue(session, kind, user, secrets, settings, now, actor)


async def require_link(
    session: AsyncSession, *, kind: TokenKind, token: str, secrets: Secrets, now: datetime
) -> None:
    """Looks at an invitation's or a reset's link and uses nothing up. Raises NotFound as `redeem`
    does."""
    await _token(session, kind, token, secrets, now)


async def redeem(
    session: AsyncSession,
    *,
    kind: TokenKind,
    token: str,
    password: str,
    secrets: Secrets,
    passwords: Passwords,
    settings: Settings,
    now: datetime,
) -> User:
    """Sets the password by an invitation's or a reset's token, once. Ends the user's sessions.

    Raises NotFound for a token that is unknown, used or expired, without telling which.
    """
    row, user = await _token(session, kind, token, secrets, now)
    check_password(password, settings, email=user.email)
    if not await repository.use_token(session, row.id, now):
        raise _dead_link()
    user.password_hash = passwords.hash(password)
    user.must_change_password = False
    user.status = "active"
    await repository.delete_sessions(session, user.id)
    await record(session, f"user.{kind}.redeem", user, actor=_as_actor(user), now=now)
    return user


async def change_password(
    session: AsyncSession,
    user_id: str,
    *,
    current: str,
    new: str,
    keep_session: str | None,
    secrets: Secrets,
    passwords: Passwords,
    settings: Settings,
    now: datetime,
) -> User:
    """Changes one's own password; every other session ends. `keep_session` is its token."""
    user = await find_user(session, user_id, tenant_id=None, lock=True)
    if not passwords.matches(current, user.password_hash):
        raise InvalidRequest(
            "The current password is wrong.", code="wrong_password", param="current_password"
        )
    if current == new:
        raise InvalidRequest(
            "The new password is the old one; choose another.",
            code="weak_password",
            param="new_password",
        )
    check_password(new, settings, email=user.email)
    user.password_hash = passwords.hash(new)
    user.must_change_password = False
    keep = [] if keep_session is None else secrets.hashes("session", keep_session)
    await repository.delete_sessions(session, user.id, keep=keep)
    await record(session, "user.password.change", user, actor=_as_actor(user), now=now)
    return user


async def set_status(
    session: AsyncSession,
    user_id: str,
    *,
    active: bool,
    tenant_id: str | None,
    now: datetime,
    actor: Caller | str,
) -> User:
    """Suspends a user (their sessions end) or resumes one. The last operator stays."""
    user = await find_user(session, user_id, tenant_id=tenant_id, lock=True)
    if not active:
        await _require_another_operator(session, user)
    wanted = ("active" if user.password_hash else "invited") if active else "suspended"
    if user.status != wanted:
        user.status = wanted
        if not active:
            await repository.delete_sessions(session, user.id)
        action = "user.resume" if active else "user.suspend"
        await record(session, action, user, actor=actor, now=now)
    return user


async def set_role(
    session: AsyncSession,
    user_id: str,
    *,
    role: Literal["tenant_admin", "tenant_viewer"],
    tenant_id: str | None,
    now: datetime,
    actor: Caller | str,
) -> User:
    """Makes a tenant's user its admin or a viewer; applies to open sessions at once."""
    user = await find_user(session, user_id, tenant_id=tenant_id, lock=True)
    if user.role == "operator":
        raise InvalidRequest("An operator's role cannot be changed.", param="role")
    if user.role != role:
        detail = {"from": user.role, "to": role}
        user.role = role
        await record(session, "user.role", user, actor=actor, now=now, detail=detail)
    return user


async def remove_user(
    session: AsyncSession,
    user_id: str,
    *,
    tenant_id: str | None,
    now: datetime,
    actor: Caller | str,
) -> User:
    """Deletes a user with their sessions and links; the audit log keeps what they did."""
    user = await find_user(session, user_id, tenant_id=tenant_id, lock=True)
    await _require_another_operator(session, user)
    await record(session, "user.remove", user, actor=actor, now=now)
    await repository.delete_user(session, user.id)
    return user


async def _require_another_operator(session: AsyncSession, user: User) -> None:
    if user.role != "operator":
        return
    if await repository.count_other_active_operators(session, user.id) == 0:
        raise Conflict(
            "This is the last active operator; make another one first.", code="last_operator"
        )


async def find_user(
    session: AsyncSession, user_id: str, *, tenant_id: str | None, lock: bool = False
) -> User:
    """Raises NotFound, also for another tenant's user. `tenant_id=None`: an operator asks."""
    user = await repository.get(session, user_id, tenant_id=tenant_id, lock=lock)
    if user is None:
        raise NotFound(f"There is no user {user_id[:40]!r}; list the users to see their ids.")
    return user


async def find_by_email(session: AsyncSession, email: str) -> User:
    """By email or id (the command line takes either). Raises NotFound."""
    user = await repository.by_email(session, email.strip().lower())
    return user or await find_user(session, email, tenant_id=None)


async def list_users(
    session: AsyncSession, *, tenant_id: str | None, after: str | None = None, limit: int = 100
) -> list[User]:
    """Newest first."""
    return await repository.page(session, tenant_id=tenant_id, after=after, limit=limit)


async def user_table(
    session: AsyncSession, wanted: TableQuery, *, tenant_id: str | None
) -> Table[tuple[User, str | None]]:
    """A page of users, each with its tenant's name; sorted by email, role, status, tenant,
    created_at or last_sign_in_at. `tenant_id=None`: an operator asks."""
    return await repository.table(session, wanted, tenant_id=tenant_id)


def check_password(password: str, settings: Settings, *, email: str) -> None:
    """Raises InvalidRequest for a password that is too short, too long, or the account's name."""
    if not settings.password_min_length <= len(password) <= MAX_PASSWORD:
        raise InvalidRequest(
            f"A password has {settings.password_min_length} to {MAX_PASSWORD} characters; "
            f"this one has {len(password)}.",
            code="weak_password",
            param="password",
        )
    if len(set(password)) < 5 or password.lower() in (email, email.partition("@")[0]):
        raise InvalidRequest(
            "This password is too easy to guess; choose one with more different characters.",
            code="weak_password",
            param="password",
        )


def _new(email: str, role: UserRole, tenant: Tenant | None, now: datetime) -> User:
    return User(
        id=new_id("usr"),
        email=email,
        role=role,
        tenant_id=None if tenant is None else tenant.id,
        status="invited",
        must_change_password=False,
        created_at=now,
    )


def _address(email: str) -> str:
    email = email.strip().lower()
    if EMAIL.fullmatch(email) is None:
        raise InvalidRequest("email must be like name@example.com.", param="email")
    return email


def _issue(
    session: AsyncSession,
    kind: TokenKind,
    user: User,
    secrets: Secrets,
    settings: Settings,
    now: datetime,
    actor: Caller | str,
) -> Invitation:
    token = random.token_urlsafe(32)
    stored = secrets.hash(kind, token)
    seconds = settings.invitation_s if kind == "invitation" else settings.password_reset_s
    row = UserToken(
        id=new_id("tok"),
        kind=kind,
        user_id=user.id,
        token_hash=stored.digest,
        hash_version=stored.version,
        created_by=audit.actor_id(actor),
        created_at=now,
        expires_at=now + timedelta(seconds=seconds),
    )
    repository.add(session, row)
    return Invitation(kind, user, token, row.expires_at)


def _as_actor(user: User) -> Caller:
    return Caller(
        tenant_id=user.tenant_id or "",
        tenant_name="",
        tenant_salt="",
        role=user.role,  # type: ignore[arg-type]
        user_id=user.id,
        label=user.email,
    )


def _taken() -> Conflict:
    return Conflict(
        "There already is a user with this email; choose another.",
        code="email_taken",
        param="email",
    )


async def _token(
    session: AsyncSession, kind: TokenKind, token: str, secrets: Secrets, now: datetime
) -> tuple[UserToken, User]:
    found = await repository.token_by_hash(session, kind, secrets.hashes(kind, token))
    if found is None:
        raise _dead_link()
    row, user = found
    if row.used_at is not None or row.expires_at <= now or user.status == "suspended":
        raise _dead_link()
    return row, user


def _dead_link() -> NotFound:
    return NotFound(
        "This link is unknown, was used, or has expired; ask for a new one.", code="link_invalid"
    )


async def record(
    session: AsyncSession,
    action: str,
    user: User,
    *,
    actor: Caller | str,
    now: datetime,
    detail: dict[str, Any] | None = None,
) -> None:
    """The audit event of something that was done to a user."""
    await audit.record(
        session,
        actor=actor,
        action=action,
        target=user.id,
        tenant_id=user.tenant_id,
        detail={"email": user.email, "role": user.role, **(detail or {})},
        at=now,
    )
