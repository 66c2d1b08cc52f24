"""`loramux users`."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, cast

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
from app.tenants import service as tenants
from app.users import service, sessions
from app.users.links import link_url
from app.users.models import User
from app.users.schemas import SessionOut
from app.users.service import UserRole

app = typer.Typer(
    help="Invite, list, change, suspend and remove users of the console.", no_args_is_help=True
)

ROLES = {"admin": "tenant_admin", "viewer": "tenant_viewer", "operator": "operator"}


@app.command()
def create(
    email: str,
    tenant: Annotated[str | None, typer.Option(help="The tenant; none for an operator.")] = None,
    role: Annotated[str, typer.Option(help="admin, viewer or operator.")] = "admin",
    as_json: JsonFlag = False,
) -> None:
    """Invite a user; prints the link at which they choose a password."""
    if role not in ROLES:
        fail(f"{role!r} is no role; choose {', '.join(ROLES)}")

    async def act(platform: Platform, session: AsyncSession) -> dict[str, Any]:
        invitation = await service.invite(
            session,
            email=email,
            role=cast(UserRole, ROLES[role]),
            tenant=None if tenant is None else await tenants.find_by_name(session, tenant),
            secrets=platform.secrets,
            passwords=platform.passwords,
            settings=platform.settings,
            now=platform.clock.now(),
            actor=ACTOR,
        )
        link = link_url(platform.settings, invitation)
        return {"id": invitation.user.id, "email": invitation.user.email, "link": link}

    made = in_transaction(act)
    if as_json:
        print_json(made)
        return
    console.print(f"Send this link to {made['email']}; it works once:")
    console.print(made["link"], soft_wrap=True, highlight=False)


Change = Callable[[Platform, AsyncSession, User], Awaitable[tuple[str, dict[str, Any]]]]
"""What a command does to a user; answers a sentence, and what --json shows beside the user."""


def _change(email: str, change: Change, as_json: bool) -> None:
    """Finds the user by email or id, and tells what `change` answers."""

    async def act(platform: Platform, session: AsyncSession) -> tuple[str, dict[str, Any]]:
        user = await service.find_by_email(session, email)
        sentence, more = await change(platform, session, user)
        return sentence, _row(user) | more

    sentence, document = in_transaction(act)
    say(sentence, document, as_json=as_json)


@app.command()
def reset(email: str, as_json: JsonFlag = False) -> None:
    """Print a link at which a user chooses a new password."""

    async def change(
        platform: Platform, session: AsyncSession, user: User
    ) -> tuple[str, dict[str, Any]]:
        invitation = await service.start_reset(
            session,
            user.id,
            tenant_id=None,
            secrets=platform.secrets,
            settings=platform.settings,
            now=platform.clock.now(),
            actor=ACTOR,
        )
        link = link_url(platform.settings, invitation)
        return link, {"link": link}

    _change(email, change, as_json)


@app.command()
def role(
    email: str,
    to: Annotated[str, typer.Argument(metavar="ROLE", help="admin or viewer.")],
    as_json: JsonFlag = False,
) -> None:
    """Make a tenant's user its admin or a viewer."""
    if to not in ("admin", "viewer"):
        fail(f"{to!r} is no role; choose admin or viewer")

    async def change(
        platform: Platform, session: AsyncSession, user: User
    ) -> tuple[str, dict[str, Any]]:
        changed = await service.set_role(
            session,
            user.id,
            role="tenant_admin" if to == "admin" else "tenant_viewer",
            tenant_id=None,
            now=platform.clock.now(),
            actor=ACTOR,
        )
        return f"{changed.email} is {to}", {}

    _change(email, change, as_json)


@app.command("sessions")
def list_sessions(email: str, as_json: JsonFlag = False) -> None:
    """Show where a user is signed in."""

    async def act(_: Platform, session: AsyncSession) -> list[dict[str, Any]]:
        user = await service.find_by_email(session, email)
        rows = await sessions.list_sessions(session, user.id, tenant_id=None)
        return [SessionOut.of(row).model_dump() for row in rows]

    print_rows(
        in_transaction(act),
        ("created_at", "last_seen_at", "address", "user_agent"),
        as_json=as_json,
        empty=f"{email} is signed in nowhere.",
    )


@app.command()
def suspend(email: str, as_json: JsonFlag = False) -> None:
    """Sign a user out and let them in no more."""
    _set_status(email, active=False, as_json=as_json)


@app.command()
def resume(email: str, as_json: JsonFlag = False) -> None:
    """Let a suspended user in again."""
    _set_status(email, active=True, as_json=as_json)


def _set_status(email: str, *, active: bool, as_json: bool) -> None:
    async def change(
        platform: Platform, session: AsyncSession, user: User
    ) -> tuple[str, dict[str, Any]]:
        now = platform.clock.now()
        changed = await service.set_status(
            session, user.id, active=active, tenant_id=None, now=now, actor=ACTOR
        )
        return f"{changed.email} is {changed.status}", {}

    _change(email, change, as_json)


@app.command("sign-out")
def sign_out(email: str, as_json: JsonFlag = False) -> None:
    """End all of a user's sessions."""

    async def change(
        platform: Platform, session: AsyncSession, user: User
    ) -> tuple[str, dict[str, Any]]:
        now = platform.clock.now()
        ended = await sessions.end_sessions(session, user.id, tenant_id=None, now=now, actor=ACTOR)
        return f"{user.email}: {ended} sessions ended", {"sessions_ended": ended}

    _change(email, change, as_json)


@app.command()
def remove(email: str, as_json: JsonFlag = False) -> None:
    """Delete a user; the audit log keeps what they did."""

    async def change(
        platform: Platform, session: AsyncSession, user: User
    ) -> tuple[str, dict[str, Any]]:
        now = platform.clock.now()
        await service.remove_user(session, user.id, tenant_id=None, now=now, actor=ACTOR)
        return f"{user.email} is removed", {"removed": True}

    _change(email, change, as_json)


@app.command("list")
def list_(search: SearchOption = "", sort: SortOption = "", as_json: JsonFlag = False) -> None:
    """List the users."""

    async def act(_: Platform, session: AsyncSession) -> list[dict[str, Any]]:
        wanted = TableQuery(search=search, sort=sort, limit=ALL_ROWS)
        table = await service.user_table(session, wanted, tenant_id=None)
        return [{**_row(user), "tenant": tenant} for user, tenant in table.rows]

    print_rows(
        in_transaction(act),
        ("email", "role", "tenant", "status", "last_sign_in_at"),
        as_json=as_json,
        empty="There is no such user: loramux users create EMAIL --tenant NAME",
    )


def _row(user: User) -> dict[str, Any]:
    fields = ("id", "email", "role", "tenant_id", "status", "last_sign_in_at")
    return {name: getattr(user, name) for name in fields}
