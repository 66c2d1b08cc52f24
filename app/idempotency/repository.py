"""SQL of kept answers."""

from datetime import datetime

from sqlalchemy import delete, select
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
