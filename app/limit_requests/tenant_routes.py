"""/v1/limit-requests: asking for other limits. Who may: see app.keys.access."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from app.audit.service import actor_id
from app.auth import ApiCaller
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.idempotency.service import create_once
from app.limit_requests import service
from app.limit_requests.models import RequestState
from app.limit_requests.schemas import LimitRequestIn, LimitRequestOut
from app.paging import PageDep, list_body

router = APIRouter(prefix="/v1/limit-requests", tags=["limits"])

RequestId = Annotated[str, Path(max_length=40)]
State = Annotated[RequestState | None, Query()]


@router.post("", status_code=201)
async def ask_for_a_limit(
    body: LimitRequestIn,
    caller: ApiCaller,
    platform: PlatformDep,
    session: Session,
    key: IdempotencyKey = None,
) -> LimitRequestOut:
    """Waits for whoever runs loramux; once about each limit, and five times a day."""
    now = platform.clock.now()

    async def create() -> LimitRequestOut:
        row = await service.ask(
            session,
            caller,
            limit_name=body.limit,
            wanted=body.wanted,
            reason=body.reason.strip(),
            settings=platform.settings,
            now=now,
        )
        return LimitRequestOut.of(row)

    return await create_once(
        session,
        create,
        LimitRequestOut,
        key=key,
        caller_id=actor_id(caller),
        route="limit-requests",
        body=body,
        secrets=platform.secrets,
        now=now,
    )


@router.get("")
async def list_own_limit_requests(
    caller: ApiCaller, session: ReadSession, page: PageDep, state: State = None
) -> dict[str, Any]:
    """Newest first, with their answers."""
    rows = await service.list_requests(
        session, tenant_id=caller.tenant_id, state=state, after=page.after, limit=page.fetch
    )
    return list_body(page, [LimitRequestOut.of(row) for row, _ in rows])


@router.get("/{request_id}")
async def get_own_limit_request(
    request_id: RequestId, caller: ApiCaller, session: ReadSession
) -> LimitRequestOut:
    return LimitRequestOut.of(await service.find(session, request_id, tenant_id=caller.tenant_id))


@router.post("/{request_id}/withdraw")
async def withdraw_limit_request(
    request_id: RequestId, caller: ApiCaller, platform: PlatformDep, session: Session
) -> LimitRequestOut:
    """Takes back what waits for an answer; the same limit may then be asked for again."""
    row = await service.withdraw(session, caller, request_id, now=platform.clock.now())
    return LimitRequestOut.of(row)
