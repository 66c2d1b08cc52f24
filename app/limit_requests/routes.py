"""/admin/v1/limit-requests: what tenants ask of their limits, and the answers."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query

from app.adapters.deps import ResourcesDep
from app.auth import OperatorCaller
from app.deps import PlatformDep, ReadSession
from app.limit_requests import service
from app.limit_requests.decisions import Decisions
from app.limit_requests.models import RequestState
from app.limit_requests.schemas import ApproveIn, DeclineIn, OperatorLimitRequestOut
from app.paging import PageDep, list_body

router = APIRouter(prefix="/admin/v1/limit-requests", tags=["operator: limits"])

RequestId = Annotated[str, Path(max_length=40)]


async def _decisions(
    platform: PlatformDep, resources: ResourcesDep, caller: OperatorCaller
) -> Decisions:
    return Decisions(platform, resources.queue, caller)


DecisionsDep = Annotated[Decisions, Depends(_decisions)]


@router.get("")
async def list_limit_requests(
    _: OperatorCaller,
    session: ReadSession,
    page: PageDep,
    tenant_id: Annotated[str | None, Query(max_length=40, pattern=r"^[^\x00]*$")] = None,
    state: Annotated[RequestState | None, Query()] = None,
) -> dict[str, Any]:
    """Newest first; `state=open` is what waits for an answer."""
    rows = await service.list_requests(
        session, tenant_id=tenant_id, state=state, after=page.after, limit=page.fetch
    )
    return list_body(page, [OperatorLimitRequestOut.of(row) for row, _ in rows])


@router.get("/{request_id}")
async def get_limit_request(
    request_id: RequestId, _: OperatorCaller, session: ReadSession
) -> OperatorLimitRequestOut:
    return OperatorLimitRequestOut.of(await service.find(session, request_id, tenant_id=None))


@router.post("/{request_id}/approve")
async def approve_limit_request(
    request_id: RequestId, decisions: DecisionsDep, body: ApproveIn | None = None
) -> OperatorLimitRequestOut:
    """Sets the tenant's limit: to what was asked, or to `value`."""
    wanted = body or ApproveIn()
    row = await decisions.approve(request_id, value=wanted.value, answer=wanted.answer)
    return OperatorLimitRequestOut.of(row)


@router.post("/{request_id}/decline")
async def decline_limit_request(
    request_id: RequestId, decisions: DecisionsDep, body: DeclineIn
) -> OperatorLimitRequestOut:
    """Changes no limit; the tenant reads the answer."""
    return OperatorLimitRequestOut.of(await decisions.decline(request_id, answer=body.answer))
