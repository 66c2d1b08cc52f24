"""SQL of users, sessions, one-use tokens and sign-in counters."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.table_repository import read_table
from app.tables import Table, TableQuery
from app.tenants.models import Tenant
from app.users.models import SignInCounter, User, UserSession, UserToken


def add(session: AsyncSession, row: User | UserSession | UserToken) -> None:
    session.add(row)


async def by_email(session: AsyncSession, email: str) -> User | None:
    """Of any tenant: this look-up is what tells the tenant at sign-in."""
    return (await session.execute(select(User).where(User.email == email))).scalar_one_or_none()


async def get(
    session: AsyncSession, user_id: str, *, tenant_id: str | None, lock: bool = False
) -> User | None:
    """A user by id; with a tenant, only that tenant's."""
    query = select(User).where(User.id == user_id)
    if tenant_id is not None:
        query = query.where(User.tenant_id == tenant_id)
    if lock:
        query = query.with_for_update()
    return (await session.execute(query)).scalar_one_or_none()


async def page(
    session: AsyncSession, *, tenant_id: str | None, after: str | None, limit: int
) -> list[User]:
    """Newest first."""
    query = select(User).order_by(User.id.desc()).limit(limit)
    if tenant_id is not None:
        query = query.where(User.tenant_id == tenant_id)
    if after is not None:
        query = query.where(User.id < after)
    return list((await session.execute(query)).scalars())


async def table(
    session: AsyncSession, wanted: TableQuery, *, tenant_id: str | None
) -> Table[tuple[User, str | None]]:
    """Users with their tenants' names; with a tenant, only that tenant's."""
    query = select(User, Tenant.name).outerjoin(Tenant, Tenant.id == User.tenant_id)
    if tenant_id is not None:
        query = query.where(User.tenant_id == tenant_id)
    return await read_table(
        session,
        query,
        wanted,
        searched=[User.email, Tenant.name, User.id],
        sorted_by={
            "email": User.email,
            "role": User.role,
            "status": User.status,
            "tenant": Tenant.name,
            "created_at": User.created_at,
            "last_sign_in_at": User.last_sign_in_at,
            "id": User.id,
        },
        default="-id",
    )


async def delete_of_tenant(session: AsyncSession, tenant_id: str) -> tuple[int, int]:
    """Removes a tenant's users with their sessions and links; (users, sessions) removed."""
    own = select(User.id).where(User.tenant_id == tenant_id).scalar_subquery()
    ended = await session.execute(
        delete(UserSession).where(UserSession.user_id.in_(own)).returning(UserSession.id)
    )
    sessions = len(ended.all())
    await session.execute(delete(UserToken).where(UserToken.user_id.in_(own)))
    gone = await session.execute(delete(User).where(User.tenant_id == tenant_id).returning(User.id))
    return len(gone.all()), sessions


async def delete_user(session: AsyncSession, user_id: str) -> None:
    """With their sessions and links. By its parent: the user was found before."""
    await delete_sessions(session, user_id)
    await session.execute(delete(UserToken).where(UserToken.user_id == user_id))
    await session.execute(delete(User).where(User.id == user_id))


async def count_of_tenant(session: AsyncSession, tenant_id: str) -> int:
    query = select(func.count()).select_from(User).where(User.tenant_id == tenant_id)
    return (await session.execute(query)).scalar_one()


async def count_operators(session: AsyncSession) -> int:
    """Of any tenant: operators have none."""
    query = select(func.count()).select_from(User).where(User.role == "operator")
    return (await session.execute(query)).scalar_one()


async def count_other_active_operators(session: AsyncSession, user_id: str) -> int:
    """Of any tenant: operators have none."""
    query = (
        select(func.count())
        .select_from(User)
        .where(User.role == "operator", User.status == "active", User.id != user_id)
    )
    return (await session.execute(query)).scalar_one()


async def session_by_hash(
    session: AsyncSession, digests: Sequence[str]
) -> tuple[UserSession, User, Tenant | None] | None:
    """A session with its user and the user's tenant (operators have none).

    Of any tenant: this look-up is what tells the tenant.
    """
    row = (
        await session.execute(
            select(UserSession, User, Tenant)
            .join(User, User.id == UserSession.user_id)
            .outerjoin(Tenant, Tenant.id == User.tenant_id)
            .where(UserSession.token_hash.in_(digests))
        )
    ).one_or_none()
    return None if row is None else (row[0], row[1], row[2])


async def touch_session(session: AsyncSession, session_id: str, now: datetime) -> None:
    """By its parent: the session was found by its token."""
    await session.execute(
        update(UserSession)
        .where(UserSession.id == session_id, UserSession.last_seen_at < now)
        .values(last_seen_at=now)
    )


async def sessions_of(session: AsyncSession, user_id: str) -> list[UserSession]:
    """By its parent: the user was found before."""
    query = select(UserSession).where(UserSession.user_id == user_id)
    return list((await session.execute(query.order_by(UserSession.id.desc()))).scalars())


async def delete_sessions(session: AsyncSession, user_id: str, *, keep: Sequence[str] = ()) -> None:
    """Ends a user's sessions, but for those whose token hashes are kept.

    By its parent: the user was found before.
    """
    await session.execute(
        delete(UserSession).where(
            UserSession.user_id == user_id, UserSession.token_hash.not_in(keep)
        )
    )


async def delete_session(session: AsyncSession, digests: Sequence[str]) -> None:
    """Of any tenant: by the token of its cookie."""
    await session.execute(delete(UserSession).where(UserSession.token_hash.in_(digests)))


async def delete_expired(session: AsyncSession, now: datetime, idle_since: datetime) -> None:
    """Of any tenant: for the sweep."""
    await session.execute(
        delete(UserSession).where(
            (UserSession.expires_at <= now) | (UserSession.last_seen_at <= idle_since)
        )
    )


async def token_by_hash(
    session: AsyncSession, kind: str, digests: Sequence[str]
) -> tuple[UserToken, User] | None:
    """Of any tenant: this look-up is what tells the tenant."""
    row = (
        await session.execute(
            select(UserToken, User)
            .join(User, User.id == UserToken.user_id)
            .where(UserToken.kind == kind, UserToken.token_hash.in_(digests))
        )
    ).one_or_none()
    return None if row is None else (row[0], row[1])


async def use_token(session: AsyncSession, token_id: str, now: datetime) -> bool:
    """True for exactly one caller: whoever used the token first.

    By its parent: the token was found by its text.
    """
    result = await session.execute(
        update(UserToken)
        .where(UserToken.id == token_id, UserToken.used_at.is_(None))
        .values(used_at=now)
        .returning(UserToken.id)
    )
    return result.scalar_one_or_none() is not None


async def void_tokens(session: AsyncSession, user_id: str, now: datetime) -> None:
    """Ends all of a user's unused tokens. By its parent: the user was found before."""
    await session.execute(
        update(UserToken)
        .where(UserToken.user_id == user_id, UserToken.used_at.is_(None))
        .values(used_at=now)
    )


async def lock_counter(session: AsyncSession, subject: str, now: datetime) -> SignInCounter:
    """The counter, made when absent, and locked until the transaction ends."""
    sqlite = session.get_bind().dialect.name == "sqlite"
    statement = (sqlite_insert if sqlite else postgres_insert)(SignInCounter)
    await session.execute(
        statement.values(subject=subject, failures=0, last_failure_at=now).on_conflict_do_nothing()
    )
    query = select(SignInCounter).where(SignInCounter.subject == subject).with_for_update()
    return (await session.execute(query)).scalar_one()


async def counter(session: AsyncSession, subject: str) -> SignInCounter | None:
    query = select(SignInCounter).where(SignInCounter.subject == subject).with_for_update()
    return (await session.execute(query)).scalar_one_or_none()


async def delete_counter(session: AsyncSession, subject: str) -> None:
    await session.execute(delete(SignInCounter).where(SignInCounter.subject == subject))


async def delete_old_counters(session: AsyncSession, before: datetime) -> None:
    await session.execute(delete(SignInCounter).where(SignInCounter.last_failure_at < before))


async def count_sessions_by_version(session: AsyncSession, now: datetime) -> dict[int, int]:
    """Live sessions and unused tokens, by the root secret's version that hashed them.

    Of any tenant: for the end of a rotation of the root secret.
    """
    counts: dict[int, int] = {}
    for query in (
        select(UserSession.hash_version, func.count())
        .where(UserSession.expires_at > now)
        .group_by(UserSession.hash_version),
        select(UserToken.hash_version, func.count())
        .where(UserToken.used_at.is_(None), UserToken.expires_at > now)
        .group_by(UserToken.hash_version),
    ):
        for version, count in await session.execute(query):
            counts[version] = counts.get(version, 0) + count
    return counts
