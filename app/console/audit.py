"""The audit log: a tenant's own events, or for an operator everybody's."""

import json
from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.audit import service
from app.audit.models import AuditEvent
from app.auth import SessionUser
from app.caller import Caller
from app.console.render import render
from app.csv_text import lines
from app.deps import PlatformDep
from app.errors import Forbidden

router = APIRouter(prefix="/console/audit", include_in_schema=False)

PAGE = 50
MOST_EXPORTED = 10_000
Action = Annotated[str, Query(max_length=64)]
Target = Annotated[str, Query(max_length=120)]


@router.get("")
async def audit_page(
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    action: Action = "",
    target: Target = "",
    after: Annotated[str | None, Query(max_length=40)] = None,
) -> Response:
    async with platform.db.reading() as session:
        events = await service.list_events(
            session,
            tenant_id=_scope(caller),
            action=action.strip() or None,
            target=target.strip() or None,
            after=after,
            limit=PAGE + 1,
        )
    return render(
        request,
        "audit.html",
        events=events[:PAGE],
        details={event.id: _detail(event) for event in events[:PAGE]},
        older=events[PAGE - 1].id if len(events) > PAGE else None,
        action=action,
        target=target,
        filtered=bool(action.strip() or target.strip()),
        everybody=caller.role == "operator",
    )


@router.get("/export.csv")
async def export(
    caller: SessionUser, platform: PlatformDep, action: Action = "", target: Target = ""
) -> Response:
    """The newest events that the filter leaves, as CSV."""
    async with platform.db.reading() as session:
        events = await service.list_events(
            session,
            tenant_id=_scope(caller),
            action=action.strip() or None,
            target=target.strip() or None,
            limit=MOST_EXPORTED,
        )
    return Response(
        _csv(events),
        media_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": 'attachment; filename="audit.csv"'},
    )


def _scope(caller: Caller) -> str | None:
    """The tenant whose events are shown; None for an operator: everybody's."""
    if caller.role == "operator":
        return None
    if not caller.tenant_id:
        raise Forbidden("Sign in as a user of a tenant.")
    return caller.tenant_id


def _detail(event: AuditEvent) -> str:
    return ", ".join(f"{name}: {_short(value)}" for name, value in event.detail.items())


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"


def _csv(events: Iterable[AuditEvent]) -> bytes:
    return lines(
        [
            ("at", "actor", "role", "action", "target", "tenant", "detail", "request"),
            *(
                (
                    event.at,
                    event.actor_label,
                    event.actor_kind,
                    event.action,
                    event.target,
                    event.tenant_id,
                    json.dumps(event.detail, ensure_ascii=False, sort_keys=True),
                    event.request_id,
                )
                for event in events
            ),
        ]
    )
