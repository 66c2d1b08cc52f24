"""SQL of kept answers."""

from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.idempotency.models import KeptAnswer


def add(session: AsyncSession, answer: KeptAnswer) -> None:
    session.add(answer)


async def get(session: AsyncSession, caller_id: str, key_hash: str) -> KeptAnswer | None:
    query = select(KeptAnswer).where(
        KeptAnswer.caller_id == caller_id, KeptAnswer.key_hash == key_hash
    )
    return (await session.execute(query)).scalar_one_or_none()


async def delete_before(session: AsyncSession, before: datetime) -> None:
    """Of any tenant: for the sweep."""
    await session.execute(delete(KeptAnswer).where(KeptAnswer.created_at < before))


async def count_by_version(session: AsyncSession) -> dict[int, int]:
    """Kept answers by the version of the root secret that sealed them (their first four bytes).

    Of any tenant: for the end of a rotation of the root secret.
    """
    version = func.substr(KeptAnswer.sealed, 1, 4)
    rows = await session.execute(select(version, func.count()).group_by(version))
    return {int.from_bytes(row[0], "big"): row[1] for row in rows}
