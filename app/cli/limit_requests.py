"""`loramux limit-requests`."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, get_args

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli.database import ACTOR, in_transaction
from app.cli.output import ALL_ROWS, JsonFlag, fail, print_rows, say
from app.limit_requests import service
from app.limit_requests.models import LimitRequest, RequestState
from app.limit_requests.schemas import OperatorLimitRequestOut
from app.platform import Platform
from app.tenants import service as tenants

app = typer.Typer(help="List and answer what tenants ask of their limits.", no_args_is_help=True)

COLUMNS = ("id", "tenant", "limit", "current", "wanted", "state", "granted", "reason", "created_at")


@app.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option("--tenant", help="The tenant's name or id.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="open, approved, declined or withdrawn.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List requests, newest first."""
    wanted = next((known for known in get_args(RequestState) if known == state), None)
    if state is not None and wanted is None:
        fail(f"{state!r} is no state; choose {', '.join(get_args(RequestState))}")

    async def act(_: Platform, session: AsyncSession) -> list[dict[str, Any]]:
        tenant_id = None
        if tenant is not None:
            tenant_id = (await tenants.find_by_name(session, tenant)).id
        rows = await service.list_requests(
            session, tenant_id=tenant_id, state=wanted, limit=ALL_ROWS
        )
        return [{"tenant": name, **_row(row)} for row, name in rows]

    print_rows(in_transaction(act), COLUMNS, as_json=as_json, empty="There is no such request.")


@app.command()
def approve(
    request_id: str,
    value: Annotated[
        float | None, typer.Option(help="What the limit becomes; without it, what was asked.")
    ] = None,
    answer: Annotated[str, typer.Option(help="For the tenant to read.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Set the tenant's limit to what it asked for, or to --value."""

    async def act(platform: Platform, session: AsyncSession) -> LimitRequest:
        return await service.approve(
            session,
            request_id,
            actor=ACTOR,
            value=value,
            answer=answer,
            settings=platform.settings,
            now=platform.clock.now(),
        )

    _answer(act, as_json)


@app.command()
def decline(
    request_id: str,
    answer: Annotated[str, typer.Option(help="Why; the tenant reads it.")],
    as_json: JsonFlag = False,
) -> None:
    """Leave the limit as it is, and say why."""

    async def act(platform: Platform, session: AsyncSession) -> LimitRequest:
        return await service.decline(
            session,
            request_id,
            actor=ACTOR,
            answer=answer,
            settings=platform.settings,
            now=platform.clock.now(),
        )

    _answer(act, as_json)


def _answer(
    act: Callable[[Platform, AsyncSession], Awaitable[LimitRequest]], as_json: bool
) -> None:
    row = _row(in_transaction(act))
    outcome = f"set to {row['granted']}" if row["state"] == "approved" else "as it was"
    say(f"{row['id']} is {row['state']}: {row['limit']} is {outcome}", row, as_json=as_json)


def _row(row: LimitRequest) -> dict[str, Any]:
    return OperatorLimitRequestOut.of(row).model_dump(exclude={"object"})
