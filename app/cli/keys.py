"""`loramux keys`."""

from datetime import timedelta
from typing import Annotated, Any

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from app.caller import KeyBudget, KeyLimits
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
from app.cli.tenants import LimitOption, parse_limits
from app.clock import SystemClock
from app.keys import changes, leaks, service
from app.keys.models import ApiKey
from app.keys.restrictions import access_of
from app.keys.schemas import CheckedKey
from app.platform import Platform
from app.tables import TableQuery
from app.tenants import service as tenants

app = typer.Typer(help="Create, list, change, rotate and revoke API keys.", no_args_is_help=True)

LIMITS, BUDGETS = tuple(KeyLimits.__dataclass_fields__), tuple(KeyBudget.__dataclass_fields__)
LIVE_KEY = 3
"""Exit code of `check` when a key in the text can be used."""
TenantOption = Annotated[str | None, typer.Option("--tenant", help="The tenant's name or id.")]


@app.command()
def create(
    tenant: TenantOption = None,
    operator: Annotated[bool, typer.Option("--operator", help="A key for /admin/v1.")] = False,
    name: Annotated[str, typer.Option(help="To tell it from others.")] = "",
    adapter: Annotated[
        list[str], typer.Option("--adapter", help="Restrict to this adapter; may be repeated.")
    ] = [],  # noqa: B006
    access: Annotated[
        str,
        typer.Option(
            help="full; read: look at everything; inference: only call models; "
            "manage: keys and users too."
        ),
    ] = "full",
    network: Annotated[
        list[str],
        typer.Option("--network", help="Usable from this CIDR network alone; may be repeated."),
    ] = [],  # noqa: B006
    limit: LimitOption = [],  # noqa: B006
    days: Annotated[int, typer.Option(help="Lifetime in days; 0: does not expire.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Create a key and print its secret, this once."""
    if (tenant is None) != operator:
        fail("give --tenant NAME, or --operator for a key of the operator API")
    given = parse_limits(limit, (*LIMITS, *BUDGETS))
    limits = KeyLimits(**{name: value for name, value in given.items() if name in LIMITS})
    budget = KeyBudget(**{name: value for name, value in given.items() if name in BUDGETS})

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
            access=access,
            networks=list(network) or None,
            limits=limits,
            budget=budget,
            settings=platform.settings,
            expires_at=now + timedelta(days=days) if days else None,
        )
        return {"id": made.row.id, "key": made.secret.text, "name": made.row.name}

    _show_once(in_transaction(act), as_json)


@app.command("list")
def list_(
    tenant: TenantOption = None,
    search: SearchOption = "",
    sort: SortOption = "",
    as_json: JsonFlag = False,
) -> None:
    """List keys, of one tenant or of all."""

    async def act(platform: Platform, session: AsyncSession) -> list[dict[str, Any]]:
        tenant_id = None
        if tenant is not None:
            tenant_id = (await tenants.find_by_name(session, tenant)).id
        now = platform.clock.now()
        wanted = TableQuery(search=search, sort=sort, limit=ALL_ROWS)
        table = await service.key_table(session, wanted, tenant_id=tenant_id)
        return [_row(key, owner, service.state(key, now)) for key, owner in table.rows]

    print_rows(
        in_transaction(act),
        ("id", "name", "key", "tenant", "adapters", "access", "state", "last_used_at"),
        as_json=as_json,
        empty="There is no such key: loramux keys create --tenant NAME",
    )


@app.command()
def update(
    key_id: str,
    name: Annotated[str | None, typer.Option(help="To tell it from others.")] = None,
    adapter: Annotated[
        list[str], typer.Option("--adapter", help="Restrict to this adapter; `all` ends it.")
    ] = [],  # noqa: B006
    access: Annotated[str | None, typer.Option(help="full, read, inference or manage.")] = None,
    network: Annotated[
        list[str], typer.Option("--network", help="Restrict to this CIDR network; `all` ends it.")
    ] = [],  # noqa: B006
    limit: LimitOption = [],  # noqa: B006
    days: Annotated[
        int | None, typer.Option(min=0, help="Lifetime in days from now; 0: does not expire.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Change what a key is restricted to; its secret stays."""
    wanted: dict[str, Any] = parse_limits(limit, (*LIMITS, *BUDGETS))
    wanted |= {key: value for key, value in (("name", name), ("access", access)) if value}
    for field, values in (("adapters", adapter), ("networks", network)):
        if values:
            wanted[field] = None if values == ["all"] else list(values)
    if days is not None:
        wanted["expires_at"] = SystemClock().now() + timedelta(days=days) if days else None
    if not wanted:
        fail("nothing to change: give an option; `loramux keys update --help` lists them")

    async def act(platform: Platform, session: AsyncSession) -> dict[str, Any]:
        now = platform.clock.now()
        key = await changes.update_key(
            session,
            key_id,
            changes=wanted,
            now=now,
            actor=ACTOR,
            tenant_id=None,
            settings=platform.settings,
        )
        return _row(key, None, service.state(key, now))

    changed = in_transaction(act)
    say(f"{changed['key']} is changed: {', '.join(sorted(wanted))}", changed, as_json=as_json)


@app.command()
def rotate(
    key_id: str,
    overlap: Annotated[
        int | None,
        typer.Option(metavar="SECONDS", min=0, help="How long the old key still works."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a key's successor and print its secret, this once; the old one works meanwhile."""

    async def act(platform: Platform, session: AsyncSession) -> dict[str, Any]:
        seconds = platform.settings.key_rotation_overlap_s if overlap is None else overlap
        made = await service.rotate_key(
            session,
            key_id,
            secrets=platform.secrets,
            now=platform.clock.now(),
            actor=ACTOR,
            tenant_id=None,
            overlap=timedelta(seconds=seconds),
        )
        return {"id": made.row.id, "key": made.secret.text, "name": made.row.name}

    _show_once(in_transaction(act), as_json)


@app.command()
def revoke(key_id: str, as_json: JsonFlag = False) -> None:
    """Revoke a key at once."""

    async def act(platform: Platform, session: AsyncSession) -> dict[str, Any]:
        now = platform.clock.now()
        key = await service.revoke_key(session, key_id, now=now, actor=ACTOR, tenant_id=None)
        return _row(key, None, service.state(key, now))

    revoked = in_transaction(act)
    say(f"{revoked['key']} is revoked", revoked, as_json=as_json)


@app.command()
def check(
    text: Annotated[
        str, typer.Argument(help="The key, or - to read a text from standard input.")
    ] = "-",
    offline: Annotated[
        bool, typer.Option("--offline", help="Shape and checksum alone, without the database.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Tell whether a text holds one of our keys, whose it is, and whether it works now.

    Exit code 0: no key in it works; 3: one does (offline: one may).
    """
    if text == "-":
        text = typer.get_text_stream("stdin").read(leaks.MAX_TEXT)
    candidates = leaks.find_keys(text)

    async def act(platform: Platform, session: AsyncSession) -> list[CheckedKey]:
        found = await leaks.look_up(
            session, candidates, secrets=platform.secrets, now=platform.clock.now()
        )
        return [CheckedKey.of(candidate, owner) for candidate, owner in found]

    if offline:
        findings = [CheckedKey.of(candidate, None) for candidate in candidates]
    else:
        findings = in_transaction(act)
    if as_json:
        skipped = {"known", "live"} if offline else set()
        print_json([finding.model_dump(exclude=skipped, exclude_none=True) for finding in findings])
    elif not findings:
        console.print("Nothing in it has the shape of a loramux key.")
    else:
        for finding in findings:
            console.print(_sentence(finding, offline), soft_wrap=True, highlight=False)
    if any(finding.checksum if offline else finding.live for finding in findings):
        raise typer.Exit(LIVE_KEY)


def _show_once(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    console.print("It is shown this once:")
    console.print(made["key"], soft_wrap=True, highlight=False)


def _sentence(finding: CheckedKey, offline: bool) -> str:
    if not finding.checksum:
        return f"{finding.shown} has the shape of a key and a wrong checksum: mistyped or invented."
    if offline:
        return f"{finding.shown} is a whole key; without --offline its owner is looked up."
    if not finding.known:
        return f"{finding.shown} is a whole key, but none that was made here."
    whose = f"tenant {finding.tenant}" if finding.tenant else "an operator"
    if finding.live:
        return f"{finding.shown} of {whose} WORKS NOW: loramux keys revoke {finding.key_id}"
    why = "its tenant is suspended" if finding.state == "active" else f"it is {finding.state}"
    return f"{finding.shown} of {whose} does not work: {why}."


def _row(key: ApiKey, tenant: str | None, state: str) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "key": f"lmx_{key.public_id}_…{key.last4}",
        "tenant_id": key.tenant_id,
        "tenant": tenant,
        "adapters": key.scopes.get("adapters"),
        "access": access_of(key.scopes),
        "networks": key.scopes.get("networks"),
        "state": state,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "last_used_at": key.last_used_at,
    }
