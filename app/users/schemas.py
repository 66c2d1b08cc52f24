"""What the tenant API and the operator API take and answer for users."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from app.settings import Settings
from app.users.links import link_url
from app.users.models import User, UserSession
from app.users.service import Invitation

UserRole = Literal["operator", "tenant_admin", "tenant_viewer"]


class UserIn(BaseModel):
    """A new user; they get an invitation's link and choose their password with it."""

    model_config = ConfigDict(extra="forbid")

    email: str = Field(max_length=254)
    role: UserRole
    tenant_id: str | None = Field(default=None, max_length=40)


class OwnUserIn(BaseModel):
    """Somebody of the caller's own tenant."""

    model_config = ConfigDict(extra="forbid")

    email: str = Field(max_length=254)
    role: Literal["tenant_admin", "tenant_viewer"]


class UserChange(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["tenant_admin", "tenant_viewer"]


class UserOut(BaseModel):
    id: str
    object: Literal["user"] = "user"
    email: str
    role: UserRole
    tenant_id: str | None
    status: Literal["invited", "active", "suspended"]
    must_change_password: bool
    created_at: datetime
    last_sign_in_at: datetime | None

    @classmethod
    def of(cls, user: User) -> "UserOut":
        names = cls.model_fields.keys() - {"object"}
        return cls(**{name: getattr(user, name) for name in names})


class SessionOut(BaseModel):
    """An open session of the console; never its cookie."""

    id: str
    object: Literal["user_session"] = "user_session"
    address: str
    user_agent: str
    created_at: datetime
    last_seen_at: datetime
    expires_at: datetime

    @classmethod
    def of(cls, row: UserSession) -> "SessionOut":
        names = cls.model_fields.keys() - {"object"}
        return cls(**{name: getattr(row, name) for name in names})


class SessionList(BaseModel):
    object: Literal["list"] = "list"
    data: list[SessionOut]


class SignedOut(BaseModel):
    """How many sessions a sign-out has ended."""

    id: str
    object: Literal["user.signed_out"] = "user.signed_out"
    sessions: int


class RemovedUser(BaseModel):
    id: str
    object: Literal["user.removed"] = "user.removed"


class LinkOut(BaseModel):
    """A link that works once; it is shown this once."""

    id: str
    object: Literal["user_link"] = "user_link"
    user: UserOut
    url: str
    expires_at: datetime

    @classmethod
    def of(cls, invitation: Invitation, settings: Settings) -> "LinkOut":
        return cls(
            id=invitation.user.id,
            user=UserOut.of(invitation.user),
            url=link_url(settings, invitation),
            expires_at=invitation.expires_at,
        )
