"""/v1/keys: a tenant's own keys. What may be changed with which key: see app.keys.access."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path

from app.auth import ApiCaller
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.keys import service
from app.keys.actions import KeyActions
from app.keys.schemas import KeyChange, KeyOut, NewKeyOut, OwnKeyIn, RotateIn
from app.paging import PageDep, list_body

router = APIRouter(prefix="/v1/keys", tags=["keys"])

KeyId = Annotated[str, Path(max_length=64)]


async def _actions(session: Session, platform: PlatformDep, caller: ApiCaller) -> KeyActions:
    return KeyActions(session, platform, caller, caller.tenant_id)


Actions = Annotated[KeyActions, Depends(_actions)]


@router.get("")
async def list_own_keys(
    caller: ApiCaller, platform: PlatformDep, session: ReadSession, page: PageDep
) -> dict[str, Any]:
    """Newest first, revoked ones too; never their secrets."""
    rows = await service.list_keys(
        session, tenant_id=caller.tenant_id, after=page.after, limit=page.fetch
    )
    return list_body(page, [KeyOut.of(row, platform.clock.now()) for row in rows])


@router.post("", status_code=201)
async def create_own_key(body: OwnKeyIn, actions: Actions, key: IdempotencyKey = None) -> NewKeyOut:
    """The key's text is in this answer alone. It may do no more than the key that asks."""
    return await actions.create_own(body, key)


@router.get("/{key_id}")
async def get_own_key(
    key_id: KeyId, caller: ApiCaller, platform: PlatformDep, session: ReadSession
) -> KeyOut:
    key = await service.find_key(session, key_id, tenant_id=caller.tenant_id)
    return KeyOut.of(key, platform.clock.now())


@router.patch("/{key_id}")
async def update_own_key(key_id: KeyId, body: KeyChange, actions: Actions) -> KeyOut:
    """Only what is sent changes; null ends a restriction, where the key that asks has none."""
    return await actions.update(key_id, body)


@router.post("/{key_id}/rotate", status_code=201)
async def rotate_own_key(
    key_id: KeyId, actions: Actions, body: RotateIn | None = None, key: IdempotencyKey = None
) -> NewKeyOut:
    """A successor; the old key works until the overlap ends."""
    return await actions.rotate(key_id, body, key)


@router.post("/{key_id}/revoke")
async def revoke_own_key(key_id: KeyId, actions: Actions) -> KeyOut:
    """At once here, within seconds in other api processes; a key may revoke itself."""
    return await actions.revoke(key_id)
