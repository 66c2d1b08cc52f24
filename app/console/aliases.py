"""One alias: its targets side by side, their weights, promote and roll back, its history."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import alias_service
from app.adapters.alias_schemas import AliasChangeObject, AliasTarget
from app.adapters.aliases import MAX_TARGETS
from app.adapters.comparison import AliasOverview, alias_overview
from app.adapters.comparison_schemas import Window
from app.adapters.names import LIVE
from app.auth import SessionUser, TenantAdmin
from app.caller import Caller
from app.console.adapters import MOST_OFFERED, Name, may_write, tenant_only
from app.console.figures import moment
from app.console.forms import Form, Work, read_form, submit
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError, InvalidRequest
from app.platform import Platform
from app.preconditions import Precondition

router = APIRouter(prefix="/console/adapters/{name}/aliases", include_in_schema=False)

WINDOWS: dict[Window, tuple[str, str]] = {
    "change": ("last change", "since its last change"),
    "1h": ("1h", "in the last hour"),
    "24h": ("24h", "in the last 24 hours"),
}
"""The link's text, and how a sentence says it."""
SHOWN_CHANGES = 10
WindowQuery = Annotated[Window, Query()]
ACTIONS = {
    "set": "set",
    "promote": "promoted",
    "rollback": "rolled back",
    "follow": "followed a new version",
    "release": "left an erased version",
    "delete": "deleted",
}


@router.get("/{alias}")
async def alias_page(
    name: Name,
    alias: Name,
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    window: WindowQuery = "change",
) -> Response:
    tenant_only(caller)
    return await _page(request, platform, caller, name, alias, window=window)


@router.get("/{alias}/comparison")
async def comparison_fragment(
    name: Name,
    alias: Name,
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    window: WindowQuery = "change",
) -> Response:
    """The figures alone, which the page asks for again while it is looked at."""
    tenant_only(caller)
    return await _page(
        request, platform, caller, name, alias, window=window, template="_comparison.html"
    )


@router.post("/{alias}")
async def set_targets(
    name: Name, alias: Name, request: Request, caller: TenantAdmin, platform: PlatformDep
) -> Response:
    async def change(session: AsyncSession, form: Form) -> None:
        await alias_service.set_alias(
            session,
            caller,
            name,
            alias,
            _weights(form),
            now=platform.clock.now(),
            expected=_seen(form),
        )

    return await _submit(request, platform, caller, name, alias, change, keeps=True)


@router.post("/{alias}/promote")
async def promote(
    name: Name, alias: Name, request: Request, caller: TenantAdmin, platform: PlatformDep
) -> Response:
    async def change(session: AsyncSession, form: Form) -> None:
        await alias_service.promote(
            session,
            caller,
            name,
            alias,
            form.integer("version", 0),
            now=platform.clock.now(),
            expected=_seen(form),
        )

    return await _submit(request, platform, caller, name, alias, change)


@router.post("/{alias}/rollback")
async def roll_back(
    name: Name, alias: Name, request: Request, caller: TenantAdmin, platform: PlatformDep
) -> Response:
    """Before the last change, or to the revision of the form's `to_revision`."""

    async def change(session: AsyncSession, form: Form) -> None:
        await alias_service.roll_back(
            session,
            caller,
            name,
            alias,
            to_revision=form.integer("to_revision", 0) or None,
            now=platform.clock.now(),
            expected=_seen(form),
        )

    return await _submit(request, platform, caller, name, alias, change)


async def _submit(
    request: Request,
    platform: Platform,
    caller: Caller,
    name: str,
    alias: str,
    change: Work[None],
    *,
    keeps: bool = False,
) -> Response:
    """Does what a form asks; on a refusal the page again, with what was typed where it `keeps`."""
    tenant_only(caller)

    async def find(session: AsyncSession) -> object:
        return await alias_service.find_alias(session, caller, name, alias)

    async def done(_: None) -> Response:
        return _back(name, alias)

    async def again(form: Form, error: AppError) -> Response:
        typed = form if keeps else None
        return await _page(request, platform, caller, name, alias, form=typed, error=error)

    return await submit(request, platform.db, change, done=done, again=again, find=find)


@router.post("/{alias}/delete")
async def delete(
    name: Name, alias: Name, request: Request, caller: TenantAdmin, platform: PlatformDep
) -> Response:
    tenant_only(caller)
    form = await read_form(request)
    async with platform.db.transaction() as session:
        await alias_service.remove(
            session, caller, name, alias, now=platform.clock.now(), expected=_seen(form)
        )
    return RedirectResponse(f"/console/adapters/{name}", status_code=303)


def _back(name: str, alias: str) -> Response:
    return RedirectResponse(f"/console/adapters/{name}/aliases/{alias}", status_code=303)


def _seen(form: Form) -> Precondition:
    """The revision that the page showed: what somebody else changed since is not overwritten."""
    revision = form.integer("revision", 0)
    return Precondition(revisions=frozenset({revision})) if revision else Precondition()


def _weights(form: Form) -> list[tuple[int, int]]:
    """(version, percent) of the rows that name a version. Raises InvalidRequest."""
    weights = []
    for row in range(1, MAX_TARGETS + 1):
        if form.text(f"version_{row}"):
            weights.append((form.integer(f"version_{row}", 0), form.integer(f"weight_{row}", 0)))
        elif form.text(f"weight_{row}") not in ("", "0"):
            raise InvalidRequest(
                f"Row {row} has a weight and no version; choose one, or clear its weight.",
                param=f"version_{row}",
            )
    return weights


async def _page(
    request: Request,
    platform: Platform,
    caller: Caller,
    name: str,
    alias: str,
    *,
    window: Window = "change",
    template: str = "alias.html",
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    async with platform.db.reading() as session:
        found = await alias_overview(session, caller, name, alias, window, platform.clock.now())
    return render(
        request,
        template,
        adapter={"name": found.alias.adapter},
        alias=found.alias,
        updated_at=moment(found.alias.updated_at),
        compared=found.comparison,
        window=window,
        windows=WINDOWS,
        rows=_rows(found, form),
        ready=_offered(found),
        earlier=_earlier(found.history),
        history=[_change(change) for change in found.history[:SHOWN_CHANGES]],
        is_live=found.alias.alias == LIVE,
        may_write=may_write(caller),
        error=error,
    )


def _rows(found: AliasOverview, form: Form | None) -> list[tuple[str, str]]:
    """(version, weight) of each row of the form, as it was typed; an empty one to add a target."""
    if form is not None:
        rows = [
            (form.fields.get(f"version_{row}", ""), form.fields.get(f"weight_{row}", ""))
            for row in range(1, MAX_TARGETS + 1)
        ]
        filled = [row for row in rows if any(row)]
    else:
        filled = [(str(target.version), str(target.weight)) for target in found.alias.targets]
    return [*filled, ("", "")][:MAX_TARGETS]


def _offered(found: AliasOverview) -> list[int]:
    """Ready versions to choose from: the newest, and those that the alias points at."""
    ready = [v.number for v in reversed(found.versions) if v.state == "ready"]
    targets = {target.version for target in found.alias.targets}
    return [number for n, number in enumerate(ready) if n < MOST_OFFERED or number in targets]


def _earlier(history: list[AliasChangeObject]) -> str:
    """What a roll back leads to; empty when there is nothing to go back to."""
    if not history or history[0].action == "rollback" or not history[0].before:
        return ""
    return _shares(history[0].before)


def _change(change: AliasChangeObject) -> dict[str, Any]:
    return {
        "revision": change.revision,
        "what": ACTIONS.get(change.action, change.action),
        "targets": _shares(change.after),
        "restorable": bool(change.after),
        "by": change.by.label,
        "at": moment(change.at),
    }


def _shares(targets: list[AliasTarget] | None) -> str:
    if not targets:
        return "nothing"
    if len(targets) == 1:
        return f"v{targets[0].version}"
    return ", ".join(f"v{target.version} {target.weight} %" for target in targets)
