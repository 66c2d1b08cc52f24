"""/v1/audit: what was done in the caller's tenant, by whom. Nothing changes it."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.audit import service
from app.audit.schemas import AuditEventOut
from app.auth import ApiCaller
from app.deps import ReadSession
from app.paging import PageDep, list_body

router = APIRouter(prefix="/v1/audit", tags=["audit"])


@router.get("")
async def list_own_events(
    session: ReadSession,
    caller: ApiCaller,
    page: PageDep,
    action: Annotated[str | None, Query(max_length=64)] = None,
    target: Annotated[str | None, Query(max_length=120)] = None,
) -> dict[str, Any]:
    """Newest first; the same events as on the console's page."""
    rows = await service.list_events(
        session,
        tenant_id=caller.tenant_id,
        action=action,
        target=target,
        after=page.after,
        limit=page.fetch,
    )
    return list_body(page, [AuditEventOut.of(row) for row in rows])
