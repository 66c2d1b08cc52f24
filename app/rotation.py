"""Ending a rotation of the root secret: an old version goes when nothing needs it any more.

Keys move to the new version when they are used, webhook secrets within the hour; sessions and
links end by themselves.
"""

from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.caller import Caller
from app.crypto import FileSource
from app.errors import Conflict
from app.idempotency import repository as idempotency
from app.keys import repository as keys
from app.users import repository as users
from app.webhooks import repository as webhooks

READ_BY = timedelta(seconds=120)
"""By then every process has read a changed root secret: each reads it once a minute."""


async def versions_in_use(session: AsyncSession, now: datetime) -> dict[int, int]:
    """How many live keys, sessions, links, kept answers and webhook secrets each holds up."""
    counts = await keys.count_by_version(session, now)
    for others in (
        await users.count_sessions_by_version(session, now),
        await idempotency.count_by_version(session),
        await webhooks.count_by_secret_version(session, now),
    ):
        for version, count in others.items():
            counts[version] = counts.get(version, 0) + count
    return counts


async def drop_drained(
    session: AsyncSession, source: FileSource, version: int, *, now: datetime, actor: Caller | str
) -> None:
    """Removes a version from the file. Raises Conflict while something needs it, or while a
    process may still sign with it because it has not read the file again."""
    if now - source.changed_at() < READ_BY:
        raise Conflict(
            "The root secret was changed a moment ago, and running processes may still sign with "
            f"the version before; try again in {READ_BY.seconds} s.",
            code="just_rotated",
        )
    needed = (await versions_in_use(session, now)).get(version, 0)
    if needed:
        raise Conflict(
            f"{needed} keys, sessions, links, answers or webhook secrets still depend on version "
            f"{version}; revoke the keys that nobody uses, or wait.",
            code="version_in_use",
        )
    await audit.record(
        session,
        actor=actor,
        action="secrets.drop",
        target=f"version {version}",
        tenant_id=None,
        at=now,
    )
    source.drop(version)
