"""/admin/v1/users."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from app.auth import OperatorCaller
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.paging import PageDep, list_body
from app.users import service, sessions
from app.users.actions import UserActions
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


async def _actions(session: Session, platform: PlatformDep, caller: OperatorCaller) -> UserActions:
    return UserActions(session, platform, caller, None)


Actions = Annotated[UserActions, Depends(_actions)]


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
async def invite_user(body: UserIn, actions: Actions, key: IdempotencyKey = None) -> LinkOut:
    return await actions.invite(body, key)


@router.get("/{user_id}")
async def get_user(user_id: str, session: ReadSession, _: OperatorCaller) -> UserOut:
    return UserOut.of(await service.find_user(session, user_id, tenant_id=None))


@router.patch("/{user_id}")
async def update_user(user_id: str, body: UserChange, actions: Actions) -> UserOut:
    return await actions.set_role(user_id, body)


@router.post("/{user_id}/reset", status_code=201)
async def reset_user(user_id: str, actions: Actions) -> LinkOut:
    """A link to choose a new password (for an invited user, a new invitation)."""
    return await actions.reset(user_id)


@router.post("/{user_id}/suspend")
async def suspend_user(user_id: str, actions: Actions) -> UserOut:
    """Their sessions end at once."""
    return await actions.set_active(user_id, active=False)


@router.post("/{user_id}/resume")
async def resume_user(user_id: str, actions: Actions) -> UserOut:
    return await actions.set_active(user_id, active=True)


@router.delete("/{user_id}")
async def remove_user(user_id: str, actions: Actions) -> RemovedUser:
    """Their sessions and links go with them; the audit log keeps what they did."""
    return await actions.remove(user_id)


@router.get("/{user_id}/sessions")
async def list_sessions(user_id: str, session: ReadSession, _: OperatorCaller) -> SessionList:
    """Where a user is signed in, newest first."""
    rows = await sessions.list_sessions(session, user_id, tenant_id=None)
    return SessionList(data=[SessionOut.of(row) for row in rows])


@router.post("/{user_id}/sign-out")
async def sign_user_out(user_id: str, actions: Actions) -> SignedOut:
    """Ends all of a user's sessions; they may sign in again."""
    return await actions.sign_out(user_id)
