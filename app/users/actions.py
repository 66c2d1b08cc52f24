"""What /v1/users and /admin/v1/users do, said once: a tenant does it to its own people alone."""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from app.audit.service import actor_id
from app.caller import Caller
from app.idempotency.service import create_once
from app.keys import grants
from app.platform import Platform
from app.tenants import service as tenants
from app.users import service, sessions
from app.users.schemas import (
    LinkOut,
    OwnUserIn,
    RemovedUser,
    SignedOut,
    UserChange,
    UserIn,
    UserOut,
)


@dataclass(frozen=True, slots=True)
class UserActions:
    """Of one request. `tenant_id` None: an operator asks, about anybody.

    What lets a person in (an invitation, a new password's link, a wider role, an end of
    suspension) needs of a key that nothing binds it: see app.keys.grants.
    """

    session: AsyncSession
    platform: Platform
    caller: Caller
    tenant_id: str | None

    async def invite(self, body: UserIn | OwnUserIn, key: str | None) -> LinkOut:
        """The link at which they choose a password; no mail is sent."""

        async def create() -> LinkOut:
            tenant = None
            await self._require_unbound()
            if self.tenant_id is not None:
                tenant = await tenants.find_tenant(self.session, self.tenant_id, lock=True)
                most = self.platform.settings.tenant_max_users
                await service.require_room(self.session, tenant.id, most=most)
            elif isinstance(body, UserIn) and body.tenant_id is not None:
                tenant = await tenants.find_tenant(self.session, body.tenant_id)
            invitation = await service.invite(
                self.session,
                email=body.email,
                role=body.role,
                tenant=tenant,
                secrets=self.platform.secrets,
                passwords=self.platform.passwords,
                settings=self.platform.settings,
                now=self.platform.clock.now(),
                actor=self.caller,
            )
            return LinkOut.of(invitation, self.platform.settings)

        return await create_once(
            self.session,
            create,
            LinkOut,
            key=key,
            caller_id=actor_id(self.caller),
            route="users" if self.tenant_id is None else "own-users",
            body=body,
            secrets=self.platform.secrets,
            now=self.platform.clock.now(),
        )

    async def set_role(self, user_id: str, body: UserChange) -> UserOut:
        await self._may_change(user_id, lets_in=body.role == "tenant_admin")
        user = await service.set_role(
            self.session,
            user_id,
            role=body.role,
            tenant_id=self.tenant_id,
            now=self.platform.clock.now(),
            actor=self.caller,
        )
        return UserOut.of(user)

    async def reset(self, user_id: str) -> LinkOut:
        """A link to choose a new password; for an invited user, a new invitation."""
        await self._may_change(user_id, lets_in=True)
        invitation = await service.start_reset(
            self.session,
            user_id,
            tenant_id=self.tenant_id,
            secrets=self.platform.secrets,
            settings=self.platform.settings,
            now=self.platform.clock.now(),
            actor=self.caller,
        )
        return LinkOut.of(invitation, self.platform.settings)

    async def set_active(self, user_id: str, *, active: bool) -> UserOut:
        """Suspended, their sessions end at once."""
        await self._may_change(user_id, lets_in=active)
        user = await service.set_status(
            self.session,
            user_id,
            active=active,
            tenant_id=self.tenant_id,
            now=self.platform.clock.now(),
            actor=self.caller,
        )
        return UserOut.of(user)

    async def sign_out(self, user_id: str) -> SignedOut:
        """Ends all of a user's sessions; they may sign in again."""
        ended = await sessions.end_sessions(
            self.session,
            user_id,
            tenant_id=self.tenant_id,
            now=self.platform.clock.now(),
            actor=self.caller,
        )
        return SignedOut(id=user_id, sessions=ended)

    async def remove(self, user_id: str) -> RemovedUser:
        """Their sessions and links go with them; the audit log keeps what they did."""
        await service.remove_user(
            self.session,
            user_id,
            tenant_id=self.tenant_id,
            now=self.platform.clock.now(),
            actor=self.caller,
        )
        return RemovedUser(id=user_id)

    async def _may_change(self, user_id: str, *, lets_in: bool) -> None:
        """Raises NotFound before Forbidden: a key learns nothing of people who are not its."""
        if not lets_in:
            return
        await service.find_user(self.session, user_id, tenant_id=self.tenant_id)
        await self._require_unbound()

    async def _require_unbound(self) -> None:
        grants.require_unbound(await grants.own_key(self.session, self.caller))
