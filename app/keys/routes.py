"""/admin/v1/keys."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from app.auth import OperatorCaller
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.errors import InvalidRequest
from app.keys import leaks, service
from app.keys.actions import KeyActions
from app.keys.schemas import (
    CheckedKey,
    CheckIn,
    CheckOut,
    KeyChange,
    KeyIn,
    KeyOut,
    NewKeyOut,
    RotateIn,
)
from app.paging import PageDep, list_body

router = APIRouter(prefix="/admin/v1/keys", tags=["operator: keys"])


async def _actions(session: Session, platform: PlatformDep, caller: OperatorCaller) -> KeyActions:
    return KeyActions(session, platform, caller, None)


Actions = Annotated[KeyActions, Depends(_actions)]


@router.get("")
async def list_keys(
    session: ReadSession,
    platform: PlatformDep,
    _: OperatorCaller,
    page: PageDep,
    tenant_id: Annotated[str | None, Query(max_length=40)] = None,
) -> dict[str, Any]:
    rows = await service.list_keys(session, tenant_id=tenant_id, after=page.after, limit=page.fetch)
    return list_body(page, [KeyOut.of(row, platform.clock.now()) for row in rows])


@router.post("", status_code=201)
async def create_key(body: KeyIn, actions: Actions, key: IdempotencyKey = None) -> NewKeyOut:
    """The key's text is in this answer alone."""
    if body.operator == (body.tenant_id is not None):
        raise InvalidRequest(
            "Send `tenant_id`, or `operator: true` for an operator's key; not both.",
            param="tenant_id",
        )
    return await actions.create(body, key)


@router.post("/check")
async def check_keys(
    body: CheckIn, session: ReadSession, platform: PlatformDep, _: OperatorCaller
) -> CheckOut:
    """Which keys a text holds, whose they are, and whether they work now. Nothing is kept."""
    found = await leaks.look_up(
        session, leaks.find_keys(body.text), secrets=platform.secrets, now=platform.clock.now()
    )
    return CheckOut(data=[CheckedKey.of(candidate, owner) for candidate, owner in found])


@router.get("/{key_id}")
async def get_key(
    key_id: str, session: ReadSession, platform: PlatformDep, _: OperatorCaller
) -> KeyOut:
    key = await service.find_key(session, key_id, tenant_id=None)
    return KeyOut.of(key, platform.clock.now())


@router.patch("/{key_id}")
async def update_key(key_id: str, body: KeyChange, actions: Actions) -> KeyOut:
    """Only what is sent changes; the secret stays the same."""
    return await actions.update(key_id, body)


@router.post("/{key_id}/rotate", status_code=201)
async def rotate_key(
    key_id: str, actions: Actions, body: RotateIn | None = None, key: IdempotencyKey = None
) -> NewKeyOut:
    """A successor; the old key works until the overlap ends."""
    return await actions.rotate(key_id, body, key)


@router.post("/{key_id}/revoke")
async def revoke_key(key_id: str, actions: Actions) -> KeyOut:
    return await actions.revoke(key_id)
