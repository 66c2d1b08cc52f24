"""/v1/users: who may sign in to the console for a tenant. Who may change it: app.keys.access."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path

from app.auth import ApiCaller
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.paging import PageDep, list_body
from app.users import service
from app.users.actions import UserActions
from app.users.schemas import LinkOut, OwnUserIn, RemovedUser, SignedOut, UserChange, UserOut

router = APIRouter(prefix="/v1/users", tags=["users"])

UserId = Annotated[str, Path(max_length=64)]


async def _actions(session: Session, platform: PlatformDep, caller: ApiCaller) -> UserActions:
    return UserActions(session, platform, caller, caller.tenant_id)


Actions = Annotated[UserActions, Depends(_actions)]


@router.get("")
async def list_own_users(caller: ApiCaller, session: ReadSession, page: PageDep) -> dict[str, Any]:
    """Newest first; `status` is `invited` until somebody chose a password."""
    rows = await service.list_users(
        session, tenant_id=caller.tenant_id, after=page.after, limit=page.fetch
    )
    return list_body(page, [UserOut.of(row) for row in rows])


@router.post("", status_code=201)
async def invite_own_user(body: OwnUserIn, actions: Actions, key: IdempotencyKey = None) -> LinkOut:
    """The link at which they choose a password, this once; no mail is sent."""
    return await actions.invite(body, key)


@router.get("/{user_id}")
async def get_own_user(user_id: UserId, caller: ApiCaller, session: ReadSession) -> UserOut:
    return UserOut.of(await service.find_user(session, user_id, tenant_id=caller.tenant_id))


@router.patch("/{user_id}")
async def update_own_user(user_id: UserId, body: UserChange, actions: Actions) -> UserOut:
    """Applies to their open sessions at once."""
    return await actions.set_role(user_id, body)


@router.post("/{user_id}/reset", status_code=201)
async def reset_own_user(user_id: UserId, actions: Actions) -> LinkOut:
    """A link to choose a new password (for an invited user, a new invitation)."""
    return await actions.reset(user_id)


@router.post("/{user_id}/suspend")
async def suspend_own_user(user_id: UserId, actions: Actions) -> UserOut:
    """Their sessions end at once."""
    return await actions.set_active(user_id, active=False)


@router.post("/{user_id}/resume")
async def resume_own_user(user_id: UserId, actions: Actions) -> UserOut:
    return await actions.set_active(user_id, active=True)


@router.post("/{user_id}/sign-out")
async def sign_own_user_out(user_id: UserId, actions: Actions) -> SignedOut:
    """Ends all of a user's sessions; they may sign in again."""
    return await actions.sign_out(user_id)


@router.delete("/{user_id}")
async def remove_own_user(user_id: UserId, actions: Actions) -> RemovedUser:
    """Their sessions and links go with them; the audit log keeps what they did."""
    return await actions.remove(user_id)
