"""/admin/v1/users."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.audit.service import actor_id
from app.auth import OperatorCaller
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.idempotency.service import create_once
from app.paging import PageDep, list_body
from app.tenants import service as tenants
from app.users import service, sessions
from app.users.schemas import (
    LinkOut,
    RemovedUser,
    SessionList,
    SessionOut,
    SignedOut,
    UserChange,
    UserIn,
    UserOut,
)

router = APIRouter(prefix="/admin/v1/users", tags=["operator: users"])


@router.get("")
async def list_users(
    session: ReadSession,
    _: OperatorCaller,
    page: PageDep,
    tenant_id: Annotated[str | None, Query(max_length=40)] = None,
) -> dict[str, Any]:
    rows = await service.list_users(
        session, tenant_id=tenant_id, after=page.after, limit=page.fetch
    )
    return list_body(page, [UserOut.of(row) for row in rows])


@router.post("", status_code=201)
async def invite_user(
    body: UserIn,
    session: Session,
    platform: PlatformDep,
    caller: OperatorCaller,
    key: IdempotencyKey = None,
) -> LinkOut:
    async def create() -> LinkOut:
        tenant = None
        if body.tenant_id is not None:
            tenant = await tenants.find_tenant(session, body.tenant_id)
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
        route="users",
        body=body,
        secrets=platform.secrets,
        now=platform.clock.now(),
    )


@router.get("/{user_id}")
async def get_user(user_id: str, session: ReadSession, _: OperatorCaller) -> UserOut:
    return UserOut.of(await service.find_user(session, user_id, tenant_id=None))


@router.patch("/{user_id}")
async def update_user(
    user_id: str,
    body: UserChange,
    session: Session,
    platform: PlatformDep,
    caller: OperatorCaller,
) -> UserOut:
    user = await service.set_role(
        session,
        user_id,
        role=body.role,
        tenant_id=None,
        now=platform.clock.now(),
        actor=caller,
    )
    return UserOut.of(user)


@router.post("/{user_id}/reset", status_code=201)
async def reset_user(
    user_id: str, session: Session, platform: PlatformDep, caller: OperatorCaller
) -> LinkOut:
    """A link to choose a new password (for an invited user, a new invitation)."""
    invitation = await service.start_reset(
        session,
        user_id,
        tenant_id=None,
        secrets=platform.secrets,
        settings=platform.settings,
        now=platform.clock.now(),
        actor=caller,
    )
    return LinkOut.of(invitation, platform.settings)


@router.post("/{user_id}/suspend")
async def suspend_user(
    user_id: str, session: Session, platform: PlatformDep, caller: OperatorCaller
) -> UserOut:
    """Their sessions end at once."""
    user = await service.set_status(
        session,
        user_id,
        active=False,
        tenant_id=None,
        now=platform.clock.now(),
        actor=caller,
    )
    return UserOut.of(user)


@router.post("/{user_id}/resume")
async def resume_user(
    user_id: str, session: Session, platform: PlatformDep, caller: OperatorCaller
) -> UserOut:
    user = await service.set_status(
        session,
        user_id,
        active=True,
        tenant_id=None,
        now=platform.clock.now(),
        actor=caller,
    )
    return UserOut.of(user)


@router.delete("/{user_id}")
async def remove_user(
    user_id: str, session: Session, platform: PlatformDep, caller: OperatorCaller
) -> RemovedUser:
    """Their sessions and links go with them; the audit log keeps what they did."""
    await service.remove_user(
        session, user_id, tenant_id=None, now=platform.clock.now(), actor=caller
    )
    return RemovedUser(id=user_id)


@router.get("/{user_id}/sessions")
async def list_sessions(user_id: str, session: ReadSession, _: OperatorCaller) -> SessionList:
    """Where a user is signed in, newest first."""
    rows = await sessions.list_sessions(session, user_id, tenant_id=None)
    return SessionList(data=[SessionOut.of(row) for row in rows])


@router.post("/{user_id}/sign-out")
async def sign_user_out(
    user_id: str, session: Session, platform: PlatformDep, caller: OperatorCaller
) -> SignedOut:
    """Ends all of a user's sessions; they may sign in again."""
    ended = await sessions.end_sessions(
        session, user_id, tenant_id=None, now=platform.clock.now(), actor=caller
    )
    return SignedOut(id=user_id, sessions=ended)
