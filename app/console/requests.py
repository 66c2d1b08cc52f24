"""The operator's page of what tenants ask of their limits: accepted here, or declined."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse

from app.console.forms import read_form
from app.console.limits import request_row
from app.console.operator import Operator
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError, Conflict, InvalidRequest
from app.limit_requests import service
from app.platform import Platform

router = APIRouter(prefix="/console/requests", include_in_schema=False)

MOST_OPEN, MOST_DECIDED = 100, 25
RequestId = Annotated[str, Path(max_length=40)]


@router.get("")
async def requests_page(request: Request, caller: Operator, platform: PlatformDep) -> Response:
    return await _page(request, platform)


@router.post("/{request_id}/accept")
async def accept(
    request_id: RequestId, request: Request, caller: Operator, platform: PlatformDep
) -> Response:
    """The tenant's limit is from now on what it asked for."""
    return await _decide(request_id, request, caller, platform, accepted=True)


@router.post("/{request_id}/decline")
async def decline(
    request_id: RequestId, request: Request, caller: Operator, platform: PlatformDep
) -> Response:
    """With the reason, which the tenant reads on its page of limits."""
    return await _decide(request_id, request, caller, platform, accepted=False)


async def _decide(
    request_id: str, request: Request, caller: Operator, platform: Platform, *, accepted: bool
) -> Response:
    form = await read_form(request)
    decide = service.accept if accepted else service.decline
    try:
        async with platform.db.transaction() as session:
            await decide(
                session,
                request_id,
                actor=caller,
                answer=form.text("answer", most=service.MOST_TEXT),
                now=platform.clock.now(),
            )
    except (Conflict, InvalidRequest) as error:
        return await _page(request, platform, error=error, refused=request_id)
    if accepted:
        platform.forget_keys()
    return RedirectResponse("/console/requests", status_code=303)


async def _page(
    request: Request, platform: Platform, *, error: AppError | None = None, refused: str = ""
) -> Response:
    async with platform.db.reading() as session:
        waiting = await service.requests(session, is_open=True, limit=MOST_OPEN)
        decided = await service.requests(session, is_open=False, limit=MOST_DECIDED)
    return render(
        request,
        "requests.html",
        waiting=[request_row(row) | {"tenant": name} for row, name in waiting],
        decided=[request_row(row) | {"tenant": name} for row, name in decided],
        most_answer=service.MOST_TEXT,
        refused=refused,
        error=error,
    )
