"""The SQL of resumable uploads. Every tenant-facing query takes the tenant's id."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters.models import Upload, UploadPart

OPEN = "open"
COMPLETED = "completed"


async def find(
    session: AsyncSession, tenant_id: str, upload_id: str, now: datetime, *, lock: bool = False
) -> Upload | None:
    """The tenant's upload, unless it has expired."""
    query = select(Upload).where(
        Upload.id == upload_id, Upload.tenant_id == tenant_id, Upload.expires_at > now
    )
    if lock:
        query = query.with_for_update().execution_options(populate_existing=True)
    return (await session.scalars(query)).first()


async def open_of(
    session: AsyncSession, tenant_id: str, now: datetime, names: Iterable[str] | None = None
) -> Sequence[Upload]:
    """The tenant's uploads that wait for parts, oldest first."""
    query = select(Upload).where(
        Upload.tenant_id == tenant_id, Upload.state == OPEN, Upload.expires_at > now
    )
    if names is not None:
        query = query.where(Upload.name.in_(sorted(names)))
    return (await session.scalars(query.order_by(Upload.id))).all()


async def reserved_bytes(
    session: AsyncSession, tenant_id: str, now: datetime, *, besides: str | None = None
) -> int:
    """What the tenant's open uploads have announced."""
    query = select(func.sum(Upload.config_bytes + Upload.weights_bytes)).where(
        Upload.tenant_id == tenant_id, Upload.state == OPEN, Upload.expires_at > now
    )
    if besides is not None:
        query = query.where(Upload.id != besides)
    return int(await session.scalar(query) or 0)


async def parts_of(session: AsyncSession, upload_ids: Iterable[str]) -> Sequence[UploadPart]:
    """By upload and number. By its parent: the uploads were found by their tenant."""
    rows = await session.scalars(
        select(UploadPart)
        .where(UploadPart.upload_id.in_(list(upload_ids)))
        .order_by(UploadPart.upload_id, UploadPart.number)
    )
    return rows.all()


async def part(session: AsyncSession, upload_id: str, number: int) -> UploadPart | None:
    """By its parent: the upload was found by its tenant."""
    return await session.get(UploadPart, (upload_id, number))


async def drop_parts(
    session: AsyncSession, upload_id: str, *, stored_as: str | None = None
) -> None:
    """Forgets all parts of an upload, or the one of that name.

    By its parent: the upload was found by its tenant, or has expired.
    """
    query = delete(UploadPart).where(UploadPart.upload_id == upload_id)
    if stored_as is not None:
        query = query.where(UploadPart.stored_as == stored_as)
    await session.execute(query)


async def drop(session: AsyncSession, upload_id: str) -> None:
    """By its parent: the upload was found by its tenant, or has expired."""
    await drop_parts(session, upload_id)
    await session.execute(delete(Upload).where(Upload.id == upload_id))


async def ids_of(session: AsyncSession, tenant_id: str) -> Sequence[str]:
    """All of the tenant's, expired and completed ones too."""
    return (await session.scalars(select(Upload.id).where(Upload.tenant_id == tenant_id))).all()


async def expire_all(session: AsyncSession, tenant_id: str, now: datetime) -> int:
    """Ends the tenant's uploads: nobody finds them any more. How many waited for parts."""
    ended = await session.execute(
        update(Upload)
        .where(Upload.tenant_id == tenant_id, Upload.state == OPEN, Upload.expires_at > now)
        .values(expires_at=now)
        .returning(Upload.id)
    )
    return len(ended.all())


async def expired(session: AsyncSession, now: datetime, limit: int) -> Sequence[str]:
    """Ids of uploads of any tenant whose day is over. Of any tenant: for the sweep."""
    rows = await session.scalars(
        select(Upload.id).where(Upload.expires_at <= now).order_by(Upload.expires_at).limit(limit)
    )
    return rows.all()


async def still_open(session: AsyncSession, upload_ids: Iterable[str]) -> set[str]:
    """Those of the ids that an open upload has. Of any tenant: for the sweep."""
    rows = await session.scalars(
        select(Upload.id).where(Upload.id.in_(list(upload_ids)), Upload.state == OPEN)
    )
    return set(rows.all())
