"""`loramux tenants`."""

from typing import Annotated, Any

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli.database import ACTOR, in_transaction
from app.cli.output import (
    ALL_ROWS,
    JsonFlag,
    SearchOption,
    SortOption,
    console,
    fail,
    print_json,
    print_rows,
    say,
)
from app.platform import Platform
from app.tables import TableQuery
from app.tenants import deletion, service
from app.tenants.models import Tenant
from app.tenants.schemas import TenantReceipt

app = typer.Typer(help="Create, list, change, suspend and delete tenants.", no_args_is_help=True)

COLUMNS = ("name", "id", "status", "requests_per_minute", "tokens_per_minute", "weight")
FRACTIONAL = ("weight", "ttft_ms", "tpot_ms", "budget_percentile")
LimitOption = Annotated[
    list[str],
    typer.Option("--limit", help="NAME=VALUE, such as tokens_per_minute=50000; VALUE may be none."),
]


@app.command()
def create(name: str, limit: LimitOption = [], as_json: JsonFlag = False) -> None:  # noqa: B006
    """Create a tenant."""
    limits = parse_limits(limit)

    async def act(platform: Platform, session: AsyncSession) -> dict[str, Any]:
        now = platform.clock.now()
        made = await service.create_tenant(session, name=name, now=now, actor=ACTOR, limits=limits)
        return row(made)

    made = in_transaction(act)
    if as_json:
        print_json(made)
        return
    console.print(f"{made['name']} is ready. Next: loramux keys create --tenant {made['name']}")


@app.command("list")
def list_(
    search: SearchOption = "",
    sort: SortOption = "",
    deleted: Annotated[bool, typer.Option("--deleted", help="Also those that are gone.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the tenants, and when each was last used."""

    async def act(_: Platform, session: AsyncSession) -> list[dict[str, Any]]:
        wanted = TableQuery(search=search, sort=sort, limit=ALL_ROWS)
        table = await service.tenant_table(session, wanted, deleted=deleted)
        return [{**row(tenant), "last_used_at": used} for tenant, used in table.rows]

    empty = "There is no such tenant." if search else "There is none: loramux tenants create NAME"
    print_rows(in_transaction(act), (*COLUMNS, "last_used_at"), as_json=as_json, empty=empty)


@app.command()
def update(name: str, limit: LimitOption = [], as_json: JsonFlag = False) -> None:  # noqa: B006
    """Change a tenant's limits, weight or latency budget."""
    changes = parse_limits(limit)
    if not changes:
        fail(f"nothing to change: give --limit NAME=VALUE; the names are {known_limits()}")

    async def act(platform: Platform, session: AsyncSession) -> dict[str, Any]:
        tenant = await service.find_by_name(session, name)
        now = platform.clock.now()
        return row(
            await service.update_tenant(session, tenant.id, changes=changes, now=now, actor=ACTOR)
        )

    changed = in_transaction(act)
    print_rows([changed], COLUMNS, as_json=as_json, empty="")


@app.command()
def suspend(name: str, as_json: JsonFlag = False) -> None:
    """Refuse a tenant's keys and users until it is resumed."""
    _set_status(name, active=False, as_json=as_json)


@app.command()
def resume(name: str, as_json: JsonFlag = False) -> None:
    """Admit a suspended tenant again."""
    _set_status(name, active=True, as_json=as_json)


@app.command()
def delete(
    name: str,
    confirm: Annotated[
        str, typer.Option(prompt="Its adapters are erased for good. Type the tenant's name")
    ],
    as_json: JsonFlag = False,
) -> None:
    """Delete a tenant: its keys and users end at once, its adapters are erased by the worker."""

    async def act(platform: Platform, session: AsyncSession) -> str:
        tenant = await service.find_by_name(session, name)
        now = platform.clock.now()
        await deletion.begin(session, tenant.id, confirm=confirm, now=now, actor=ACTOR)
        return tenant.id

    _show_receipt(in_transaction(act), as_json)


@app.command("deletion")
def show_deletion(name: str, as_json: JsonFlag = False) -> None:
    """Show what is gone of a deleted tenant (its name or id), and what stays."""

    async def act(_: Platform, session: AsyncSession) -> str:
        return (await deletion.find_deleted(session, name)).tenant_id

    _show_receipt(in_transaction(act), as_json)


def _show_receipt(tenant_id: str, as_json: bool) -> None:
    async def act(_: Platform, session: AsyncSession) -> TenantReceipt:
        return await deletion.read_receipt(session, tenant_id)

    receipt = in_transaction(act)
    if as_json:
        print_json(receipt.model_dump(mode="json"))
        return
    adapters = receipt.adapters
    lines = [
        f"{receipt.tenant_name} ({receipt.tenant_id}) is "
        + ("erased." if receipt.complete else "being erased; nothing of it works any more."),
        f"keys revoked: {receipt.keys_revoked}; users removed: {receipt.users_removed}; "
        f"sessions ended: {receipt.sessions_ended}; uploads dropped: {receipt.uploads_dropped}; "
        f"calls running: {receipt.calls_running}",
        f"adapters erased: {adapters.erased}; waiting for engines: {adapters.pending}; "
        f"to do: {adapters.left}",
        "What stays:",
        *(f"- {item.what}: {item.why}" for item in receipt.kept),
    ]
    if not receipt.complete:
        lines.append(f"The worker carries it on; see: loramux tenants deletion {tenant_id}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _set_status(name: str, *, active: bool, as_json: bool) -> None:
    async def act(platform: Platform, session: AsyncSession) -> dict[str, Any]:
        tenant = await service.find_by_name(session, name)
        now = platform.clock.now()
        await service.set_status(session, tenant.id, active=active, now=now, actor=ACTOR)
        return row(tenant)

    changed = in_transaction(act)
    say(f"{changed['name']} is {changed['status']}", changed, as_json=as_json)


def parse_limits(given: list[str], known: tuple[str, ...] = service.LIMITS) -> dict[str, Any]:
    """["weight=2", "max_rank=none"] -> {"weight": 2.0, "max_rank": None}; ends on a bad one."""
    limits: dict[str, Any] = {}
    for entry in given:
        name, equals, text = entry.partition("=")
        if not equals or name not in known:
            fail(f"{entry!r} is no limit; write NAME=VALUE, the names are {', '.join(known)}")
        fractional = name in FRACTIONAL
        try:
            limits[name] = None if text == "none" else float(text) if fractional else int(text)
        except ValueError:
            fail(f"{name} takes {'a number' if fractional else 'a whole number'}, not {text!r}")
    return limits


def known_limits() -> str:
    return ", ".join(service.LIMITS)


def row(tenant: Tenant) -> dict[str, Any]:
    limits = {name: getattr(tenant, name) for name in service.LIMITS}
    return {"id": tenant.id, "name": tenant.name, "status": tenant.state, **limits}
