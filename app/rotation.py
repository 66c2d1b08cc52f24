"""Ending a rotation of the root secret: an old version goes when nothing needs it any more.

Keys move to the new version when they are used, webhook secrets within the hour; sessions and
links end by themselves.
"""

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.caller import Caller
from app.crypto import FileSource
from app.errors import Conflict
from app.keys import repository as keys
from app.users import repository as users
from app.webhooks import repository as webhooks


async def versions_in_use(session: AsyncSession, now: datetime) -> dict[int, int]:
    """How many live keys, sessions, links and webhook secrets each version still holds up."""
    counts = await keys.count_by_version(session, now)
    for others in (
        await users.count_sessions_by_version(session, now),
        await webhooks.count_by_secret_version(session, now),
    ):
        for version, count in others.items():
            counts[version] = counts.get(version, 0) + count
    return counts


async def drop_drained(
    session: AsyncSession, source: FileSource, version: int, *, now: datetime, actor: Caller | str
) -> None:
    """Removes a version from the file. Raises Conflict while something needs it."""
    needed = (await versions_in_use(session, now)).get(version, 0)
    if needed:
        raise Conflict(
            f"{needed} keys, sessions, links or webhook secrets still depend on version {version}; "
            "revoke the keys that nobody uses, or wait.",
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
