"""/v1/keys: a tenant's own keys. What may be changed with which key: see app.keys.access."""

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Path

from app.audit.service import actor_id
from app.auth import ApiCaller
from app.caller import KeyBudget, KeyLimits
from app.db import after_commit
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.idempotency.service import create_once
from app.keys import changes, grants, service
from app.keys.schemas import KeyChange, KeyOut, NewKeyOut, OwnKeyIn, RotateIn
from app.paging import PageDep, list_body
from app.platform import Platform
from app.tenants import service as tenants

router = APIRouter(prefix="/v1/keys", tags=["keys"])

KeyId = Annotated[str, Path(max_length=64)]


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
async def create_own_key(
    body: OwnKeyIn,
    caller: ApiCaller,
    platform: PlatformDep,
    session: Session,
    key: IdempotencyKey = None,
) -> NewKeyOut:
    """The key's text is in this answer alone. It may do no more than the key that asks."""

    async def create() -> NewKeyOut:
        own = await grants.own_key(session, caller)
        grants.require_no_limits(own)
        bounds = grants.inherited(own, body.model_dump())
        now = platform.clock.now()
        tenant = await tenants.find_tenant(session, caller.tenant_id, lock=True)
        most = platform.settings.tenant_max_keys
        await service.require_room(session, tenant.id, most=most, now=now)
        made = await service.create_key(
            session,
            secrets=platform.secrets,
            now=now,
            actor=caller,
            tenant=tenant,
            name=body.name,
            adapters=body.adapters,
            access=body.access,
            networks=bounds["networks"],
            expires_at=bounds["expires_at"],
            limits=KeyLimits(**{name: bounds[name] for name in grants.LIMITS}),
            budget=KeyBudget(**{name: bounds[name] for name in grants.BUDGETS}),
            settings=platform.settings,
        )
        return _shown_once(made, platform)

    return await create_once(
        session,
        create,
        NewKeyOut,
        key=key,
        caller_id=actor_id(caller),
        route="own-keys",
        body=body,
        secrets=platform.secrets,
        now=platform.clock.now(),
    )


@router.get("/{key_id}")
async def get_own_key(
    key_id: KeyId, caller: ApiCaller, platform: PlatformDep, session: ReadSession
) -> KeyOut:
    key = await service.find_key(session, key_id, tenant_id=caller.tenant_id)
    return KeyOut.of(key, platform.clock.now())


@router.patch("/{key_id}")
async def update_own_key(
    key_id: KeyId,
    body: KeyChange,
    caller: ApiCaller,
    platform: PlatformDep,
    session: Session,
) -> KeyOut:
    """Only what is sent changes; null ends a restriction, where the key that asks has none."""
    now = platform.clock.now()
    wanted = body.model_dump(exclude_unset=True)
    key = await service.find_key(session, key_id, tenant_id=caller.tenant_id, lock=True)
    if wanted.keys() - {"name"}:
        grants.require_within(await grants.own_key(session, caller), grants.left(key, wanted))
    key = await changes.update_key(
        session,
        key_id,
        changes=wanted,
        now=now,
        actor=caller,
        tenant_id=caller.tenant_id,
        settings=platform.settings,
    )
    after_commit(session, platform.forget_keys)
    return KeyOut.of(key, now)


@router.post("/{key_id}/rotate", status_code=201)
async def rotate_own_key(
    key_id: KeyId,
    caller: ApiCaller,
    platform: PlatformDep,
    session: Session,
    body: RotateIn | None = None,
    key: IdempotencyKey = None,
) -> NewKeyOut:
    """A successor; the old key works until the overlap ends."""
    seconds = body.overlap_s if body is not None else None
    if seconds is None:
        seconds = platform.settings.key_rotation_overlap_s

    async def rotate() -> NewKeyOut:
        old = await service.find_key(session, key_id, tenant_id=caller.tenant_id, lock=True)
        own = await grants.own_key(session, caller)
        grants.require_no_limits(own)
        grants.require_within(own, grants.left(old, {}))
        made = await service.rotate_key(
            session,
            key_id,
            secrets=platform.secrets,
            now=platform.clock.now(),
            actor=caller,
            tenant_id=caller.tenant_id,
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
        route=f"own-keys/{key_id}/rotate",
        body=body,
        secrets=platform.secrets,
        now=platform.clock.now(),
    )


@router.post("/{key_id}/revoke")
async def revoke_own_key(
    key_id: KeyId, caller: ApiCaller, platform: PlatformDep, session: Session
) -> KeyOut:
    """At once here, within seconds in other api processes; a key may revoke itself."""
    now = platform.clock.now()
    key = await service.revoke_key(
        session, key_id, now=now, actor=caller, tenant_id=caller.tenant_id
    )
    after_commit(session, platform.forget_keys)
    return KeyOut.of(key, now)


def _shown_once(made: service.NewKey, platform: Platform) -> NewKeyOut:
    shown = KeyOut.of(made.row, platform.clock.now())
    return NewKeyOut(id=made.row.id, key=made.secret.text, api_key=shown)
