"""/admin/v1/keys."""

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.audit.service import actor_id
from app.auth import OperatorCaller
from app.db import after_commit
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.errors import InvalidRequest
from app.idempotency.service import create_once
from app.keys import changes, leaks, service
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
from app.platform import Platform
from app.tenants import service as tenants

router = APIRouter(prefix="/admin/v1/keys", tags=["operator: keys"])


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
async def create_key(
    body: KeyIn,
    session: Session,
    platform: PlatformDep,
    caller: OperatorCaller,
    key: IdempotencyKey = None,
) -> NewKeyOut:
    """The key's text is in this answer alone."""
    if body.operator == (body.tenant_id is not None):
        raise InvalidRequest(
            "Send `tenant_id`, or `operator: true` for an operator's key; not both.",
            param="tenant_id",
        )

    async def create() -> NewKeyOut:
        tenant = None
        if body.tenant_id is not None:
            tenant = await tenants.find_tenant(session, body.tenant_id)
        made = await service.create_key(
            session,
            secrets=platform.secrets,
            now=platform.clock.now(),
            actor=caller,
            tenant=tenant,
            name=body.name,
            adapters=body.adapters,
            access=body.access,
            networks=body.networks,
            expires_at=body.expires_at,
            limits=body.limits(),
            budget=body.budget(),
            settings=platform.settings,
        )
        return _shown_once(made, platform)

    return await create_once(
        session,
        create,
        NewKeyOut,
        key=key,
        caller_id=actor_id(caller),
        route="keys",
        body=body,
        secrets=platform.secrets,
        now=platform.clock.now(),
    )


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
async def update_key(
    key_id: str,
    body: KeyChange,
    session: Session,
    platform: PlatformDep,
    caller: OperatorCaller,
) -> KeyOut:
    """Only what is sent changes; the secret stays the same."""
    now = platform.clock.now()
    key = await changes.update_key(
        session,
        key_id,
        changes=body.model_dump(exclude_unset=True),
        now=now,
        actor=caller,
        tenant_id=None,
        settings=platform.settings,
    )
    after_commit(session, platform.forget_keys)
    return KeyOut.of(key, now)


@router.post("/{key_id}/rotate", status_code=201)
async def rotate_key(
    key_id: str,
    session: Session,
    platform: PlatformDep,
    caller: OperatorCaller,
    body: RotateIn | None = None,
    key: IdempotencyKey = None,
) -> NewKeyOut:
    """A successor; the old key works until the overlap ends."""
    seconds = body.overlap_s if body is not None else None
    if seconds is None:
        seconds = platform.settings.key_rotation_overlap_s

    async def rotate() -> NewKeyOut:
        made = await service.rotate_key(
            session,
            key_id,
            secrets=platform.secrets,
            now=platform.clock.now(),
            actor=caller,
            tenant_id=None,
            overlap=timedelta(seconds=seconds),
        )
        after_commit(session, platform.forget_keys)
        return _shown_once(made, platform)

    return await create_once(
        session,
        rotate,
        NewKeyOut,
        key=key,
        caller_id=actor_id(caller),
        route=f"keys/{key_id}/rotate",
        body=body,
        secrets=platform.secrets,
        now=platform.clock.now(),
    )


@router.post("/{key_id}/revoke")
async def revoke_key(
    key_id: str, session: Session, platform: PlatformDep, caller: OperatorCaller
) -> KeyOut:
    now = platform.clock.now()
    key = await service.revoke_key(session, key_id, now=now, actor=caller, tenant_id=None)
    after_commit(session, platform.forget_keys)
    return KeyOut.of(key, now)


def _shown_once(made: service.NewKey, platform: Platform) -> NewKeyOut:
    shown = KeyOut.of(made.row, platform.clock.now())
    return NewKeyOut(id=made.row.id, key=made.secret.text, api_key=shown)
