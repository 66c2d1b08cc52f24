"""/admin/v1/audit."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.audit import service
from app.audit.schemas import AuditEventOut
from app.auth import OperatorCaller
from app.deps import ReadSession
from app.paging import PageDep, list_body

router = APIRouter(prefix="/admin/v1/audit", tags=["operator: audit"])


@router.get("")
async def list_events(
    session: ReadSession,
    _: OperatorCaller,
    page: PageDep,
    tenant_id: Annotated[str | None, Query(max_length=40)] = None,
    action: Annotated[str | None, Query(max_length=64)] = None,
    target: Annotated[str | None, Query(max_length=120)] = None,
) -> dict[str, Any]:
    rows = await service.list_events(
        session,
        tenant_id=tenant_id,
        action=action,
        target=target,
        after=page.after,
        limit=page.fetch,
    )
    return list_body(page, [AuditEventOut.of(row) for row in rows])
