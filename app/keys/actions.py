"""What /v1/keys and /admin/v1/keys do, said once: a tenant does it to its own keys alone, and
hands on no more than it has (app.keys.grants)."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit.service import actor_id
from app.caller import Caller, KeyBudget, KeyLimits
from app.db import after_commit
from app.idempotency.service import create_once
from app.keys import changes, grants, service
from app.keys.schemas import KeyChange, KeyIn, KeyOut, NewKeyOut, OwnKeyIn, RotateIn
from app.platform import Platform
from app.tenants import service as tenants


@dataclass(frozen=True, slots=True)
class KeyActions:
    """Of one request. `tenant_id` None: an operator asks, about any key."""

    session: AsyncSession
    platform: Platform
    caller: Caller
    tenant_id: str | None

    async def create(self, body: KeyIn, key: str | None) -> NewKeyOut:
        """An operator makes a tenant's key, or with `operator` one of its own kind."""

        async def create() -> NewKeyOut:
            own = await grants.own_key(self.session, self.caller)
            grants.require_within(own, {"expires_at": body.expires_at})
            tenant = None
            if body.tenant_id is not None:
                tenant = await tenants.find_tenant(self.session, body.tenant_id)
            made = await service.create_key(
                self.session,
                secrets=self.platform.secrets,
                now=self.platform.clock.now(),
                actor=self.caller,
                tenant=tenant,
                name=body.name,
                adapters=body.adapters,
                access=body.access,
                networks=body.networks,
                expires_at=body.expires_at,
                limits=body.limits(),
                budget=body.budget(),
                settings=self.platform.settings,
            )
            return self._shown_once(made)

        return await self._once(create, "keys", key, body)

    async def create_own(self, body: OwnKeyIn, key: str | None) -> NewKeyOut:
        """It may do no more than the key that asks."""

        async def create() -> NewKeyOut:
            own = await grants.own_key(self.session, self.caller)
            grants.require_no_limits(own)
            bounds = grants.inherited(own, body.model_dump())
            now = self.platform.clock.now()
            tenant = await tenants.find_tenant(self.session, self.caller.tenant_id, lock=True)
            most = self.platform.settings.tenant_max_keys
            await service.require_room(self.session, tenant.id, most=most, now=now)
            made = await service.create_key(
                self.session,
                secrets=self.platform.secrets,
                now=now,
                actor=self.caller,
                tenant=tenant,
                name=body.name,
                adapters=body.adapters,
                access=body.access,
                networks=bounds["networks"],
                expires_at=bounds["expires_at"],
                limits=KeyLimits(**{name: bounds[name] for name in grants.LIMITS}),
                budget=KeyBudget(**{name: bounds[name] for name in grants.BUDGETS}),
                settings=self.platform.settings,
            )
            return self._shown_once(made)

        return await self._once(create, "own-keys", key, body)

    async def update(self, key_id: str, body: KeyChange) -> KeyOut:
        """Only what is sent changes; the secret stays the same."""
        now = self.platform.clock.now()
        wanted = body.model_dump(exclude_unset=True)
        found = await service.find_key(self.session, key_id, tenant_id=self.tenant_id, lock=True)
        if wanted.keys() - {"name"}:
            own = await grants.own_key(self.session, self.caller)
            grants.require_within(own, grants.left(found, wanted))
        key = await changes.update_key(
            self.session,
            key_id,
            changes=wanted,
            now=now,
            actor=self.caller,
            tenant_id=self.tenant_id,
            settings=self.platform.settings,
        )
        after_commit(self.session, self.platform.forget_keys)
        return KeyOut.of(key, now)

    async def rotate(self, key_id: str, body: RotateIn | None, key: str | None) -> NewKeyOut:
        """A successor; the old key works until the overlap ends."""
        seconds = body.overlap_s if body is not None else None
        if seconds is None:
            seconds = self.platform.settings.key_rotation_overlap_s

        async def rotate() -> NewKeyOut:
            old = await service.find_key(self.session, key_id, tenant_id=self.tenant_id, lock=True)
            own = await grants.own_key(self.session, self.caller)
            grants.require_no_limits(own)
            grants.require_within(own, grants.left(old, {}))
            made = await service.rotate_key(
                self.session,
                key_id,
                secrets=self.platform.secrets,
                now=self.platform.clock.now(),
                actor=self.caller,
                tenant_id=self.tenant_id,
                overlap=timedelta(seconds=seconds),
            )
            after_commit(self.session, self.platform.forget_keys)
            return self._shown_once(made)

        kind = "keys" if self.tenant_id is None else "own-keys"
        return await self._once(rotate, f"{kind}/{key_id}/rotate", key, body)

    async def revoke(self, key_id: str) -> KeyOut:
        """At once here, within seconds in other api processes."""
        now = self.platform.clock.now()
        key = await service.revoke_key(
            self.session, key_id, now=now, actor=self.caller, tenant_id=self.tenant_id
        )
        after_commit(self.session, self.platform.forget_keys)
        return KeyOut.of(key, now)

    def _shown_once(self, made: service.NewKey) -> NewKeyOut:
        shown = KeyOut.of(made.row, self.platform.clock.now())
        return NewKeyOut(id=made.row.id, key=made.secret.text, api_key=shown)

    async def _once(
        self,
        create: Callable[[], Awaitable[NewKeyOut]],
        route: str,
        key: str | None,
        body: BaseModel | None,
    ) -> NewKeyOut:
        return await create_once(
            self.session,
            create,
            NewKeyOut,
            key=key,
            caller_id=actor_id(self.caller),
            route=route,
            body=body,
            secrets=self.platform.secrets,
            now=self.platform.clock.now(),
        )
