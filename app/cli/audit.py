"""`loramux audit`: who did what."""

from typing import Annotated, Any

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service
from app.audit.schemas import AuditEventOut
from app.cli.database import in_transaction
from app.cli.output import JsonFlag, print_rows
from app.platform import Platform
from app.tenants import service as tenants

MOST = 10_000


def audit(
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone: name or id.")] = None,
    action: Annotated[str | None, typer.Option(help="Such as key.create or authz_fail.")] = None,
    target: Annotated[str | None, typer.Option(help="The id of what it was done to.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST)] = 50,
    as_json: JsonFlag = False,
) -> None:
    """Show what was done, by whom and to what; newest first."""

    async def act(_: Platform, session: AsyncSession) -> list[dict[str, Any]]:
        tenant_id = None
        if tenant is not None:
            tenant_id = (await tenants.find_by_name(session, tenant)).id
        events = await service.list_events(
            session, tenant_id=tenant_id, action=action, target=target, limit=limit
        )
        return [AuditEventOut.of(event).model_dump() for event in events]

    rows = in_transaction(act)
    shown = rows if as_json else [row | {"who": row["actor_label"]} for row in rows]
    print_rows(
        shown,
        ("at", "who", "action", "target", "tenant_id", "detail"),
        as_json=as_json,
        empty="Nothing of that kind was done.",
    )
