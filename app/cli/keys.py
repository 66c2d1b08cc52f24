"""`loramux keys`."""

from datetime import timedelta
from typing import Annotated, Any

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli.database import ACTOR, in_transaction
from app.cli.output import JsonFlag, console, fail, print_json, print_rows
from app.keys import service
from app.keys.models import ApiKey
from app.platform import Platform
from app.tenants import service as tenants

app = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)

TenantOption = Annotated[str | None, typer.Option("--tenant", help="The tenant's name or id.")]


@app.command()
def create(
    tenant: TenantOption = None,
    operator: Annotated[bool, typer.Option("--operator", help="A key for /admin/v1.")] = False,
    name: Annotated[str, typer.Option(help="To tell it from others.")] = "",
    adapter: Annotated[
        list[str], typer.Option("--adapter", help="Restrict to this adapter; may be repeated.")
    ] = [],  # noqa: B006
    days: Annotated[int, typer.Option(help="Lifetime in days; 0: does not expire.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Create a key and print its secret, this once."""
    if (tenant is None) != operator:
        fail("give --tenant NAME, or --operator for a key of the operator API")

    async def act(platform: Platform, session: AsyncSession) -> dict[str, Any]:
        now = platform.clock.now()
        made = await service.create_key(
            session,
            secrets=platform.secrets,
            now=now,
            actor=ACTOR,
            tenant=None if tenant is None else await tenants.find_by_name(session, tenant),
            name=name,
            adapters=list(adapter) or None,
            expires_at=now + timedelta(days=days) if days else None,
        )
        return {"id": made.row.id, "key": made.secret.text, "name": made.row.name}

    made = in_transaction(act)
    if as_json:
        print_json(made)
        return
    console.print("It is shown this once:")
    console.print(made["key"], soft_wrap=True, highlight=False)


@app.command("list")
def list_(tenant: TenantOption = None, as_json: JsonFlag = False) -> None:
    """List keys, of one tenant or of all."""

    async def act(platform: Platform, session: AsyncSession) -> list[dict[str, Any]]:
        tenant_id = None
        if tenant is not None:
            tenant_id = (await tenants.find_by_name(session, tenant)).id
        now = platform.clock.now()
        rows = await service.list_keys(session, tenant_id=tenant_id, limit=10_000)
        return [_row(key, service.state(key, now)) for key in rows]

    print_rows(
        in_transaction(act),
        ("id", "name", "key", "tenant_id", "adapters", "state", "last_used_at"),
        as_json=as_json,
        empty="There is no key yet: loramux keys create --tenant NAME",
    )


@app.command()
def revoke(key_id: str) -> None:
    """Revoke a key at once."""

    async def act(platform: Platform, session: AsyncSession) -> str:
        now = platform.clock.now()
        key = await service.revoke_key(session, key_id, now=now, actor=ACTOR, tenant_id=None)
        return key.public_id

    console.print(f"lmx_{in_transaction(act)}_… is revoked")


def _row(key: ApiKey, state: str) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "key": f"lmx_{key.public_id}_…{key.last4}",
        "tenant_id": key.tenant_id,
        "adapters": key.scopes.get("adapters"),
        "state": state,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "last_used_at": key.last_used_at,
    }
