"""/v1/users: who may sign in to the console for a tenant. Who may change it: app.keys.access.

What lets a person in (an invitation, a new password's link, a wider role, an end of suspension)
needs a key that nothing binds, for that person will be bound by nothing: see app.keys.grants.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Path
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit.service import actor_id
from app.auth import ApiCaller
from app.caller import Caller
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.idempotency.service import create_once
from app.keys import grants
from app.paging import PageDep, list_body
from app.tenants import service as tenants
from app.users import service, sessions
from app.users.schemas import LinkOut, OwnUserIn, RemovedUser, SignedOut, UserChange, UserOut

router = APIRouter(prefix="/v1/users", tags=["users"])

UserId = Annotated[str, Path(max_length=64)]


@router.get("")
async def list_own_users(caller: ApiCaller, session: ReadSession, page: PageDep) -> dict[str, Any]:
    """Newest first; `status` is `invited` until somebody chose a password."""
    rows = await service.list_users(
        session, tenant_id=caller.tenant_id, after=page.after, limit=page.fetch
    )
    return list_body(page, [UserOut.of(row) for row in rows])


@router.post("", status_code=201)
async def invite_own_user(
    body: OwnUserIn,
    caller: ApiCaller,
    platform: PlatformDep,
    session: Session,
    key: IdempotencyKey = None,
) -> LinkOut:
    """The link at which they choose a password, this once; no mail is sent."""

    async def create() -> LinkOut:
        await _require_unbound(session, caller)
        tenant = await tenants.find_tenant(session, caller.tenant_id, lock=True)
        most = platform.settings.tenant_max_users
        await service.require_room(session, tenant.id, most=most)
        invitation = await service.invite(
            session,
            email=body.email,
            role=body.role,
            tenant=tenant,
            secrets=platform.secrets,
            passwords=platform.passwords,
            settings=platform.settings,
            now=platform.clock.now(),
            actor=caller,
        )
        return LinkOut.of(invitation, platform.settings)

    return await create_once(
        session,
        create,
        LinkOut,
        key=key,
        caller_id=actor_id(caller),
        route="own-users",
        body=body,
        secrets=platform.secrets,
        now=platform.clock.now(),
    )


@router.get("/{user_id}")
async def get_own_user(user_id: UserId, caller: ApiCaller, session: ReadSession) -> UserOut:
    return UserOut.of(await service.find_user(session, user_id, tenant_id=caller.tenant_id))


@router.patch("/{user_id}")
async def update_own_user(
    user_id: UserId,
    body: UserChange,
    caller: ApiCaller,
    platform: PlatformDep,
    session: Session,
) -> UserOut:
    """Applies to their open sessions at once."""
    await service.find_user(session, user_id, tenant_id=caller.tenant_id)
    if body.role == "tenant_admin":
        await _require_unbound(session, caller)
    user = await service.set_role(
        session,
        user_id,
        role=body.role,
        tenant_id=caller.tenant_id,
        now=platform.clock.now(),
        actor=caller,
    )
    return UserOut.of(user)


@router.post("/{user_id}/reset", status_code=201)
async def reset_own_user(
    user_id: UserId, caller: ApiCaller, platform: PlatformDep, session: Session
) -> LinkOut:
    """A link to choose a new password (for an invited user, a new invitation)."""
    await service.find_user(session, user_id, tenant_id=caller.tenant_id)
    await _require_unbound(session, caller)
    invitation = await service.start_reset(
        session,
        user_id,
        tenant_id=caller.tenant_id,
        secrets=platform.secrets,
        settings=platform.settings,
        now=platform.clock.now(),
        actor=caller,
    )
    return LinkOut.of(invitation, platform.settings)


@router.post("/{user_id}/suspend")
async def suspend_own_user(
    user_id: UserId, caller: ApiCaller, platform: PlatformDep, session: Session
) -> UserOut:
    """Their sessions end at once."""
    user = await service.set_status(
        session,
        user_id,
        active=False,
        tenant_id=caller.tenant_id,
        now=platform.clock.now(),
        actor=caller,
    )
    return UserOut.of(user)


@router.post("/{user_id}/resume")
async def resume_own_user(
    user_id: UserId, caller: ApiCaller, platform: PlatformDep, session: Session
) -> UserOut:
    await service.find_user(session, user_id, tenant_id=caller.tenant_id)
    await _require_unbound(session, caller)
    user = await service.set_status(
        session,
        user_id,
        active=True,
        tenant_id=caller.tenant_id,
        now=platform.clock.now(),
        actor=caller,
    )
    return UserOut.of(user)


@router.post("/{user_id}/sign-out")
async def sign_own_user_out(
    user_id: UserId, caller: ApiCaller, platform: PlatformDep, session: Session
) -> SignedOut:
    """Ends all of a user's sessions; they may sign in again."""
    ended = await sessions.end_sessions(
        session, user_id, tenant_id=caller.tenant_id, now=platform.clock.now(), actor=caller
    )
    return SignedOut(id=user_id, sessions=ended)


@router.delete("/{user_id}")
async def remove_own_user(
    user_id: UserId, caller: ApiCaller, platform: PlatformDep, session: Session
) -> RemovedUser:
    """Their sessions and links go with them; the audit log keeps what they did."""
    await service.remove_user(
        session, user_id, tenant_id=caller.tenant_id, now=platform.clock.now(), actor=caller
    )
    return RemovedUser(id=user_id)


async def _require_unbound(session: AsyncSession, caller: Caller) -> None:
    grants.require_unbound(await grants.own_key(session, caller))
