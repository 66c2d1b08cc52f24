"""The operator's page of what tenants ask of their limits: approved here, or declined."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse

from app.adapters.deps import ResourcesDep
from app.console.forms import Form, read_form
from app.console.limits import request_row, typed_number
from app.console.operator import Operator
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError, Conflict, InvalidRequest
from app.limit_requests import service
from app.limit_requests.decisions import Decisions
from app.platform import Platform

router = APIRouter(prefix="/console/requests", include_in_schema=False)

MOST_OPEN, MOST_DECIDED = 100, 25
RequestId = Annotated[str, Path(max_length=40)]


@router.get("")
async def requests_page(request: Request, caller: Operator, platform: PlatformDep) -> Response:
    return await _page(request, platform)


@router.post("/{request_id}/approve")
async def approve(
    request_id: RequestId,
    request: Request,
    caller: Operator,
    platform: PlatformDep,
    resources: ResourcesDep,
) -> Response:
    """The tenant's limit is from now on what it asked for, or what the form says instead."""
    decisions = Decisions(platform, resources.queue, caller)
    form = await read_form(request)

    async def decide() -> None:
        value = typed_number(form, "value") if form.text("value") else None
        await decisions.approve(request_id, value=value, answer=_answer(form))

    return await _decided(request, platform, request_id, form, decide)


@router.post("/{request_id}/decline")
async def decline(
    request_id: RequestId,
    request: Request,
    caller: Operator,
    platform: PlatformDep,
    resources: ResourcesDep,
) -> Response:
    """With the reason, which the tenant reads on its page of limits."""
    decisions = Decisions(platform, resources.queue, caller)
    form = await read_form(request)

    async def decide() -> None:
        await decisions.decline(request_id, answer=_answer(form))

    return await _decided(request, platform, request_id, form, decide)


def _answer(form: Form) -> str:
    return form.text("answer", most=service.MOST_TEXT)


async def _decided(
    request: Request,
    platform: Platform,
    request_id: str,
    form: Form,
    decide: Callable[[], Awaitable[None]],
) -> Response:
    try:
        await decide()
    except (Conflict, InvalidRequest) as error:
        return await _page(request, platform, error=error, refused=request_id, form=form)
    return RedirectResponse("/console/requests", status_code=303)


async def _page(
    request: Request,
    platform: Platform,
    *,
    error: AppError | None = None,
    refused: str = "",
    form: Form | None = None,
) -> Response:
    """`refused`: the request whose form comes back as it was typed."""
    async with platform.db.reading() as session:
        waiting = await service.waiting(session, limit=MOST_OPEN)
        decided = await service.answered(session, limit=MOST_DECIDED)
    return render(
        request,
        "requests.html",
        waiting=[request_row(row) | {"tenant": name} for row, name in waiting],
        decided=[request_row(row) | {"tenant": name} for row, name in decided],
        most_answer=service.MOST_TEXT,
        refused=refused,
        typed={} if form is None else form.fields,
        error=error,
    )
